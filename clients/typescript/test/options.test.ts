/** What create sends, who ends a sandbox, and how results read. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { inspect } from "node:util";

import { type CreateOptions, ExecFailedError, Place, Result, SandboxRef } from "baton-sandbox";

import { ID, type Peer, ScriptedServer, create } from "./scripted_server.js";

const limits = { memory: "512MiB", cpus: 1.5, pids: 256, disk: "1GiB", files: 1024 };
const SENT: [CreateOptions, Record<string, unknown>][] = [
  [{}, { persistent: "auto" }],
  [{ persistent: true }, { persistent: true }],
  [{ persistent: false }, { persistent: false }],
  [{ enableCheckpoint: false }, { persistent: "auto", enable_checkpoint: false }],
  [
    { enableCheckpoint: true, enableSandboxHandoff: false, enableIdleTimeoutAutoCheckpoint: false },
    { persistent: "auto", enable_checkpoint: true, enable_sandbox_handoff: false, enable_idle_timeout_auto_checkpoint: false },
  ],
  [{ ...limits }, { persistent: "auto", limits }],
  [{ memory: 1, limits: { memory: 2, cpus: 3 } }, { persistent: "auto", limits: { memory: 1, cpus: 3 } }],
];

for (const [given, sent] of SENT) {
  test(`create sends what was given: ${JSON.stringify(given)}`, async () => {
    await using server = await ScriptedServer.start();
    const [sandbox, peer] = await create(server, given);
    assert.deepEqual(peer.config, sent);
    await sandbox.close();
  });
}

async function deleted(peer: Peer): Promise<void> {
  assert.deepEqual(await peer.receiveRequest(), { action: "kill_sandbox" });
  peer.status("DELETED");
  peer.status("KILLED");
  peer.close(1000);
}

for (const given of [{}, { persistent: true }, { enableCheckpoint: true }]) {
  test(`the block kills what it created: ${JSON.stringify(given)}`, async () => {
    await using server = await ScriptedServer.start();
    const [sandbox, peer] = await create(server, given);
    await Promise.all([sandbox[Symbol.asyncDispose](), deleted(peer)]);
  });
}

test("the block keeps what was kept, detached or attached", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server, { keep: true });
  await sandbox[Symbol.asyncDispose]();
  assert.deepEqual(await peer.gone(), []);
  [sandbox, peer] = await create(server);
  const ref = await sandbox.detach();
  await sandbox[Symbol.asyncDispose]();
  assert.deepEqual([ref.id, ref.token], [ID, "t0ken"]);
  assert.deepEqual(await peer.gone(), []);
  const attaching = ref.attach();
  peer = await server.attach();
  await (await attaching)[Symbol.asyncDispose]();
  assert.deepEqual(await peer.gone(), []);
});

test("a sandbox that was checkpointed is kept", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const saving = sandbox.checkpoint();
  await peer.receiveRequest();
  peer.status("CHECKPOINTED", { checkpoint_id: "c-1" });
  peer.close(1000);
  assert.equal(await saving, "c-1");
  assert.deepEqual(await peer.gone(), []);
  await sandbox[Symbol.asyncDispose]();
});

test("the abort signal of create is not used for a later attach", async () => {
  await using server = await ScriptedServer.start();
  const abort = new AbortController();
  const [sandbox] = await create(server, { signal: abort.signal });
  const ref = await sandbox.detach();
  abort.abort();
  const attaching = ref.attach();
  await server.attach();
  await (await attaching).close();
});

test("a result reads well", () => {
  const bytes = (text: string) => new TextEncoder().encode(text);
  const result = (exitCode: number | undefined, stdout = "", stderr = "") =>
    new Result({ exitCode, timedOut: false }, bytes(stdout), bytes(stderr), 0, false);
  assert.equal(String(result(3, "hello\n", "oh\nno\n")), "exit code 3\nstdout: hello\nstderr:\noh\nno");
  assert.equal(inspect(result(3, "hello\n")), "Result: exit code 3\nstdout: hello");
  assert.equal(String(result(0)), "exit code 0");
  const lost = new Result({ signal: 9, timedOut: true }, bytes(""), bytes(""), 5, true);
  assert.equal(String(lost), "timed out; 5 bytes of output lost; rolled back to an older checkpoint");
  assert.equal(String(new Result({ signal: 15, timedOut: false }, bytes(""), bytes(""), 0, false)), "killed by signal 15");
  const long = String(result(0, `${"x".repeat(9000)}end`));
  assert.ok(long.length < 2100 && long.includes("… 7003 characters …") && long.endsWith("end"));
  assert.throws(() => result(3, "", "oh\nno\n").check(), (error: unknown) => error instanceof ExecFailedError && error.message === "exit code 3: no");
  assert.equal(Place, SandboxRef);
});
