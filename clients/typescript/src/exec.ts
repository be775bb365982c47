/** One command: what the connection knows of it, and the handle a caller has. */

import { BatonError, EndedError, ExecFailedError, OutputGapError, TimeoutError } from "./errors.js";
import { type Chunk, PART, Pipe, Stdin } from "./pipe.js";
import * as protocol from "./protocol.js";
import { OUTPUTS, type Offsets, type Output, type Request } from "./protocol.js";
import { Bell, now } from "./seam.js";

/** How a command ended. */
export interface Outcome {
  exitCode?: number | undefined;
  /** The number of the signal that ended it. */
  signal?: number | undefined;
  /** It was killed because its own time was up. */
  timedOut: boolean;
  /** How long it ran, without the time the sandbox stood still. */
  durationMs?: number | undefined;
}

/** What a command wrote, and how it ended. A non-zero exit code is a result, not an error. */
export class Result implements Outcome {
  /** Exactly what it wrote, except for what somebody else read from the streams. */
  readonly stdoutBytes: Uint8Array;
  readonly stderrBytes: Uint8Array;
  readonly exitCode: number | undefined;
  readonly signal: number | undefined;
  readonly timedOut: boolean;
  readonly durationMs: number | undefined;
  /** How many bytes were not kept anywhere and are missing here. */
  readonly lost: number;

  constructor(outcome: Outcome, stdoutBytes: Uint8Array, stderrBytes: Uint8Array, lost: number) {
    this.exitCode = outcome.exitCode;
    this.signal = outcome.signal;
    this.timedOut = outcome.timedOut;
    this.durationMs = outcome.durationMs;
    this.stdoutBytes = stdoutBytes;
    this.stderrBytes = stderrBytes;
    this.lost = lost;
  }

  get stdout(): string {
    return new TextDecoder().decode(this.stdoutBytes);
  }

  get stderr(): string {
    return new TextDecoder().decode(this.stderrBytes);
  }

  get ok(): boolean {
    return this.exitCode === 0;
  }

  /** How it ended, for a person. */
  get ending(): string {
    if (this.timedOut) return "its time was up";
    return this.signal === undefined ? `exit code ${this.exitCode}` : `ended by signal ${this.signal}`;
  }

  /** Itself, if the command succeeded; throws `ExecFailedError` otherwise. */
  check(): this {
    if (!this.ok) throw new ExecFailedError(this);
    return this;
  }
}

/** One command as the connection and its handle share it. */
export class Exec {
  readonly id: string;
  /** `undefined` for a command that somebody else started. */
  readonly request: Request | undefined;
  stage: "asked" | "started" | "ended";
  end: Outcome | BatonError | undefined;
  readonly bell = new Bell();
  readonly pipes: Record<Output, Pipe>;
  readonly stdin = new Stdin();
  isRead = true;
  killWanted = false;
  /** Tells the connection to look. */
  readonly look: () => void;

  constructor(id: string, request: Request | undefined, from: Offsets, look: () => void) {
    this.id = id;
    this.request = request;
    this.stage = request ? "asked" : "started";
    this.look = look;
    const ring = () => this.bell.ring();
    this.pipes = { stdout: new Pipe(from.stdout, ring), stderr: new Pipe(from.stderr, ring) };
  }

  started(): void {
    if (this.stage === "asked") {
      this.stage = "started";
      this.bell.ring();
    }
  }

  /** Only the first end counts. */
  ended(end: Outcome | BatonError): void {
    if (this.stage !== "ended") {
      this.stage = "ended";
      this.end = end;
    }
    this.isRead = false;
    for (const stream of OUTPUTS) this.pipes[stream].end();
    this.bell.ring();
  }

  /** One item; the connection looks when an acknowledgement is due or when it waited for room. */
  pop(stream: Output): Chunk | undefined {
    const pipe = this.pipes[stream];
    const wasFlooded = pipe.isFlooded;
    const chunk = pipe.pop();
    if (chunk && (pipe.isAckDue || wasFlooded)) this.look();
    return chunk;
  }

  async read(stream: Output): Promise<Chunk | undefined> {
    for (;;) {
      const chunk = this.pop(stream);
      if (chunk || this.pipes[stream].isOver) return chunk;
      await this.bell.wait();
    }
  }

