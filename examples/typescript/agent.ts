// A tool loop: a model asks for commands, a sandbox runs them, and the model sees the results.
//
// `model` replaces a real one: it returns the next message of a conversation.

import { Sandbox } from "baton-sandbox";

type Call =
  | { tool: "run_python"; code: string }
  | { tool: "run_bash"; command: string }
  | { tool: "write_file"; path: string; text: string };
type Message = { role: "system" | "user" | "assistant" | "tool"; content?: string; call?: Call };

const TOOLS = "run_python(code), run_bash(command), write_file(path, text)";

/** Plays a model that computes, makes a mistake, sees it and corrects it. */
function model(messages: Message[]): Message {
  const results = messages.filter((message) => message.role === "tool");
  const text = "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, p))]\n";
  const script: Call[] = [
    { tool: "write_file", path: "/app/primes.py", text },
    { tool: "run_python", code: "from primes import primes; print(primes(30))" },
    { tool: "run_bash", command: "cd /app && python3 -c 'from primes import primes; print(primes(30))'" },
  ];
  const call = script[results.length];
  if (call) return { role: "assistant", call };
  const last = JSON.parse(results.at(-1)?.content ?? "{}") as { stdout: string };
  return { role: "assistant", content: `The primes below 30 are ${last.stdout.trim()}` };
}

async function answer(sandbox: Sandbox, call: Call): Promise<unknown> {
  if (call.tool === "write_file") {
    await sandbox.writeFile(call.path, call.text);
    return { ok: true };
  }
  const options = { timeoutMs: 30_000 };
  const run = call.tool === "run_python" ? sandbox.runCode(call.code, "python", options) : sandbox.run(call.command, options);
  // The model decides what to do about a failure.
  const { stdout, stderr, exitCode, timedOut } = await run;
  return { stdout, stderr: stderr.slice(-2000), exitCode, timedOut };
}

const messages: Message[] = [
  { role: "system", content: `You have a sandbox. Tools: ${TOOLS}.` },
  { role: "user", content: "Which primes are there below 30?" },
];
await using sandbox = await Sandbox.create(undefined, { idleTimeoutMs: 600_000, labels: { purpose: "agent" } });
for (;;) {
  const message = model(messages);
  messages.push(message);
  if (!message.call) {
    console.log(message.content);
    break;
  }
  const content = JSON.stringify(await answer(sandbox, message.call));
  console.log(message.call.tool, "->", content);
  messages.push({ role: "tool", content });
}
