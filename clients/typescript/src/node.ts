/** The package in Node: the `ws` library, headers, Google's credentials, local files. */

import { WebSocket } from "ws";

import { type Handshake, type Socket, setPlatform } from "./connect.js";
import { ConnectionError, ProtocolError, TimeoutError, describe } from "./errors.js";
import { credentials } from "./google.js";
import { SUBPROTOCOL } from "./protocol.js";
import { type RetryPolicy, fatal, fromHttp, lost } from "./retry_policy.js";

export * from "./index.js";

/** Frames of the server stay under 1 MiB. */
const MAX_MESSAGE = 16 << 20;
/** The time limit of the closing handshake. */
const CLOSE_WITHIN = 1_000;

class NodeSocket implements Socket {
  readonly seesPings = true;
  onMessage: Socket["onMessage"] = () => {};
  onAlive: Socket["onAlive"] = () => {};
  onEnd: Socket["onEnd"] = () => {};
  #socket: WebSocket;
  #cause = "the connection was cut";

  constructor(socket: WebSocket) {
    this.#socket = socket;
    socket.on("message", (data: Buffer, isBinary) => {
      this.onMessage(isBinary ? new Uint8Array(data.buffer, data.byteOffset, data.length) : data.toString());
    });
    socket.on("ping", () => this.onAlive());
    socket.on("error", (error) => {
      this.#cause = describe(error);
    });
    socket.on("close", (code) => this.onEnd(code === 1006 ? undefined : code, this.#cause));
  }

  get buffered(): number {
    return this.#socket.bufferedAmount;
  }

  send(data: string | Uint8Array): void {
    // The event of the end reports a connection that is closed already.
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(data, () => {});
  }

  close(): void {
    this.#socket.resume();
    this.#socket.close(1000);
    setTimeout(() => this.#socket.terminate(), CLOSE_WITHIN).unref();
  }

  drop(): void {
    this.#socket.terminate();
  }

  pause(): void {
    this.#socket.pause();
  }

  resume(): void {
    this.#socket.resume();
  }
}

function open(handshake: Handshake): Promise<{ socket: Socket } | RetryPolicy> {
  const headers: Record<string, string> = { ...handshake.headers };
  if (handshake.apiKey !== undefined) headers["X-API-Key"] = handshake.apiKey;
  if (handshake.identity) headers["X-Sandbox-Token"] = handshake.identity.sandboxToken;
  const cookie = handshake.cookies.header();
  if (cookie !== undefined) headers["Cookie"] = cookie;
  return new Promise((done) => {
    let socket: WebSocket;
    try {
      socket = new WebSocket(handshake.url, [SUBPROTOCOL], {
        headers,
        perMessageDeflate: false,
        maxPayload: MAX_MESSAGE,
      });
    } catch (error) {
      done(fatal(new ConnectionError(describe(error))));
      return;
    }
    const timer = setTimeout(() => {
      done({ error: new TimeoutError(`no connection within ${handshake.withinMs} ms`), isRetry: true });
      socket.terminate();
    }, handshake.withinMs);
    const failed = (error: Error) => {
      clearTimeout(timer);
      const isRefused = /subprotocol/i.test(error.message);
      done(isRefused ? fatal(new ProtocolError(`the server did not accept the subprotocol ${SUBPROTOCOL}`)) : lost(describe(error)));
    };
    socket.on("error", failed);
    socket.once("unexpected-response", (request, response) => {
      clearTimeout(timer);
      done(fromHttp(response.statusCode ?? 0));
      request.destroy();
    });
    socket.once("upgrade", (response) => handshake.cookies.store(response.headers["set-cookie"] ?? []));
    socket.once("open", () => {
      clearTimeout(timer);
      // At once, because the first messages may arrive in the same turn of the event loop.
      done({ socket: new NodeSocket(socket) });
      socket.off("error", failed);
      socket.pause();
      setImmediate(() => socket.resume());
    });
  });
}

setPlatform({
  open,
  credentials,
  transfer: () => import("./transfer.js"),
  ports: () => import("./port_stream.js"),
});
