/** Removing, renaming and watching files, and the idle timeout of a running sandbox. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { type FileChange, FileError, ProtocolError } from "baton-sandbox";

import { ScriptedServer, create } from "./scripted_server.js";
import { proxy, sandbox, scenario } from "./suite.js";

const WATCH = readFileSync(new URL("../../../crates/protocol/fixtures/files/watch.jsonl", import.meta.url));
const hasCode = (code: string) => (error: unknown) => error instanceof FileError && error.code === code;

scenario("files are removed and renamed", async () => {
  await sandbox.makeDirectory("/data/new/deep");
  await sandbox.makeDirectory("/data/new/deep");
  await assert.rejects(sandbox.makeDirectory("/data/other/deep", { parents: false }), hasCode("ENOENT"));
  await sandbox.writeFile("/data/new/a", "a", { mode: 0o640 });
  const { name, kind, size, mode } = await sandbox.statFile("/data/new/a");
  assert.deepEqual([name, kind, size, mode], ["a", "file", 1, 0o640]);
  await sandbox.renameFile("a", "deep/b", { cwd: "/data/new" });
  assert.ok(!(await sandbox.fileExists("/data/new/a")) && (await sandbox.fileExists("/data/new/deep/b")));
  assert.ok(!(await sandbox.fileExists("/data/new/deep/b/c")));
  await assert.rejects(sandbox.removeFile("/data/new"), hasCode("ENOTEMPTY"));
  await sandbox.removeFile("/data/new", { recursive: true });
  await assert.rejects(sandbox.statFile("/data/new"), hasCode("ENOENT"));
});

scenario("changes are watched over a drop", async () => {
  await sandbox.makeDirectory("/data");
  await assert.rejects(sandbox.watchFiles("/no/such/directory"), FileError);
  const watch = await sandbox.watchFiles("/data", { recursive: true });
  await sandbox.run("touch /data/a");
  for await (const change of watch) {
    assert.deepEqual(change, { type: "create", name: "a" });
    break;
  }
  await proxy.network({ cut: true });
  await sandbox.renameFile("/data/a", "/data/b");
  for await (const change of watch) {
    if (change.type !== "rename") continue;
    assert.deepEqual(change, { type: "rename", name: "a", to: "b" });
    break;
  }
  await watch.close();
  for await (const change of watch) assert.ok(["write", "chmod"].includes(change.type));
  // A watch ends with its directory.
  const ending = await sandbox.watchFiles("/data");
  await sandbox.removeFile("/data", { recursive: true });
  const changes: FileChange[] = [];
  for await (const change of ending) changes.push(change);
  assert.ok(changes.some(({ type, name }) => type === "remove" && name === "b"));
});

scenario("the idle timeout changes", async () => {
  assert.equal(await sandbox.setIdleTimeout(600_000), 600_000);
  assert.equal(await sandbox.setIdleTimeout(null), null);
  await assert.rejects(sandbox.setIdleTimeout(-1));
});

test("a watch reports every line and every gap", async () => {
  await using server = await ScriptedServer.start();
  const [scripted, peer] = await create(server);
  let starting = scripted.watchFiles("/data");
  let id = String((await peer.receiveRequest())["exec_id"]);
  peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 1 });
  const half = Math.floor(WATCH.length / 2);
  peer.output(1, 1, 0, WATCH.subarray(0, half));
  const watch = await starting;
  peer.output(1, 1, half, WATCH.subarray(half));
  const end = WATCH.length + 10;
  peer.sendEvent("output_gap", { exec_id: id, stream: "stdout", from: WATCH.length, to: end });
  peer.output(1, 1, end, 'half a line"}\n{"type":"create","name":"c"}\n');
  peer.done(id);
  const changes: FileChange[] = [];
  for await (const change of watch) changes.push(change);
  assert.deepEqual(changes, [
    { type: "create", name: "a" },
    { type: "write", name: "a" },
    { type: "chmod", name: "a" },
    { type: "rename", name: "a", to: "b" },
    { type: "remove", name: "b" },
    { type: "overflow", name: "" },
    { type: "overflow", name: "" },
    { type: "create", name: "c" },
  ]);
  starting = scripted.watchFiles("/data");
  const refused = assert.rejects(starting, ProtocolError);
  id = String((await peer.receiveRequest())["exec_id"]);
  peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 2 });
  peer.output(1, 2, 0, '{"type":"ready"}\n');
  await refused;
  await scripted.close();
});
