/** The suite that every client library runs: files. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { access, chmod, mkdir, mkdtemp, open, readFile, readdir, readlink, rm, stat, symlink, utimes, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

import { FileError } from "baton-sandbox";

import { cuts, proxy, sandbox, scenario } from "./suite.js";
import { SIZES } from "./testbed.js";

/** Runs a test with a temporary directory. */
async function withDirectory(body: (directory: string) => Promise<void>): Promise<void> {
  const directory = await mkdtemp(join(tmpdir(), "baton-"));
  try {
    await body(directory);
  } finally {
    await rm(directory, { recursive: true });
  }
}

async function digestOf(path: string): Promise<string> {
  const digest = createHash("sha256");
  for await (const data of createReadStream(path)) digest.update(data as Buffer);
  return digest.digest("hex");
}

scenario("files go in and out", () =>
  withDirectory(async (directory) => {
    await sandbox.writeFile("/data/new/note.txt", "é\n", { mode: 0o640 });
    assert.equal(Buffer.from(await sandbox.readFile("/data/new/note.txt")).toString(), "é\n");
    assert.equal(await sandbox.readText("/data/new/note.txt"), "é\n");
    const part = await sandbox.readFile("note.txt", { cwd: "/data/new", offset: 1, length: 1 });
    assert.deepEqual([...part], [0xa9]);
    assert.equal((await sandbox.run("stat -c %a /data/new/note.txt")).stdout, "640\n");
    await sandbox.writeFile("/data/empty", new Uint8Array());
    const entries = await sandbox.listFiles("/data", { depth: 2 });
    const files = entries.filter((entry) => entry.kind === "file").map((entry) => [entry.name, entry.size]);
    assert.deepEqual(files, [["empty", 0], ["new/note.txt", 3]]);
    await sandbox.writeFile("/data/pieces", ["0", "1", "2"].map((piece) => Buffer.from(piece)));
    let pieces = "";
    for await (const data of sandbox.readStream("/data/pieces")) pieces += Buffer.from(data).toString();
    assert.equal(pieces, "012");
    for (const [path, code] of [["/no/such", "ENOENT"], ["/data", "EISDIR"]] as const) {
      await assert.rejects(sandbox.readFile(path), (error: unknown) => error instanceof FileError && error.code === code);
    }
    await assert.rejects(sandbox.writeFile("/data", "x"), FileError);
    async function* half() {
      yield Buffer.from("half");
      throw new Error("the disk is gone");
    }
    await assert.rejects(sandbox.writeFile("/data/half", half()), /the disk is gone/);
    await assert.rejects(sandbox.readFile("/data/half"), FileError);
    const local = join(directory, "up");
    await writeFile(local, "up and down");
    await chmod(local, 0o750);
    await utimes(local, 1_700_000_000, 1_700_000_000);
    await sandbox.upload(local, "/data/up");
    await sandbox.download("/data/up", join(directory, "deep", "down"));
    const down = await stat(join(directory, "deep", "down"));
    assert.deepEqual([down.mode & 0o777, down.mtimeMs, down.size], [0o750, 1_700_000_000_000, 11]);
  }),
);

scenario("a directory goes in and out", () =>
  withDirectory(async (directory) => {
    const [source, target] = [join(directory, "source"), join(directory, "target")];
    const long = "n".repeat(120);
    for (const name of ["a.txt", `sub/${long}`, "sub/empty"]) {
      await mkdir(dirname(join(source, name)), { recursive: true });
      await writeFile(join(source, name), name.replace("empty", ""));
    }
    await symlink("sub/empty", join(source, "link"));
    await chmod(join(source, "a.txt"), 0o755);
    await sandbox.upload(source, "/in");
    const found = await sandbox.run("cd /in; find . -type f -o -type l | sort; stat -c %a a.txt; readlink link");
    assert.deepEqual(found.stdout.trim().split("\n"), ["./a.txt", "./link", "./sub/empty", `./sub/${long}`, "755", "sub/empty"]);
    await sandbox.run("cd /in; ln -s /etc/passwd out; mkfifo pipe; echo more > more");
    await assert.rejects(sandbox.download("/in", target), FileError);
    // What could be trusted is there, and nothing else.
    const names = (await readdir(target, { recursive: true })).sort();
    assert.deepEqual(names, ["a.txt", "link", "more", "sub", "sub/empty", `sub/${long}`]);
    assert.equal(await readFile(join(target, "sub", long), "utf8"), `sub/${long}`);
    await access(join(target, "a.txt"), 1);
    assert.equal(await readlink(join(target, "link")), "sub/empty");
  }),
);

scenario("files are exact over cuts", () =>
  withDirectory(async (directory) => {
    const [local, back] = [join(directory, "local"), join(directory, "back")];
    const file = await open(local, "w");
    for (let i = 0; i <= SIZES.file / 65_536; i += 1) {
      const piece = createHash("sha256").update(`${i}`).digest();
      await file.write(Buffer.concat(Array.from({ length: 2048 }, () => piece)));
    }
    await file.close();
    const cutting = (async () => {
      for (let i = 0; i < SIZES.file_cuts; i += 1) {
        await new Promise((done) => setTimeout(done, 150));
        await proxy.network({ cut: true });
      }
    })();
    await sandbox.upload(local, "/big");
    await cutting;
    await proxy.network({ cuts: cuts(SIZES.file, SIZES.file_cuts), cut: true });
    await sandbox.download("/big", back);
    assert.equal(await digestOf(back), await digestOf(local));
    await sandbox.run("rm /big");
  }),
);
