/** TCP over a WebSocket: binary messages are the bytes, an empty text message ends a direction. Node only. */

import { type Server, createServer } from "node:net";
import { Duplex, pipeline } from "node:stream";

import { WebSocket } from "ws";

import type { Handshake } from "./connect.js";
import {
  ConnectionError,
  InUseError,
  NotFoundError,
  PermissionDeniedError,
  ProtocolError,
  TimeoutError,
  describe,
} from "./errors.js";
import { type RetryPolicy, fatal, lost } from "./retry_policy.js";

/** How much one message carries. */
const PIECE = 64 << 10;
/** How much of a response is read for its sentence. */
const SENTENCE = 4 << 10;

class PortStream extends Duplex {
  #socket: WebSocket;
  #hasEnded = false;

  constructor(socket: WebSocket) {
    super({ allowHalfOpen: true, writableHighWaterMark: PIECE, readableHighWaterMark: PIECE });
    this.#socket = socket;
    socket.on("message", (data: Buffer, isBinary) => {
      this.#hasEnded ||= !isBinary;
      if (!this.push(isBinary ? data : null)) socket.pause();
    });
    socket.on("error", (error) => this.destroy(new ConnectionError(describe(error))));
    socket.on("close", () => {
      if (!this.#hasEnded || !this.writableFinished) {
        this.destroy(new ConnectionError("the connection to the port was reset"));
      }
    });
  }

  override _read(): void {
    this.#socket.resume();
  }

  override _write(chunk: Buffer, _encoding: BufferEncoding, done: (error?: Error | null) => void): void {
    for (let start = 0; start < chunk.length; start += PIECE) {
      const isLast = start + PIECE >= chunk.length;
      this.#socket.send(chunk.subarray(start, start + PIECE), isLast ? done : () => {});
    }
    if (chunk.length === 0) done();
  }

  override _final(done: (error?: Error | null) => void): void {
    this.#socket.send("", done);
  }

  override _destroy(error: Error | null, done: (error?: Error | null) => void): void {
    // Closing politely takes a while, and only means something at the end of both directions.
    if (this.#hasEnded && this.writableFinished && !error) this.#socket.resume();
    else this.#socket.terminate();
    this.#socket.close();
    done(error);
  }
}

/** What a response other than a WebSocket means. */
function explain(code: number, said: string): RetryPolicy {
  if (code === 401 || code === 403) return fatal(new PermissionDeniedError(said));
  if (code === 404) return fatal(new NotFoundError(said));
  if (code === 409) return fatal(new InUseError(said));
  if (code === 502) return fatal(new ConnectionError(said));
  return code === 429 || code >= 500 ? lost(said) : fatal(new ProtocolError(`${said} instead of a WebSocket`));
}

export function open(handshake: Handshake): Promise<{ stream: Duplex } | RetryPolicy> {
  const headers: Record<string, string> = { ...handshake.headers };
  if (handshake.apiKey !== undefined) headers["X-API-Key"] = handshake.apiKey;
  if (handshake.identity) headers["X-Sandbox-Token"] = handshake.identity.sandboxToken;
  const cookie = handshake.cookies.header();
  if (cookie !== undefined) headers["Cookie"] = cookie;
  return new Promise((done) => {
    const socket = new WebSocket(handshake.url, { headers, perMessageDeflate: false });
    const timer = setTimeout(() => {
      done({ error: new TimeoutError(`no connection within ${handshake.withinMs} ms`), isRetry: true });
      socket.terminate();
    }, handshake.withinMs);
    const failed = (error: Error) => {
      clearTimeout(timer);
      done(lost(describe(error)));
    };
    socket.on("error", failed);
    socket.once("unexpected-response", (request, response) => {
      clearTimeout(timer);
      const code = response.statusCode ?? 0;
      let said = "";
      response.setEncoding("utf8");
      response.on("data", (text: string) => {
        said = (said + text).slice(0, SENTENCE);
      });
      response.once("close", () => {
        done(explain(code, said.trim() || `HTTP ${code}`));
        request.destroy();
      });
    });
    socket.once("upgrade", (response) => handshake.cookies.store(response.headers["set-cookie"] ?? []));
    socket.once("open", () => {
      clearTimeout(timer);
      socket.off("error", failed);
      // At once, because the first messages may arrive in the same turn of the event loop.
      done({ stream: new PortStream(socket) });
    });
  });
}

/** Connects everyone who connects to the local port. */
export function listen(connect: () => Promise<Duplex>, local: number, host: string): Promise<Server> {
  const server = createServer({ allowHalfOpen: true }, (socket) => {
    // The local program sees a reset connection, as without the sandbox in between.
    const reset = () => void (socket.destroyed || socket.resetAndDestroy());
    socket.on("error", () => {});
    connect().then((inside) => {
      pipeline(socket, inside, socket, (error) => {
        if (error) reset();
      });
    }, reset);
  });
  return new Promise((done, failed) => {
    server.once("error", failed);
    server.listen(local, host, () => {
      server.off("error", failed);
      done(server);
    });
  });
}
