/**
 * Open directories, and entries that are created in them by name. Node only.
 *
 * Node has no `openat`. On Linux `/proc/self/fd/N/name` does the same: the kernel starts at the open directory N and looks up
 * only `name`, so no path can lead elsewhere. Other systems have only paths. There each directory is identified by its inode
 * number, and before anything is created in it, its path must still lead to that directory and through no link. Between this
 * check and its use another process that may write there could exchange a directory for a link; an archive alone cannot.
 */

import { type BigIntStats, constants } from "node:fs";
import { type FileHandle, lstat, lutimes, mkdir, open, realpath, rename, stat, symlink, unlink } from "node:fs/promises";
import { randomBytes } from "node:crypto";

import { FileError } from "./errors.js";
import { MAX_TIME_MS } from "./tar.js";

const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_RDONLY, O_WRONLY } = constants;

/** A name or the target of a link, with one character for each byte. */
export type Bytes = string;

export interface About {
  mode: number;
  mtimeMs: number;
}

export class Directory {
  readonly handle: FileHandle;
  /** The path of the directory. */
  #path: Bytes;
  #isByHandle: boolean;

  private constructor(handle: FileHandle, path: Bytes, isByHandle: boolean) {
    this.handle = handle;
    this.#path = path;
    this.#isByHandle = isByHandle;
  }

  /** Opens a directory that the caller chose: this path may go through links. */
  static async open(path: string, mayUseHandles = true): Promise<Directory> {
    const real = await realpath(path, "buffer");
    const handle = await open(real, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    const byHandle = `/proc/self/fd/${handle.fd}`;
    const isByHandle = mayUseHandles && isSame(await handle.stat({ bigint: true }), await statOrNothing(`${byHandle}/.`));
    return new Directory(handle, isByHandle ? byHandle : real.toString("latin1"), isByHandle);
  }

  /** Opens the directory of that name, and never the target of a link. */
  async enter(name: Bytes): Promise<Directory> {
    const path = await this.at(name);
    const handle = await open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    const below = this.#isByHandle ? `/proc/self/fd/${handle.fd}` : `${this.#path}/${name}`;
    return new Directory(handle, below, this.#isByHandle);
  }

  async make(name: Bytes): Promise<void> {
    await mkdir(await this.at(name), 0o777);
  }

  /** The path by which the system reaches an entry, right now. */
  async at(name: Bytes): Promise<Buffer> {
    if (!this.#isByHandle) await this.#confirm();
    return Buffer.from(`${this.#path}/${name}`, "latin1");
  }

  /** Throws unless the path still leads to this directory and contains no link. */
  async #confirm(): Promise<void> {
    const path = Buffer.from(this.#path, "latin1");
    const isHere = isSame(await this.handle.stat({ bigint: true }), await lstat(path, { bigint: true }));
    if (!isHere || !(await realpath(path, "buffer")).equals(path)) {
      throw new FileError("a directory was exchanged while it was written to", "EPERM");
    }
  }

  /**
   * Creates an entry under a random name and renames it. An existing entry is replaced and never followed; a reader sees the old
   * or the new one.
   */
  async put(name: Bytes, make: (unused: Buffer) => Promise<void>): Promise<void> {
    const unused = await this.at(unusedName());
    try {
      await make(unused);
      await rename(unused, await this.at(name));
    } finally {
      // The temporary name still exists if renaming failed, or if both names belong to the same file.
      await unlink(unused).catch(() => {});
    }
  }

  async putFile(name: Bytes, source: AsyncIterable<Uint8Array>, about: About): Promise<void> {
    await this.put(name, (unused) => writeNew(unused, source, about));
  }

  async putSymlink(name: Bytes, target: Bytes, mtimeMs: number): Promise<void> {
    await this.put(name, async (unused) => {
      await symlink(Buffer.from(target, "latin1"), unused);
      await lutimes(unused, time(mtimeMs), time(mtimeMs)).catch(() => {});
    });
  }

  async close(): Promise<void> {
    await this.handle.close();
  }
}

export function unusedName(): string {
  return `.baton-${randomBytes(8).toString("hex")}`;
}

/** Creates a file that must not exist. */
export async function writeNew(path: Buffer | string, source: AsyncIterable<Uint8Array>, about: About): Promise<void> {
  // Windows lacks some of these flags and does not need them.
  const file = await open(path, O_WRONLY | O_CREAT | O_EXCL | (O_NOFOLLOW ?? 0), 0o600);
  try {
    for await (const data of source) await file.writeFile(data);
    await setTimeAndMode(file, about);
  } finally {
    await file.close();
  }
}

/** Sets the time and the mode of an open file. */
export async function setTimeAndMode(handle: FileHandle, about: About): Promise<void> {
  await handle.utimes(time(about.mtimeMs), time(about.mtimeMs));
  await handle.chmod(about.mode);
}

/** Limited to what a `Date` can hold. A negative time is a `Date`, because Node takes a negative number for the current time. */
function time(ms: number): number | Date {
  return ms < 0 ? new Date(Math.max(ms, -MAX_TIME_MS)) : Math.min(ms, MAX_TIME_MS) / 1000;
}

async function statOrNothing(path: string): Promise<BigIntStats | undefined> {
  return stat(path, { bigint: true }).catch(() => undefined);
}

function isSame(one: BigIntStats, other: BigIntStats | undefined): boolean {
  return one.dev === other?.dev && one.ino === other.ino;
}
