/**
 * Tar archives of directories, written and read piece by piece: ustar with pax headers. Node only.
 *
 * An archive that comes out of a sandbox is not trusted: nothing is written outside the directory it
 * is unpacked in, neither by a member's name nor through a link.
 */

import { createReadStream } from "node:fs";
import { lstat, link, mkdir, open, readdir, readlink, rename, rm, symlink, utimes, chmod } from "node:fs/promises";
import { dirname, join, relative, resolve, sep } from "node:path";

import { FileError } from "./errors.js";

const BLOCK = 512;
const text = new TextEncoder();

interface Member {
  name: string;
  kind: "file" | "directory" | "symlink" | "link";
  mode: number;
  mtimeMs: number;
  size: number;
  target: string;
}

const FLAGS: Record<Member["kind"], string> = { file: "0", link: "1", symlink: "2", directory: "5" };
const KINDS: Record<string, Member["kind"] | undefined> = { "0": "file", "\0": "file", "7": "file", "1": "link", "2": "symlink", "5": "directory" };

function padding(size: number): Uint8Array {
  return new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);
}

function header(flag: string, name: string, target: string, size: number, mode: number, mtimeMs: number): Uint8Array {
  const block = new Uint8Array(BLOCK);
  const put = (value: string, at: number, length: number) => block.set(text.encode(value).subarray(0, length), at);
  const octal = (value: number, at: number, length: number) => put(value.toString(8).padStart(length - 1, "0"), at, length - 1);
  put(name, 0, 100);
  octal(mode & 0o7777, 100, 8);
  octal(0, 108, 8);
  octal(0, 116, 8);
  // What does not fit is said in a pax header.
  octal(size < 8 ** 11 ? size : 0, 124, 12);
  octal(Math.min(Math.max(0, Math.floor(mtimeMs / 1000)), 8 ** 11 - 1), 136, 12);
  put("        ", 148, 8);
  put(flag, 156, 1);
  put(target, 157, 100);
  put("ustar\u000000", 257, 8);
  octal(block.reduce((sum, byte) => sum + byte, 0), 148, 7);
  block[154] = 0;
  block[155] = 0x20;
  return block;
}

function* head(member: Member): Generator<Uint8Array> {
  const { name, target, size, mode, mtimeMs } = member;
  const records: [string, string][] = [["mtime", (mtimeMs / 1000).toFixed(3)]];
  if (text.encode(name).length > 100) records.push(["path", name]);
  if (text.encode(target).length > 100) records.push(["linkpath", target]);
  if (size >= 8 ** 11) records.push(["size", String(size)]);
  const pax = text.encode(records.map(([key, value]) => record(key, value)).join(""));
  yield header("x", "pax", "", pax.length, 0o644, mtimeMs);
  yield pax;
  yield padding(pax.length);
  yield header(FLAGS[member.kind], name, target, size, mode, mtimeMs);
}

/** `LENGTH KEY=VALUE\n`, whose length counts itself. */
function record(key: string, value: string): string {
  const rest = text.encode(` ${key}=${value}\n`).length;
  let length = rest;
  while (String(length).length + rest !== length) length = String(length).length + rest;
  return `${length} ${key}=${value}\n`;
}

/** A directory and everything in it, links as links. */
export async function* pack(directory: string): AsyncGenerator<Uint8Array, void, void> {
  async function* walk(path: string, name: string): AsyncGenerator<Uint8Array, void, void> {
    const about = await lstat(path);
    const common = { name, mode: about.mode & 0o7777, mtimeMs: about.mtimeMs, size: 0, target: "" };
    if (about.isDirectory()) {
      yield* head({ ...common, name: `${name}/`, kind: "directory" });
      for (const child of (await readdir(path)).sort()) yield* walk(join(path, child), `${name}/${child}`);
    } else if (about.isSymbolicLink()) {
      yield* head({ ...common, kind: "symlink", target: await readlink(path) });
    } else if (about.isFile()) {
      yield* head({ ...common, kind: "file", size: about.size });
      let left = about.size;
      if (left > 0) {
        for await (const data of createReadStream(path, { end: about.size - 1, highWaterMark: 256 << 10 })) {
          left -= (data as Buffer).length;
          yield data as Buffer;
        }
      }
      // Its place in the archive is as long as was said.
      if (left > 0) throw new FileError(`${path} became shorter while it was read`, "EIO");
      yield padding(about.size);
    }
  }
  yield* walk(directory, ".");
  yield new Uint8Array(2 * BLOCK);
}

