/** The files of the suite have every scenario of `clients/suite`. */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import { CASES } from "./testbed.js";

test("every scenario is here", () => {
  const files = readdirSync(new URL(".", import.meta.url)).filter((name) => /^suite_.*\.test\.js$/.test(name));
  const code = files.map((name) => readFileSync(new URL(name, import.meta.url), "utf8")).join();
  const written = [...code.matchAll(/^scenario\("([^"]+)"/gm)].map(([, name]) => name);
  assert.deepEqual(written.sort(), [...CASES.scenarios].sort());
});
