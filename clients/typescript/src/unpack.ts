/**
 * An archive from a sandbox to a directory of this machine, which nothing in it can lead out of. Node only.
 *
 * The sandbox may be hostile, and so may every member of its archive be. Each directory on a member's way is opened alone,
 * and never through a link; what is made is made by its name in an open directory; modes and times are set on what is open.
 * A member that cannot be unpacked is left out, and the others go on. `crates/files` has the same rules in Rust.
 */

import { link, lstat, mkdir, stat } from "node:fs/promises";

import { type Bytes, Directory, settle } from "./directory.js";
import { FileError } from "./errors.js";
import { type Member, Reader, textOf } from "./tar.js";

/** More directories than any path that can be opened by its name has. */
const MAX_DEPTH = 2048;
/** No file of a stranger runs as another user. */
const MODE_BITS = 0o777;
/** Lines about members that were left out, of however many. */
const MAX_LINES = 10;
const LONGEST_NAME = 200;

/**
 * Unpacks into a directory, which is made if it is missing. What was left out is said at the end; what is no archive, or only half
 * of one, ends it. `mayUseHandles` is for tests of the other way.
 */
export async function unpack(source: AsyncIterable<Uint8Array>, directory: string, mayUseHandles = true): Promise<void> {
  const reader = new Reader(source);
  try {
    requireSafePaths();
    const isNew = !(await stat(directory).catch(() => undefined));
    await mkdir(directory, { recursive: true });
    const unpacking = new Unpacking(await Directory.open(directory, mayUseHandles), isNew);
    try {
      for (let member; (member = await reader.next()); ) await unpacking.add(member, reader);
      await unpacking.leave();
    } finally {
      await unpacking.close();
    }
    await reader.end();
    unpacking.leftOut.raise();
  } finally {
    await reader.close();
  }
}

/** On Windows names mean more than they say: drives, streams, devices and a second separator. */
function requireSafePaths(): void {
  if (process.platform !== "win32") return;
  const instead = "download single files, or keep the archive with readStream(path, { archive: true })";
  throw new FileError(`an archive from a sandbox cannot be unpacked safely on Windows; ${instead}`, "ENOTSUP");
}

/** The parts of a name in an archive; nothing if it leads out, or is none. */
export function splitName(name: Bytes): Bytes[] | undefined {
  const parts = name.split("/").filter((part) => part !== "" && part !== ".");
  const leadsOut = name.startsWith("/") || name.includes("\0") || parts.includes("..");
  return leadsOut || parts.length > MAX_DEPTH ? undefined : parts;
}

/**
 * Whether a link `depth` directories below the top cannot lead above it. Dots are only believed in front: behind a name that is
 * itself a link, `..` is not where it seems to be.
 */
export function staysInside(target: Bytes, depth: number): boolean {
  const parts = target.split("/").filter((part) => part !== "" && part !== ".");
  const first = parts.findIndex((part) => part !== "..");
  const up = first < 0 ? parts.length : first;
  return !target.startsWith("/") && !target.includes("\0") && up <= depth && !parts.slice(up).includes("..");
}

/** Members that were not unpacked: how many, and a line about each of the first. */
class LeftOut {
  #count = 0;
  #code = "";
  #lines: string[] = [];

