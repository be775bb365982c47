/** A clean directory in which the package is installed. */

import { execFile } from "node:child_process";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

export const own = fileURLToPath(new URL("..", import.meta.url));

/** Runs a program and resolves to its output. */
export async function run(cwd: string, command: string, words: string[], env = process.env): Promise<string> {
  const { stdout } = await promisify(execFile)(command, words, { cwd, env, timeout: 50_000 });
  return stdout;
}

export async function install(): Promise<string> {
  const directory = await mkdtemp(join(tmpdir(), "baton-package-"));
  const packed = await run(own, "npm", ["pack", "--silent", "--ignore-scripts", "--pack-destination", directory]);
  await writeFile(join(directory, "package.json"), '{"private":true,"type":"module"}');
  await run(directory, "npm", ["install", "--silent", "--no-audit", "--no-fund", "--prefer-offline", `./${packed.trim()}`]);
  return directory;
}
