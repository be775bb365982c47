/** Copies local files and directories to and from a sandbox, as streams. Node only. */

import { createReadStream } from "node:fs";
import { mkdir, rename, rm, stat } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";

import { pack } from "./archive.js";
import { type About, unusedName, writeNew } from "./directory.js";
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
  const entry = await files.statFile(path, options);
  if (entry.kind === "directory") {
    await unpack(files.readStream(path, { ...options, archive: true }), local);
    return;
  }
  const target = resolve(local);
  await mkdir(dirname(target), { recursive: true });
  // The mode of a link means nothing; the file that it points to was downloaded.
  const mode = entry.kind === "file" ? entry.mode & 0o777 : 0o644;
  await writeAtomically(target, files.readStream(path, options), { mode, mtimeMs: entry.mtimeMs });
}

/** Renames a temporary file at the end: a reader sees the old or the new file. */
async function writeAtomically(path: string, source: AsyncIterable<Uint8Array>, about: About): Promise<void> {
  const temporary = join(dirname(path), unusedName());
  try {
    await writeNew(temporary, source, about);
    await rename(temporary, path);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}
