/** Every fixture of the protocol: requests are built like them, and events are parsed. */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { parseListing } from "../dist/file_results.js";
import * as protocol from "../dist/protocol.js";
import * as requests from "../dist/requests.js";

const root = fileURLToPath(new URL("../../../crates/protocol/fixtures/", import.meta.url));

function fixtures(kind: string): Record<string, Record<string, unknown>> {
  const names = readdirSync(root + kind).filter((name) => name.endsWith(".json"));
  return Object.fromEntries(names.map((name) => [name.slice(0, -5), JSON.parse(readFileSync(`${root}${kind}/${name}`, "utf8"))]));
}

const CHECKPOINT = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab-7-12-00112233445566778899aabbccddeeff";
const REQUESTS: Record<string, requests.Request> = {
  ack: requests.ack("build-7", { stdout: 4096, stderr: 17 }),
  checkpoint: requests.checkpoint({ live: true, keepRunning: true }),
  config: requests.config({
    idleTimeoutMs: 300_000,
    enableCheckpoint: true,
    enableSandboxHandoff: true,
    enableIdleTimeoutAutoCheckpoint: true,
    filesystemSnapshotName: "py3.11",
    labels: { team: "blue" },
    env: { LANG: "C.UTF-8" },
    cwd: "/root",
    limits: { memory: 512 * 2 ** 20, cpus: 1.5, pids: 256, disk: 2 ** 30, files: 1024 },
    ttlMs: 86_400_000,
    onIncompatible: "files",
    fromCheckpoint: CHECKPOINT,
    sourceToken: "t0ken",
  }),
  config_network: requests.config({ egress: ["example.org:443", "*.example.net", "203.0.113.0/24:5432"] }),
  config_never_idle: requests.config({ idleTimeoutMs: null }),
  config_persistent: requests.config({ persistent: true }),
  config_persistent_auto: requests.config({ persistent: "auto" }),
  config_stays: requests.config({ enableCheckpoint: true, enableSandboxHandoff: false, enableIdleTimeoutAutoCheckpoint: false }),
  exec_argv: requests.exec({
    execId: "build-7",
    argv: ["make", "-j2"],
    env: { CI: "1" },
    cwd: "/src",
    user: "nobody",
    stdin: true,
    pty: { cols: 80, rows: 24 },
    timeoutMs: 30_000,
  }),
  fork: requests.fork(3),
  handoff: requests.handoff(),
  make_directory: requests.makeDirectory({ execId: "", path: "/data/new/deep", parents: true, mode: 0o755 }),
  remove_file: requests.removeFile({ execId: "", path: "/data/old", recursive: true }),
  rename_file: requests.renameFile({ execId: "", path: "/data/a", to: "/data/b" }),
  set_idle_timeout: requests.setIdleTimeout(600_000),
  set_idle_timeout_never: requests.setIdleTimeout(null),
  watch_files: requests.watchFiles({ execId: "watch-1", path: "/data", recursive: true }),
  kill_process: requests.killProcess("build-7"),
  kill_sandbox: requests.killSandbox(),
  list_files: requests.listFiles({ execId: "", path: "/src", depth: 3 }),
  read_file: requests.readFile({ execId: "get-1", path: "/data/big.bin", offset: 1_048_576, length: 4096 }),
  read_file_archive: requests.readFile({ execId: "", path: "/src", archive: true }),
  reconnect: requests.reconnect({ "build-7": { stdout: 4096, stderr: 0 } }),
  reconnect_peek: requests.reconnect({ "exec-1": { stdout: 0, stderr: 0 } }, true),
  resize: requests.resize("build-7", 120, 40),
  signal: requests.signal("build-7", "INT"),
  snapshot_filesystem: requests.snapshot("py3.11", true),
  stdin_base64: requests.stdin("build-7", "/wA=", { encoding: "base64", eof: true, offset: 12 }),
  write_file: requests.writeFile({
    execId: "put-1",
    path: "/data/run.sh",
    mode: 0o755,
    mtimeMs: 1_731_751_200_250,
    size: 4096,
    user: "nobody",
    timeoutMs: 60_000,
  }),
  write_file_archive: requests.writeFile({ execId: "", path: "src", archive: true, cwd: "/data" }),
};
/** Requests of the plain dialect, which this client does not use. */
const PLAIN = ["exec", "stdin"];

for (const [name, fixture] of Object.entries(fixtures("requests"))) {
  if (PLAIN.includes(name)) continue;
  test(`the request ${name} equals its fixture`, () => {
    const { exec_id, ...rest } = REQUESTS[name] ?? {};
    assert.deepEqual(exec_id ? { exec_id, ...rest } : rest, fixture);
  });
}

const snake = (value: unknown): unknown => {
  if (Array.isArray(value)) return value.map(snake);
  if (typeof value !== "object" || value === null) return value;
  const rename = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [rename(name), snake(inner)]));
};

for (const kind of ["events", "events/status_update"]) {
  for (const [name, fixture] of Object.entries(fixtures(kind))) {
    test(`the event ${kind}/${name} is parsed`, () => {
      const event = protocol.parse(JSON.stringify(fixture));
      assert.ok(event);
      assert.deepEqual(snake(event), fixture);
      assert.ok(protocol.parse(JSON.stringify({ ...fixture, later: { field: 1 } })), "it passes over what it does not know");
    });
  }
}

test("every status has a fixture", () => {
  const statuses = Object.values(fixtures("events/status_update")).map((fixture) => fixture["status"]);
  assert.deepEqual(statuses.sort(), [...protocol.STATUSES].sort());
});

test("what is not known is ignored", () => {
  const unknown = '{"event":"status_update","status":"SANDBOX_LATER"}';
  for (const text of ['{"event":"later"}', unknown, "[]", "no", "{}", "null", '{"event":"stdin_ack"}', '{"event":"toString"}']) {
    assert.equal(protocol.parse(text), undefined, text);
  }
});

test("a listing is parsed", () => {
  const entries = parseListing(readFileSync(`${root}files/list.jsonl`, "utf8"));
  assert.deepEqual(
    entries.map(({ name, kind }) => [name, kind]),
    [["run.sh", "file"], ["lib", "directory"], ["lib/latest", "symlink"], ["control", "other"]],
  );
  assert.deepEqual([entries[0]?.size, entries[0]?.mode, entries[0]?.mtimeMs], [4096, 0o755, 1_731_751_200_250]);
  assert.equal(entries[2]?.target, "run.sh");
  assert.equal(parseListing('{"name":"x","kind":"whiteout","later":1}')[0]?.kind, "other");
});

test("a binary frame comes back as it was", () => {
  const chunk = { stream: "stderr" as const, exec: 0x01020304, offset: 2 ** 40, payload: Uint8Array.of(255, 0, 120) };
  const frame = protocol.encodeChunk(chunk);
  assert.deepEqual([...frame.subarray(0, 13)], [2, 1, 2, 3, 4, 0, 0, 1, 0, 0, 0, 0, 0]);
  assert.deepEqual(protocol.decodeChunk(frame), chunk);
  assert.throws(() => protocol.decodeChunk(new Uint8Array(12)));
  assert.throws(() => protocol.decodeChunk(new Uint8Array(13).fill(3)));
});
