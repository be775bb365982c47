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
const README_BLOCKS = [...readFileSync(join(own, "README.md"), "utf8").matchAll(/^```ts\n(.*?)^```$/gms)].map(([, code = ""]) => code);
/** A part of the output of each block of the README, in order. */
const README_OUTPUT = ["exit code 3\nstdout: hello\n42\n", "remember me", "tick 3", "hello from a file\n\n[ 'main.py' ]", "it ran once 0"];

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
  assert.equal(README_BLOCKS.length, README_OUTPUT.length);
  await cp(examples, join(directory, "code"), { recursive: true });
  const { url } = await testbed.proxy();
  const programs = { ...EXAMPLE_OUTPUT };
  for (const [number, block] of README_BLOCKS.entries()) {
    assert.ok(block.includes(README_ADDRESS), block);
    programs[`readme_${number}`] = README_OUTPUT[number] ?? "";
    await writeFile(join(directory, "code", `readme_${number}.ts`), block.replaceAll(README_ADDRESS, url));
  }
  const options = { target: "ES2022", module: "NodeNext", lib: ["ES2023", "ESNext.Disposable"], strict: true, types: ["node"], outDir: "out" };
  const typeRoots = [join(own, "node_modules", "@types")];
  const config = { compilerOptions: { ...options, typeRoots, skipLibCheck: false, rootDir: "code" }, include: ["code"] };
  await writeFile(join(directory, "tsconfig.json"), JSON.stringify(config));
  await run(directory, join(own, "node_modules", ".bin", "tsc"), ["-p", directory]);
  for (const [name, expected] of Object.entries(programs)) {
    await context.test(name, async () => {
      const output = await run(directory, process.execPath, [join("out", `${name}.js`)], { ...process.env, BATON_URL: url });
      assert.ok(output.includes(expected), output);
    });
  }
});
