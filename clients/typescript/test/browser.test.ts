/** The package as a browser loads it: in Chromium, and in Node with only a `WebSocket`. */

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { type Proxy, Testbed } from "./testbed.js";

const own = fileURLToPath(new URL("..", import.meta.url));
let testbed: Testbed;
let proxy: Proxy;
let tell: (result: string) => void = () => {};

const page = (url: string) => `<!doctype html><script type="module">
  import { Sandbox } from "/dist/browser.js";
  import { tour } from "/dist-test/tour.js";
  const cut = () => fetch("/cut", { method: "POST" });
  const result = await tour(Sandbox, "${url}", cut).then(() => "good", String);
  await fetch("/result", { method: "POST", body: result });
</script>`;

/** Serves the page and the package, and does what a page cannot do itself. */
const site = createServer(async (request, response) => {
  const path = request.url ?? "/";
  if (path === "/result") {
    let body = "";
    for await (const part of request) body += part;
    tell(body);
    response.end();
  } else if (path === "/cut") {
    await proxy.network({ cut: true });
    response.end();
  } else if (/^\/dist(-test)?\/[a-z0-9_]+\.js$/.test(path)) {
    response.setHeader("Content-Type", "text/javascript");
    response.end(await readFile(join(own, path)));
  } else {
    response.setHeader("Content-Type", "text/html");
    response.end(page(proxy.url));
  }
});

before(async () => {
  await new Promise<void>((done) => site.listen(0, "127.0.0.1", done));
  testbed = new Testbed();
  await testbed.do("server", { name: "a", settings: { BATON_ORIGINS: origin(), BATON_API_KEYS: "k3y" } });
});
after(async () => {
  await testbed.end();
  site.closeAllConnections();
  site.close();
});

function origin(): string {
  return `http://127.0.0.1:${(site.address() as AddressInfo).port}`;
}

/** Runs a program until the page reports its result. */
async function resultOf(command: string, words: string[]): Promise<string> {
  proxy = await testbed.proxy();
  const child = spawn(command, words, { stdio: ["ignore", "ignore", "pipe"], cwd: own });
  let output = "";
  child.stderr.on("data", (data: Buffer) => {
    output = (output + data.toString()).slice(-4000);
  });
  const gone = new Promise<void>((done) => child.on("close", () => done()));
  try {
    return await Promise.race([
      new Promise<string>((done) => {
        tell = done;
      }),
      gone.then(() => `it exited without a result: ${output}`),
    ]);
  } finally {
    child.kill();
    await gone;
  }
}

test("with only a WebSocket", async () => {
  const code = `
    import { Sandbox } from "./dist/browser.js";
    import { tour } from "./dist-test/tour.js";
    const site = "${origin()}";
    const url = /"(ws:[^"]+)"/.exec(await (await fetch(site)).text())[1];
    const cut = () => fetch(site + "/cut", { method: "POST" });
    const body = await tour(Sandbox, url, cut).then(() => "good", (error) => error.stack);
    await fetch(site + "/result", { method: "POST", body });`;
  assert.equal(await resultOf(process.execPath, ["--experimental-websocket", "--input-type=module", "-e", code]), "good");
});

function chromium(): string | undefined {
  for (const name of ["chromium", "chromium-browser", "google-chrome"]) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {
      // Try the next one.
    }
  }
  return undefined;
}

test("in Chromium", { skip: chromium() ? false : "there is no Chromium" }, async () => {
  const profile = await mkdtemp(join(tmpdir(), "baton-chromium-"));
  const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", "--disable-component-update"];
  try {
    assert.equal(await resultOf(chromium() ?? "", [...flags, `--user-data-dir=${profile}`, origin()]), "good");
  } finally {
    await rm(profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 });
  }
});
