/** Downloads from a hostile sandbox: every client unpacks the archives of `clients/suite`, and one program checks the results. */

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdir, mkdtemp, open, readFile, readdir, readlink, rename, stat, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mock, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Directory, writeNew } from "../dist/directory.js";
import { FileError, ProtocolError } from "../dist/errors.js";
import { type FileEntry, parseListing } from "../dist/file_results.js";
import type { Files } from "../dist/files.js";
import { parseNumber, parseRecords, parseTime } from "../dist/tar.js";
import { download } from "../dist/transfer.js";
import { splitName, staysInside, unpack } from "../dist/unpack.js";

const PROGRAM = fileURLToPath(new URL("../../suite/hostile_archives.py", import.meta.url));
const PYTHON = process.env["BATON_TEST_PYTHON"] ?? "python3";

/** Has a short name, because one archive has paths of just under 4096 bytes, which only `rm` can remove. */
async function withDirectory(body: (directory: string) => Promise<void>): Promise<void> {
  const directory = await mkdtemp(join(tmpdir(), "b"));
  try {
    await body(directory);
  } finally {
    execFileSync("rm", ["-rf", directory]);
  }
}

/** A sandbox that claims to be a directory and sends an archive of its own. */
class HostileSandbox {
  sent = 0;
  isClosed = false;
  constructor(
    readonly archive: Uint8Array,
    readonly piece = 1 << 20,
    readonly failure?: Error,
  ) {}

  async statFile(): Promise<FileEntry> {
    return { name: "x", kind: "directory", size: 0, mode: 0, mtimeMs: 0 };
  }

  async *readStream(): AsyncGenerator<Uint8Array, void, void> {
    try {
      for (let at = 0; at < this.archive.length; at += this.piece) {
        this.sent += 1;
        yield this.archive.subarray(at, at + this.piece);
      }
      if (this.failure) throw this.failure;
    } finally {
      this.isClosed = true;
    }
  }

  async download(local: string): Promise<void> {
    await download(this as unknown as Files, "/x", local, {});
  }
}

/** The outcome of a download, in the form that the check expects. */
async function outcomeOf(unpacking: Promise<void>): Promise<object> {
  try {
    await unpacking;
    return { left_out: 0 };
  } catch (error) {
    assert.ok(error instanceof FileError, String(error));
    if (!error.message.startsWith("left out: ")) return { error: error.message };
    const [, more] = /; and (\d+) more$/.exec(error.message) ?? [];
    return { left_out: error.message.split("; ").length + (more ? Number(more) - 1 : 0) };
  }
}

type Way = (archive: Uint8Array, target: string) => Promise<void>;

const WAYS: Record<string, Way> = {
  "in small pieces": async (archive, target) => {
    const sandbox = new HostileSandbox(archive, 100);
    await sandbox.download(target).finally(() => assert.ok(sandbox.isClosed));
  },
  "in one piece": (archive, target) => new HostileSandbox(archive).download(target),
  "by paths, where the system has no other way": (archive, target) =>
    unpack(new HostileSandbox(archive).readStream(), target, false),
};

for (const [name, way] of Object.entries(WAYS)) {
  test(`every hostile archive leaves behind what the table says, ${name}`, () =>
    withDirectory(async (directory) => {
      execFileSync(PYTHON, [PROGRAM, "prepare", directory]);
      const outcomes: Record<string, object> = {};
      for (const archive of await readdir(directory)) {
        const bytes = await readFile(join(directory, archive, "archive.tar"));
        outcomes[archive] = await outcomeOf(way(bytes, join(directory, archive, "scene", "target")));
      }
      const judged = spawnSync(PYTHON, [PROGRAM, "judge", directory], { input: JSON.stringify(outcomes), encoding: "utf8" });
      const checked = Object.entries(JSON.parse(judged.stdout) as Record<string, string[]>);
      assert.ok(checked.length >= 50, judged.stderr);
      assert.deepEqual(checked.filter(([, complaints]) => complaints.length), []);
    }));
}

test("names are split, and links are accepted, as in the other clients", () => {
  for (const bad of ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "a\0b", "a/".repeat(3000)]) assert.equal(splitName(bad), undefined, bad);
  assert.deepEqual([splitName("./a//b/."), splitName("./"), splitName("..a/b..")], [["a", "b"], [], ["..a", "b.."]]);
  const table: [string, number, boolean][] = [
    ["b", 0, true],
    ["../b", 1, true],
    ["../../b", 1, false],
    ["..", 0, false],
    ["/etc", 5, false],
    // If `a` is a link to `.`, these are above the top.
    ["a/../b", 0, false],
    ["../a/../../b", 3, false],
    ["a\0b", 0, false],
    ["", 0, true],
  ];
  for (const [target, depth, isInside] of table) assert.equal(staysInside(target, depth), isInside, target);
});

