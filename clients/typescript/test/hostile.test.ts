/** Downloads from a hostile sandbox: the archives of `clients/suite`, which every client unpacks, and one judge. */

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdir, mkdtemp, open, readFile, readdir, readlink, rename, stat, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mock, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Directory, writeNew } from "../dist/directory.js";
import { type FileEntry, type Files, parseListing } from "../dist/files.js";
import { FileError, ProtocolError } from "../dist/errors.js";
import { parseNumber, parseRecords, parseTime } from "../dist/tar.js";
import { download } from "../dist/transfer.js";
import { splitName, staysInside, unpack } from "../dist/unpack.js";

const PROGRAM = fileURLToPath(new URL("../../suite/hostile_archives.py", import.meta.url));
const PYTHON = process.env["BATON_TEST_PYTHON"] ?? "python3";

/** With a short name: one archive is about paths of just under 4096 bytes, and only `rm` takes those away again. */
async function withPlace(body: (place: string) => Promise<void>): Promise<void> {
  const place = await mkdtemp(join(tmpdir(), "b"));
  try {
    await body(place);
  } finally {
    execFileSync("rm", ["-rf", place]);
  }
}

/** Says that it is a directory, and sends an archive of its own making. */
class HostileSandbox {
  sent = 0;
  isClosed = false;
  constructor(
    readonly archive: Uint8Array,
    readonly piece = 1 << 20,
    readonly failure?: Error,
  ) {}

  async listFiles(): Promise<FileEntry[]> {
    return [{ name: "x", kind: "directory", size: 0, mode: 0, mtimeMs: 0 }];
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

/** What the client says of an archive, in the judge's words. */
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
    withPlace(async (place) => {
      execFileSync(PYTHON, [PROGRAM, "prepare", place]);
      const outcomes: Record<string, object> = {};
      for (const archive of await readdir(place)) {
        const bytes = await readFile(join(place, archive, "archive.tar"));
        outcomes[archive] = await outcomeOf(way(bytes, join(place, archive, "scene", "target")));
      }
      const judged = spawnSync(PYTHON, [PROGRAM, "judge", place], { input: JSON.stringify(outcomes), encoding: "utf8" });
      const verdicts = Object.entries(JSON.parse(judged.stdout) as Record<string, string[]>);
      assert.ok(verdicts.length >= 50, judged.stderr);
      assert.deepEqual(verdicts.filter(([, complaints]) => complaints.length), []);
    }));
}

test("names are parted, and links believed, as in the other clients", () => {
  for (const bad of ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "a\0b", "a/".repeat(3000)]) assert.equal(splitName(bad), undefined, bad);
  assert.deepEqual([splitName("./a//b/."), splitName("./"), splitName("..a/b..")], [["a", "b"], [], ["..a", "b.."]]);
  const table: [string, number, boolean][] = [
    ["b", 0, true],
    ["../b", 1, true],
    ["../../b", 1, false],
    ["..", 0, false],
    ["/etc", 5, false],
    // `a` may be a link to `.`, and then these are above the top.
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

/** An archive of empty files, by the names that Python gives them. */
function packed(names: string): Buffer {
  const make = `
import sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
    for name in ${names}:
        tar.addfile(tarfile.TarInfo(name))`;
  return execFileSync(PYTHON, ["-c", make], { maxBuffer: 16 << 20 });
}

test("names that are no text come out as they are", () =>
  withPlace(async (place) => {
    await new HostileSandbox(packed(`["odd-\\udcff\\udc80"]`)).download(place);
    assert.deepEqual(await readdir(place, "buffer"), [Buffer.from("odd-\xff\x80", "latin1")]);
  }));

test("a hostile name cannot write to the terminal nor fill memory", () =>
  withPlace(async (place) => {
    const archive = packed(`["../\\x1b[2J\\n\\u202e%d" % number + "n" * 5000 for number in range(300)]`);
    await assert.rejects(new HostileSandbox(archive).download(join(place, "out")), (error: unknown) => {
      assert.ok(error instanceof FileError && error.code === "EINVAL");
      assert.match(error.message, /^[^\p{C}]{1,5000}; and 290 more$/u);
      return true;
    });
  }));

test("an archive that is refused ends the transfer", () =>
  withPlace(async (place) => {
    const sandbox = new HostileSandbox(Buffer.alloc(1 << 20, 0xff), 1000);
    await assert.rejects(sandbox.download(place), /damaged/);
    assert.ok(sandbox.isClosed && sandbox.sent < 10);
  }));

test("no descriptor is left open", () =>
  withPlace(async (place) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", place]);
    const openBelow = async () => {
      const links = (await readdir("/proc/self/fd")).map((fd) => readlink(`/proc/self/fd/${fd}`).catch(() => ""));
      return (await Promise.all(links)).filter((path) => path.startsWith(place));
    };
    for (const name of ["kinds-that-change", "hard-link-to-no-file", "hard-link-honest", "cut-in-a-file", "closed-directory"]) {
      const archive = await readFile(join(place, name, "archive.tar"));
      await outcomeOf(new HostileSandbox(archive).download(join(place, name, "scene", "target")));
      assert.deepEqual(await openBelow(), [], name);
    }
  }));

test("what the sandbox says at the end comes first", () =>
  withPlace(async (place) => {
    const archive = Buffer.concat([packed(`["../bad", "good"]`), Buffer.alloc(100 << 10)]);
    const failure = Object.assign(new Error("the disk is gone"), { code: "EIO" });
    await assert.rejects(new HostileSandbox(archive, 512, failure).download(join(place, "out")), /the disk is gone/);
    assert.deepEqual(await readdir(join(place, "out")), ["good"]);
  }));

test("a network that fails in a file is not that file's fault, and leaves no half of it", () =>
  withPlace(async (place) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", join(place, "scenes")]);
    const archive = await readFile(join(place, "scenes", "cut-in-a-file", "archive.tar"));
    const failure = Object.assign(new Error("the network is gone"), { code: "ECONNRESET" });
    await assert.rejects(new HostileSandbox(archive, 512, failure).download(join(place, "out")), /the network is gone/);
    assert.deepEqual(await readdir(join(place, "out")), ["good"]);
  }));

