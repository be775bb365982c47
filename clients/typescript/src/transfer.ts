/** Files and directories between a machine and a sandbox, streamed. Node only. */

import { createReadStream } from "node:fs";
import { mkdir, rename, rm, stat } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";

import { pack } from "./archive.js";
import { type About, unusedName, writeNew } from "./directory.js";
import { FileError } from "./errors.js";
import type { FileOptions, Files } from "./files.js";
import { unpack } from "./unpack.js";

export async function upload(files: Files, local: string, path: string, options: FileOptions): Promise<void> {
  const about = await stat(local);
  if (about.isDirectory()) {
    await files.writeFile(path, pack(local), { ...options, archive: true });
  } else {
    const source = createReadStream(local, { highWaterMark: 256 << 10 });
    const { size, mtimeMs } = about;
    await files.writeFile(path, source, { ...options, size, mode: about.mode & 0o777, mtimeMs: Math.round(mtimeMs) });
  }
}

export async function download(files: Files, path: string, local: string, options: FileOptions): Promise<void> {
  const [entry] = await files.listFiles(path, { ...options, depth: 0 });
  if (!entry) throw new FileError(`${path}: no such file`, "ENOENT");
  if (entry.kind === "directory") {
    await unpack(files.readStream(path, { ...options, archive: true }), local);
    return;
  }
  const target = resolve(local);
  await mkdir(dirname(target), { recursive: true });
  // A link is followed, and has a mode of its own that means nothing.
  const mode = entry.kind === "file" ? entry.mode & 0o777 : 0o644;
  await writeWhole(target, files.readStream(path, options), { mode, mtimeMs: entry.mtimeMs });
}

/** To a new file beside, which takes its name at the end: a reader sees the old or the new one. */
async function writeWhole(path: string, source: AsyncIterable<Uint8Array>, about: About): Promise<void> {
  const beside = join(dirname(path), unusedName());
  try {
    await writeNew(beside, source, about);
    await rename(beside, path);
  } catch (error) {
    await rm(beside, { force: true });
    throw error;
  }
}
