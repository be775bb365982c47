/** Cut connections: what the client asks for when it comes back, and what its caller sees of it. */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { inspect } from "node:util";

import {
  AuthError,
  ConnectionError,
  type CreateOptions,
  EndedError,
  type ExecOptions,
  ExecLostError,
  NotFoundError,
  OutputGapError,
  PermissionDeniedError,
  ProtocolError,
  RefusedError,
  RestoreError,
  type Running,
  Sandbox,
  TimeoutError,
  type Update,
} from "baton-sandbox";

import { ACK_EVERY, WINDOW } from "../dist/pipe.js";
import { pause } from "../dist/seam.js";
import { Heard } from "../dist/verdict.js";
import { ID, type Peer, Script, view } from "./script.js";

async function create(server: Script, options: CreateOptions = {}): Promise<[Sandbox, Peer]> {
  return Promise.all([Sandbox.create(server.url, options), server.create()]);
}

async function start(sandbox: Sandbox, peer: Peer, options: ExecOptions = {}): Promise<[Running, string]> {
  return Promise.all([sandbox.exec(["x"], options), peer.exec()]);
}

const text = (data: Uint8Array | undefined | void) => new TextDecoder().decode(data ?? new Uint8Array());

test("a cut command goes on where it was", async () => {
  await using server = await Script.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  peer.output(1, 1, 0, "one");
  peer.output(2, 1, 0, "e");
  const reader = running.stdout[Symbol.asyncIterator]();
  assert.equal(text((await reader.next()).value), "one");
  peer.cut();
  peer = await server.attach(view(id, 8));
  assert.deepEqual(await peer.hearButAck(), { action: "reconnect", offsets: { [id]: { stdout: 3, stderr: 1 } } });
  peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 8 });
  peer.output(1, 8, 2, "e two");
  peer.done(id);
  assert.equal(text((await reader.next()).value), " two");
  const result = await running.wait();
  assert.deepEqual([result.stderr, result.exitCode], ["e", 0]);
  await sandbox.close();
});

for (const isKnown of [false, true]) {
  test(`a command is asked for again only if the sandbox does not know it (${isKnown})`, async () => {
    await using server = await Script.start();
    let [sandbox, peer] = await create(server);
    const starting = sandbox.exec(["once"]);
    const asked = await peer.hearButAck();
    const id = String(asked["exec_id"]);
    peer.cut();
    peer = await server.attach(...(isKnown ? [view(id, 1)] : []));
    const resumed = { action: "reconnect", offsets: { [id]: { stdout: 0, stderr: 0 } } };
    assert.deepEqual(await peer.hear(), isKnown ? resumed : asked);
    peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 1 });
    peer.done(id, 3);
    assert.equal((await (await starting).wait()).exitCode, 3);
    await sandbox.close();
  });
}

test("a command the sandbox has forgotten ends with the reason", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const [running] = await start(sandbox, peer);
  peer.cut();
  await server.attach();
  await assert.rejects(running.wait(), ExecLostError);
  await sandbox.close();
});

test("input is sent again from where it was taken", async () => {
  await using server = await Script.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer, { stdin: true });
  await running.writeStdin("abcdef");
  assert.equal(text((await peer.bytes()).subarray(13)), "abcdef");
  peer.say("stdin_ack", { exec_id: id, offset: 2 });
  peer.cut();
  await running.closeStdin();
  peer = await server.attach(view(id, 5, 4));
  assert.equal((await peer.hearButAck())["action"], "reconnect");
  const frame = await peer.bytes();
  assert.deepEqual([frame.readUInt32BE(1), frame.readBigUInt64BE(5), text(frame.subarray(13))], [5, 4n, "ef"]);
  assert.deepEqual(await peer.hear(), { event: "stdin", exec_id: id, data: "", eof: true, offset: 6 });
  // Restored from before what it had taken: nobody has those bytes any more.
  peer.cut();
  await server.attach(view(id, 5, 1));
  await assert.rejects(running.wait(), ExecLostError);
  await sandbox.close();
});

