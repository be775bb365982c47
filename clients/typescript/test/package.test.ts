/** The package builds, and installs into a clean directory. */

import assert from "node:assert/strict";
import { cp, mkdir, readFile, readdir, rm, symlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { install, own, run } from "./installed.js";

let directory: string;

before(async () => {
  directory = await install();
});
after(() => rm(directory, { recursive: true }));

test("the clean directory has the package and its dependency", async () => {
  const names = (await readdir(join(directory, "node_modules"))).filter((name) => !name.startsWith("."));
  assert.deepEqual(names.sort(), ["baton-sandbox", "ws"]);
  const inside = await readdir(join(directory, "node_modules", "baton-sandbox"));
  assert.deepEqual(inside.sort(), ["README.md", "dist", "package.json"]);
});

test("the package installs from a directory, and builds itself", async () => {
  const [source, project] = [join(directory, "source"), join(directory, "project")];
  for (const name of [".npmrc", "package.json", "package-lock.json", "prepare.mjs", "src", "tsconfig.json"]) {
    await cp(join(own, name), join(source, name), { recursive: true });
  }
  await symlink(join(own, "node_modules"), join(source, "node_modules"));
  await mkdir(project);
  await writeFile(join(project, "package.json"), '{"private":true,"type":"module"}');
  await run(project, "npm", ["install", "--silent", "--no-audit", "--no-fund", source]);
  const code = 'import { Sandbox } from "baton-sandbox"; console.log(typeof Sandbox.create);';
  assert.equal(await run(project, process.execPath, ["--input-type=module", "-e", code]), "function\n");
});

test("what a browser loads has no dependencies", async () => {
  const seen = new Set<string>();
  async function follow(name: string): Promise<void> {
    if (seen.has(name)) return;
    seen.add(name);
    const code = await readFile(join(directory, "node_modules", "baton-sandbox", "dist", name), "utf8");
    for (const [, from = ""] of code.matchAll(/(?:from|import)\s*\(?\s*"([^"]+)"/g)) {
      assert.match(from, /^\.\//, `${name} needs ${from}`);
      await follow(from.slice(2));
    }
  }
  await follow("browser.js");
  assert.ok(seen.has("sandbox.js") && !seen.has("archive.js"));
});
