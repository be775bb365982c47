// A command keeps running while no client is connected, and the next client gets all its output.
//
// Short drops need none of this, because the client reconnects by itself. This is for a program that exits and
// attaches again later, with the id and the token of the sandbox.

import { Sandbox, type Update } from "baton-sandbox";

const onStatus = (update: Update) => console.log("  status", update.status);

const first = await Sandbox.create(undefined, { onStatus });
await first.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", { execId: "count" });
const { id, token } = await first.detach();
console.log("no client is connected");

const again = await Sandbox.attach(undefined, id, token, { onStatus });
const result = await (await again.follow("count")).wait({ check: true });
const lines = result.stdout.trim().split("\n");
if (lines.join() !== Array.from({ length: 20 }, (_, i) => i + 1).join()) throw new Error(`only ${lines}`);
console.log("all 20 lines arrived, exit code", result.exitCode);
await again.kill();
