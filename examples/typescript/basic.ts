// Run commands and code in a new sandbox, with input, streamed output, and files.

import { Sandbox } from "baton-sandbox";

// Without an address it uses BATON_URL. The sandbox is deleted at the end of the block.
await using sandbox = await Sandbox.create();

console.log(await sandbox.run("uname -s; echo oops >&2; exit 3"));

console.log("python says", (await sandbox.runCode("print(sum(range(10)))")).stdout.trim());

const counting = await sandbox.exec("for i in 1 2 3; do echo tick $i; sleep 0.1; done");
for await (const line of counting.stdout.lines()) console.log("streamed:", line);
console.log("exit code", (await counting.wait()).exitCode);

console.log((await sandbox.run(["tr", "a-z", "A-Z"], { stdin: "some input" })).stdout);

await sandbox.writeFile("/app/data.csv", "a,b\n1,2\n");
const names = (await sandbox.listFiles("/app")).map((entry) => entry.name);
console.log(names, await sandbox.readText("/app/data.csv"));