  discard(...streams: Output[]): void {
    for (const stream of streams) this.pipes[stream].discard();
    this.look();
  }

  get isFlooded(): boolean {
    return OUTPUTS.some((stream) => this.pipes[stream].isFlooded);
  }

  takeAck(): Offsets | undefined {
    const { stdout, stderr } = this.pipes;
    return stdout.isAckDue || stderr.isAckDue ? { stdout: stdout.ack(), stderr: stderr.ack() } : undefined;
  }

  get received(): Offsets {
    return { stdout: this.pipes.stdout.received, stderr: this.pipes.stderr.received };
  }

  /** A new connection knows it: the offsets to name. */
  resume(): Offsets {
    this.stdin.resend();
    return { stdout: this.pipes.stdout.named(), stderr: this.pipes.stderr.named() };
  }

  stdinAck(offset: number): void {
    this.stdin.ack(offset);
    this.bell.ring();
  }

  /** Nobody takes its stdin any more. */
  stdinOver(): void {
    this.isRead = false;
    this.bell.ring();
  }
}

/** Nobody has the handle any more: its output must not hold the command back. */
const handles = new FinalizationRegistry<Exec>((exec) => exec.discard(...OUTPUTS));

/** What is collected of one stream for `wait`. */
class Collected {
  #parts: Uint8Array[] = [];
  #size = 0;
  #base: number | undefined;
  lost = 0;

  begin(at: number): void {
    this.#base ??= at;
  }

  push(chunk: Chunk): void {
    if (chunk.kind === "data") {
      this.#parts.push(chunk.data);
      this.#size += chunk.data.length;
    } else if (chunk.kind === "lost") {
      this.lost += chunk.end - chunk.start;
    } else if (!this.lost) {
      // With a gap before it the place is not known; then all is kept.
      const kept = this.bytes().subarray(0, Math.max(0, chunk.to - (this.#base ?? 0)));
      this.#parts = [kept];
      this.#size = kept.length;
    }
  }

  bytes(): Uint8Array {
    const all = new Uint8Array(this.#size);
    let at = 0;
    for (const part of this.#parts) {
      all.set(part, at);
      at += part.length;
    }
    this.#parts = [all];
    return all;
  }
}

/** How to wait for the end of a command. */
export interface WaitOptions {
  /** Throw `ExecFailedError` unless the exit code is 0. */
  check?: boolean;
  /** Bounds the waiting, not the command. */
  timeoutMs?: number;
  /** Ends the waiting, not the command. */
  signal?: AbortSignal;
}

/**
 * A command that runs: its output, its input, its end.
 *
 * Letting go of it leaves the command running; its output is then thrown away.
 */
export class Running {
  /** @internal */ readonly _exec: Exec;
  /** @internal */ readonly _readers: Record<Output, number> = { stdout: 0, stderr: 0 };
  #tell: (request: Request) => void;
  #collected = { stdout: new Collected(), stderr: new Collected() };
  #writing: Promise<void> = Promise.resolve();

  /** @internal */
  constructor(exec: Exec, tell: (request: Request) => void) {
    this._exec = exec;
    this.#tell = tell;
    handles.register(this, exec);
  }

  get id(): string {
    return this._exec.id;
  }

  /** Read it or wait for the command: unread, it holds the command back. */
  get stdout(): OutputStream {
    return new OutputStream(this, "stdout");
  }

  /** Read it or wait for the command: unread, it holds the command back. */
  get stderr(): OutputStream {
    return new OutputStream(this, "stderr");
  }

  /** Waits for the end, and collects the output that nobody else reads. May be called again. */
  async wait(options: WaitOptions = {}): Promise<Result> {
    const { timeoutMs, signal } = options;
    const until = timeoutMs === undefined ? undefined : now() + timeoutMs;
    const result = await this._exec.bell.until(() => this.#look(), until, signal);
    if (!result) throw new TimeoutError(`the command runs on after ${timeoutMs} ms`);
    return options.check ? result.check() : result;
  }

  #look(): Result | undefined {
    for (const stream of OUTPUTS) {
      if (this._readers[stream]) continue;
      const collected = this.#collected[stream];
      collected.begin(this._exec.pipes[stream].taken);
      for (let chunk = this._exec.pop(stream); chunk; chunk = this._exec.pop(stream)) collected.push(chunk);
    }
    const end = this._exec.end;
    if (!end) return undefined;
    if (end instanceof BatonError) throw end;
    const { stdout, stderr } = this.#collected;
    return new Result(end, stdout.bytes(), stderr.bytes(), stdout.lost + stderr.lost);
  }

  /**
   * Waits while a mebibyte is on its way. Each byte arrives once, also over a reconnect.
   * The command must have been started with `stdin: true`.
   */
  writeStdin(data: Uint8Array | string): Promise<void> {
    // A copy: the caller may use its buffer again.
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data.slice();
    return this.#inTurn(async () => {
      for (let at = 0; at < bytes.length; at += PART) {
        const part = bytes.subarray(at, at + PART);
        await this._exec.bell.until(() => this.#hasRoom(part.length));
        this._exec.stdin.write(part);
        this._exec.look();
      }
    });
  }

  #hasRoom(size: number): true | undefined {
    const { end, isRead, stdin } = this._exec;
    if (end instanceof BatonError) throw end;
    if (!isRead) throw new EndedError(end ? "the command is over" : "the command reads no more");
    if (stdin.isClosed) throw new EndedError("its stdin was closed");
    return stdin.room >= size ? true : undefined;
  }

  /** The command reads the end after everything written before. */
  closeStdin(): Promise<void> {
    return this.#inTurn(async () => {
      this._exec.stdin.close();
      this._exec.look();
    });
  }

