/**
 * Tar archives as a stream of members: ustar, pax headers and, when reading, GNU's long names. Touches no file. Node only.
 *
 * The archive may come from a hostile sandbox. Every field is validated, and only the names of one member are kept in
 * memory, up to a limit.
 */

import { FileError } from "./errors.js";

export const BLOCK = 512;
/** The longest pax header or long name, which bounds the memory that one member needs. */
const MAX_HEADER = 256 << 10;
/** The largest time that a `Date` can have, in both directions. */
export const MAX_TIME_MS = 8.64e15;

export type Kind = "file" | "directory" | "symlink" | "link";

/** One member, without its data. */
export interface Member {
  /** One character for each byte, because names need not be UTF-8. Not validated if it was read. */
  name: string;
  /** `other` is a device, a pipe, or an unknown type. */
  kind: Kind | "other";
  /** Permission bits, including set-user-ID, set-group-ID and sticky. */
  mode: number;
  /** The size of the data; 0 unless it is a file. */
  size: number;
  mtimeMs: number;
  /** The target of a link, one character for each byte. */
  target: string;
}

const FLAGS: Record<Kind, string> = { file: "0", link: "1", symlink: "2", directory: "5" };
const KINDS: Record<string, Kind | undefined> = { "0": "file", "\0": "file", "7": "file", "1": "link", "2": "symlink", "5": "directory" };

/** Converts between a string and its bytes, one character for each. */
export const bytesOf = (text: string): string => Buffer.from(text).toString("latin1");
export const textOf = (bytes: string): string => Buffer.from(bytes, "latin1").toString();

export function padding(size: number): Uint8Array {
  return new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);
}

/** The header of a member, after a pax header with the fields that do not fit into it. */
export function* headers(member: Member & { kind: Kind }): Generator<Uint8Array> {
  const { name, target, size, mode, mtimeMs } = member;
  const records: [string, string][] = [["mtime", (mtimeMs / 1000).toFixed(3)]];
  if (name.length > 100) records.push(["path", name]);
  if (target.length > 100) records.push(["linkpath", target]);
  if (size >= 8 ** 11) records.push(["size", String(size)]);
  const pax = Buffer.from(records.map(([key, value]) => record(key, value)).join(""), "latin1");
  yield header("x", "pax", "", pax.length, 0o644, mtimeMs);
  yield pax;
  yield padding(pax.length);
  yield header(FLAGS[member.kind], name, target, size, mode, mtimeMs);
}

