/** Roll-backs: the client reports each of them, and marks the commands that they affect. */

import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { setImmediate } from "node:timers/promises";

import { ExecLostError, type Rollback, Sandbox } from "baton-sandbox";

import { ID, ScriptedServer, create, start, view } from "./scripted_server.js";

const isRolledBack = (error: unknown) => error instanceof ExecLostError && error.rolledBack;

test("a roll-back is reported and marks the commands it affects", async () => {
  await using server = await ScriptedServer.start();
  const warned = mock.method(console, "warn", () => {});
  const reported: Rollback[] = [];
  let [sandbox, peer] = await create(server, { onRollback: (rollback) => reported.push(rollback) });
  const [kept, keptId] = await start(sandbox, peer);
  const [lost] = await start(sandbox, peer);
  const losing = assert.rejects(lost.wait(), isRolledBack);
  peer.cut();
  peer = await server.attachAfter("c-1", view(keptId, 1));
  await losing;
  assert.equal((await peer.receiveRequest())["action"], "reconnect");
  peer.done(keptId);
  assert.ok((await kept.wait()).rolledBack);
  assert.deepEqual(reported, [{ checkpointId: "c-1", ageMs: 1500 }]);
  assert.deepEqual(sandbox.rollbacks, reported);
  assert.equal(warned.mock.callCount(), 0);
  warned.mock.restore();
  // Commands after the roll-back are not affected.
  const [running, id] = await start(sandbox, peer);
  peer.done(id);
  assert.ok(!(await running.wait()).rolledBack);
  await sandbox.close();
});

test("a command that another restore rewound is marked", async () => {
  await using server = await ScriptedServer.start();
  const [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer);
  peer.output(1, 1, 0, "abcdef");
  peer.sendEvent("output_rewound", { exec_id: id, stream: "stdout", to: 2 });
  peer.done(id);
  const result = await running.wait();
  assert.ok(result.rolledBack);
  assert.match(String(result), /rolled back/);
  await sandbox.close();
});

test("without a callback it is a warning", async () => {
  await using server = await ScriptedServer.start();
  const warned = mock.method(console, "warn", () => {});
  const attaching = Sandbox.attach(server.url, ID, "t0ken");
  const peer = await server.attachAfter("c-2", view("x", 1));
  const sandbox = await attaching;
  warned.mock.restore();
  assert.match(String(warned.mock.calls[0]?.arguments[0]), /checkpoint c-2, which is 1.5 s old/);
  const running = await sandbox.follow("x");
  peer.done("x");
  assert.ok((await running.wait()).rolledBack);
  await sandbox.close();
});

test("an error in the callback does not break the connection", async () => {
  await using server = await ScriptedServer.start();
  const logged = mock.method(console, "error", () => {});
  const attaching = Sandbox.attach(server.url, ID, "t0ken", {
    onRollback: () => {
      throw new Error("an error in the callback");
    },
  });
  await server.attachAfter("c-3");
  const sandbox = await attaching;
  logged.mock.restore();
  assert.equal(logged.mock.callCount(), 1);
  assert.deepEqual(sandbox.rollbacks.map(({ checkpointId }) => checkpointId), ["c-3"]);
  await sandbox.close();
});

test("a roll-back is remembered over a drop before RUNNING", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server, { onRollback: () => {} });
  const [running, id] = await start(sandbox, peer);
  peer.cut();
  peer = await server.peer();
  peer.sendEvent("rolled_back", { checkpoint_id: "c-4", age_ms: 1 });
  while (!sandbox.rollbacks.length) await setImmediate();
  peer.cut();
  peer = await server.attach(view(id, 1));
  peer.done(id);
  assert.ok((await running.wait()).rolledBack);
  assert.equal(sandbox.rollbacks.length, 1);
  await sandbox.close();
});

test("a transfer during a roll-back is not trusted", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server, { onRollback: () => {} });
  const reading = assert.rejects(sandbox.readFile("/data"), (error: unknown) => isRolledBack(error) && /start it again/.test(String(error)));
  const id = String((await peer.receiveRequest())["exec_id"]);
  peer.status("EXECUTION_RUNNING", { exec_id: id, exec: 1 });
  peer.cut();
  peer = await server.attachAfter("c-5", view(id, 1));
  peer.done(id);
  await reading;
  await sandbox.close();
});