  #inTurn(work: () => Promise<void>): Promise<void> {
    const done = this.#writing.then(work);
    this.#writing = done.catch(() => {});
    return done;
  }

  /** Sends a signal such as `"INT"`, at most once: a drop at the wrong moment loses it. */
  async signal(name: string): Promise<void> {
    this.#say(protocol.signal(this.id, name));
  }

  /** Kills its whole process tree. Asked again after a reconnect for as long as it runs. */
  async kill(): Promise<void> {
    this._exec.killWanted = true;
    this.#say(protocol.killProcess(this.id));
  }

  /** Its terminal has a new size. */
  async resize(cols: number, rows: number): Promise<void> {
    this.#say(protocol.resize(this.id, Math.max(1, cols), Math.max(1, rows)));
  }

  /** To a command that is over nothing is said. */
  #say(request: Request): void {
    const { end } = this._exec;
    if (end instanceof BatonError) throw end;
    if (!end) this.#tell(request);
  }
}

/** One stream of a command's output, to be read once. */
export class OutputStream implements AsyncIterable<Uint8Array> {
  #running: Running;
  #stream: Output;

  /** @internal */
  constructor(running: Running, stream: Output) {
    this.#running = running;
    this.#stream = stream;
  }

  /** Bytes, and where some are missing or come again after a restore. While it is read, `wait` leaves the stream alone. */
  async *chunks(): AsyncGenerator<Chunk, void, void> {
    const exec = this.#running._exec;
    this.#running._readers[this.#stream] += 1;
    try {
      for (;;) {
        const chunk = await exec.read(this.#stream);
        if (!chunk) break;
        yield chunk;
      }
    } finally {
      this.#running._readers[this.#stream] -= 1;
      exec.bell.ring();
    }
    if (exec.end instanceof BatonError) throw exec.end;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void> {
    for await (const chunk of this.chunks()) {
      if (chunk.kind === "data") yield chunk.data;
      if (chunk.kind === "lost") throw new OutputGapError(this.#stream, chunk.start, chunk.end);
    }
  }

  /** Line by line, without their ends. */
  async *lines(): AsyncGenerator<string, void, void> {
    const decoder = new TextDecoder();
    let rest = "";
    for await (const data of this) {
      const lines = (rest + decoder.decode(data, { stream: true })).split("\n");
      rest = lines.pop() ?? "";
      yield* lines;
    }
    rest += decoder.decode();
    if (rest) yield rest;
  }

  /** Everything that is still to come. */
  async bytes(): Promise<Uint8Array> {
    const collected = new Collected();
    for await (const data of this) collected.push({ kind: "data", data });
    return collected.bytes();
  }

  async text(): Promise<string> {
    return new TextDecoder().decode(await this.bytes());
  }

  /** Throws the rest away, so that it does not hold the command back. */
  discard(): void {
    this.#running._exec.discard(this.#stream);
  }
}
