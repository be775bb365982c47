/** The suite that every client library runs: real servers, real sandboxes, a bad network. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { access, chmod, mkdir, mkdtemp, open, readFile, readdir, readlink, rm, stat, symlink, utimes, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, test } from "node:test";

import {
  BatonError,
  CheckpointError,
  ConnectionError,
  CreationError,
  EndedError,
  ExecFailedError,
  type ExecOptions,
  FileError,
  InUseError,
  NotFoundError,
  PermissionDeniedError,
  RefusedError,
  Sandbox,
  SnapshotError,
  type Update,
} from "baton-sandbox";

import { CASES, type Case, type Proxy, SIZES, Stage } from "./stage.js";

/** Writes so many bytes that no two places look alike, then their digest to stderr. */
const flood = (size: number) => `
import hashlib, sys
left, number, digest = ${size}, 0, hashlib.sha256()
while left:
    part = b"".join(hashlib.sha256(b"%d" % (number + i)).digest() * 64 for i in range(32))[:left]
    number, left = number + 32, left - len(part)
    digest.update(part)
    sys.stdout.buffer.write(part)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
`;
const tick = (count: number) => `for i in $(seq 1 ${count}); do echo line $i; sleep 0.05; done; exit 7`;
const ticks = (count: number) => Array.from({ length: count }, (_, i) => `line ${i + 1}\n`).join("");
const sha256 = (data: Uint8Array) => createHash("sha256").update(data).digest("hex");
const persistent = { enableCheckpoint: true, enableSandboxHandoff: true };
/** Each connection ends a little later than the one before. */
const cuts = (size: number, count: number) => Array.from({ length: count }, (_, i) => Math.floor(size / (count + 2)) + i * 997);

function commandOf(one: Case): [string | string[], ExecOptions] {
  const { pty, timeout, ...rest } = one.options ?? {};
  const options: ExecOptions = { ...rest };
  if (one.language !== undefined) options.language = one.language;
  if (pty) options.pty = { cols: pty[0], rows: pty[1] };
  if (timeout !== undefined) options.timeoutMs = timeout * 1000;
  return [one.code ?? one.argv ?? [], options];
}

let stage: Stage;
let proxy: Proxy;
let sandbox: Sandbox;
const written = new Set<string>();

before(async () => {
  stage = new Stage();
  await stage.do("server", { name: "a" });
});
after(() => stage.end());