test("input written without a connection waits and is bounded", async () => {
  await using server = await Script.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer, { stdin: true });
  await server.shut();
  await running.writeStdin(new Uint8Array(WINDOW));
  let isWritten = false;
  const more = running.writeStdin("y").then(() => {
    isWritten = true;
  });
  await sleep(300);
  assert.ok(!isWritten && !sandbox.info().isConnected);
  await server.open();
  peer = await server.attach(view(id, 1));
  for (let got = 0; got < WINDOW; ) {
    const message = await peer.hear();
    if (message instanceof Uint8Array) got += message.length - 13;
  }
  peer.say("stdin_ack", { exec_id: id, offset: WINDOW });
  assert.equal(text((await peer.bytes()).subarray(13)), "y");
  await more;
  await sandbox.close();
});

test("only what was read is acknowledged", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  const part = new Uint8Array(ACK_EVERY / 2);
  for (let i = 0; i < 4; i += 1) peer.output(1, 1, i * part.length, part);
  await assert.rejects(peer.hear(200), /nothing came/);
  const reader = running.stdout[Symbol.asyncIterator]();
  for (let i = 0; i < 2; i += 1) assert.equal((await reader.next()).value?.length, part.length);
  assert.deepEqual(await peer.hear(), { action: "ack", exec_id: id, stdout: ACK_EVERY, stderr: 0 });
  running.stdout.discard();
  assert.deepEqual(await peer.hear(), { action: "ack", exec_id: id, stdout: 2 * ACK_EVERY, stderr: 0 });
  await sandbox.close();
});

test("what was not kept is said", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  peer.output(1, 1, 0, "ab");
  peer.say("output_gap", { exec_id: id, stream: "stdout", from: 2, to: 10 });
  peer.output(1, 1, 10, "cd");
  await assert.rejects(async () => {
    for await (const data of running.stdout) assert.equal(text(data), "ab");
  }, OutputGapError);
  const chunks = running.stdout.chunks();
  assert.equal(text(((await chunks.next()).value as { data: Uint8Array }).data), "cd");
  peer.say("output_rewound", { exec_id: id, stream: "stdout", to: 11 });
  assert.deepEqual((await chunks.next()).value, { kind: "again", to: 11 });
  await chunks.return();
  peer.output(1, 1, 11, "e");
  peer.say("output_gap", { exec_id: id, stream: "stderr", from: 0, to: 5 });
  peer.done(id);
  const result = await running.wait();
  assert.deepEqual([result.stdout, result.lost], ["e", 5]);
  await sandbox.close();
});

test("a restored command writes again, and its result is right", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  const waiting = running.wait();
  peer.output(1, 1, 0, "abcdef");
  peer.say("output_rewound", { exec_id: id, stream: "stdout", to: 2 });
  peer.output(1, 1, 2, "CD");
  peer.done(id);
  assert.equal((await waiting).stdout, "abCD");
  await sandbox.close();
});

test("bytes that are missing are an error", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const [running] = await start(sandbox, peer);
  peer.output(1, 1, 5, "x");
  await assert.rejects(running.wait(), ProtocolError);
});

