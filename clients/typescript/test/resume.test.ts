/** Cut connections: what the client requests after a reconnect, and what its caller sees. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { inspect } from "node:util";

import {
  ConnectionError,
  EndedError,
  ExecLostError,
  NotFoundError,
  OutputGapError,
  PermissionDeniedError,
  ProtocolError,
  RefusedError,
  RestoreError,
  Sandbox,
  TimeoutError,
  type Update,
} from "baton-sandbox";

import { backoff } from "../dist/clock.js";
import { ConnectionSummary } from "../dist/retry_policy.js";
import { WINDOW } from "../dist/stdin.js";
import { ACK_EVERY } from "../dist/stream.js";
import { ID, ScriptedServer, create, start, text, view } from "./scripted_server.js";

test("a command is resumed where it was cut", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  peer.output(1, 1, 0, "one");
  peer.output(2, 1, 0, "e");
  const reader = running.stdout[Symbol.asyncIterator]();
  assert.equal(text((await reader.next()).value), "one");
  peer.cut();
  peer = await server.attach(view(id, 8));
  assert.deepEqual(await peer.receiveRequest(), { action: "reconnect", offsets: { [id]: { stdout: 3, stderr: 1 } } });
  peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 8 });
  peer.output(1, 8, 2, "e two");
  peer.done(id);
  assert.equal(text((await reader.next()).value), " two");
  const result = await running.wait();
  assert.deepEqual([result.stderr, result.exitCode], ["e", 0]);
  await sandbox.close();
});

for (const isKnown of [false, true]) {
  test(`a command is requested again only if the sandbox does not know it (${isKnown})`, async () => {
    await using server = await ScriptedServer.start();
    let [sandbox, peer] = await create(server);
    const starting = sandbox.exec(["once"]);
    const asked = await peer.receiveRequest();
    const id = String(asked["exec_id"]);
    peer.cut();
    peer = await server.attach(...(isKnown ? [view(id, 1)] : []));
    const resumed = { action: "reconnect", offsets: { [id]: { stdout: 0, stderr: 0 } } };
    assert.deepEqual(await peer.receive(), isKnown ? resumed : asked);
    peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 1 });
    peer.done(id, 3);
    assert.equal((await (await starting).wait()).exitCode, 3);
    await sandbox.close();
  });
}

test("a command the sandbox has forgotten ends with the reason", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running] = await start(sandbox, peer);
  peer.cut();
  await server.attach();
  await assert.rejects(running.wait(), ExecLostError);
  await sandbox.close();
});

test("input is sent again from where it was taken", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer, { stdin: true });
  await running.writeStdin("abcdef");
  assert.equal(text((await peer.bytes()).subarray(13)), "abcdef");
  peer.sendEvent("stdin_ack", { exec_id: id, offset: 2 });
  peer.cut();
  await running.closeStdin();
  peer = await server.attach(view(id, 5, 4));
  assert.equal((await peer.receiveRequest())["action"], "reconnect");
  const frame = await peer.bytes();
  assert.deepEqual([frame.readUInt32BE(1), frame.readBigUInt64BE(5), text(frame.subarray(13))], [5, 4n, "ef"]);
  assert.deepEqual(await peer.receive(), { event: "stdin", exec_id: id, data: "", eof: true, offset: 6 });
  // Restored from before input that it had accepted, which the client no longer has.
  peer.cut();
  await server.attach(view(id, 5, 1));
  await assert.rejects(running.wait(), ExecLostError);
  await sandbox.close();
});

test("input written without a connection waits and is bounded", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer, { stdin: true });
  await server.stopListening();
  await running.writeStdin(new Uint8Array(WINDOW));
  let isWritten = false;
  const more = running.writeStdin("y").then(() => {
    isWritten = true;
  });
  await sleep(300);
  assert.ok(!isWritten && !sandbox.info().isConnected);
  await server.listen();
  peer = await server.attach(view(id, 1));
  for (let got = 0; got < WINDOW; ) {
    const message = await peer.receive();
    if (message instanceof Uint8Array) got += message.length - 13;
  }
  peer.sendEvent("stdin_ack", { exec_id: id, offset: WINDOW });
  assert.equal(text((await peer.bytes()).subarray(13)), "y");
  await more;
  await sandbox.close();
});

test("only what was read is acknowledged", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  const part = new Uint8Array(ACK_EVERY / 2);
  for (let i = 0; i < 4; i += 1) peer.output(1, 1, i * part.length, part);
  await assert.rejects(peer.receive(200), /nothing arrived/);
  const reader = running.stdout[Symbol.asyncIterator]();
  for (let i = 0; i < 2; i += 1) assert.equal((await reader.next()).value?.length, part.length);
  assert.deepEqual(await peer.receive(), { action: "ack", exec_id: id, stdout: ACK_EVERY, stderr: 0 });
  running.stdout.discard();
  assert.deepEqual(await peer.receive(), { action: "ack", exec_id: id, stdout: 2 * ACK_EVERY, stderr: 0 });
  await sandbox.close();
});

test("dropped output is reported", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  peer.output(1, 1, 0, "ab");
  peer.sendEvent("output_gap", { exec_id: id, stream: "stdout", from: 2, to: 10 });
  peer.output(1, 1, 10, "cd");
  await assert.rejects(async () => {
    for await (const data of running.stdout) assert.equal(text(data), "ab");
  }, OutputGapError);
  const chunks = running.stdout.chunks();
  assert.equal(text(((await chunks.next()).value as { data: Uint8Array }).data), "cd");
  peer.sendEvent("output_rewound", { exec_id: id, stream: "stdout", to: 11 });
  assert.deepEqual((await chunks.next()).value, { kind: "again", to: 11 });
  await chunks.return();
  peer.output(1, 1, 11, "e");
  peer.sendEvent("output_gap", { exec_id: id, stream: "stderr", from: 0, to: 5 });
  peer.done(id);
  const result = await running.wait();
  assert.deepEqual([result.stdout, result.lost], ["e", 5]);
  await sandbox.close();
});

test("a restored command writes again, and its result is right", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  const waiting = running.wait();
  peer.output(1, 1, 0, "abcdef");
  peer.sendEvent("output_rewound", { exec_id: id, stream: "stdout", to: 2 });
  peer.output(1, 1, 2, "CD");
  peer.done(id);
  assert.equal((await waiting).stdout, "abCD");
  await sandbox.close();
});

test("bytes that are missing are an error", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running] = await start(sandbox, peer);
  peer.output(1, 1, 5, "x");
  await assert.rejects(running.wait(), ProtocolError);
});

test("the affinity cookie is sent until the instance shuts down", async () => {
  await using server = await ScriptedServer.start();
  server.cookies = ["GAESA=one; Path=/; HttpOnly", "b=2"];
  let [sandbox, peer] = await create(server);
  assert.equal(peer.headers.cookie, undefined);
  server.cookies = ["GAESA=two"];
  peer.cut();
  peer = await server.attach();
  assert.equal(peer.headers.cookie, "GAESA=one; b=2");
  peer.cut();
  peer = await server.attach();
  assert.equal(peer.headers.cookie, "GAESA=two; b=2");
  peer.close(1012);
  peer = await server.attach();
  assert.equal(peer.headers.cookie, undefined);
  peer.cut();
  peer = await server.attach();
  assert.equal(peer.headers.cookie, "GAESA=two");
  await sandbox.close();
});

test("it never reconnects in a tight loop", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const before = server.accepted;
  server.status = 503;
  peer.cut();
  await sleep(1_500);
  const tries = server.accepted - before;
  assert.ok(tries >= 2 && tries <= 9, `${tries} tries`);
  server.status = undefined;
  await server.attach();
  await sandbox.close();
  assert.deepEqual([backoff(0, 0), backoff(0, 1), backoff(3, 1), backoff(50, 1), backoff(50, 0)], [100, 200, 1_600, 5_000, 100]);
});

test("a fatal answer ends everything with its type", async () => {
  const kinds = { RESTORE_ERROR: RestoreError, NOT_FOUND: NotFoundError, PERMISSION_DENIAL_ERROR: PermissionDeniedError };
  for (const [status, kind] of Object.entries(kinds)) {
    await using server = await ScriptedServer.start();
    let [sandbox, peer] = await create(server);
    const [running] = await start(sandbox, peer);
    const waiting = assert.rejects(running.wait(), kind);
    peer.cut();
    peer = await server.peer();
    peer.status(status, { message: "no" });
    await waiting;
    await assert.rejects(sandbox.run("true"), kind);
    await sleep(300);
    assert.equal(server.accepted, 2, "it does not reconnect");
  }
});

test("reconnecting ends", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server, { reconnectForMs: 500 });
  const [running] = await start(sandbox, peer);
  const waiting = assert.rejects(running.wait(), ConnectionError);
  await server.stopListening();
  await waiting;
  await server.listen();
  [sandbox, peer] = await create(server, { reconnectForMs: null });
  peer.cut();
  await assert.rejects(sandbox.run("true"), ConnectionError);
});

test("a lost answer is an error", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const asking = assert.rejects(sandbox.checkpoint(), /before the answer/);
  assert.equal((await peer.receiveRequest())["action"], "checkpoint");
  peer.cut();
  await asking;
  await server.attach();
  const waiting = assert.rejects(sandbox.run("true"), EndedError);
  await sandbox.close();
  await waiting;
});

test("a kill is sent again after a cut", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  await running.kill();
  assert.equal((await peer.receiveRequest())["action"], "kill_process");
  peer.cut();
  peer = await server.attach(view(id, 1));
  assert.deepEqual(await peer.receive(), { action: "kill_process", exec_id: id });
  peer.done(id);
  await running.wait();
  const killing = sandbox.kill();
  while ((await peer.receiveRequest())["action"] !== "kill_sandbox");
  peer.cut();
  peer = await server.attach();
  while ((await peer.receiveRequest())["action"] !== "kill_sandbox");
  peer.status("DELETED");
  peer.close(1000);
  await killing;
});

test("forks and snapshots are requested and answered", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const forking = sandbox.fork(2);
  assert.deepEqual(await peer.receive(), { action: "fork", count: 2 });
  peer.sendEvent("forked", { sandboxes: [0, 1].map((i) => ({ sandbox_id: `${ID.slice(0, -1)}${i}`, sandbox_token: `t${i}` })) });
  assert.deepEqual((await forking).map((ref) => ref.token), ["t0", "t1"]);
  const making = sandbox.snapshot("py");
  assert.deepEqual(await peer.receive(), { action: "snapshot_filesystem", name: "py" });
  peer.status("FILESYSTEM_SNAPSHOT_CREATED", { snapshot: "py" });
  assert.equal(await making, "py");
  const refused = assert.rejects(sandbox.snapshot("py"), (error: unknown) => error instanceof RefusedError && /not here/.test(error.message));
  await peer.receive();
  peer.status("FILESYSTEM_SNAPSHOT_ERROR", { message: "not here" });
  await refused;
  await sandbox.close();
});

test("what the caller gives is sent", async () => {
  await using server = await ScriptedServer.start();
  const updates: string[] = [];
  const [sandbox, peer] = await create(server, {
    idleTimeoutMs: null,
    labels: { a: "b" },
    apiKey: "k3y",
    headers: { "X-Front": "door" },
    auth: async () => ({ Authorization: "Bearer abc" }),
    onStatus: (update) => void updates.push(update.status),
  });
  assert.deepEqual(peer.config, { persistent: "auto", idle_timeout: null, labels: { a: "b" } });
  const sent = ["x-api-key", "x-front", "authorization"].map((name) => peer.headers[name]);
  assert.deepEqual(sent, ["k3y", "door", "Bearer abc"]);
  assert.deepEqual(updates, ["SANDBOX_CREATING", "SANDBOX_RUNNING"]);
  assert.doesNotMatch(inspect([sandbox, sandbox.ref], { depth: 9 }), /t0ken|k3y/);
  await sandbox.close();
});

test("progress is reported", async () => {
  await using server = await ScriptedServer.start();
  const updates: Update[] = [];
  const attaching = Sandbox.attach(server.url, ID, "t0ken", { onStatus: (update) => void updates.push(update) });
  const peer = await server.peer();
  peer.status("RESTORING");
  peer.status("RESTORING", { progress: { done: 3, total: 8 } });
  peer.status("RUNNING", { execs: [] });
  const sandbox = await attaching;
  const saving = sandbox.checkpoint({ keepRunning: true });
  await peer.receive();
  peer.status("CHECKPOINTING");
  peer.status("CHECKPOINTING", { progress: { done: 5, total: 0 } });
  peer.status("CHECKPOINTED", { checkpoint_id: "c-1", paused_ms: 41 });
  assert.equal(await saving, "c-1");
  assert.deepEqual(
    updates.map(({ status, progress }) => [status.slice(8), progress?.done, progress?.total]),
    [
      ["RESTORING", undefined, undefined],
      ["RESTORING", 3, 8],
      ["RUNNING", undefined, undefined],
      ["CHECKPOINTING", undefined, undefined],
      ["CHECKPOINTING", 5, 0],
      ["CHECKPOINTED", undefined, undefined],
    ],
  );
  assert.equal(updates.at(-1)?.pausedMs, 41);
  await sandbox.close();
});

test("a server that is not compatible is an error", async () => {
  await using server = await ScriptedServer.start();
  for (const [status, kind] of [[401, PermissionDeniedError], [404, ProtocolError], [503, ConnectionError]] as const) {
    server.status = status;
    await assert.rejects(Sandbox.create(server.url), kind);
  }
  server.status = undefined;
  server.subprotocol = "";
  await assert.rejects(Sandbox.create(server.url), ProtocolError);
  server.subprotocol = "baton.v1";
  await assert.rejects(Sandbox.create(server.url, { startWithinMs: 300 }), TimeoutError);
});

test("what the end of a connection means", () => {
  const ended = (statuses: string[], code?: number) => {
    const summary = new ConnectionSummary();
    for (const status of statuses) {
      const policy = summary.update({ event: "status_update", status: `SANDBOX_${status}` as "SANDBOX_RUNNING" });
      if (policy) return policy.isRetry;
    }
    return summary.policy(code, "cut").isRetry;
  };
  const fatal: [string[], number?][] = [
    [["RESTORING", "NOT_FOUND"]], [["PERMISSION_DENIAL_ERROR"], 4000], [["RESTORE_ERROR"]], [["CREATION_ERROR"], 4000],
    [["DELETED"], 1000], [["DELETED"], 1012], [["DELETED"]], [[], 4000], [[], 1007],
  ];
  const followed: [string[], number?][] = [
    [["RUNNING"]], [["RUNNING"], 1011], [["CHECKPOINTING", "CHECKPOINTED"], 1012], [["LOCK_RENEWAL_ERROR"], 1012],
    [["IN_USE"], 1011], [["CHECKPOINTING", "CHECKPOINT_ERROR"], 4000],
  ];
  for (const [statuses, code] of fatal) assert.equal(ended(statuses, code), false, `${statuses} ${code}`);
  for (const [statuses, code] of followed) assert.equal(ended(statuses, code), true, `${statuses} ${code}`);
});