/** With a proxy of its own and a sandbox behind it. */
function scenario(name: string, body: () => Promise<void>): void {
  written.add(name);
  test(name, async () => {
    proxy = await stage.proxy();
    await using own = await Sandbox.create(proxy.url);
    sandbox = own;
    await body();
  });
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
  // Whoever stops reading leaves the rest to `wait`.
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
  const polite = await sandbox.exec("trap 'echo bye; exit 9' INT; echo ready; while true; do sleep 0.02; done");
  for await (const line of polite.stdout.lines()) {
    assert.equal(line, "ready");
    break;
  }
  await polite.signal("INT");
  await sleeper.kill();
  const result = await polite.wait();
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
  setTimeout(() => abort.abort(), 300);
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

scenario("output is exact over many cuts", async () => {
  await proxy.weather({ cuts: cuts(SIZES.output, SIZES.cuts), cut: true });
  const result = await sandbox.runCode(flood(SIZES.output));
  assert.equal(result.stdoutBytes.length, SIZES.output);
  assert.equal(sha256(result.stdoutBytes), result.stderr);
  assert.ok((await proxy.weather()).cut >= SIZES.cuts - 2, "it was hardly cut");
});

scenario("input is exact over many cuts", async () => {
  const count = Math.floor(SIZES.input / 32);
  const data = Buffer.concat(Array.from({ length: count }, (_, i) => createHash("sha256").update(`${i}`).digest()));
  const running = await sandbox.exec(["sha256sum"], { stdin: true });
  const parts = SIZES.input_cuts + 1;
  for (let i = 0; i < parts; i += 1) {
    const edge = (number: number) => Math.floor((number * data.length) / parts);
    await running.writeStdin(data.subarray(edge(i), edge(i + 1)));
    await proxy.weather({ cut: true });
  }
  await running.closeStdin();
  assert.equal((await running.wait()).stdout.split(" ")[0], sha256(data));
  // All of it at once, as an option, comes to the same.
  assert.equal((await sandbox.run(["sha256sum"], { stdin: data })).stdout.split(" ")[0], sha256(data));
});

scenario("a slow network changes nothing", async () => {
  await proxy.weather({ delay: 0.05 });
  assert.equal((await sandbox.run(tick(10))).stdout, ticks(10));
  assert.equal((await sandbox.run(["cat"], { stdin: "slow" })).stdout, "slow");
});

scenario("a stalled connection is given up and taken up again", async () => {
  await using impatient = await Sandbox.create(proxy.url, { silenceMs: 3_000 });
  const { connections } = await proxy.weather();
  const running = await impatient.exec(tick(40));
  for await (const _ of running.stdout) break;
  await proxy.weather({ stall: true });
  const result = await running.wait();
  assert.ok(result.stdout.endsWith(ticks(40).slice(-100)) && result.exitCode === 7);
  assert.ok((await proxy.weather()).connections > connections);
  await proxy.weather({ stall: false });
});

scenario("a command outlives SIGTERM of its server", async () => {
  await Promise.all(["old", "new"].map((name) => stage.do("server", { name })));
  const moving = await stage.proxy("old");
  const heard: Update[] = [];
  const moved = await Sandbox.create(moving.url, { ...persistent, onStatus: (update) => heard.push(update) });
  const running = await moved.exec(tick(40));
  const first = moved.info().instance;
  for await (const line of running.stdout.lines()) if (line === "line 5") break;
  await moving.weather({ to: "new" });
  await stage.do("signal", { name: "old", signal: "TERM" });
  const result = await running.wait();
  assert.equal(result.exitCode, 7);
  assert.ok(ticks(40).endsWith(result.stdout), "nothing is missing and nothing is doubled");
  assert.ok(result.stdout.split("\n").length > 10, "a good part of it came after the move");
  assert.notEqual(moved.info().instance, first);
  assert.ok(heard.some((update) => update.status === "SANDBOX_CHECKPOINTED"));
  await moved.kill();
});

scenario("a command outlives a handoff", async () => {
  await stage.do("server", { name: "other" });
  const moved = await Sandbox.create(proxy.url, persistent);
  const running = await moved.exec(tick(40));
  const waiting = running.wait();
  const first = moved.info().instance;
  const other = await stage.proxy("other");
  await proxy.weather({ to: "other" });
  await moved.handoff();
  assert.notEqual(moved.info().instance, first);
  const result = await waiting;
  assert.deepEqual([result.stdout, result.exitCode], [ticks(40), 7]);
  await moved.kill();
  assert.equal((await other.weather()).connections, 0);
  await proxy.weather({ to: "a" });
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

scenario("errors have their types", async () => {
  const nobody = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
  await assert.rejects(Sandbox.attach(proxy.url, nobody, sandbox.token), NotFoundError);
  await assert.rejects(Sandbox.attach(proxy.url, sandbox.id, "wrong"), PermissionDeniedError);
  await assert.rejects(Sandbox.attach(proxy.url, sandbox.id, sandbox.token), InUseError);
  await assert.rejects(Sandbox.create(proxy.url, { cwd: "relative" }), (error: unknown) => error instanceof CreationError && /cwd/.test(error.message));
  await assert.rejects(Sandbox.create("ws://127.0.0.1:1"), ConnectionError);
  await assert.rejects(Sandbox.create("ftp://example"), ConnectionError);
  await assert.rejects(Sandbox.create(proxy.url, { signal: AbortSignal.abort() }), { name: "AbortError" });
  await assert.rejects(sandbox.checkpoint(), CheckpointError);
  // Only the session was closed: the sandbox is there, and the client is back with it.
  assert.equal((await sandbox.run("echo back")).stdout, "back\n");
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

/** A directory of its own, gone afterwards. */
async function withDirectory(body: (directory: string) => Promise<void>): Promise<void> {
  const directory = await mkdtemp(join(tmpdir(), "baton-"));
  try {
    await body(directory);
  } finally {
    await rm(directory, { recursive: true });
  }
}

scenario("files go in and out", () =>
  withDirectory(async (directory) => {
    await sandbox.writeFile("/data/new/note.txt", "é\n", { mode: 0o640 });
    assert.equal(Buffer.from(await sandbox.readFile("/data/new/note.txt")).toString(), "é\n");
    assert.equal(await sandbox.readText("/data/new/note.txt"), "é\n");
    const part = await sandbox.readFile("note.txt", { cwd: "/data/new", offset: 1, length: 1 });
    assert.deepEqual([...part], [0xa9]);
    assert.equal((await sandbox.run("stat -c %a /data/new/note.txt")).stdout, "640\n");
    await sandbox.writeFile("/data/empty", new Uint8Array());
    const entries = await sandbox.listFiles("/data", { depth: 2 });
    const files = entries.filter((entry) => entry.kind === "file").map((entry) => [entry.name, entry.size]);
    assert.deepEqual(files, [["empty", 0], ["new/note.txt", 3]]);
    await sandbox.writeFile("/data/pieces", ["0", "1", "2"].map((piece) => Buffer.from(piece)));
    let pieces = "";
    for await (const data of sandbox.readStream("/data/pieces")) pieces += Buffer.from(data).toString();
    assert.equal(pieces, "012");
    for (const [path, code] of [["/no/such", "ENOENT"], ["/data", "EISDIR"]] as const) {
      await assert.rejects(sandbox.readFile(path), (error: unknown) => error instanceof FileError && error.code === code);
    }
    await assert.rejects(sandbox.writeFile("/data", "x"), FileError);
    async function* half() {
      yield Buffer.from("half");
      throw new Error("the disk is gone");
    }
    await assert.rejects(sandbox.writeFile("/data/half", half()), /the disk is gone/);
    await assert.rejects(sandbox.readFile("/data/half"), FileError);
    const local = join(directory, "up");
    await writeFile(local, "up and down");
    await chmod(local, 0o750);
    await utimes(local, 1_700_000_000, 1_700_000_000);
    await sandbox.upload(local, "/data/up");
    await sandbox.download("/data/up", join(directory, "deep", "down"));
    const down = await stat(join(directory, "deep", "down"));
    assert.deepEqual([down.mode & 0o777, down.mtimeMs, down.size], [0o750, 1_700_000_000_000, 11]);
  }),
);

scenario("a directory goes in and out", () =>
  withDirectory(async (directory) => {
    const [source, target] = [join(directory, "source"), join(directory, "target")];
    const long = "n".repeat(120);
    for (const name of ["a.txt", `sub/${long}`, "sub/empty"]) {
      await mkdir(dirname(join(source, name)), { recursive: true });
      await writeFile(join(source, name), name.replace("empty", ""));
    }
    await symlink("sub/empty", join(source, "link"));
    await chmod(join(source, "a.txt"), 0o755);
    await sandbox.upload(source, "/in");
    const found = await sandbox.run("cd /in; find . -type f -o -type l | sort; stat -c %a a.txt; readlink link");
    assert.deepEqual(found.stdout.trim().split("\n"), ["./a.txt", "./link", "./sub/empty", `./sub/${long}`, "755", "sub/empty"]);
    await sandbox.run("cd /in; ln -s /etc/passwd out; mkfifo pipe; echo more > more");
    await assert.rejects(sandbox.download("/in", target), FileError);
    // What could be trusted is there, and nothing else.
    const names = (await readdir(target, { recursive: true })).sort();
    assert.deepEqual(names, ["a.txt", "link", "more", "sub", "sub/empty", `sub/${long}`]);
    assert.equal(await readFile(join(target, "sub", long), "utf8"), `sub/${long}`);
    await access(join(target, "a.txt"), 1);
    assert.equal(await readlink(join(target, "link")), "sub/empty");
  }),
);

async function digestOf(path: string): Promise<string> {
  const digest = createHash("sha256");
  for await (const data of createReadStream(path)) digest.update(data as Buffer);
  return digest.digest("hex");
}

scenario("files are exact over cuts", () =>
  withDirectory(async (directory) => {
    const [local, back] = [join(directory, "local"), join(directory, "back")];
    const file = await open(local, "w");
    for (let i = 0; i <= SIZES.file / 65_536; i += 1) {
      const piece = createHash("sha256").update(`${i}`).digest();
      await file.write(Buffer.concat(Array.from({ length: 2048 }, () => piece)));
    }
    await file.close();
    const cutting = (async () => {
      for (let i = 0; i < SIZES.file_cuts; i += 1) {
        await new Promise((done) => setTimeout(done, 150));
        await proxy.weather({ cut: true });
      }
    })();
    await sandbox.upload(local, "/big");
    await cutting;
    await proxy.weather({ cuts: cuts(SIZES.file, SIZES.file_cuts), cut: true });
    await sandbox.download("/big", back);
    assert.equal(await digestOf(back), await digestOf(local));
    await sandbox.run("rm /big");
  }),
);

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
  const places = await source.fork(2);
  assert.equal(new Set([source.id, ...places.map((place) => place.id)]).size, 3);
  const copies = await Promise.all(places.map((place) => place.attach()));
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

test("every scenario is here", () => {
  assert.deepEqual(CASES.scenarios.filter((name) => !written.has(name)), []);
});