/** Reads exact amounts from pieces of any size. */
class Intake {
  #source: AsyncIterator<Uint8Array>;
  #rest: Uint8Array = new Uint8Array();

  constructor(source: AsyncIterable<Uint8Array>) {
    this.#source = source[Symbol.asyncIterator]();
  }

  /** At most so much, and at least one byte; nothing at the end. */
  async some(most: number): Promise<Uint8Array | undefined> {
    while (!this.#rest.length) {
      const next = await this.#source.next();
      if (next.done) return undefined;
      this.#rest = next.value;
    }
    const part = this.#rest.subarray(0, most);
    this.#rest = this.#rest.subarray(part.length);
    return part;
  }

  async *exactly(size: number): AsyncGenerator<Uint8Array, void, void> {
    for (let left = size; left > 0; ) {
      const part = await this.some(left);
      if (!part) throw new FileError("the archive ends in the middle", "EIO");
      left -= part.length;
      yield part;
    }
  }

  async whole(size: number): Promise<Uint8Array> {
    const all = new Uint8Array(size);
    let at = 0;
    for await (const part of this.exactly(size)) {
      all.set(part, at);
      at += part.length;
    }
    return all;
  }

  /** The source says at its end whether all was well. */
  async end(): Promise<void> {
    this.#rest = new Uint8Array();
    while (!(await this.#source.next()).done);
  }

  async give(): Promise<void> {
    await this.#source.return?.();
  }
}

/** A member's header must not be longer than this. */
const MOST_PAX = 1 << 20;

/** Unpacks into a directory, which is made if it is missing. */
export async function unpack(source: AsyncIterable<Uint8Array>, directory: string): Promise<void> {
  const intake = new Intake(source);
  const root = resolve(directory);
  const directories: { path: string; member: Member }[] = [];
  // A member that cannot be trusted is left out; the others go on.
  const faults: string[] = [];
  await mkdir(root, { recursive: true });
  try {
    for (let said: Record<string, string> = {}; ; ) {
      const block = await intake.whole(BLOCK);
      if (block.every((byte) => byte === 0)) break;
      const flag = string(block, 156, 1) || "\0";
      const size = said["size"] === undefined ? number(block, 124, 12) : Number(said["size"]);
      if (flag === "x" || flag === "g" || flag === "L" || flag === "K") {
        if (size > MOST_PAX) throw new FileError("a header of the archive is too long", "EINVAL");
        const data = await intake.whole(size);
        await intake.whole(padding(size).length);
        const value = () => new TextDecoder().decode(data).replace(/\0+$/, "");
        if (flag === "x") said = { ...said, ...records(data) };
        if (flag === "L") said = { ...said, path: value() };
        if (flag === "K") said = { ...said, linkpath: value() };
        continue;
      }
      const member = read(block, flag, size, said);
      said = {};
      const fault = member ? await place(root, member, intake, directories) : undefined;
      if (fault) faults.push(fault);
      if (fault || !member) for await (const _ of intake.exactly(member?.size ?? size));
      await intake.whole(padding(size).length);
    }
    await intake.end();
  } finally {
    await intake.give();
    // Last, since what is written into a directory changes its time, and its mode may forbid it.
    for (const { path, member } of directories.reverse()) await settle(path, member);
  }
  if (faults.length) throw new FileError(`left out: ${faults.join("; ")}`, "EINVAL");
}

function read(block: Uint8Array, flag: string, size: number, said: Record<string, string>): Member | undefined {
  const kind = KINDS[flag];
  if (!kind) return undefined;
  const prefix = string(block, 345, 155);
  const short = string(block, 0, 100);
  const mtime = said["mtime"] === undefined ? number(block, 136, 12) : Number(said["mtime"]);
  return {
    kind,
    size: kind === "file" ? size : 0,
    name: said["path"] ?? (prefix ? `${prefix}/${short}` : short),
    target: said["linkpath"] ?? string(block, 157, 100),
    mode: number(block, 100, 8) & 0o777,
    mtimeMs: Number.isFinite(mtime) ? mtime * 1000 : 0,
  };
}

/** Says why, if the member does not belong here. */
async function place(
  root: string,
  member: Member,
  intake: Intake,
  directories: { path: string; member: Member }[],
): Promise<string | undefined> {
  const path = inside(root, member.name);
  if (path === undefined) return `${member.name} leads outside of the directory`;
  if (path === root && member.kind === "directory") {
    directories.push({ path, member });
    return undefined;
  }
  if (!(await hasParents(root, dirname(path)))) return `${member.name} leads through a link`;
  const there = await lstat(path).catch(() => undefined);
  if (member.kind === "directory") {
    if (there && !there.isDirectory()) await rm(path);
    if (!there?.isDirectory()) await mkdir(path);
    directories.push({ path, member });
    return undefined;
  }
  if (there?.isDirectory()) return `${member.name} is a directory here`;
  if (member.kind === "file") {
    await writeWhole(path, intake.exactly(member.size), member);
    return undefined;
  }
  if (there) await rm(path);
  if (member.kind === "link") {
    const target = inside(root, member.target);
    if (target === undefined || !(await hasParents(root, dirname(target)))) return `${member.name} links to ${member.target}`;
    await link(target, path);
    return undefined;
  }
  const target = resolve(dirname(path), member.target);
  // Behind a name `..` may lead elsewhere than it seems: that name may be a link.
  const winds = /(^|\/)(?!\.\.?(\/|$))[^/]+\/(.*\/)?\.\.(\/|$)/.test(member.target);
  if (member.target.startsWith("/") || winds || !isInside(root, target)) return `${member.name} links to ${member.target}`;
  await symlink(member.target, path);
  return undefined;
}

function isInside(root: string, path: string): boolean {
  return path === root || path.startsWith(root.endsWith(sep) ? root : root + sep);
}

function inside(root: string, name: string): string | undefined {
  const path = resolve(root, name);
  return name.startsWith("/") || name.split("/").includes("..") || !isInside(root, path) ? undefined : path;
}

/** Every directory on the way exists and is one, not a link to somewhere else. */
async function hasParents(root: string, path: string): Promise<boolean> {
  let at = root;
  for (const part of relative(root, path).split(sep).filter(Boolean)) {
    at = join(at, part);
    const there = await lstat(at).catch(() => undefined);
    if (!there) await mkdir(at);
    else if (!there.isDirectory()) return false;
  }
  return true;
}

/** To a new file beside, which takes its name at the end: a reader sees the old or the new one. */
export async function writeWhole(
  path: string,
  source: AsyncIterable<Uint8Array>,
  about: { mode: number; mtimeMs: number },
): Promise<void> {
  const beside = join(dirname(path), `.baton-${process.pid}-${Math.random().toString(36).slice(2)}`);
  const file = await open(beside, "wx", 0o600);
  try {
    try {
      for await (const data of source) await file.writeFile(data);
    } finally {
      await file.close();
    }
    await settle(beside, about);
    await rename(beside, path);
  } catch (error) {
    await rm(beside, { force: true });
    throw error;
  }
}

async function settle(path: string, about: { mode: number; mtimeMs: number }): Promise<void> {
  await utimes(path, about.mtimeMs / 1000, about.mtimeMs / 1000);
  await chmod(path, about.mode);
}

function string(block: Uint8Array, at: number, length: number): string {
  const field = block.subarray(at, at + length);
  const end = field.indexOf(0);
  return new TextDecoder().decode(end < 0 ? field : field.subarray(0, end));
}

/** Octal digits, or a big-endian number marked by its first bit. */
function number(block: Uint8Array, at: number, length: number): number {
  const field = block.subarray(at, at + length);
  if ((field[0] ?? 0) & 0x80) return field.subarray(1).reduce((sum, byte) => sum * 256 + byte, 0);
  return Number.parseInt(string(block, at, length).trim() || "0", 8);
}

function records(data: Uint8Array): Record<string, string> {
  const found: Record<string, string> = {};
  for (let at = 0; at < data.length; ) {
    const space = data.indexOf(0x20, at);
    const length = Number(new TextDecoder().decode(data.subarray(at, space)));
    if (space < 0 || !Number.isInteger(length) || length <= space - at) break;
    const line = new TextDecoder().decode(data.subarray(space + 1, at + length - 1));
    const mark = line.indexOf("=");
    found[line.slice(0, mark)] = line.slice(mark + 1);
    at += length;
  }
  return found;
}
