// A command goes on while nobody is connected, and its output is all there afterwards.
//
// Short drops need nothing of this: the client mends its connection by itself. This is for a program
// that ends and comes back later, with the sandbox's id and token in its pocket.

import { Sandbox, type Update } from "baton-sandbox";

const onStatus = (update: Update) => console.log("  status", update.status);

const first = await Sandbox.create(undefined, { onStatus });
await first.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", { execId: "count" });
const { id, token } = first;
await first.close();
console.log("nobody is connected");

const again = await Sandbox.attach(undefined, id, token, { onStatus });
const result = await (await again.follow("count")).wait({ check: true });
const lines = result.stdout.trim().split("\n");
if (lines.join() !== Array.from({ length: 20 }, (_, i) => i + 1).join()) throw new Error(`only ${lines}`);
console.log("all 20 lines are here, exit code", result.exitCode);
await again.kill();
