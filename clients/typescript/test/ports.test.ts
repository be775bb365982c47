/** Raw connections to ports, against a server that speaks their wire and nothing else. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { type IncomingMessage, type Server, createServer } from "node:http";
import { type AddressInfo, connect as connectTo } from "node:net";
import type { Duplex } from "node:stream";
import { test } from "node:test";

import { ConnectionError, InUseError, NotFoundError, PermissionDeniedError } from "baton-sandbox";
import { type WebSocket, WebSocketServer } from "ws";

import { Link } from "../dist/link.js";
import { Port } from "../dist/ports.js";

const ID = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
const IDENTITY = { sandboxId: ID, sandboxToken: "t0ken" };

/** Greets, and sends back everything when it has all of it. */
class PortServer implements AsyncDisposable {
  /** Refuses that many handshakes first. */
  refusals: [number, string][] = [];
  paths: string[] = [];
  isResetting = false;
  #http: Server = createServer();
  #sockets = new WebSocketServer({ noServer: true });

  static async start(): Promise<PortServer> {
    const server = new PortServer();
    server.#http.on("upgrade", (request: IncomingMessage, socket: Duplex, head: Buffer) => {
      server.paths.push(request.url ?? "");
      assert.equal(request.headers["x-sandbox-token"], "t0ken");
      const refusal = server.refusals.shift();
      if (refusal) {
        const [status, text] = refusal;
        socket.end(`HTTP/1.1 ${status} No\r\ncontent-length: ${text.length}\r\nconnection: close\r\n\r\n${text}`);
        return;
      }
      server.#sockets.handleUpgrade(request, socket, head, (opened) => server.#handle(opened));
    });
    server.#http.listen(0, "127.0.0.1");
    await once(server.#http, "listening");
    return server;
  }

  get url(): string {
    return `ws://127.0.0.1:${(this.#http.address() as AddressInfo).port}`;
  }

  port(reconnectForMs: number | null = 10_000): Port {
    const { settings } = new Link(this.url, IDENTITY, {}, { reconnectForMs });
    return new Port(this.url, IDENTITY, 5432, settings);
  }

  #handle(socket: WebSocket): void {
    const heard: Buffer[] = [];
    socket.send(Buffer.from("hello\n"));
    socket.on("message", (data: Buffer, isBinary) => {
      if (this.isResetting) socket.close(1011);
      if (isBinary) heard.push(data);
      else {
        socket.send(Buffer.concat(heard));
        socket.send("");
      }
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets.clients) socket.terminate();
    this.#http.close();
    this.#http.closeAllConnections();
  }
}

async function readAll(stream: Duplex): Promise<Buffer> {
  const pieces: Buffer[] = [];
  for await (const piece of stream) pieces.push(piece as Buffer);
  return Buffer.concat(pieces);
}

test("bytes go both ways and each direction ends by itself", async () => {
  await using server = await PortServer.start();
  const stream = await server.port().connect();
  const data = Buffer.alloc(500_000, "0123456789");
  stream.end(data);
  assert.deepEqual(await readAll(stream), Buffer.concat([Buffer.from("hello\n"), data]));
  assert.deepEqual(server.paths, [`/sandboxes/${ID}/port-forward/5432`]);
});

test("a reset is an error", async () => {
  await using server = await PortServer.start();
  server.isResetting = true;
  const stream = await server.port().connect();
  stream.write("x");
  await assert.rejects(readAll(stream), ConnectionError);
});

test("refusals have their sentence and a sandbox that moves is waited for", async () => {
  await using server = await PortServer.start();
  const kinds = [
    [401, PermissionDeniedError],
    [404, NotFoundError],
    [409, InUseError],
    [502, ConnectionError],
  ] as const;
  for (const [status, kind] of kinds) {
    server.refusals = [[status, "Because of this.\n"]];
    await assert.rejects(server.port().connect(), (error) => {
      assert.ok(error instanceof kind, String(error));
      assert.match(error.message, /Because of this\./);
      return true;
    });
  }
  server.refusals = [
    [503, "Not yet.\n"],
    [503, "Not yet.\n"],
  ];
  (await server.port().connect()).destroy();
  server.refusals = [[503, "Not yet.\n"]];
  await assert.rejects(server.port(null).connect(), /Not yet\./);
});

test("a local port leads inside", async () => {
  await using server = await PortServer.start();
  const forward = await server.port().forward();
  const { port } = forward.address() as AddressInfo;
  const local = connectTo({ port, host: "127.0.0.1", allowHalfOpen: true });
  local.end("bytes");
  assert.equal((await readAll(local)).toString(), "hello\nbytes");
  server.refusals = [[502, "Nothing listens.\n"]];
  const refused = connectTo(port, "127.0.0.1");
  await assert.rejects(readAll(refused), /ECONNRESET/);
  forward.close();
  await once(forward, "close");
});

test("a link has the address and the token", () => {
  const { settings } = new Link("wss://sandboxes.example/api/", IDENTITY, {}, {});
  const port = new Port("wss://sandboxes.example/api/", IDENTITY, 8000, settings);
  assert.equal(port.url, `https://sandboxes.example/api/sandboxes/${ID}/ports/8000/?sandbox_token=t0ken`);
});
