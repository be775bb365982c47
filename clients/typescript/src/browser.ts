/** The package in a browser: its own WebSocket, and no dependency. */

import { type Handshake, type Socket, setPlatform } from "./connect.js";
import { AuthError, ConnectionError, ProtocolError, TimeoutError } from "./errors.js";
import { SUBPROTOCOL } from "./protocol.js";
import { type RetryPolicy, fatal, lost } from "./retry_policy.js";

export * from "./index.js";

class BrowserSocket implements Socket {
  // A browser answers pings by itself and does not report them.
  readonly seesPings = false;
  onMessage: Socket["onMessage"] = () => {};
  onAlive: Socket["onAlive"] = () => {};
  onEnd: Socket["onEnd"] = () => {};
  #socket: WebSocket;
  #isOver = false;
  #early: (string | Uint8Array)[] | undefined = [];
  #drop = () => this.drop();

  constructor(socket: WebSocket) {
    this.#socket = socket;
    socket.onmessage = ({ data }) => {
      const message = typeof data === "string" ? data : new Uint8Array(data as ArrayBuffer);
      if (this.#early) this.#early.push(message);
      else this.onMessage(message);
    };
    socket.onclose = ({ code }) => this.#end(code === 1006 ? undefined : code);
    // The network was gone and is back: the old connection is most likely dead.
    globalThis.addEventListener?.("online", this.#drop);
    // Messages that arrived before the session was ready are delivered first.
    setTimeout(() => {
      const early = this.#early ?? [];
      this.#early = undefined;
      for (const message of early) this.onMessage(message);
    });
  }

  #end(code: number | undefined): void {
    if (this.#isOver) return;
    this.#isOver = true;
    globalThis.removeEventListener?.("online", this.#drop);
    setTimeout(() => this.onEnd(code, "the connection was cut"));
  }

  get buffered(): number {
    return this.#socket.bufferedAmount;
  }

  send(data: string | Uint8Array): void {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(data as string | Uint8Array<ArrayBuffer>);
  }

  close(): void {
    this.#socket.close(1000);
  }

  drop(): void {
    this.#socket.close();
    this.#end(undefined);
  }

  // A browser cannot stop reading; the server's window limits what arrives.
  pause(): void {}
  resume(): void {}
}

function open(handshake: Handshake): Promise<{ socket: Socket } | RetryPolicy> {
  if (Object.keys(handshake.headers).length) {
    return Promise.resolve(fatal(new ConnectionError("a browser cannot send headers with a WebSocket")));
  }
  const offers = [SUBPROTOCOL];
  if (handshake.identity) offers.push(`baton.token.${handshake.identity.sandboxToken}`);
  if (handshake.apiKey !== undefined) offers.push(`baton.key.${handshake.apiKey}`);
  return new Promise((done) => {
    let socket: WebSocket;
    try {
      socket = new WebSocket(handshake.url, offers);
    } catch (error) {
      done(fatal(new ConnectionError(String(error))));
      return;
    }
    socket.binaryType = "arraybuffer";
    const timer = setTimeout(() => {
      socket.close();
      done({ error: new TimeoutError(`no connection within ${handshake.withinMs} ms`), isRetry: true });
    }, handshake.withinMs);
    // A browser does not report why it failed.
    socket.onclose = () => {
      clearTimeout(timer);
      done(lost("the server cannot be reached, or it refused the connection"));
    };
    socket.onopen = () => {
      clearTimeout(timer);
      if (socket.protocol === SUBPROTOCOL) done({ socket: new BrowserSocket(socket) });
      else done(fatal(new ProtocolError(`the server did not accept the subprotocol ${SUBPROTOCOL}`)));
    };
  });
}

setPlatform({
  open,
  credentials: (auth) => {
    if (auth && auth !== "none") throw new AuthError("a browser cannot send headers with a WebSocket");
    return () => ({});
  },
  transfer: () => Promise.reject(new ConnectionError("a browser has no local files: use readFile and writeFile")),
  ports: () => Promise.reject(new ConnectionError("a browser has no raw connections: use the url of the port")),
});
