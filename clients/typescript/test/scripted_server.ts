/** A server that sends exactly what a test tells it to. */

import assert from "node:assert/strict";
import { type IncomingMessage, type Server, createServer } from "node:http";
import type { AddressInfo, Socket } from "node:net";

import { type CreateOptions, type ExecOptions, type Running, Sandbox } from "baton-sandbox";
import { type WebSocket, WebSocketServer } from "ws";

export const ID = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
type Fields = Record<string, unknown>;

/** A queue with a timeout. */
class Inbox<T> {
  #items: T[] = [];
  #waiting: ((item: T) => void)[] = [];

  put(item: T): void {
    const next = this.#waiting.shift();
    if (next) next(item);
    else this.#items.push(item);
  }

  rest(): T[] {
    return this.#items.splice(0);
  }

  take(withinMs = 30_000): Promise<T> {
    const item = this.#items.shift();
    if (item !== undefined) return Promise.resolve(item);
    return new Promise((done, failed) => {
      const timer = setTimeout(() => {
        this.#waiting = this.#waiting.filter((one) => one !== tell);
        failed(new Error("nothing arrived"));
      }, withinMs);
      const tell = (came: T) => {
        clearTimeout(timer);
        done(came);
      };
      this.#waiting.push(tell);
    });
  }
}

/** One connection, from the server's side. */
export class Peer {
  readonly path: string;
  readonly headers: IncomingMessage["headers"];
  config: Fields = {};
  #socket: WebSocket;
  #inbox = new Inbox<Fields | Uint8Array>();
  #gone: Promise<unknown>;

  constructor(socket: WebSocket, request: IncomingMessage) {
    this.#socket = socket;
    this.path = request.url ?? "";
    this.headers = request.headers;
    socket.on("message", (data: Buffer, isBinary) => this.#inbox.put(isBinary ? data : JSON.parse(data.toString())));
    socket.on("error", () => {});
    this.#gone = new Promise((done) => socket.on("close", done));
  }

  sendEvent(event: string, fields: Fields = {}): void {
    this.#socket.send(JSON.stringify({ event, ...fields }));
  }

  status(status: string, fields: Fields = {}): void {
    this.sendEvent("status_update", { status: `SANDBOX_${status}`, ...fields });
  }

  output(stream: number, exec: number, offset: number, data: string | Uint8Array): void {
    const header = Buffer.alloc(13);
    header.writeUInt8(stream, 0);
    header.writeUInt32BE(exec, 1);
    header.writeBigUInt64BE(BigInt(offset), 5);
    this.#socket.send(Buffer.concat([header, Buffer.from(data)]));
  }

  /** The next message: an object, or the bytes of a frame. */
  receive(withinMs?: number): Promise<Fields | Uint8Array> {
    return this.#inbox.take(withinMs);
  }

  /** The next message that is not an acknowledgement. */
  async receiveRequest(): Promise<Fields> {
    for (;;) {
      const request = (await this.receive()) as Fields;
      if (request["action"] !== "ack") return request;
    }
  }

  async bytes(): Promise<Buffer> {
    const frame = await this.receive();
    assert.ok(frame instanceof Uint8Array, JSON.stringify(frame));
    return Buffer.from(frame);
  }

  /** Receives the request for a command, and starts it. */
  async exec(number = 1): Promise<string> {
    const request = await this.receiveRequest();
    assert.equal(request["action"], "exec");
    this.status("EXECUTION_RUNNING", { exec_id: request["exec_id"], exec: number });
    return String(request["exec_id"]);
  }

  done(execId: string, exitCode = 0): void {
    this.status("EXECUTION_DONE", { exec_id: execId, exit_code: exitCode, duration_ms: 1 });
  }

  close(code: number): void {
    this.#socket.close(code);
  }

  cut(): void {
    this.#socket.terminate();
  }

  /** Waits until the client has left; what it sent that was not received yet. */
  async gone(): Promise<(Fields | Uint8Array)[]> {
    await this.#gone;
    return this.#inbox.rest();
  }
}

export function view(execId: string, number: number, stdin = 0): Fields {
  const kept = { from: 0, to: 0 };
  return { exec_id: execId, exec: number, running: true, stdin, stdout: kept, stderr: kept };
}

export class ScriptedServer implements AsyncDisposable {
  accepted = 0;
  cookies: string[] = [];
  /** Responds with this HTTP status instead of a WebSocket. */
  status: number | undefined;
  subprotocol = "baton.v1";
  #peers = new Inbox<Peer>();
  #server: Server | undefined;
  #sockets = new Set<Socket>();
  #port = 0;

  static async start(): Promise<ScriptedServer> {
    const server = new ScriptedServer();
    await server.listen();
    return server;
  }

  get url(): string {
    return `ws://127.0.0.1:${this.#port}`;
  }

  async listen(): Promise<void> {
    const sockets = new WebSocketServer({ noServer: true, handleProtocols: () => this.subprotocol || false });
    sockets.on("headers", (headers) => headers.push(...this.cookies.map((cookie) => `Set-Cookie: ${cookie}`)));
    const server = createServer();
    server.on("connection", (socket) => {
      this.#sockets.add(socket);
      socket.on("close", () => this.#sockets.delete(socket));
    });
    server.on("upgrade", (request, socket, head) => {
      this.accepted += 1;
      if (this.status !== undefined) socket.end(`HTTP/1.1 ${this.status} No\r\nConnection: close\r\n\r\n`);
      else sockets.handleUpgrade(request, socket, head, (opened) => this.#peers.put(new Peer(opened, request)));
    });
    await new Promise<void>((done) => server.listen(this.#port, "127.0.0.1", done));
    this.#server = server;
    this.#port = (server.address() as AddressInfo).port;
  }

  async stopListening(): Promise<void> {
    const closed = new Promise((done) => this.#server?.close(done));
    for (const socket of this.#sockets) socket.destroy();
    await closed;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.stopListening();
  }

  peer(): Promise<Peer> {
    return this.#peers.take();
  }

  async create(): Promise<Peer> {
    const peer = await this.peer();
    assert.equal(peer.path, "/create");
    peer.sendEvent("hello", { protocol: 1, max_frame: 1 << 20, max_execs: 64, instance: "inst-1" });
    peer.status("CREATING");
    peer.config = (await peer.receive()) as Fields;
    peer.sendEvent("sandbox_id", { sandbox_id: ID, sandbox_token: "t0ken" });
    peer.status("RUNNING");
    return peer;
  }

  async attach(...views: Fields[]): Promise<Peer> {
    return this.attachAfter(undefined, ...views);
  }

  /** As `attach`, after a roll-back to this checkpoint. */
  async attachAfter(rolledBackTo: string | undefined, ...views: Fields[]): Promise<Peer> {
    const peer = await this.peer();
    assert.equal(peer.path, `/attach/${ID}`);
    assert.equal(peer.headers["x-sandbox-token"], "t0ken");
    if (rolledBackTo !== undefined) peer.sendEvent("rolled_back", { checkpoint_id: rolledBackTo, age_ms: 1500 });
    peer.status("RUNNING", { execs: views });
    return peer;
  }
}

export async function create(server: ScriptedServer, options: CreateOptions = {}): Promise<[Sandbox, Peer]> {
  return Promise.all([Sandbox.create(server.url, options), server.create()]);
}

export async function start(sandbox: Sandbox, peer: Peer, options: ExecOptions = {}): Promise<[Running, string]> {
  return Promise.all([sandbox.exec(["x"], options), peer.exec()]);
}

export const text = (data: Uint8Array | undefined | void) => new TextDecoder().decode(data ?? new Uint8Array());
