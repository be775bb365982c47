// Copy a running sandbox with its memory and commands, and let each copy do something else.

import { Sandbox, type SandboxRef } from "baton-sandbox";

// Loads its data once and then answers questions. Only the first sandbox does the slow part.
const SERVICE = `
import sys
table = {n: n * n for n in range(100_000)}
print("ready", flush=True)
for line in sys.stdin:
    print(table[int(line)], flush=True)
`;

async function ask(ref: SandboxRef, number: number): Promise<string> {
  const copy = await ref.attach();
  const service = await copy.follow("service");
  await service.writeStdin(`${number}\n`);
  await service.closeStdin();
  const answer = (await service.wait({ check: true })).stdout.trim().split("\n").at(-1) ?? "";
  await copy.kill();
  return answer;
}

const sandbox = await Sandbox.create(undefined, { persistent: true });
const service = await sandbox.exec(SERVICE, { language: "python", stdin: true, execId: "service" });
for await (const line of service.stdout.lines()) {
  console.log("the first one is", line);
  break;
}

const refs = await sandbox.fork(3);
const answers = await Promise.all(refs.map((ref, i) => ask(ref, 10 * (i + 1))));
console.log("three copies answer", answers.join(", "));
await sandbox.kill();
