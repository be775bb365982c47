/**
 * Unpacks an archive of a sandbox into a local directory, and never writes outside that directory. Node only.
 *
 * The sandbox may be hostile, and so may every member of its archive. Each directory above a member is opened by its name in
 * the open directory above it, and never through a link; files are created by name in an open directory; modes and times are
 * set on open files. A member that cannot be unpacked is skipped, and the others are unpacked. `crates/files` has the same
 * rules in Rust.
 */

import { link, lstat, mkdir, stat } from "node:fs/promises";

import { type Bytes, Directory, setTimeAndMode } from "./directory.js";
import { FileError } from "./errors.js";
import { type Member, Reader, textOf } from "./tar.js";

/** More than the number of directories in any path that the system accepts. */
const MAX_DEPTH = 2048;
/** Without the set-user-ID bits: no unpacked file may run as another user. */
const MODE_BITS = 0o777;
/** How many skipped members an error names. */
const MAX_LINES = 10;
const LONGEST_NAME = 200;

/**
 * Unpacks into a directory, which is created if it is missing. Throws for an incomplete archive, and at the end for skipped
 * members. Tests turn `mayUseHandles` off to use paths instead of open directories.
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

/** On Windows names can contain drives, streams, devices and a second separator. */
function requireSafePaths(): void {
  if (process.platform !== "win32") return;
  const instead = "download single files, or keep the archive with readStream(path, { archive: true })";
  throw new FileError(`an archive from a sandbox cannot be unpacked safely on Windows; ${instead}`, "ENOTSUP");
}

/** The components of a name in an archive; nothing if the name is invalid or leaves the directory. */
export function splitName(name: Bytes): Bytes[] | undefined {
  const parts = name.split("/").filter((part) => part !== "" && part !== ".");
  const leadsOut = name.startsWith("/") || name.includes("\0") || parts.includes("..");
  return leadsOut || parts.length > MAX_DEPTH ? undefined : parts;
}

/**
 * Whether a link `depth` directories below the top stays inside it. `..` is accepted only at the start: after a name that may
 * itself be a link, its meaning is not known.
 */
export function staysInside(target: Bytes, depth: number): boolean {
  const parts = target.split("/").filter((part) => part !== "" && part !== ".");
  const first = parts.findIndex((part) => part !== "..");
  const up = first < 0 ? parts.length : first;
  return !target.startsWith("/") && !target.includes("\0") && up <= depth && !parts.slice(up).includes("..");
}

/** Members that were not unpacked: their number, and a line about each of the first ones. */
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

/** An untrusted name, made safe for a terminal and for a single line. */
function printable(name: Bytes): string {
  return textOf(name.slice(0, LONGEST_NAME)).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "?");
}

class Unpacking {
  readonly leftOut = new LeftOut();
  readonly #top: Directory;
  readonly #isNew: boolean;
  /** The directory that was opened last. */
  #last: { parts: Bytes[]; directory: Directory } | undefined;
  /**
   * The directories above the current member that this archive created, the deepest last. Their mode and time are set when all
   * their members are unpacked, because a restrictive mode would prevent that and unpacking would change the time.
   */
  #made: { parts: Bytes[]; member: Member }[] = [];

  constructor(top: Directory, isNew: boolean) {
    this.#top = top;
    this.#isNew = isNew;
  }

  async add(member: Member, reader: Reader): Promise<void> {
    const parts = splitName(member.name);
    if (!parts) {
      this.leftOut.add(member.name, "the name leads outside the directory", "EINVAL");
      return;
    }
    await this.leave(parts);
    if (!parts.length) {
      if (this.#isNew && member.kind === "directory") this.#made.push({ parts, member });
      return;
    }
    try {
      await this.#unpackMember(member, parts, reader);
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      // Errors of the archive or the network do not concern one member, and with a full disk the next member would fail, too.
      if (reader.failure || code === undefined) throw error;
      if (code === "ENOSPC") throw new FileError(`${printable(member.name)}: ${message}`, code);
      this.leftOut.add(member.name, error instanceof FileError ? message : `unknown error (${code})`, code);
    }
  }

  async #unpackMember(member: Member, parts: Bytes[], reader: Reader): Promise<void> {
    const above = parts.slice(0, -1);
    const name = parts.at(-1) ?? "";
    if (member.kind === "file") {
      const about = { mode: member.mode & MODE_BITS, mtimeMs: member.mtimeMs };
      await (await this.#directory(above)).putFile(name, reader.data(), about);
    } else if (member.kind === "directory") {
      if (await makeDirectory(await this.#directory(above), name)) this.#made.push({ parts, member });
    } else if (member.kind === "symlink") {
      if (!staysInside(member.target, above.length)) throw new FileError("the link leads outside the directory", "EPERM");
      await (await this.#directory(above)).putSymlink(name, member.target, member.mtimeMs);
    } else if (member.kind === "link") {
      await this.#hardLink(member, above, name);
    } else {
      throw new FileError("neither a file nor a directory nor a link", "EINVAL");
    }
  }

  /**
   * Links to an existing regular file. A hard link to a symbolic link is refused, because its target would mean something else
   * in another directory.
   */
  async #hardLink(member: Member, above: Bytes[], name: Bytes): Promise<void> {
    const first = splitName(member.target);
    if (!first?.length) throw new FileError("the link leads outside the directory", "EPERM");
    const source = await this.#walk(first.slice(0, -1), false);
    try {
      const parent = await this.#directory(above);
      const existing = await source.at(first.at(-1) ?? "");
      // On some systems link() follows links.
      const isFile = async (path: Buffer) => (await lstat(path)).isFile();
      const refused = new FileError("a hard link to something that is not a file", "EPERM");
      if (!(await isFile(existing))) throw refused;
      await parent.put(name, async (unused) => {
        await link(existing, unused);
        // Checked again under the new, random name, which nothing else can exchange.
        if (!(await isFile(unused))) throw refused;
      });
    } finally {
      if (source !== this.#top) await source.close();
    }
  }

  /** Completes the directories that do not contain the next member; without a next member, all of them. */
  async leave(next?: Bytes[]): Promise<void> {
    for (let made; (made = this.#made.at(-1)); this.#made.pop()) {
      const { parts, member } = made;
      if (next && parts.every((part, at) => part === next[at])) return;
      // A failure is ignored, because the files themselves are complete.
      const about = { mode: member.mode & MODE_BITS, mtimeMs: member.mtimeMs };
      await this.#directory(parts, false).then(({ handle }) => setTimeAndMode(handle, about)).catch(() => {});
    }
  }

  async close(): Promise<void> {
    await this.#forget();
    await this.#top.close();
  }

  /** An open directory, valid until the next call. Creates missing directories on request. */
  async #directory(parts: Bytes[], mayMake = true): Promise<Directory> {
    if (!parts.length) return this.#top;
    const last = this.#last;
    if (last && last.parts.length === parts.length && last.parts.every((part, at) => part === parts[at])) return last.directory;
    await this.#forget();
    const directory = await this.#walk(parts, mayMake);
    this.#last = { parts, directory };
    return directory;
  }

  /** Opens the directories one by one, and follows no link. */
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

/** Creates a directory unless it exists. Returns whether it is new. */
async function makeDirectory(parent: Directory, name: Bytes): Promise<boolean> {
  try {
    await parent.make(name);
    return true;
  } catch (error) {
    if (codeOf(error) !== "EEXIST") throw error;
    // The existing entry may be a file or a link.
    await (await parent.enter(name)).close();
    return false;
  }
}
