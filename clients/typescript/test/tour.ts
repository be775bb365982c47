/** What a page does with the package: it runs in browsers, and wherever there is a `WebSocket`. */

import type { Sandbox as Sandboxes } from "baton-sandbox/browser";

export async function tour(Sandbox: typeof Sandboxes, url: string, cut: () => Promise<unknown>): Promise<void> {
  const claim = (holds: boolean, what: string) => {
    if (!holds) throw new Error(what);
  };
  const sandbox = await Sandbox.create(url, { enableCheckpoint: true, apiKey: "k3y" });
  const result = await sandbox.run("echo out; echo err >&2; exit 3");
  claim(result.stdout === "out\n" && result.stderr === "err\n" && result.exitCode === 3, "a command runs");

  const size = 3_000_000;
  const flood = sandbox.runCode(`print("".join("%09d\\n" % i for i in range(${size / 10})), end="")`);
  for (let i = 0; i < 3; i += 1) {
    await new Promise((done) => setTimeout(done, 100));
    await cut();
  }
  const { stdout } = await flood;
  const lines = stdout.split("\n").slice(0, -1);
  claim(stdout.length === size && lines.every((line, i) => Number(line) === i), "output is exact over cuts");

  await sandbox.writeFile("/data/note", "é");
  claim((await sandbox.readText("/data/note")) === "é", "files go in and out");

  // The token goes as a subprotocol: a browser sends no headers.
  const { ref } = sandbox;
  await sandbox.checkpoint();
  const again = await ref.attach();
  claim((await again.readText("/data/note")) === "é", "it is attached again");
  const wrong = await Sandbox.attach(url, ref.id, "wrong").catch((error: Error) => error.name);
  claim(wrong === "PermissionDeniedError", `a wrong token is refused: ${wrong}`);
  const refused = await Sandbox.create(url, { headers: { "X-Front": "door" } }).catch((error: Error) => error.name);
  claim(refused === "ConnectionError", `headers cannot be sent: ${refused}`);
  await again.kill();
}
