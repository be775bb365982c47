/** The suite that every client library runs: checkpoints, moves and roll-backs. */

import assert from "node:assert/strict";
import { mock } from "node:test";

import { CheckpointError, CreationError, EndedError, ExecLostError, type Rollback, Sandbox, SnapshotError, type Update } from "baton-sandbox";

import { persistent, proxy, sandbox, scenario, testbed, tick, ticks } from "./suite.js";

scenario("a command outlives SIGTERM of its server", async () => {
  await Promise.all(["old", "new"].map((name) => testbed.do("server", { name })));
  const moving = await testbed.proxy("old");
  const updates: Update[] = [];
  const moved = await Sandbox.create(moving.url, { ...persistent, onStatus: (update) => updates.push(update) });
  const running = await moved.exec(tick(40));
  const first = moved.info().instance;
  for await (const line of running.stdout.lines()) if (line === "line 5") break;
  await moving.network({ to: "new" });
  await testbed.do("signal", { name: "old", signal: "TERM" });
  const result = await running.wait();
  assert.equal(result.exitCode, 7);
  assert.ok(ticks(40).endsWith(result.stdout), "nothing is missing and nothing is doubled");
  assert.ok(result.stdout.split("\n").length > 10, "a good part of it came after the move");
  assert.notEqual(moved.info().instance, first);
  assert.ok(updates.some((update) => update.status === "SANDBOX_CHECKPOINTED"));
  await moved.kill();
});

scenario("a command outlives a handoff", async () => {
  await testbed.do("server", { name: "other" });
  const moved = await Sandbox.create(proxy.url, persistent);
  const running = await moved.exec(tick(40));
  const waiting = running.wait();
  const first = moved.info().instance;
  const other = await testbed.proxy("other");
  await proxy.network({ to: "other" });
  await moved.handoff();
  assert.notEqual(moved.info().instance, first);
  const result = await waiting;
  assert.deepEqual([result.stdout, result.exitCode], [ticks(40), 7]);
  await moved.kill();
  assert.equal((await other.network()).connections, 0);
  await proxy.network({ to: "a" });
});

scenario("a checkpoint is attached again with its running command", async () => {
  const kept = await Sandbox.create(proxy.url, persistent);
  const running = await kept.exec(`echo kept > /tmp/note; ${tick(20)}`, { execId: "tick" });
  for await (const _ of running.stdout) break;
  const checkpoint = await kept.checkpoint({ live: true });
  assert.ok(checkpoint.startsWith(kept.id));
  await assert.rejects(running.wait(), EndedError);
  const again = await Sandbox.connect(proxy.url, kept.id, kept.token);
  assert.deepEqual(again.info().execs.map((view) => view.execId), ["tick"]);
  const result = await (await again.follow("tick")).wait();
  assert.deepEqual([result.stdout, result.exitCode], [ticks(20), 7]);
  assert.equal((await again.run("cat /tmp/note")).stdout, "kept\n");
  assert.notEqual(await again.checkpoint({ keepRunning: true }), checkpoint);
  assert.ok((await again.run("echo on")).ok);
  await again.kill();
});

scenario("a checkpoint that is refused leaves the command running", async () => {
  const kept = await Sandbox.create(proxy.url, persistent);
  const running = await kept.exec(tick(10));
  await assert.rejects(kept.checkpoint(), (error: unknown) => error instanceof CheckpointError && /in progress/.test(error.message));
  assert.equal((await running.wait()).stdout, ticks(10));
  await kept.kill();
});

scenario("a roll-back is loud", async () => {
  await testbed.do("server", { name: "crashing" });
  const crashing = await testbed.proxy("crashing");
  const reported: Rollback[] = [];
  const kept = await Sandbox.create(crashing.url, { ...persistent, onRollback: (rollback) => reported.push(rollback) });
  const running = await kept.exec(tick(40));
  const chunks = running.stdout.chunks();
  let output = "";
  const read = async (until: string) => {
    while (!output.includes(until)) {
      const { value } = await chunks.next();
      assert.ok(value && value.kind !== "lost");
      output = value.kind === "again" ? output.slice(0, value.to) : output + new TextDecoder().decode(value.data);
    }
  };
  const crash = async () => {
    await testbed.do("signal", { name: "crashing", signal: "KILL" });
    await testbed.do("server", { name: "crashing" });
    await crashing.network({ to: "crashing" });
  };

  await read("line 5\n");
  const checkpoint = await kept.checkpoint({ live: true, keepRunning: true });
  const later = await kept.exec("sleep 60");
  await read("line 25\n");
  await crash();
  await assert.rejects(later.wait(), (error: unknown) => error instanceof ExecLostError && error.rolledBack);
  await read("line 40\n");
  const result = await running.wait();
  assert.deepEqual([output, result.exitCode, result.rolledBack], [ticks(40), 7, true]);
  assert.match(String(result), /rolled back/);
  assert.deepEqual(kept.rollbacks, reported);
  assert.deepEqual(reported.map(({ checkpointId, ageMs }) => [checkpointId, ageMs > 0]), [[checkpoint, true]]);
  assert.ok(!(await kept.run("echo after")).rolledBack);
  // Without a callback it is a warning.
  const ref = await kept.detach();
  await crash();
  const warned = mock.method(console, "warn", () => {});
  const again = await Sandbox.attach(crashing.url, ref.id, ref.token);
  warned.mock.restore();
  assert.ok(String(warned.mock.calls[0]?.arguments[0]).includes(checkpoint));
  assert.deepEqual(again.rollbacks.map(({ checkpointId }) => checkpointId), [checkpoint]);
  await again.kill();
});

scenario("a snapshot starts another sandbox", async () => {
  const name = `suite-${sandbox.id.slice(-12)}`;
  await sandbox.writeFile("/opt/tool.py", "print('from the snapshot')");
  const running = await sandbox.exec(tick(10));
  assert.equal(await sandbox.snapshot(name), name);
  assert.equal((await running.wait()).stdout, ticks(10));
  await assert.rejects(sandbox.snapshot(name), SnapshotError);
  await using other = await Sandbox.create(proxy.url, { filesystemSnapshotName: name });
  assert.equal((await other.run("python3 /opt/tool.py")).stdout, "from the snapshot\n");
  await assert.rejects(Sandbox.create(proxy.url, { filesystemSnapshotName: `${name}-not` }), CreationError);
});

scenario("a fork goes on where its source was", async () => {
  const source = await Sandbox.create(proxy.url, persistent);
  const running = await source.exec(`echo kept > /tmp/note; ${tick(30)}`, { execId: "tick" });
  for await (const _ of running.stdout) break;
  const refs = await source.fork(2);
  assert.equal(new Set([source.id, ...refs.map((ref) => ref.id)]).size, 3);
  const copies = await Promise.all(refs.map((ref) => ref.attach()));
  for (const [number, copy] of copies.entries()) {
    assert.equal((await (await copy.follow("tick")).wait()).stdout, ticks(30));
    await copy.run(`echo copy ${number} >> /tmp/note`);
  }
  assert.equal((await running.wait()).exitCode, 7);
  assert.equal(await source.readText("/tmp/note"), "kept\n");
  for (const [number, copy] of copies.entries()) {
    assert.equal(await copy.readText("/tmp/note"), `kept\ncopy ${number}\n`);
    await copy.kill();
  }
  await source.kill();
});
