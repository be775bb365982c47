/** What is sent over HTTP to list and kill sandboxes, and what is made of the responses. */

import assert from "node:assert/strict";
import { type IncomingHttpHeaders, createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { ConnectionError, NotFoundError, PermissionDeniedError, ProtocolError, Sandbox, TimeoutError } from "baton-sandbox";

type Answer = [code: number, body?: string, headers?: Record<string, string>];

/** A server with one answer for each request; without one it stays silent. */
class AnsweringServer implements AsyncDisposable {
  readonly lines: string[] = [];
  readonly headers: IncomingHttpHeaders[] = [];
  readonly url: string;
  #server: ReturnType<typeof createServer>;

  static async start(...answers: Answer[]): Promise<AnsweringServer> {
    const server = createServer();
    await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
    return new AnsweringServer(server, answers);
  }

  private constructor(server: ReturnType<typeof createServer>, answers: Answer[]) {
    this.#server = server;
    this.url = `ws://127.0.0.1:${(server.address() as AddressInfo).port}`;
    server.on("request", (request, response) => {
      this.lines.push(`${request.method} ${request.url}`);
      this.headers.push(request.headers);
      const [code, body, headers] = answers.shift() ?? [];
      if (code !== undefined) response.writeHead(code, headers).end(body);
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = new Promise((done) => this.#server.close(done));
    this.#server.closeAllConnections();
    await closed;
  }
}

const page = (sandboxes: object[], next: string | null = null): Answer => [200, JSON.stringify({ sandboxes, next })];

test("the list is requested page by page and filtered by every label", async () => {
  const labels = { team: "a&b", tier: "free" };
  const rest = { phase: "running", reason: "Created", message: null, instance: "inst", created: "2026-11-18T20:00:00Z" };
  const first = { sandbox_id: "one", labels, age_seconds: 7, persistent: true, tenant: "blue", news: "of a newer server", ...rest };
  await using server = await AnsweringServer.start(
    page([first, { sandbox_id: "two", labels: { team: "a&b" } }], "two"),
    page([], "three"),
    page([{ sandbox_id: "four", labels }]),
    page([{ sandbox_id: "five", error: "it cannot be read" }]),
  );
  const options = { labels, apiKey: "k3y", headers: { "X-Proxy": "yes" }, auth: () => ({ Authorization: "Bearer x" }) };
  const found = [];
  for await (const one of Sandbox.list(server.url, options)) found.push(one);
  const [one, four] = found;
  const expected = { id: "one", labels, ageMs: 7000, persistent: true, tenant: "blue", error: undefined, ...rest, message: undefined };
  assert.deepEqual([one, four?.id, found.length], [expected, "four", 2]);
  const path = "GET /sandboxes?label=team%3Da%26b";
  assert.deepEqual(server.lines, [path, `${path}&after=two`, `${path}&after=three`]);
  for (const headers of server.headers) {
    assert.deepEqual([headers["x-api-key"], headers["x-proxy"], headers.authorization], ["k3y", "yes", "Bearer x"]);
  }
  const unread = (await Sandbox.list(server.url).next()).value;
  assert.deepEqual([unread?.phase, unread?.error, server.lines.at(-1)], [undefined, "it cannot be read", "GET /sandboxes"]);
});

test("a refused kill says why", async () => {
  const cases: [Answer, new (message: string) => Error, RegExp][] = [
    [[404], NotFoundError, /no sandbox/],
    [[401], PermissionDeniedError, /requires a key/],
    [[403], PermissionDeniedError, /does not match/],
    [[403, "This server refuses\n"], PermissionDeniedError, /^This server refuses$/],
    [[503, '{"message":"Storage does not answer."}'], ConnectionError, /^Storage does not answer\.$/],
    [[429], ConnectionError, /HTTP 429/],
    // A key is for one server: a redirect is not followed.
    [[302, "", { Location: "http://127.0.0.1:1/" }], ConnectionError, /redirect/],
  ];
  for (const [answer, Kind, text] of cases) {
    await using server = await AnsweringServer.start(answer);
    const isKind = (error: unknown) => error instanceof Kind && text.test(error.message);
    await assert.rejects(Sandbox.killById(server.url, "the id", { token: "t0ken" }), isKind);
    assert.deepEqual([server.lines, server.headers[0]?.["x-sandbox-token"]], [["DELETE /sandboxes/the%20id?wait=30"], "t0ken"]);
  }
});

test("a list that cannot be had says why", async () => {
  await using server = await AnsweringServer.start([403], [200, '{"message":"Server is running"}']);
  await assert.rejects(Sandbox.list(server.url).next(), (error: unknown) => error instanceof PermissionDeniedError && /admin key/.test(error.message));
  await assert.rejects(Sandbox.list(server.url).next(), ProtocolError);
});

test("a server that does not answer is not waited for", async () => {
  await using server = await AnsweringServer.start();
  await assert.rejects(Sandbox.killById(server.url, "x", { token: "t", answerWithinMs: 100 }), TimeoutError);
  const abort = new AbortController();
  setTimeout(() => abort.abort(), 50);
  await assert.rejects(Sandbox.killById(server.url, "x", { signal: abort.signal }), { name: "AbortError" });
});
