// Store a sandbox with its memory, files and running commands; bring it back, wherever that is.

import { Sandbox } from "baton-sandbox";

const sandbox = await Sandbox.create(undefined, { enableCheckpoint: true });
await sandbox.run("echo remembered > /srv/note");
await sandbox.exec("for i in $(seq 1 20); do echo $i; sleep 0.05; done", { execId: "count" });
const { place } = sandbox;
console.log("stored as", await sandbox.checkpoint({ live: true }));

// Nothing of it runs now. Hours later, on any instance:
const again = await place.attach();
const result = await (await again.follow("count")).wait({ check: true });
console.log("the command went on and wrote", result.stdout.trim().split("\n").length, "lines");
console.log("the file says", (await again.readText("/srv/note")).trim());
await again.kill();
