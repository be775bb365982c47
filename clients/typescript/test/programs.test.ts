/** The examples and the blocks of the README compile and run with the installed package. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { cp, readdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { install, own, run } from "./installed.js";
import { Testbed } from "./testbed.js";

const examples = fileURLToPath(new URL("../../../examples/typescript", import.meta.url));
/** A part of the output of each example. */
const EXAMPLE_OUTPUT: Record<string, string> = {
  agent: "The primes below 30 are [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]",
  basic: "SOME INPUT",
  checkpoint: "the command continued and wrote 20 lines",
  fork: "three copies answer 100, 400, 900",
  handoff: "40 lines, none missing, none repeated",
  reconnect: "all 20 lines arrived, exit code 0",
  snapshot: "hello snapshot",
};
const README_ADDRESS = "ws://127.0.0.1:8080";
const READMES = [join(own, "README.md"), join(own, "..", "..", "README.md")];
/** Every block of the READMEs, and the output that is shown below it. */
const README_BLOCKS = READMES.flatMap((readme) => [
  ...readFileSync(readme, "utf8").matchAll(/^```ts\n(.*?)^```\n(?:\n```text\n(.*?)^```)?/gms),
]).map(([, code = "", shown = ""]) => ({ code, shown }));

/** Whether an output is the shown one, with something in place of each `…`. */
function isShown(shown: string, output: string): boolean {
  const parts = shown.trim().split("…").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join(".+")}$`).test(output.trim());
}

let testbed: Testbed;
let directory: string;

before(async () => {
  directory = await install();
  testbed = new Testbed();
  await testbed.do("server", { name: "a" });
});
after(async () => {
  await testbed.end();
  await rm(directory, { recursive: true });
});

test("every example and every block of the README compiles and runs", async (context) => {
  assert.deepEqual((await readdir(examples)).sort(), Object.keys(EXAMPLE_OUTPUT).map((name) => `${name}.ts`).sort());
  assert.equal(README_BLOCKS.length, 5);
  await cp(examples, join(directory, "code"), { recursive: true });
  const { url } = await testbed.proxy();
  for (const [number, { code, shown }] of README_BLOCKS.entries()) {
    assert.ok(code.includes(README_ADDRESS) && shown, code);
    await writeFile(join(directory, "code", `readme_${number}.ts`), code.replaceAll(README_ADDRESS, url));
  }
  const options = { target: "ES2022", module: "NodeNext", lib: ["ES2023", "ESNext.Disposable"], strict: true, types: ["node"], outDir: "out" };
  const typeRoots = [join(own, "node_modules", "@types")];
  const config = { compilerOptions: { ...options, typeRoots, skipLibCheck: false, rootDir: "code" }, include: ["code"] };
  await writeFile(join(directory, "tsconfig.json"), JSON.stringify(config));
  await run(directory, join(own, "node_modules", ".bin", "tsc"), ["-p", directory]);
  const output = (name: string) => run(directory, process.execPath, [join("out", `${name}.js`)], { ...process.env, BATON_URL: url });
  for (const [name, expected] of Object.entries(EXAMPLE_OUTPUT)) {
    await context.test(name, async () => {
      const found = await output(name);
      assert.ok(found.includes(expected), found);
    });
  }
  for (const [number, { shown }] of README_BLOCKS.entries()) {
    await context.test(`block ${number} of the READMEs`, async () => {
      const found = await output(`readme_${number}`);
      assert.ok(isShown(shown, found), `${found}\nshown:\n${shown}`);
    });
  }
});