function header(flag: string, name: string, target: string, size: number, mode: number, mtimeMs: number): Uint8Array {
  const block = Buffer.alloc(BLOCK);
  const put = (value: string, at: number, length: number) => block.write(value.slice(0, length), at, "latin1");
  const octal = (value: number, at: number, length: number) => put(value.toString(8).padStart(length - 1, "0"), at, length - 1);
  put(name, 0, 100);
  octal(mode & 0o7777, 100, 8);
  octal(0, 108, 8);
  octal(0, 116, 8);
  // Fields that do not fit go into a pax header.
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

/** `LENGTH KEY=VALUE\n`, whose length includes its own digits. */
function record(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`.length;
  let length = rest;
  while (String(length).length + rest !== length) length = String(length).length + rest;
  return `${length} ${key}=${value}\n`;
}

/** The extended headers of a member. */
interface Extended {
  name?: string;
  target?: string;
  size?: number;
  mtimeMs?: number | undefined;
  isSparse?: boolean;
}

/** Reads one member after the other, and the data of the current one. */
export class Reader {
  /** Set once the source failed or the archive turned out to be malformed. */
  failure: unknown;
  #source: AsyncIterator<Uint8Array>;
  #rest: Uint8Array = new Uint8Array();
  /** Unread bytes of the member's data, and of the padding after it. */
  #left = 0;
  #padding = 0;

  constructor(source: AsyncIterable<Uint8Array>) {
    this.#source = source[Symbol.asyncIterator]();
  }

  /** The next member; nothing at the end. Skips the unread data of the current one. */
  async next(): Promise<Member | undefined> {
    const extended: Extended = {};
    for (;;) {
      await this.#passOver();
      const block = await this.#block();
      // The archive may end between two members, with or without a block of zeros.
      if (!block || block.every((byte) => byte === 0)) return undefined;
      const { flag, size, member } = this.#try(() => decode(block));
      this.#expect(size);
      if (flag === "x") {
        const data = await this.#whole();
        this.#try(() => takeRecords(extended, data));
      } else if (flag === "L") extended.name = untilNul(await this.#whole());
      else if (flag === "K") extended.target = untilNul(await this.#whole());
      else if (flag !== "g") return this.#complete(member, extended);
    }
  }

  /** The unread data of the member, piece by piece. */
  async *data(): AsyncGenerator<Uint8Array, void, void> {
    while (this.#left > 0) {
      const part = await this.#some(this.#left);
      if (!part) throw this.#fail(damaged("it ends in the middle"));
      this.#left -= part.length;
      yield part;
    }
  }

  /** Reads the source to its end, where it reports errors. */
  async end(): Promise<void> {
    while (await this.#some(BLOCK));
  }

  async close(): Promise<void> {
    await this.#source.return?.();
  }

  #complete(member: Member, extended: Extended): Member {
    if (extended.size !== undefined && (member.kind === "file" || member.kind === "other")) {
      this.#expect(extended.size);
      member.size = member.kind === "file" ? extended.size : 0;
    }
    // The data of a sparse file is not the content of the file.
    if (extended.isSparse) Object.assign(member, { kind: "other", size: 0 });
    member.name = extended.name ?? member.name;
    // Old archivers mark directories only by a slash at the end of the name, and a long name is complete only now.
    if (member.kind === "file" && member.name.endsWith("/")) Object.assign(member, { kind: "directory", size: 0 });
    member.target = extended.target ?? member.target;
    member.mtimeMs = extended.mtimeMs ?? member.mtimeMs;
    return member;
  }

  #expect(size: number): void {
    this.#left = size;
    this.#padding = padding(size).length;
  }

  async #passOver(): Promise<void> {
    this.#left += this.#padding;
    this.#padding = 0;
    for await (const _ of this.data());
  }

  async #whole(): Promise<string> {
    if (this.#left > MAX_HEADER) throw this.#fail(damaged("a header is too long"));
    const parts: Uint8Array[] = [];
    for await (const part of this.data()) parts.push(part);
    return Buffer.concat(parts).toString("latin1");
  }

  async #block(): Promise<Buffer | undefined> {
    const block = Buffer.alloc(BLOCK);
    for (let filled = 0; filled < BLOCK; ) {
      const part = await this.#some(BLOCK - filled);
      if (!part && !filled) return undefined;
      if (!part) throw this.#fail(damaged("it ends in the middle"));
      block.set(part, filled);
      filled += part.length;
    }
    return block;
  }

  /** Between one and `size` bytes; nothing at the end. */
  async #some(most: number): Promise<Uint8Array | undefined> {
    while (!this.#rest.length) {
      const next = await this.#source.next().catch((error: unknown) => {
        throw this.#fail(error);
      });
      if (next.done) return undefined;
      this.#rest = next.value;
    }
    const part = this.#rest.subarray(0, most);
    this.#rest = this.#rest.subarray(part.length);
    return part;
  }

  #try<T>(parse: () => T): T {
    try {
      return parse();
    } catch (error) {
      throw this.#fail(error);
    }
  }

  #fail<T>(error: T): T {
    this.failure = error;
    return error;
  }
}

function damaged(why: string): FileError {
  return new FileError(`the archive is damaged: ${why}`, "EINVAL");
}

function decode(block: Buffer): { flag: string; size: number; member: Member } {
  checkSum(block);
  const field = (at: number, length: number) => block.toString("latin1", at, at + length);
  const flag = field(156, 1);
  const kind = KINDS[flag] ?? "other";
  const size = parseNumber(block.subarray(124, 136));
  if (size === undefined || size < 0) throw damaged("a member has no size");
  const [short, prefix] = [untilNul(field(0, 100)), untilNul(field(345, 155))];
  const member: Member = {
    name: field(257, 6) === "ustar\0" && prefix ? `${prefix}/${short}` : short,
    kind,
    mode: (parseNumber(block.subarray(100, 108)) ?? 0o644) & 0o7777,
    size: kind === "file" ? size : 0,
    mtimeMs: timeOf((parseNumber(block.subarray(136, 148)) ?? 0) * 1000) ?? 0,
    target: untilNul(field(157, 100)),
  };
  // Links, devices and pipes have no data, whatever their headers claim; unknown types have the size in their header.
  return { flag, size: "123456".includes(flag) ? 0 : size, member };
}

function checkSum(block: Buffer): void {
  const stated = parseNumber(block.subarray(148, 156));
  const counted = Buffer.concat([block.subarray(0, 148), Buffer.alloc(8, 0x20), block.subarray(156)]);
  const sum = counted.reduce((sum, byte) => sum + byte, 0);
  // Some old archivers added signed bytes.
  const signed = () => sum - 256 * counted.filter((byte) => byte > 127).length;
  if (stated !== sum && stated !== signed()) throw damaged("it is no tar archive, or a header was changed");
}

function untilNul(text: string): string {
  const end = text.indexOf("\0");
  return end < 0 ? text : text.slice(0, end);
}

/** Octal digits, or GNU's binary numbers. An empty field is 0. */
export function parseNumber(field: Uint8Array): number | undefined {
  const [first = 0, ...rest] = field;
  if (first & 0x80) {
    const start = first & 0x40 ? -1n : BigInt(first & 0x3f);
    const number = Number(rest.reduce((sum, byte) => sum * 256n + BigInt(byte), start));
    return Number.isSafeInteger(number) ? number : undefined;
  }
  const [, digits] = /^ *([0-7]*)(?:[ \0]|$)/.exec(Buffer.from(field).toString("latin1")) ?? [];
  return digits === undefined ? undefined : Number.parseInt(digits || "0", 8);
}

function takeRecords(extended: Extended, data: string): void {
  for (const [key, value] of parseRecords(data)) {
    if (key === "path" || key === "GNU.sparse.name") extended.name = value;
    else if (key === "linkpath") extended.target = value;
    else if (key === "mtime") extended.mtimeMs = parseTime(value);
    else if (key === "size") {
      extended.size = /^\d+$/.test(value) ? Number(value) : -1;
      if (!Number.isSafeInteger(extended.size) || extended.size < 0) throw damaged("a member has no size");
    }
    if (key.startsWith("GNU.sparse.")) extended.isSparse = true;
  }
}

/** The records `length key=value` of a pax header. */
export function parseRecords(data: string): [string, string][] {
  const records: [string, string][] = [];
  for (let at = 0; at < data.length; ) {
    const [, digits = ""] = /^(\d{1,7}) /.exec(data.slice(at, at + 8)) ?? [];
    const length = Number(digits);
    const equals = data.indexOf("=", at);
    const end = at + length - 1;
    if (!digits || end >= data.length || data[end] !== "\n" || equals < 0 || equals > end) throw damaged("a pax header");
    records.push([data.slice(at + digits.length + 1, equals), data.slice(equals + 1, end)]);
    at += length;
  }
  return records;
}

/** Seconds with a fraction, also before 1970, in milliseconds; nothing if it is not a valid time. */
export function parseTime(text: string): number | undefined {
  return /^-?\d+(\.\d*)?$/.test(text) ? timeOf(Number(text) * 1000) : undefined;
}

function timeOf(ms: number): number | undefined {
  return Math.abs(ms) <= MAX_TIME_MS ? ms : undefined;
}
