/** Archives: what is packed comes out again, and what is not trusted stays out. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { lstat, mkdir, mkdtemp, readFile, readdir, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { pack, unpack } from "../dist/archive.js";

async function* pieces(data: Uint8Array, size: number) {
  for (let at = 0; at < data.length; at += size) yield data.subarray(at, at + size);
}

async function packed(directory: string): Promise<Buffer> {
  const parts: Uint8Array[] = [];
  for await (const part of pack(directory)) parts.push(part);
  return Buffer.concat(parts);
}

test("what tar reads and writes is read and written", async () => {
  const root = await mkdtemp(join(tmpdir(), "baton-"));
  const long = `${"d".repeat(90)}/${"f".repeat(150)}`;
  await mkdir(join(root, "in", "d".repeat(90)), { recursive: true });
  await writeFile(join(root, "in", long), "x".repeat(1000));
  await writeFile(join(root, "in", "é"), "");
  await symlink("é", join(root, "in", "link"));
  const archive = await packed(join(root, "in"));
  await mkdir(join(root, "tar"));
  execFileSync("tar", ["-xf", "-", "-C", join(root, "tar")], { input: archive });
  assert.equal(await readFile(join(root, "tar", long), "utf8"), "x".repeat(1000));
  for (const format of ["pax", "gnu", "ustar"]) {
    const kept = format === "ustar" ? ["--exclude", "f*"] : [];
    const made = execFileSync("tar", ["-cf", "-", `--format=${format}`, ...kept, "-C", join(root, "in"), "."]);
    for (const size of [7, 512, 100_000]) {
      const out = join(root, `${format}-${size}`);
      await unpack(pieces(made, size), out);
      assert.deepEqual((await readdir(out)).sort(), ["d".repeat(90), "link", "é"]);
      if (!kept.length) assert.equal(await readFile(join(out, long), "utf8"), "x".repeat(1000));
    }
  }
  await rm(root, { recursive: true });
});

test("nothing is written outside of the directory", async () => {
  const root = await mkdtemp(join(tmpdir(), "baton-"));
  const make = `
import io, sys, tarfile
tar = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
def add(name, kind=tarfile.REGTYPE, target="", data=b""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, len(data)
    tar.addfile(member, io.BytesIO(data))
add("/absolute", data=b"bad")
add("../above", data=b"bad")
add("up", tarfile.SYMTYPE, "..")
add("up/through", data=b"bad")
add("root", tarfile.SYMTYPE, "/etc")
add("winding", tarfile.SYMTYPE, "a/../../b")
add("hard", tarfile.LNKTYPE, "../secret")
add("device", tarfile.CHRTYPE)
add("inner", tarfile.SYMTYPE, "good")
add("inner/under", data=b"bad")
add("good", data=b"good")
tar.close()`;
  const archive = execFileSync("python3", ["-c", make]);
  await writeFile(join(root, "secret"), "s");
  await assert.rejects(unpack(pieces(archive, 1000), join(root, "out")), /left out/);
  assert.deepEqual((await readdir(join(root, "out"))).sort(), ["good", "inner", "up"]);
  assert.deepEqual((await readdir(root)).sort(), ["out", "secret"]);
  assert.equal((await lstat(join(root, "secret"))).nlink, 1);
  await assert.rejects(unpack(pieces(archive.subarray(0, 1400), 100), join(root, "half")), /ends in the middle/);
  await rm(root, { recursive: true });
});
