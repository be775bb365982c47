// Builds dist/ for `npm install <directory>`, `npm pack` and `npm publish`.
//
// npm does not install the dependencies of a directory outside the project that installs it, so they are installed
// here if the compiler is missing.

import { spawnSync } from "node:child_process";
import { rmSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const cwd = fileURLToPath(new URL(".", import.meta.url));

function run(command, ...args) {
  const { status, error } = spawnSync(command, args, { cwd, stdio: ["ignore", "inherit", "inherit"] });
  if (error) throw error;
  if (status !== 0) process.exit(status ?? 1);
}

function compiler() {
  try {
    return createRequire(import.meta.url).resolve("typescript/bin/tsc");
  } catch {
    return undefined;
  }
}

if (!compiler()) {
  const npm = process.env["npm_execpath"];
  const [command, ...args] = npm?.endsWith("npm-cli.js") ? [process.execPath, npm] : ["npm"];
  run(command, ...args, "ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund");
}
rmSync(new URL("dist", import.meta.url), { recursive: true, force: true });
run(process.execPath, compiler(), "-p", ".");
