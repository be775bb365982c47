// Store a sandbox with its memory, files and running commands, and restore it later on any instance.

import { Sandbox } from "baton-sandbox";

const sandbox = await Sandbox.create(undefined, { persistent: true });
await sandbox.run("echo remembered > /srv/note");
await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", { execId: "count" });
const { ref } = sandbox;
console.log("stored as", await sandbox.checkpoint({ live: true }));

// The sandbox does not run now. Hours later, on any instance:
const again = await ref.attach();
const result = await (await again.follow("count")).wait({ check: true });
console.log("the command continued and wrote", result.stdout.trim().split("\n").length, "lines");
console.log("the file contains", (await again.readText("/srv/note")).trim());
await again.kill();