  add(name: Bytes, why: string, code: string): void {
    this.#count += 1;
    this.#code ||= code;
    if (this.#lines.length < MAX_LINES) this.#lines.push(`${printable(name)}: ${why}`);
  }

  raise(): void {
    if (!this.#count) return;
    const more = this.#count - this.#lines.length;
    throw new FileError(`left out: ${this.#lines.join("; ")}${more ? `; and ${more} more` : ""}`, this.#code);
  }
}

/** A stranger's name as it may stand on a terminal and in one line. */
function printable(name: Bytes): string {
  return textOf(name.slice(0, LONGEST_NAME)).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "?");
}

class Unpacking {
  readonly leftOut = new LeftOut();
  readonly #top: Directory;
  readonly #isNew: boolean;
  /** The directory last asked for. */
  #last: { parts: Bytes[]; directory: Directory } | undefined;
  /**
   * Directories on the way to the last member that this archive made, the deepest last: they get mode and time when they are
   * left, so that neither hinders or is changed by what is put in.
   */
  #made: { parts: Bytes[]; member: Member }[] = [];

  constructor(top: Directory, isNew: boolean) {
    this.#top = top;
    this.#isNew = isNew;
  }

  async add(member: Member, reader: Reader): Promise<void> {
    const parts = splitName(member.name);
    if (!parts) {
      this.leftOut.add(member.name, "the name leads out of the directory", "EINVAL");
      return;
    }
    await this.leave(parts);
    if (!parts.length) {
      if (this.#isNew && member.kind === "directory") this.#made.push({ parts, member });
      return;
    }
    try {
      await this.#place(member, parts, reader);
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      // What the archive or the network did wrong is no member's fault; and with a full disk the next one would not fare better.
      if (reader.failure || code === undefined) throw error;
      if (code === "ENOSPC") throw new FileError(`${printable(member.name)}: ${message}`, code);
      this.leftOut.add(member.name, error instanceof FileError ? message : `it did not work (${code})`, code);
    }
  }

  async #place(member: Member, parts: Bytes[], reader: Reader): Promise<void> {
    const above = parts.slice(0, -1);
    const name = parts.at(-1) ?? "";
    if (member.kind === "file") {
      const about = { mode: member.mode & MODE_BITS, mtimeMs: member.mtimeMs };
      await (await this.#directory(above)).putFile(name, reader.data(), about);
    } else if (member.kind === "directory") {
      if (await makeDirectory(await this.#directory(above), name)) this.#made.push({ parts, member });
    } else if (member.kind === "symlink") {
      if (!staysInside(member.target, above.length)) throw new FileError("the link leads out of the directory", "EPERM");
      await (await this.#directory(above)).putSymlink(name, member.target, member.mtimeMs);
    } else if (member.kind === "link") {
      await this.#hardLink(member, above, name);
    } else {
      throw new FileError("neither a file nor a directory nor a link", "EINVAL");
    }
  }

  /**
   * Another name for a file that is already there, and only for a file: the text of a symbolic link means something else in
   * another directory.
   */
  async #hardLink(member: Member, above: Bytes[], name: Bytes): Promise<void> {
    const first = splitName(member.target);
    if (!first?.length) throw new FileError("the link leads out of the directory", "EPERM");
    const source = await this.#walk(first.slice(0, -1), false);
    try {
      const parent = await this.#directory(above);
      const existing = await source.at(first.at(-1) ?? "");
      // Not every system's link() leaves a link as it is.
      const isFile = async (path: Buffer) => (await lstat(path)).isFile();
      const refused = new FileError("a hard link to something that is no file", "EPERM");
      if (!(await isFile(existing))) throw refused;
      await parent.put(name, async (unused) => {
        await link(existing, unused);
        // Again, under a name that nobody else knows: it cannot become something else any more.
        if (!(await isFile(unused))) throw refused;
      });
    } finally {
      if (source !== this.#top) await source.close();
    }
  }

  /** Directories that the next member is not in are complete; without a next one, all are. */
  async leave(next?: Bytes[]): Promise<void> {
    for (let made; (made = this.#made.at(-1)); this.#made.pop()) {
      const { parts, member } = made;
      if (next && parts.every((part, at) => part === next[at])) return;
      // What cannot be set stays as it is: the files are there.
      const about = { mode: member.mode & MODE_BITS, mtimeMs: member.mtimeMs };
      await this.#directory(parts, false).then(({ handle }) => settle(handle, about)).catch(() => {});
    }
  }

  async close(): Promise<void> {
    await this.#forget();
    await this.#top.close();
  }

  /** An open directory, for as long as no other is asked for. Missing ones are made, if wanted. */
  async #directory(parts: Bytes[], mayMake = true): Promise<Directory> {
    if (!parts.length) return this.#top;
    const last = this.#last;
    if (last && last.parts.length === parts.length && last.parts.every((part, at) => part === parts[at])) return last.directory;
    await this.#forget();
    const directory = await this.#walk(parts, mayMake);
    this.#last = { parts, directory };
    return directory;
  }

  /** Each step is taken alone, and no link is followed. */
  async #walk(parts: Bytes[], mayMake: boolean): Promise<Directory> {
    let here = this.#top;
    for (const part of parts) {
      const above = here;
      try {
        here = await step(above, part, mayMake);
      } finally {
        if (above !== this.#top) await above.close();
      }
    }
    return here;
  }

  async #forget(): Promise<void> {
    const last = this.#last;
    this.#last = undefined;
    await last?.directory.close();
  }
}

const codeOf = (error: unknown) => (error as NodeJS.ErrnoException).code;

async function step(above: Directory, part: Bytes, mayMake: boolean): Promise<Directory> {
  try {
    return await above.enter(part);
  } catch (error) {
    if (!mayMake || codeOf(error) !== "ENOENT") throw error;
  }
  await above.make(part).catch((error: unknown) => {
    if (codeOf(error) !== "EEXIST") throw error;
  });
  return above.enter(part);
}

/** Whether it is new. */
async function makeDirectory(parent: Directory, name: Bytes): Promise<boolean> {
  try {
    await parent.make(name);
    return true;
  } catch (error) {
    if (codeOf(error) !== "EEXIST") throw error;
    // What is there may be a file, or a link.
    await (await parent.enter(name)).close();
    return false;
  }
}