test("a directory is complete once it is left", () =>
  withPlace(async (place) => {
    execFileSync(PYTHON, [PROGRAM, "prepare", join(place, "scenes")]);
    const archive = await readFile(join(place, "scenes", "closed-directory", "archive.tar"));
    const [target, modes] = [join(place, "out"), [] as string[]];
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

test("a directory that was exchanged is not written to, whether it is known by its handle or by its path", () =>
  withPlace(async (place) => {
    const [inside, moved] = [join(place, "target", "inside"), join(place, "target", "moved")];
    await mkdir(join(place, "target"));
    await mkdir(join(place, "outside"));
    const exchanges = [() => symlink("../outside", inside), () => mkdir(inside)];
    for (const mayUseHandles of [true, false]) {
      for (const exchange of exchanges) {
        await mkdir(inside);
        const top = await Directory.open(join(place, "target"), mayUseHandles);
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

test("a new file is never one that is there, nor behind a link", () =>
  withPlace(async (place) => {
    await symlink("missing", join(place, "link"));
    const pieces = new HostileSandbox(Buffer.from("x")).readStream();
    await assert.rejects(writeNew(join(place, "link"), pieces, { mode: 0o644, mtimeMs: 0 }), { code: "EEXIST" });
    assert.deepEqual(await readdir(place), ["link"]);
  }));

test("a full disk ends it", () =>
  withPlace(async (place) => {
    const handle = await open(place);
    const full = Object.assign(new Error("ENOSPC: no space left on device"), { code: "ENOSPC" });
    const chmod = mock.method(Object.getPrototypeOf(handle), "chmod", () => Promise.reject(full));
    try {
      const refused = (error: unknown) => error instanceof FileError && error.code === "ENOSPC" && error.message.startsWith("one: ");
      await assert.rejects(new HostileSandbox(packed(`["one", "two"]`)).download(place), refused);
    } finally {
      chmod.mock.restore();
      await handle.close();
    }
    assert.deepEqual(await readdir(place), []);
  }));

test("on Windows a directory is refused before anything is made", () =>
  withPlace(async (place) => {
    const before = Object.getOwnPropertyDescriptor(process, "platform") ?? {};
    Object.defineProperty(process, "platform", { ...before, value: "win32" });
    try {
      const refused = (error: unknown) => error instanceof FileError && error.code === "ENOTSUP";
      const sandbox = new HostileSandbox(packed(`["good"]`));
      await assert.rejects(unpack(sandbox.readStream(), `${place}/new`), refused);
    } finally {
      Object.defineProperty(process, "platform", before);
    }
    assert.deepEqual(await readdir(place), []);
  }));

test("a damaged listing is an error of its own", () => {
  const good = '{"name":"x","kind":"file","size":1,"mode":420,"mtime_ms":-5}';
  assert.deepEqual(parseListing(`${good}\n`), [{ name: "x", kind: "file", size: 1, mode: 420, mtimeMs: -5 }]);
  const bad = ["x", "[]", "null", "{}", '{"name":"x"}', '{"name":1,"kind":"file"}', '{"name":"x","kind":"file","mode":"0"}'];
  bad.push('{"name":"x","kind":"file","mtime_ms":1e400}', '{"name":"x","kind":"file","target":1}');
  for (const line of bad) assert.throws(() => parseListing(line), ProtocolError, line);
});

test("a single file is whole, and has the time it is given, however odd", () =>
  withPlace(async (place) => {
    for (const [mtimeMs, expected] of [[-1500, -1500], [1e308, undefined], [-1e308, undefined]] as const) {
      const listFiles = async () => [{ name: "x", kind: "file", size: 1, mode: 0o6755, mtimeMs }];
      const readStream = async function* () {
        yield Buffer.from("x");
      };
      await download({ listFiles, readStream } as unknown as Files, "/x", join(place, "x"), {});
      const found = await stat(join(place, "x"));
      assert.equal(found.mode & 0o7777, 0o755);
      if (expected !== undefined) assert.equal(found.mtimeMs, expected);
    }
    const broken = new HostileSandbox(Buffer.from("half"), 1, new Error("the network is gone"));
    broken.listFiles = async () => [{ name: "x", kind: "file", size: 9, mode: 0o644, mtimeMs: 0 }];
    await assert.rejects(broken.download(join(place, "x")), /the network is gone/);
    assert.deepEqual([await readdir(place), await readFile(join(place, "x"), "utf8")], [["x"], "x"]);
  }));
