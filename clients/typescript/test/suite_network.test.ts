/** The suite that every client library runs: a bad network. */

import assert from "node:assert/strict";

import { ExecLostError, Sandbox } from "baton-sandbox";

import { cuts, proxy, sample, sandbox, scenario, sha256, testbed, tick, ticks } from "./suite.js";
import { SIZES } from "./testbed.js";

/** Writes this many bytes without repetition, then their digest to stderr. */
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

scenario("output is exact over many cuts", async () => {
  await proxy.network({ cuts: cuts(SIZES.output, SIZES.cuts), cut: true });
  const result = await sandbox.runCode(flood(SIZES.output));
  assert.equal(result.stdoutBytes.length, SIZES.output);
  assert.equal(sha256(result.stdoutBytes), result.stderr);
  assert.ok((await proxy.network()).cut >= SIZES.cuts - 2, "it was hardly cut");
});

scenario("input is exact over many cuts", async () => {
  const data = sample(SIZES.input);
  const running = await sandbox.exec(["sha256sum"], { stdin: true });
  const parts = SIZES.input_cuts + 1;
  for (let i = 0; i < parts; i += 1) {
    const edge = (number: number) => Math.floor((number * data.length) / parts);
    await running.writeStdin(data.subarray(edge(i), edge(i + 1)));
    await proxy.network({ cut: true });
  }
  await running.closeStdin();
  assert.equal((await running.wait()).stdout.split(" ")[0], sha256(data));
  // The same, as an option.
  assert.equal((await sandbox.run(["sha256sum"], { stdin: data })).stdout.split(" ")[0], sha256(data));
});

scenario("input after an attach is exact", async () => {
  let kept = await Sandbox.create(proxy.url);
  let running = await kept.exec(["cat"], { stdin: true, execId: "cat" });
  await running.writeStdin("AB");
  for await (const data of running.stdout) {
    assert.equal(new TextDecoder().decode(data), "AB");
    break;
  }
  kept = await (await kept.detach()).attach();
  running = await kept.follow("cat");
  await running.writeStdin("a longer line\n");
  await running.closeStdin();
  assert.equal((await running.wait()).stdout, "ABa longer line\n");
  // The first client leaves while its input is unacknowledged: the second one continues after what was accepted.
  const data = sample(SIZES.input);
  running = await kept.exec("while [ ! -e /tmp/go ]; do sleep 0.02; done; exec sha256sum", { stdin: true, execId: "sum" });
  await running.writeStdin(data.subarray(0, 700_000));
  await proxy.network({ cut: true });
  kept = await (await kept.detach()).attach();
  const accepted = kept.info().execs.find((view) => view.execId === "sum")?.stdin ?? Infinity;
  assert.ok(accepted <= 700_000);
  running = await kept.follow("sum");
  await kept.run("touch /tmp/go");
  const step = Math.floor((data.length - accepted) / 4) + 1;
  for (let start = accepted; start < data.length; start += step) {
    await running.writeStdin(data.subarray(start, start + step));
    await proxy.network({ cut: true });
  }
  await running.closeStdin();
  assert.equal((await running.wait()).stdout.split(" ")[0], sha256(data));
  await kept.kill();
});

scenario("input after that of another client is exact", async () => {
  const { id, token } = sandbox;
  async function otherWrites(line: string, offset: number): Promise<void> {
    await proxy.network({ stall: true });
    const other = await Sandbox.attach((await testbed.proxy()).url, id, token);
    const followed = await other.follow("cat", { stdout: offset });
    await followed.writeStdin(`${line}\n`);
    for await (const found of followed.stdout.lines()) {
      assert.equal(found, line);
      break;
    }
    await other.close();
  }

  let running = await sandbox.exec(["cat"], { stdin: true, execId: "cat" });
  await running.writeStdin("one\n");
  const lines = running.stdout.lines();
  assert.equal((await lines.next()).value, "one");
  // By now the input is acknowledged, too.
  await sandbox.run("true");
  await otherWrites("two", 4);
  await proxy.network({ stall: false, cut: true });
  assert.equal((await lines.next()).value, "two");
  await running.writeStdin("three\n");
  assert.equal((await lines.next()).value, "three");
  await sandbox.run("true");
  // Written into a connection that is dead: as long as what the other one wrote, and not taken for it.
  await otherWrites("four", 14);
  await running.writeStdin("lost\n");
  await proxy.network({ stall: false, cut: true });
  await assert.rejects(running.wait(), (error: unknown) => error instanceof ExecLostError && /another client wrote input/.test(error.message));
  running = await sandbox.follow("cat", { stdout: 19 });
  await running.writeStdin("five\n");
  await running.closeStdin();
  const result = await running.wait();
  assert.deepEqual([result.stdout, result.exitCode], ["five\n", 0]);
});

scenario("a slow network changes nothing", async () => {
  await proxy.network({ delay: 0.05 });
  assert.equal((await sandbox.run(tick(10))).stdout, ticks(10));
  assert.equal((await sandbox.run(["cat"], { stdin: "slow" })).stdout, "slow");
});

scenario("a stalled connection is given up and taken up again", async () => {
  await using impatient = await Sandbox.create(proxy.url, { silenceMs: 3_000 });
  const { connections } = await proxy.network();
  const running = await impatient.exec(tick(40));
  for await (const _ of running.stdout) break;
  await proxy.network({ stall: true });
  const result = await running.wait();
  assert.ok(result.stdout.endsWith(ticks(40).slice(-100)) && result.exitCode === 7);
  assert.ok((await proxy.network()).connections > connections);
  await proxy.network({ stall: false });
});
