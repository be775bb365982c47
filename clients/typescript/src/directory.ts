/**
 * Directories that are open, and what is made in them by name. Node only.
 *
 * Node has no `openat`. On Linux `/proc/self/fd/N/name` is the same: the kernel begins at the open directory N, wherever
 * it is, and only `name` is looked up, so that there is no path that could lead somewhere else. Elsewhere paths are all
 * there is: then each directory is known by its number, and before anything is made in it, its path must still be that
 * very directory and go through no link. Between that look and the deed somebody else on this machine, who may write there,
 * could exchange a directory for a link; an archive alone cannot.
 */

import { type BigIntStats, constants } from "node:fs";
import { type FileHandle, lstat, lutimes, mkdir, open, realpath, rename, stat, symlink, unlink } from "node:fs/promises";
import { randomBytes } from "node:crypto";

import { FileError } from "./errors.js";
import { MAX_TIME_MS } from "./tar.js";

const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_RDONLY, O_WRONLY } = constants;

/** A name or a link's target: a text with one character for each byte. */
export type Bytes = string;

export interface About {
  mode: number;
  mtimeMs: number;
}

export class Directory {
  readonly handle: FileHandle;
  /** Where the system finds it. */
  #path: Bytes;
  #isByHandle: boolean;

  private constructor(handle: FileHandle, path: Bytes, isByHandle: boolean) {
    this.handle = handle;
    this.#path = path;
    this.#isByHandle = isByHandle;
  }

  /** A directory of the caller's own choice: this path may go through links. */
  static async open(path: string, mayUseHandles = true): Promise<Directory> {
    const real = await realpath(path, "buffer");
    const handle = await open(real, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    const byHandle = `/proc/self/fd/${handle.fd}`;
    const isByHandle = mayUseHandles && isSame(await handle.stat({ bigint: true }), await lookAt(`${byHandle}/.`));
    return new Directory(handle, isByHandle ? byHandle : real.toString("latin1"), isByHandle);
  }

  /** The directory of that name itself, never one that a link leads to. */
  async enter(name: Bytes): Promise<Directory> {
    const path = await this.at(name);
    const handle = await open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    const below = this.#isByHandle ? `/proc/self/fd/${handle.fd}` : `${this.#path}/${name}`;
    return new Directory(handle, below, this.#isByHandle);
  }

  async make(name: Bytes): Promise<void> {
    await mkdir(await this.at(name), 0o777);
  }

  /** By which path the system reaches a name in it, now. */
  async at(name: Bytes): Promise<Buffer> {
    if (!this.#isByHandle) await this.#confirm();
    return Buffer.from(`${this.#path}/${name}`, "latin1");
  }

  /** Whether the path still is this directory, and no part of it a link. */
  async #confirm(): Promise<void> {
    const path = Buffer.from(this.#path, "latin1");
    const isHere = isSame(await this.handle.stat({ bigint: true }), await lstat(path, { bigint: true }));
    if (!isHere || !(await realpath(path, "buffer")).equals(path)) {
      throw new FileError("a directory was exchanged while it was written to", "EPERM");
    }
  }

  /**
   * Makes something under a name that nobody has, then gives it its own. Whatever had that is replaced, and never followed; a
   * reader sees the old or the new one.
   */
  async put(name: Bytes, make: (unused: Buffer) => Promise<void>): Promise<void> {
    const unused = await this.at(unusedName());
    try {
      await make(unused);
      await rename(unused, await this.at(name));
    } finally {
      // It is still there if that failed, or if both were names of one file.
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

/** A file that was not there before. */
export async function writeNew(path: Buffer | string, source: AsyncIterable<Uint8Array>, about: About): Promise<void> {
  // Windows does not know all of these, and has no need of them.
  const file = await open(path, O_WRONLY | O_CREAT | O_EXCL | (O_NOFOLLOW ?? 0), 0o600);
  try {
    for await (const data of source) await file.writeFile(data);
    await settle(file, about);
  } finally {
    await file.close();
  }
}

/** Time and mode of what is open. */
export async function settle(handle: FileHandle, about: About): Promise<void> {
  await handle.utimes(time(about.mtimeMs), time(about.mtimeMs));
  await handle.chmod(about.mode);
}

/** Node takes a number below 0 for now, but a date for what it is; and beyond what a date can be there is no time. */
function time(ms: number): number | Date {
  return ms < 0 ? new Date(Math.max(ms, -MAX_TIME_MS)) : Math.min(ms, MAX_TIME_MS) / 1000;
}

async function lookAt(path: string): Promise<BigIntStats | undefined> {
  return stat(path, { bigint: true }).catch(() => undefined);
}

function isSame(one: BigIntStats, other: BigIntStats | undefined): boolean {
  return one.dev === other?.dev && one.ino === other.ino;
}
