/** Input of commands that earlier clients started: it continues after what was accepted, and is never cut off. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate } from "node:timers/promises";

import { ExecLostError, Sandbox } from "baton-sandbox";

import { crc32 } from "../dist/crc32.js";
import { StdinBuffer, StdinConflict, WINDOW } from "../dist/stdin.js";
import { ID, type Peer, ScriptedServer, create, start, text, view } from "./scripted_server.js";

/** The number of the command, the offset and the bytes of the next input. */
async function frame(peer: Peer): Promise<[number, number, string]> {
  for (;;) {
    const message = await peer.receive();
    if (!(message instanceof Uint8Array)) continue;
    const bytes = Buffer.from(message);
    return [bytes.readUInt32BE(1), Number(bytes.readBigUInt64BE(5)), text(bytes.subarray(13))];
  }
}

test("a followed command gets input after what it has accepted", async () => {
  await using server = await ScriptedServer.start();
  const attaching = Sandbox.attach(server.url, ID, "t0ken");
  let peer = await server.attach(view("cat", 3, 2));
  const sandbox = await attaching;
  const running = await sandbox.follow("cat");
  await running.writeStdin("longer");
  assert.deepEqual(await frame(peer), [3, 2, "longer"]);
  peer.sendEvent("stdin_ack", { exec_id: "cat", offset: 5 });
  // After a reconnect only the part that was not accepted is sent again.
  peer.cut();
  peer = await server.attach(view("cat", 4, 5));
  assert.deepEqual(await frame(peer), [4, 5, "ger"]);
  await running.closeStdin();
  assert.deepEqual(await peer.receive(), { event: "stdin", exec_id: "cat", data: "", eof: true, offset: 8 });
  // Restored from before input that it had accepted.
  peer.sendEvent("stdin_ack", { exec_id: "cat", offset: 8 });
  peer.cut();
  await server.attach(view("cat", 4, 6));
  await assert.rejects(running.wait(), (error: unknown) => error instanceof ExecLostError && error.rolledBack);
  await sandbox.close();
});

test("input that is written before the connection is back has the right offset", async () => {
  await using server = await ScriptedServer.start();
  const attaching = Sandbox.attach(server.url, ID, "t0ken");
  let peer = await server.attach(view("cat", 3, 2));
  const sandbox = await attaching;
  peer.cut();
  while (sandbox.info().isConnected) await setImmediate();
  const running = await sandbox.follow("cat");
  await running.writeStdin("later");
  // Another client wrote in the meantime.
  peer = await server.attach(view("cat", 3, 9));
  assert.deepEqual(await frame(peer), [3, 9, "later"]);
  await sandbox.close();
});

test("input comes after what another client wrote during a drop", async () => {
  await using server = await ScriptedServer.start();
  let [sandbox, peer] = await create(server);
  const [running, id] = await start(sandbox, peer, { stdin: true });
  await running.writeStdin("ab");
  assert.deepEqual(await frame(peer), [1, 0, "ab"]);
  peer.sendEvent("stdin_ack", { exec_id: id, offset: 2 });
  peer.cut();
  while (sandbox.info().isConnected) await setImmediate();
  // Written while there is no connection: it was never sent, so the seven bytes are another client's.
  await running.writeStdin("later");
  peer = await server.attach(view(id, 1, 7));
  assert.deepEqual(await frame(peer), [1, 7, "later"]);
  await running.writeStdin("last");
  assert.deepEqual(await frame(peer), [1, 12, "last"]);
  await running.closeStdin();
  assert.deepEqual(await peer.receive(), { event: "stdin", exec_id: id, data: "", eof: true, offset: 16 });
  await sandbox.close();
});

test("a command is lost rather than its input", async () => {
  // Of eight bytes sent, five were acknowledged; then the sandbox has accepted fewer, more than were sent, or others.
  const others = { stdin_crc32: crc32(new TextEncoder().encode("12345XY")) };
  for (const [accepted, crc, rolledBack, text] of [
    [4, {}, true, /rolled back to before/],
    [9, {}, false, /another client wrote/],
    [7, others, false, /another client wrote/],
  ] as const) {
    await using server = await ScriptedServer.start();
    const [sandbox, peer] = await create(server);
    const [running, id] = await start(sandbox, peer, { stdin: true });
    await running.writeStdin("12345678");
    await frame(peer);
    peer.sendEvent("stdin_ack", { exec_id: id, offset: 5 });
    peer.cut();
    await server.attach({ ...view(id, 1, accepted), ...crc });
    const isLost = (error: unknown) => error instanceof ExecLostError && error.rolledBack === rolledBack && text.test(error.message);
    await assert.rejects(running.wait(), isLost);
    await assert.rejects(running.writeStdin("x"), ExecLostError);
    await sandbox.close();
  }
});

test("bytes of another client are not taken for those in flight", () => {
  const bytes = (letters: string) => new TextEncoder().encode(letters);
  assert.equal(crc32(bytes("789"), crc32(bytes("123456"))), 0xcbf43926);
  const stdin = new StdinBuffer();
  stdin.write(bytes("ab"));
  stdin.write(bytes("cdef"));
  stdin.next();
  stdin.next();
  stdin.ack(1);
  stdin.resume(3, crc32(bytes("abc")));
  const rest = stdin.next();
  assert.deepEqual([rest?.offset, text(rest?.data)], [3, "def"]);
  assert.throws(() => stdin.resume(4, crc32(bytes("abcX"))), StdinConflict);
});

test("a buffer that starts later has the same window", () => {
  const stdin = new StdinBuffer();
  stdin.write(new TextEncoder().encode("abc"));
  stdin.resume(10);
  assert.equal(stdin.freeSpace, WINDOW - 3);
  const first = stdin.next();
  assert.deepEqual([first?.offset, text(first?.data)], [10, "abc"]);
  stdin.ack(12);
  stdin.resume(12);
  const second = stdin.next();
  assert.deepEqual([second?.offset, text(second?.data)], [12, "c"]);
  stdin.close();
  stdin.ack(13);
  stdin.resume(20);
  assert.equal(stdin.freeSpace, WINDOW);
  assert.deepEqual(stdin.next(), { offset: 20 });
});
