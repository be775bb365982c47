/** The package builds, installs into a clean directory, and the examples compile and run with it. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { cp, mkdtemp, readdir, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { Stage } from "./stage.js";

const own = fileURLToPath(new URL("..", import.meta.url));
const examples = fileURLToPath(new URL("../../../examples/typescript", import.meta.url));
/** What each example prints, among other things. */
const SAYS: Record<string, string> = {
  agent: "The primes below 30 are [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]",
  basic: "SOME INPUT",
  checkpoint: "the command went on and wrote 20 lines",
  fork: "three copies say 100, 400, 900",
  handoff: "40 lines, none missing, none doubled",
  reconnect: "all 20 lines are here, exit code 0",
  snapshot: "hello snapshot",
};

let stage: Stage;
let place: string;
const run = async (command: string, words: string[], options: object = {}) => {
  const { stdout } = await promisify(execFile)(command, words, { cwd: place, timeout: 50_000, ...options });
  return stdout;
};

before(async () => {
  place = await mkdtemp(join(tmpdir(), "baton-package-"));
  const packed = await run("npm", ["pack", "--silent", "--ignore-scripts", "--pack-destination", place], { cwd: own });
  await writeFile(join(place, "package.json"), '{"private":true,"type":"module"}');
  await run("npm", ["install", "--silent", "--no-audit", "--no-fund", "--prefer-offline", `./${packed.trim()}`]);
  stage = new Stage();
  await stage.do("server", { name: "a" });
});
after(async () => {
  await stage.end();
  await rm(place, { recursive: true });
});

test("the clean directory has the package and its dependency", async () => {
  const names = (await readdir(join(place, "node_modules"))).filter((name) => !name.startsWith("."));
  assert.deepEqual(names.sort(), ["baton-sandbox", "ws"]);
  const inside = await readdir(join(place, "node_modules", "baton-sandbox"));
  assert.deepEqual(inside.sort(), ["README.md", "dist", "package.json"]);
});

test("what a browser loads needs nothing but itself", async () => {
  const seen = new Set<string>();
  const { readFile } = await import("node:fs/promises");
  async function follow(name: string): Promise<void> {
    if (seen.has(name)) return;
    seen.add(name);
    const code = await readFile(join(place, "node_modules", "baton-sandbox", "dist", name), "utf8");
    for (const [, from = ""] of code.matchAll(/(?:from|import)\s*\(?\s*"([^"]+)"/g)) {
      assert.match(from, /^\.\//, `${name} needs ${from}`);
      await follow(from.slice(2));
    }
  }
  await follow("browser.js");
  assert.ok(seen.has("sandbox.js") && !seen.has("archive.js"));
});

test("every example compiles and runs", async (context) => {
  assert.deepEqual((await readdir(examples)).sort(), Object.keys(SAYS).map((name) => `${name}.ts`).sort());
  await cp(examples, place, { recursive: true });
  const options = { target: "ES2022", module: "NodeNext", lib: ["ES2023", "ESNext.Disposable"], strict: true, types: ["node"], outDir: "out" };
  const typeRoots = [join(own, "node_modules", "@types")];
  await writeFile(join(place, "tsconfig.json"), JSON.stringify({ compilerOptions: { ...options, typeRoots, skipLibCheck: false } }));
  await run(join(own, "node_modules", ".bin", "tsc"), ["-p", place]);
  for (const [name, said] of Object.entries(SAYS)) {
    await context.test(name, async () => {
      const { url } = await stage.proxy();
      const output = await run(process.execPath, [join("out", `${name}.js`)], { env: { ...process.env, BATON_URL: url } });
      assert.ok(output.includes(said), output);
    });
  }
});
