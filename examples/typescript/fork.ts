// Copy a running sandbox, memory and commands included, and let each copy try something else.

import { type Place, Sandbox } from "baton-sandbox";

// Loads something once, then answers: what takes long is done only in the first sandbox.
const SERVICE = `
import sys
table = {n: n * n for n in range(100_000)}
print("ready", flush=True)
for line in sys.stdin:
    print(table[int(line)], flush=True)
`;

async function ask(place: Place, number: number): Promise<string> {
  const copy = await place.attach();
  const service = await copy.follow("service");
  await service.writeStdin(`${number}\n`);
  await service.closeStdin();
  const answer = (await service.wait({ check: true })).stdout.trim().split("\n").at(-1) ?? "";
  await copy.kill();
  return answer;
}

const sandbox = await Sandbox.create(undefined, { enableCheckpoint: true });
const service = await sandbox.exec(SERVICE, { language: "python", stdin: true, execId: "service" });
for await (const line of service.stdout.lines()) {
  console.log("the first one is", line);
  break;
}

const places = await sandbox.fork(3);
const answers = await Promise.all(places.map((place, i) => ask(place, 10 * (i + 1))));
console.log("three copies say", answers.join(", "));
await sandbox.kill();
