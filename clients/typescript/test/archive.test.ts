/** Archives: what this package packs, it and `tar` unpack again. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdir, mkdtemp, readFile, readdir, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { pack } from "../dist/archive.js";
import { unpack } from "../dist/unpack.js";

async function* pieces(data: Uint8Array, size: number) {
  for (let at = 0; at < data.length; at += size) yield data.subarray(at, at + size);
}

async function packed(directory: string): Promise<Buffer> {
  const parts: Uint8Array[] = [];
  for await (const part of pack(directory)) parts.push(part);
  return Buffer.concat(parts);
}

test("archives are compatible with tar", async () => {
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
