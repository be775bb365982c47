// Prepare a file system once, save it under a name, and start any number of sandboxes from it.

import { Sandbox } from "baton-sandbox";

const name = `example-${Date.now()}`;
{
  await using sandbox = await Sandbox.create();
  await sandbox.writeFile("/opt/greet.py", "def greet(name): return f'hello {name}'\n");
  await sandbox.snapshot(name);
}

await using sandbox = await Sandbox.create(undefined, { filesystemSnapshotName: name });
const code = "from greet import greet; print(greet('snapshot'))";
console.log((await sandbox.run(["python3", "-c", code], { cwd: "/opt", check: true })).stdout.trim());
