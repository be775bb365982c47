/** The suite that every client library runs: commands and errors. */

import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";

import { BatonError, CheckpointError, ConnectionError, CreationError, EndedError, ExecFailedError, type ExecOptions, InUseError, NotFoundError, PermissionDeniedError, RefusedError, Sandbox, type SandboxSummary } from "baton-sandbox";

import { proxy, sandbox, scenario } from "./suite.js";
import { ADMIN_KEY, CASES, type Case } from "./testbed.js";

function commandOf(one: Case): [string | string[], ExecOptions] {
  const { pty, timeout, ...rest } = one.options ?? {};
  const options: ExecOptions = { ...rest };
  if (one.language !== undefined) options.language = one.language;
  if (pty) options.pty = { cols: pty[0], rows: pty[1] };
  if (timeout !== undefined) options.timeoutMs = timeout * 1000;
  return [one.code ?? one.argv ?? [], options];
}

scenario("commands end as the table says", async () => {
  for (const one of CASES.execs) {
    const result = await sandbox.run(...commandOf(one));
    const exit = one.exit_code === undefined ? 0 : (one.exit_code ?? undefined);
    assert.deepEqual(
      [result.stdout, result.stderr, result.exitCode, result.signal, result.timedOut],
      [one.stdout ?? "", one.stderr ?? "", exit, one.signal, one.timed_out ?? false],
      one.name,
    );
    assert.ok(result.durationMs !== undefined && result.lost === 0);
  }
  assert.equal((await sandbox.commands.run("echo alias")).stdout, "alias\n");
  assert.equal((await sandbox.runCode("print(1)")).stdout, "1\n");
});

scenario("what cannot start is refused", async () => {
  for (const one of CASES.refused) await assert.rejects(sandbox.exec(...commandOf(one)), RefusedError, one.name);
  assert.ok((await sandbox.run("echo still here")).ok);
});

scenario("output comes while the command runs", async () => {
  const running = await sandbox.exec("echo one; read line; echo got $line; echo err >&2", { stdin: true });
  const lines = running.stdout.lines();
  assert.equal((await lines.next()).value, "one");
  await running.writeStdin("more\n");
  assert.equal((await lines.next()).value, "got more");
  assert.equal((await lines.next()).done, true);
  const result = await running.wait();
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["", "err\n", 0]);
  // `wait` collects the rest after a reader has stopped.
  const next = await sandbox.exec("echo first; sleep 0.2; echo second");
  for await (const data of next.stdout) {
    assert.equal(new TextDecoder().decode(data), "first\n");
    break;
  }
  assert.equal((await next.wait()).stdout, "second\n");
});

scenario("commands run side by side", async () => {
  const numbers = Array.from({ length: 8 }, (_, i) => i);
  const results = await Promise.all(numbers.map((i) => sandbox.run(`sleep 0.3; echo ${i}`)));
  assert.deepEqual(results.map((result) => result.stdout), numbers.map((i) => `${i}\n`));
});

scenario("input is taken as it is written", async () => {
  const running = await sandbox.exec(["tr", "a-z", "A-Z"], { stdin: true });
  for (const part of ["hello ", new TextEncoder().encode("wor"), "ld"]) await running.writeStdin(part);
  await running.closeStdin();
  assert.equal((await running.wait()).stdout, "HELLO WORLD");
  await assert.rejects(running.writeStdin("late"), EndedError);
});

scenario("a command is killed, and another gets a signal", async () => {
  const sleeper = await sandbox.exec("sleep 60 & wait");
  const trapping = await sandbox.exec("trap 'echo bye; exit 9' INT; echo ready; while true; do sleep 0.02; done");
  for await (const line of trapping.stdout.lines()) {
    assert.equal(line, "ready");
    break;
  }
  await trapping.signal("INT");
  await sleeper.kill();
  const result = await trapping.wait();
  assert.deepEqual([result.stdout, result.exitCode], ["bye\n", 9]);
  assert.equal((await sleeper.wait()).signal, 9);
  const waits = "trap 'stty size; exit' WINCH; echo ready; while true; do sleep 0.02; done";
  const terminal = await sandbox.exec(waits, { pty: { cols: 80, rows: 24 } });
  for await (const line of terminal.stdout.lines()) {
    assert.equal(line, "ready\r");
    break;
  }
  await terminal.resize(100, 50);
  assert.equal((await terminal.wait()).stdout, "50 100\r\n");
  // An AbortSignal ends a command too.
  const abort = new AbortController();
  const aborted = sandbox.run("echo begun; sleep 60", { signal: abort.signal });
  void setTimeout(300).then(() => abort.abort());
  await assert.rejects(aborted, { name: "AbortError" });
});

scenario("check raises what a command said", async () => {
  await assert.rejects(sandbox.run("echo partly; echo oh no >&2; exit 4", { check: true }), (error: unknown) => {
    assert.ok(error instanceof ExecFailedError);
    assert.equal(error.message, "exit code 4: oh no");
    assert.equal(error.result.stdout, "partly\n");
    return true;
  });
});

