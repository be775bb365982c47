// Move a sandbox to another instance while a command runs in it, without losing a byte.

import { Sandbox } from "baton-sandbox";

const sandbox = await Sandbox.create(undefined, { persistent: true });
const running = await sandbox.exec("for i in $(seq 1 40); do echo $i; sleep 0.05; done");
const before = sandbox.info().instance;
const counting = running.wait({ check: true });

// The load balancer decides which instance is next; with a single server it is the same one.
await sandbox.handoff();
console.log("it was on", before, "and is on", sandbox.info().instance);

const lines = (await counting).stdout.trim().split("\n");
if (lines.join() !== Array.from({ length: 40 }, (_, i) => i + 1).join()) throw new Error(`only ${lines}`);
console.log(lines.length, "lines, none missing, none repeated");
await sandbox.kill();