test("numbers, times and records are read, or refused", () => {
  const field = (text: string) => parseNumber(Buffer.from(text, "latin1"));
  const negative = parseNumber(Buffer.alloc(12, 0xff));
  assert.deepEqual([field("0000644\0"), field("   644 \0"), field("\0\0\0\0"), negative], [0o644, 0o644, 0, -1]);
  assert.equal(field("\x80\0\0\0\0\0\0\x02\0\0\0\0"), 2 * 2 ** 32);
  assert.deepEqual([field("12a"), field("9"), field(`\x80${"\xff".repeat(11)}`)], [undefined, undefined, undefined]);
  assert.deepEqual([parseTime("1.25"), parseTime("-1.5"), parseTime("7.")], [1250, -1500, 7000]);
  for (const bad of ["", "x", "1.x", "nan", "1e9", "9".repeat(30)]) assert.equal(parseTime(bad), undefined, bad);
  assert.deepEqual(parseRecords("6 a=b\n8 cc=d=\n"), [["a", "b"], ["cc", "d="]]);
  for (const bad of ["5 a=b", "x a=b\n", "99 a=b\n", "6 ab\n\n", "0 ", " a=b\n"]) assert.throws(() => parseRecords(bad), FileError, bad);
});

/** An archive of empty files with the names in a Python expression. */
function packed(names: string): Buffer {
  const make = `
import sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
    for name in ${names}:
        tar.addfile(tarfile.TarInfo(name))`;
  return execFileSync(PYTHON, ["-c", make], { maxBuffer: 16 << 20 });
}

test("names that are not UTF-8 are kept", () =>
  withDirectory(async (directory) => {
    await new HostileSandbox(packed(`["odd-\\udcff\\udc80"]`)).download(directory);
    assert.deepEqual(await readdir(directory, "buffer"), [Buffer.from("odd-\xff\x80", "latin1")]);
  }));

test("a hostile name cannot write to the terminal nor fill memory", () =>
  withDirectory(async (directory) => {
    const archive = packed(`["../\\x1b[2J\\n\\u202e%d" % number + "n" * 5000 for number in range(300)]`);
    await assert.rejects(new HostileSandbox(archive).download(join(directory, "out")), (error: unknown) => {
      assert.ok(error instanceof FileError && error.code === "EINVAL");
      assert.match(error.message, /^[^\p{C}]{1,5000}; and 290 more$/u);
      return true;
    });
  }));

test("an archive that is refused ends the transfer", () =>
  withDirectory(async (directory) => {
    const sandbox = new HostileSandbox(Buffer.alloc(1 << 20, 0xff), 1000);
    await assert.rejects(sandbox.download(directory), /damaged/);
    assert.ok(sandbox.isClosed && sandbox.sent < 10);
  }));

test("no descriptor is left open", () =>
  withDirectory(async (directory) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", directory]);
    const openBelow = async () => {
      const links = (await readdir("/proc/self/fd")).map((fd) => readlink(`/proc/self/fd/${fd}`).catch(() => ""));
      return (await Promise.all(links)).filter((path) => path.startsWith(directory));
    };
    for (const name of ["kinds-that-change", "hard-link-to-no-file", "hard-link-honest", "cut-in-a-file", "closed-directory"]) {
      const archive = await readFile(join(directory, name, "archive.tar"));
      await outcomeOf(new HostileSandbox(archive).download(join(directory, name, "scene", "target")));
      assert.deepEqual(await openBelow(), [], name);
    }
  }));

test("an error of the sandbox comes first", () =>
  withDirectory(async (directory) => {
    const archive = Buffer.concat([packed(`["../bad", "good"]`), Buffer.alloc(100 << 10)]);
    const failure = Object.assign(new Error("the disk is gone"), { code: "EIO" });
    await assert.rejects(new HostileSandbox(archive, 512, failure).download(join(directory, "out")), /the disk is gone/);
    assert.deepEqual(await readdir(join(directory, "out")), ["good"]);
  }));

test("an error of the network does not blame a file, and leaves no incomplete one", () =>
  withDirectory(async (directory) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", join(directory, "scenes")]);
    const archive = await readFile(join(directory, "scenes", "cut-in-a-file", "archive.tar"));
    const failure = Object.assign(new Error("the network is gone"), { code: "ECONNRESET" });
    await assert.rejects(new HostileSandbox(archive, 512, failure).download(join(directory, "out")), /the network is gone/);
    assert.deepEqual(await readdir(join(directory, "out")), ["good"]);
  }));

test("a directory is complete once it is left", () =>
  withDirectory(async (directory) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", join(directory, "scenes")]);
    const archive = await readFile(join(directory, "scenes", "closed-directory", "archive.tar"));
    const [target, modes] = [join(directory, "out"), [] as string[]];
    async function* watched() {
      for await (const part of new HostileSandbox(archive, 512).readStream()) {
        const there = await stat(join(target, "closed")).catch(() => undefined);
        modes.push(there ? (there.mode & 0o777).toString(8) : "none");
        yield part;
      }
    }
    await unpack(watched(), target);
    const before = modes.indexOf("555");
    assert.ok(modes[0] === "none" && before > 0 && modes[before - 1] !== "555", modes.join());
    assert.ok(before < modes.length - 1, "not only at the end");
  }));