scenario("errors have their types", async () => {
  const unknown = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
  await assert.rejects(Sandbox.attach(proxy.url, unknown, sandbox.token), NotFoundError);
  await assert.rejects(Sandbox.attach(proxy.url, sandbox.id, "wrong"), PermissionDeniedError);
  await assert.rejects(Sandbox.attach(proxy.url, sandbox.id, sandbox.token), InUseError);
  await assert.rejects(Sandbox.create(proxy.url, { cwd: "relative" }), (error: unknown) => error instanceof CreationError && /cwd/.test(error.message));
  await assert.rejects(Sandbox.create("ws://127.0.0.1:1"), ConnectionError);
  await assert.rejects(Sandbox.create("ftp://example"), ConnectionError);
  await assert.rejects(Sandbox.create(proxy.url, { signal: AbortSignal.abort() }), { name: "AbortError" });
  await using ephemeral = await Sandbox.create(proxy.url, { persistent: false });
  await assert.rejects(ephemeral.checkpoint(), CheckpointError);
  // Only the session was closed: the sandbox still exists, and the client has reconnected.
  assert.equal((await ephemeral.run("echo back")).stdout, "back\n");
  assert.ok(new NotFoundError("x") instanceof BatonError);
});

scenario("the end of the sandbox ends what waits on it", async () => {
  const short = await Sandbox.create(proxy.url);
  const running = await short.exec("sleep 60");
  const waiting = assert.rejects(running.wait(), (error: unknown) => error instanceof EndedError && /killed/.test(error.message));
  await short.kill();
  await waiting;
  await assert.rejects(short.run("echo late"), EndedError);
  await short.kill();
  await short.close();
});

scenario("ends are told apart", async () => {
  const { url } = proxy;
  async function ends(one: Sandbox): Promise<EndedError> {
    while (one.info().isConnected) await setTimeout(20);
    const error: unknown = await one.run("true").then(String, (caught: unknown) => caught);
    assert.ok(error instanceof EndedError, String(error));
    await one.close();
    return error;
  }
  for (const [persistent, text] of [[true, "checkpointed"], [false, "deleted"]] as const) {
    const idle = await ends(await Sandbox.create(url, { persistent, idleTimeoutMs: 1_000 }));
    assert.ok(idle.reason === "idle" && idle.message.includes(text) && idle.message.includes("(reason: idle)"), idle.message);
  }
  assert.equal((await ends(await Sandbox.create(url, { ttlMs: 1_000 }))).reason, "expired");
  let one = await Sandbox.create(url, { persistent: true });
  await one.checkpoint();
  assert.equal((await ends(one)).reason, "checkpoint");
  one = await one.ref.attach();
  await Sandbox.killById(url, one.id, { token: one.token });
  assert.equal((await ends(one)).reason, "operator");
});

scenario("sandboxes are listed and killed by id", async () => {
  const { url } = proxy;
  const labels = { suite: "typescript", case: sandbox.id };
  await using stored = await Sandbox.create(url, { labels, persistent: true });
  const ephemeral = await Sandbox.create(url, { labels, persistent: false });
  const waiting = assert.rejects(ephemeral.run(["sleep", "60"]), EndedError);
  const found = new Map<string, SandboxSummary>();
  for await (const one of Sandbox.list(url, { labels, apiKey: ADMIN_KEY })) found.set(one.id, one);
  assert.deepEqual([...found.keys()].sort(), [stored.id, ephemeral.id].sort());
  for (const [one, isStored] of [[found.get(stored.id), true], [found.get(ephemeral.id), false]] as const) {
    assert.deepEqual([one?.phase, one?.persistent, one?.labels, one?.error], ["running", isStored, labels, undefined]);
    assert.ok(one?.ageMs !== undefined && one.ageMs >= 0 && one.created.startsWith("20"));
  }
  const everything = new Set<string>();
  for await (const one of Sandbox.list(url, { apiKey: ADMIN_KEY })) everything.add(one.id);
  for (const id of [sandbox.id, ...found.keys()]) assert.ok(everything.has(id));
  // With the key, and with the token; the sandboxes have clients, which are told.
  await Sandbox.killById(url, ephemeral.id, { apiKey: ADMIN_KEY });
  await waiting;
  await Sandbox.killById(url, stored.id, { token: stored.token });
  assert.ok((await Sandbox.list(url, { labels, apiKey: ADMIN_KEY }).next()).done);
  while (stored.info().isConnected) await setTimeout(20);
  await assert.rejects(stored.run("true"), EndedError);
  await ephemeral.close();
  const unknown = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
  for (const id of [unknown, "nonsense/../x"]) {
    await assert.rejects(Sandbox.killById(url, id, { apiKey: ADMIN_KEY }), NotFoundError);
  }
  await assert.rejects(Sandbox.killById(url, sandbox.id), denied(/key/));
  await assert.rejects(Sandbox.killById(url, sandbox.id, { token: "wrong" }), denied(/does not match/));
  for (const options of [{}, { apiKey: "wrong" }]) await assert.rejects(Sandbox.list(url, options).next(), denied(/key/));
  await assert.rejects(Sandbox.list("ws://127.0.0.1:1", { apiKey: ADMIN_KEY }).next(), ConnectionError);
  await assert.rejects(Sandbox.list(url, { apiKey: ADMIN_KEY, signal: AbortSignal.abort() }).next(), { name: "AbortError" });
  assert.ok((await sandbox.run("echo still here")).ok);
});

function denied(text: RegExp): (error: unknown) => boolean {
  return (error) => error instanceof PermissionDeniedError && text.test(error.message);
}
