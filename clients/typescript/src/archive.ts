/** Packs a local directory as a tar archive, piece by piece. Node only. */

import { createReadStream } from "node:fs";
import { lstat, readdir, readlink } from "node:fs/promises";
import { join } from "node:path";

import { FileError } from "./errors.js";
import { BLOCK, bytesOf, headers, padding } from "./tar.js";

/** Packs a directory; links are packed as links. */
export async function* pack(directory: string): AsyncGenerator<Uint8Array, void, void> {
  async function* walk(path: string, name: string): AsyncGenerator<Uint8Array, void, void> {
    const about = await lstat(path);
    const common = { name: bytesOf(name), mode: about.mode & 0o7777, mtimeMs: about.mtimeMs, size: 0, target: "" };
    if (about.isDirectory()) {
      yield* headers({ ...common, name: `${common.name}/`, kind: "directory" });
      for (const child of (await readdir(path)).sort()) yield* walk(join(path, child), `${name}/${child}`);
    } else if (about.isSymbolicLink()) {
      yield* headers({ ...common, kind: "symlink", target: bytesOf(await readlink(path)) });
    } else if (about.isFile()) {
      yield* headers({ ...common, kind: "file", size: about.size });
      let left = about.size;
      if (left > 0) {
        for await (const data of createReadStream(path, { end: about.size - 1, highWaterMark: 256 << 10 })) {
          left -= (data as Buffer).length;
          yield data as Buffer;
        }
      }
      // The header has promised its size.
      if (left > 0) throw new FileError(`${path} became shorter while it was read`, "EIO");
      yield padding(about.size);
    }
  }
  yield* walk(directory, ".");
  yield new Uint8Array(2 * BLOCK);
}