test("a directory that was exchanged is not written to, whether it is identified by its handle or by its path", () =>
  withDirectory(async (directory) => {
    const [inside, moved] = [join(directory, "target", "inside"), join(directory, "target", "moved")];
    await mkdir(join(directory, "target"));
    await mkdir(join(directory, "outside"));
    const exchanges = [() => symlink("../outside", inside), () => mkdir(inside)];
    for (const mayUseHandles of [true, false]) {
      for (const exchange of exchanges) {
        await mkdir(inside);
        const top = await Directory.open(join(directory, "target"), mayUseHandles);
        const below = await top.enter("inside");
        await rename(inside, moved);
        await exchange();
        const made = below.make("new");
        await (mayUseHandles ? made : assert.rejects(made, /exchanged/));
        assert.deepEqual(await readdir(inside), []);
        assert.deepEqual(await readdir(moved), mayUseHandles ? ["new"] : []);
        await below.close();
        await top.close();
        execFileSync("rm", ["-rf", inside, moved]);
      }
    }
  }));

test("a new file never replaces one, nor follows a link", () =>
  withDirectory(async (directory) => {
    await symlink("missing", join(directory, "link"));
    const pieces = new HostileSandbox(Buffer.from("x")).readStream();
    await assert.rejects(writeNew(join(directory, "link"), pieces, { mode: 0o644, mtimeMs: 0 }), { code: "EEXIST" });
    assert.deepEqual(await readdir(directory), ["link"]);
  }));

test("a full disk ends it", () =>
  withDirectory(async (directory) => {
    const handle = await open(directory);
    const full = Object.assign(new Error("ENOSPC: no space left on device"), { code: "ENOSPC" });
    const chmod = mock.method(Object.getPrototypeOf(handle), "chmod", () => Promise.reject(full));
    try {
      const refused = (error: unknown) => error instanceof FileError && error.code === "ENOSPC" && error.message.startsWith("one: ");
      await assert.rejects(new HostileSandbox(packed(`["one", "two"]`)).download(directory), refused);
    } finally {
      chmod.mock.restore();
      await handle.close();
    }
    assert.deepEqual(await readdir(directory), []);
  }));

test("on Windows a directory is refused before anything is created", () =>
  withDirectory(async (directory) => {
    const before = Object.getOwnPropertyDescriptor(process, "platform") ?? {};
    Object.defineProperty(process, "platform", { ...before, value: "win32" });
    try {
      const refused = (error: unknown) => error instanceof FileError && error.code === "ENOTSUP";
      const sandbox = new HostileSandbox(packed(`["good"]`));
      await assert.rejects(unpack(sandbox.readStream(), `${directory}/new`), refused);
    } finally {
      Object.defineProperty(process, "platform", before);
    }
    assert.deepEqual(await readdir(directory), []);
  }));

test("a malformed listing is a protocol error", () => {
  const good = '{"name":"x","kind":"file","size":1,"mode":420,"mtime_ms":-5}';
  assert.deepEqual(parseListing(`${good}\n`), [{ name: "x", kind: "file", size: 1, mode: 420, mtimeMs: -5 }]);
  const bad = ["x", "[]", "null", "{}", '{"name":"x"}', '{"name":1,"kind":"file"}', '{"name":"x","kind":"file","mode":"0"}'];
  bad.push('{"name":"x","kind":"file","mtime_ms":1e400}', '{"name":"x","kind":"file","target":1}');
  for (const line of bad) assert.throws(() => parseListing(line), ProtocolError, line);
});

test("a single file is complete, and has the time that the sandbox reports", () =>
  withDirectory(async (directory) => {
    for (const [mtimeMs, expected] of [[-1500, -1500], [1e308, undefined], [-1e308, undefined]] as const) {
      const statFile = async () => ({ name: "x", kind: "file", size: 1, mode: 0o6755, mtimeMs });
      const readStream = async function* () {
        yield Buffer.from("x");
      };
      await download({ statFile, readStream } as unknown as Files, "/x", join(directory, "x"), {});
      const found = await stat(join(directory, "x"));
      assert.equal(found.mode & 0o7777, 0o755);
      if (expected !== undefined) assert.equal(found.mtimeMs, expected);
    }
    const broken = new HostileSandbox(Buffer.from("half"), 1, new Error("the network is gone"));
    broken.statFile = async () => ({ name: "x", kind: "file", size: 9, mode: 0o644, mtimeMs: 0 });
    await assert.rejects(broken.download(join(directory, "x")), /the network is gone/);
    assert.deepEqual([await readdir(directory), await readFile(join(directory, "x"), "utf8")], [["x"], "x"]);
  }));
