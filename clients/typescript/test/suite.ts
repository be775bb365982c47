/** What the files of the suite share: a test bed for each file, and a proxy with a sandbox for each scenario. */

import { createHash } from "node:crypto";
import { after, before, test } from "node:test";

import { Sandbox } from "baton-sandbox";

import { type Proxy, Testbed } from "./testbed.js";

export const tick = (count: number) => `for i in $(seq 1 ${count}); do echo line $i; sleep 0.05; done; exit 7`;
export const ticks = (count: number) => Array.from({ length: count }, (_, i) => `line ${i + 1}\n`).join("");
export const sha256 = (data: Uint8Array) => createHash("sha256").update(data).digest("hex");
export const persistent = { enableCheckpoint: true, enableSandboxHandoff: true };
/** Where to cut each connection, a little later than the one before. */
export const cuts = (size: number, count: number) =>
  Array.from({ length: count }, (_, i) => Math.floor(size / (count + 2)) + i * 997);

/** Bytes without repetition. */
export function sample(size: number): Buffer {
  const count = Math.floor(size / 32);
  return Buffer.concat(Array.from({ length: count }, (_, i) => createHash("sha256").update(`${i}`).digest()));
}

export let testbed: Testbed;
export let proxy: Proxy;
export let sandbox: Sandbox;

before(async () => {
  testbed = new Testbed();
  await testbed.do("server", { name: "a" });
});
after(() => testbed.end());

/** A test with its own proxy and its own sandbox behind it. */
export function scenario(name: string, body: () => Promise<void>): void {
  test(name, async () => {
    proxy = await testbed.proxy();
    await using own = await Sandbox.create(proxy.url);
    sandbox = own;
    await body();
  });
}