test("the affinity cookie comes back until the instance asks to leave", async () => {
  await using server = await Script.start();
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

test("it never comes back in a tight loop", async () => {
  await using server = await Script.start();
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
  assert.deepEqual([pause(0, 0), pause(0, 1), pause(3, 1), pause(50, 1), pause(50, 0)], [100, 200, 1_600, 5_000, 100]);
});

test("a fatal answer ends everything with its type", async () => {
  const kinds = { RESTORE_ERROR: RestoreError, NOT_FOUND: NotFoundError, PERMISSION_DENIAL_ERROR: PermissionDeniedError };
  for (const [status, kind] of Object.entries(kinds)) {
    await using server = await Script.start();
    let [sandbox, peer] = await create(server);
    const [running] = await start(sandbox, peer);
    const waiting = assert.rejects(running.wait(), kind);
    peer.cut();
    peer = await server.peer();
    peer.status(status, { message: "no" });
    await waiting;
    await assert.rejects(sandbox.run("true"), kind);
    await sleep(300);
    assert.equal(server.accepted, 2, "it does not try again");
  }
});

test("patience ends", async () => {
  await using server = await Script.start();
  let [sandbox, peer] = await create(server, { reconnectForMs: 500 });
  const [running] = await start(sandbox, peer);
  const waiting = assert.rejects(running.wait(), ConnectionError);
  await server.shut();
  await waiting;
  await server.open();
  [sandbox, peer] = await create(server, { reconnectForMs: null });
  peer.cut();
  await assert.rejects(sandbox.run("true"), ConnectionError);
});

test("an answer that is lost is said so", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const asking = assert.rejects(sandbox.checkpoint(), /before the answer/);
  assert.equal((await peer.hearButAck())["action"], "checkpoint");
  peer.cut();
  await asking;
  await server.attach();
  const waiting = assert.rejects(sandbox.run("true"), EndedError);
  await sandbox.close();
  await waiting;
});

test("a kill is asked again after a cut", async () => {
  await using server = await Script.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  await running.kill();
  assert.equal((await peer.hearButAck())["action"], "kill_process");
  peer.cut();
  peer = await server.attach(view(id, 1));
  assert.deepEqual(await peer.hear(), { action: "kill_process", exec_id: id });
  peer.done(id);
  await running.wait();
  const killing = sandbox.kill();
  while ((await peer.hearButAck())["action"] !== "kill_sandbox");
  peer.cut();
  peer = await server.attach();
  while ((await peer.hearButAck())["action"] !== "kill_sandbox");
  peer.status("DELETED");
  peer.close(1000);
  await killing;
});

test("copies and snapshots are asked for and answered", async () => {
  await using server = await Script.start();
  const [sandbox, peer] = await create(server);
  const forking = sandbox.fork(2);
  assert.deepEqual(await peer.hear(), { action: "fork", count: 2 });
  peer.say("forked", { sandboxes: [0, 1].map((i) => ({ sandbox_id: `${ID.slice(0, -1)}${i}`, sandbox_token: `t${i}` })) });
  assert.deepEqual((await forking).map((place) => place.token), ["t0", "t1"]);
  const making = sandbox.snapshot("py");
  assert.deepEqual(await peer.hear(), { action: "snapshot_filesystem", name: "py" });
  peer.status("FILESYSTEM_SNAPSHOT_CREATED", { snapshot: "py" });
  assert.equal(await making, "py");
  const refused = assert.rejects(sandbox.snapshot("py"), (error: unknown) => error instanceof RefusedError && /not here/.test(error.message));
  await peer.hear();
  peer.status("FILESYSTEM_SNAPSHOT_ERROR", { message: "not here" });
  await refused;
  await sandbox.close();
});

test("what the caller gives is sent", async () => {
  await using server = await Script.start();
  const heard: string[] = [];
  const [sandbox, peer] = await create(server, {
    idleTimeoutMs: null,
    labels: { a: "b" },
    apiKey: "k3y",
    headers: { "X-Front": "door" },
    auth: async () => ({ Authorization: "Bearer abc" }),
    onStatus: (update) => void heard.push(update.status),
  });
  assert.deepEqual(peer.config, { idle_timeout: null, labels: { a: "b" } });
  const sent = ["x-api-key", "x-front", "authorization"].map((name) => peer.headers[name]);
  assert.deepEqual(sent, ["k3y", "door", "Bearer abc"]);
  assert.deepEqual(heard, ["SANDBOX_CREATING", "SANDBOX_RUNNING"]);
  assert.doesNotMatch(inspect([sandbox, sandbox.place], { depth: 9 }), /t0ken|k3y/);
  await sandbox.close();
});

test("how far long work is is heard", async () => {
  await using server = await Script.start();
  const heard: Update[] = [];
  const attaching = Sandbox.attach(server.url, ID, "t0ken", { onStatus: (update) => void heard.push(update) });
  const peer = await server.peer();
  peer.status("RESTORING");
  peer.status("RESTORING", { progress: { done: 3, total: 8 } });
  peer.status("RUNNING", { execs: [] });
  const sandbox = await attaching;
  const saving = sandbox.checkpoint({ keepRunning: true });
  await peer.hear();
  peer.status("CHECKPOINTING");
  peer.status("CHECKPOINTING", { progress: { done: 5, total: 0 } });
  peer.status("CHECKPOINTED", { checkpoint_id: "c-1", paused_ms: 41 });
  assert.equal(await saving, "c-1");
  assert.deepEqual(
    heard.map(({ status, progress }) => [status.slice(8), progress?.done, progress?.total]),
    [
      ["RESTORING", undefined, undefined],
      ["RESTORING", 3, 8],
      ["RUNNING", undefined, undefined],
      ["CHECKPOINTING", undefined, undefined],
      ["CHECKPOINTING", 5, 0],
      ["CHECKPOINTED", undefined, undefined],
    ],
  );
  assert.equal(heard.at(-1)?.pausedMs, 41);
  await sandbox.close();
});

test("a server that answers otherwise is named", async () => {
  await using server = await Script.start();
  for (const [status, kind] of [[401, PermissionDeniedError], [404, ProtocolError], [503, ConnectionError]] as const) {
    server.status = status;
    await assert.rejects(Sandbox.create(server.url), kind);
  }
  server.status = undefined;
  server.speaks = "";
  await assert.rejects(Sandbox.create(server.url), ProtocolError);
  server.speaks = "baton.v1";
  await assert.rejects(Sandbox.create(server.url, { startWithinMs: 300 }), TimeoutError);
});

test("what the end of a connection means", () => {
  const ended = (statuses: string[], code?: number) => {
    const heard = new Heard();
    for (const status of statuses) {
      const verdict = heard.update({ event: "status_update", status: `SANDBOX_${status}` as "SANDBOX_RUNNING" });
      if (verdict) return verdict.isRetry;
    }
    return heard.verdict(code, "cut").isRetry;
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

test("Google gives an ID token for the service", async () => {
  const part = (fields: object) => Buffer.from(JSON.stringify(fields)).toString("base64url");
  const metadata = createServer((request, response) => {
    const url = new URL(request.url ?? "", "http://metadata");
    const now = Math.floor(Date.now() / 1000);
    const claims = { aud: url.searchParams.get("audience"), iat: now, exp: now + 3600 };
    response.setHeader("Metadata-Flavor", "Google");
    response.setHeader("Content-Type", "application/text");
    response.end(url.pathname.endsWith("/identity") ? `${part({ alg: "none" })}.${part(claims)}.c2ln` : "x");
  });
  await new Promise<void>((done) => metadata.listen(0, "127.0.0.1", done));
  const host = `127.0.0.1:${(metadata.address() as AddressInfo).port}`;
  await using server = await Script.start();
  const code = "import { Sandbox } from 'baton-sandbox'; await (await Sandbox.create(process.argv[1])).close();";
  const env = { ...process.env, GCE_METADATA_HOST: host, METADATA_SERVER_DETECTION: "assume-present", BATON_AUTH: "google" };
  const cwd = new URL("..", import.meta.url);
  const child = spawn(process.execPath, ["--input-type=module", "-e", code, server.url], { env, cwd, stdio: ["ignore", "inherit", "inherit"] });
  const ended = new Promise((done) => child.on("exit", done));
  const peer = await server.create();
  const [kind, token = ""] = (peer.headers.authorization ?? "").split(" ");
  const claims = JSON.parse(Buffer.from(token.split(".")[1] ?? "", "base64url").toString());
  assert.deepEqual([kind, claims.aud], ["Bearer", server.url.replace("ws:", "http:")]);
  assert.equal(await ended, 0);
  metadata.close();
  await assert.rejects(Sandbox.create(server.url, { auth: "magic" as "google" }), AuthError);
});
