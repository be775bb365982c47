/** Google's credentials, with the real library and a fake metadata server. */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { AuthError, Sandbox } from "baton-sandbox";

import { ScriptedServer } from "./scripted_server.js";

test("Google gives an ID token for the service", async () => {
  const part = (fields: object) => Buffer.from(JSON.stringify(fields)).toString("base64url");
  const metadata = createServer((request, response) => {
    const url = new URL(request.url ?? "", "http://metadata");
    const now = Math.floor(Date.now() / 1000);
    const claims = { aud: url.searchParams.get("audience"), iat: now, exp: now + 3600 };
    response.setHeader("Metadata-Flavor", "Google");
    response.setHeader("Content-Type", "application/text");
    response.end(url.pathname.endsWith("/identity") ? `${part({ alg: "none" })}.${part(claims)}.c2ln` : "x");
  });
  await new Promise<void>((done) => metadata.listen(0, "127.0.0.1", done));
  const host = `127.0.0.1:${(metadata.address() as AddressInfo).port}`;
  await using server = await ScriptedServer.start();
  const code = "import { Sandbox } from 'baton-sandbox'; await (await Sandbox.create(process.argv[1])).close();";
  const env = { ...process.env, GCE_METADATA_HOST: host, METADATA_SERVER_DETECTION: "assume-present", BATON_AUTH: "google" };
  const cwd = new URL("..", import.meta.url);
  const child = spawn(process.execPath, ["--input-type=module", "-e", code, server.url], { env, cwd, stdio: ["ignore", "inherit", "inherit"] });
  const ended = new Promise((done) => child.on("exit", done));
  try {
    const peer = await server.create();
    const [kind, token = ""] = (peer.headers.authorization ?? "").split(" ");
    const claims = JSON.parse(Buffer.from(token.split(".")[1] ?? "", "base64url").toString());
    assert.deepEqual([kind, claims.aud], ["Bearer", server.url.replace("ws:", "http:")]);
    assert.equal(await ended, 0);
  } finally {
    child.kill();
    metadata.close();
  }
  await assert.rejects(Sandbox.create(server.url, { auth: "magic" as "google" }), AuthError);
});
