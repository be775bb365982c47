/** The package in Node: the `ws` library, headers, Google's credentials, files of the machine. */

import { WebSocket } from "ws";

import { type Handshake, type Socket, runOn } from "./connect.js";
import { ConnectionError, ProtocolError, TimeoutError, textOf } from "./errors.js";
import { credentials } from "./google.js";
import { SUBPROTOCOL } from "./protocol.js";
import { type Verdict, fatal, lost, ofHttp } from "./verdict.js";

export * from "./index.js";

/** Frames of the server stay under 1 MiB. */
const MAX_MESSAGE = 16 << 20;
/** For the close frame and the answer to it. */
const CLOSE_WITHIN = 1_000;

class NodeSocket implements Socket {
  readonly hearsPings = true;
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
      this.#cause = textOf(error);
    });
    socket.on("close", (code) => this.onEnd(code === 1006 ? undefined : code, this.#cause));
  }

  get buffered(): number {
    return this.#socket.bufferedAmount;
  }

  send(data: string | Uint8Array): void {
    // After the end nobody listens; the end itself is told by its event.
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

function open(handshake: Handshake): Promise<{ socket: Socket } | Verdict> {
  const headers: Record<string, string> = { ...handshake.headers };
  if (handshake.apiKey !== undefined) headers["X-API-Key"] = handshake.apiKey;
  if (handshake.place) headers["X-Sandbox-Token"] = handshake.place.sandboxToken;
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
      done(fatal(new ConnectionError(textOf(error))));
      return;
    }
    const timer = setTimeout(() => {
      done({ error: new TimeoutError(`no connection within ${handshake.withinMs} ms`), isRetry: true });
      socket.terminate();
    }, handshake.withinMs);
    const failed = (error: Error) => {
      clearTimeout(timer);
      const isAnswer = /subprotocol/i.test(error.message);
      done(isAnswer ? fatal(new ProtocolError("the server did not choose it")) : lost(textOf(error)));
    };
    socket.on("error", failed);
    socket.once("unexpected-response", (request, response) => {
      clearTimeout(timer);
      done(ofHttp(response.statusCode ?? 0));
      request.destroy();
    });
    socket.once("upgrade", (response) => handshake.cookies.take(response.headers["set-cookie"] ?? []));
    socket.once("open", () => {
      clearTimeout(timer);
      // At once: what the server says first comes in the same turn.
      done({ socket: new NodeSocket(socket) });
      socket.off("error", failed);
      socket.pause();
      setImmediate(() => socket.resume());
    });
  });
}

runOn({ open, credentials, transfer: () => import("./transfer.js") });
