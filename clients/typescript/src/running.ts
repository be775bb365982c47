/** The handle of a running command: its output, its input, its end. */

import { now } from "./clock.js";
import { BatonError, EndedError, OutputGapError, TimeoutError } from "./errors.js";
import type { Exec } from "./exec.js";
import { OUTPUTS, type Output } from "./protocol.js";
import * as requests from "./requests.js";
import type { Request } from "./requests.js";
import { Result } from "./result.js";
import { PART } from "./stdin.js";
import type { Chunk } from "./stream.js";

/** When a handle is garbage collected, the command must not wait for a reader. */
const handles = new FinalizationRegistry<Exec>((exec) => exec.discard(...OUTPUTS));

/** The output of one stream, collected for `wait`. */
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
      // After a gap the position is not known, and everything is kept.
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
  /** Limits the waiting, not the command. */
  timeoutMs?: number;
  /** Ends the waiting, not the command. */
  signal?: AbortSignal;
}

/**
 * A running command: its output, its input, its end.
 *
 * When the handle is garbage collected, the command keeps running and its output is discarded.
 */
export class Running {
  /** @internal */ readonly _exec: Exec;
  /** @internal */ readonly _readers: Record<Output, number> = { stdout: 0, stderr: 0 };
  #sendRequest: (request: Request) => void;
  #collected = { stdout: new Collected(), stderr: new Collected() };
  #writing: Promise<void> = Promise.resolve();

  /** @internal */
  constructor(exec: Exec, send: (request: Request) => void) {
    this._exec = exec;
    this.#sendRequest = send;
    handles.register(this, exec);
  }

  get id(): string {
    return this._exec.id;
  }

  /** Read it, or call `wait`: a command whose output is not read eventually blocks. */
  get stdout(): OutputStream {
    return new OutputStream(this, "stdout");
  }

  /** Read it, or call `wait`: a command whose output is not read eventually blocks. */
  get stderr(): OutputStream {
    return new OutputStream(this, "stderr");
  }

  /** Waits for the end and collects the output that has no other reader. May be called again. */
  async wait(options: WaitOptions = {}): Promise<Result> {
    const { timeoutMs, signal } = options;
    const deadline = timeoutMs === undefined ? undefined : now() + timeoutMs;
    const result = await this._exec.changed.until(() => this.#result(), deadline, signal);
    if (!result) throw new TimeoutError(`the command is still running after ${timeoutMs} ms`);
    return options.check ? result.check() : result;
  }

  #result(): Result | undefined {
    for (const stream of OUTPUTS) {
      if (this._readers[stream]) continue;
      const collected = this.#collected[stream];
      collected.begin(this._exec.streams[stream].taken);
      for (let chunk = this._exec.pop(stream); chunk; chunk = this._exec.pop(stream)) collected.push(chunk);
    }
    const end = this._exec.end;
    if (!end) return undefined;
    if (end instanceof BatonError) throw end;
    const { stdout, stderr } = this.#collected;
    return new Result(end, stdout.bytes(), stderr.bytes(), stdout.lost + stderr.lost, this._exec.rolledBack);
  }

  /**
   * Writes to the command, and waits while a mebibyte is unacknowledged. Each byte arrives once, also after a reconnect.
   * The command must have been started with `stdin: true`.
   */
  writeStdin(data: Uint8Array | string): Promise<void> {
    // A copy, because the caller may reuse its buffer.
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data.slice();
    return this.#oneAtATime(async () => {
      for (let at = 0; at < bytes.length; at += PART) {
        const part = bytes.subarray(at, at + PART);
        await this._exec.changed.until(() => this.#hasSpace(part.length));
        this._exec.stdin.write(part);
        this._exec.wake();
      }
    });
  }

  #hasSpace(size: number): true | undefined {
    const { end, isReading, stdin } = this._exec;
    if (end instanceof BatonError) throw end;
    if (!isReading) throw new EndedError(end ? "the command has ended" : "the command no longer reads its stdin");
    if (stdin.isClosed) throw new EndedError("its stdin was closed");
    return stdin.freeSpace >= size ? true : undefined;
  }

  /** Ends the input, after everything that was written before. */
  closeStdin(): Promise<void> {
    return this.#oneAtATime(async () => {
      this._exec.stdin.close();
      this._exec.wake();
    });
  }

  #oneAtATime(work: () => Promise<void>): Promise<void> {
    const done = this.#writing.then(work);
    this.#writing = done.catch(() => {});
    return done;
  }

  /** Sends a signal such as `"INT"`, at most once: a dropped connection can lose it. */
  async signal(name: string): Promise<void> {
    this.#send(requests.signal(this.id, name));
  }

  /** Kills the command and all its descendants. Sent again after a reconnect for as long as the command runs. */
  async kill(): Promise<void> {
    this._exec.killRequested = true;
    this.#send(requests.killProcess(this.id));
  }

  /** Changes the size of its terminal. */
  async resize(cols: number, rows: number): Promise<void> {
    this.#send(requests.resize(this.id, Math.max(1, cols), Math.max(1, rows)));
  }

  /** Sends nothing to a command that has ended. */
  #send(request: Request): void {
    const { end } = this._exec;
    if (end instanceof BatonError) throw end;
    if (!end) this.#sendRequest(request);
  }
}

/** One output stream of a command, which can be read once. */
export class OutputStream implements AsyncIterable<Uint8Array> {
  #running: Running;
  #stream: Output;

  /** @internal */
  constructor(running: Running, stream: Output) {
    this.#running = running;
    this.#stream = stream;
  }

  /** Bytes, and where some are missing or follow again after a roll-back. While it is read, `wait` does not collect the stream. */
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
      exec.changed.notify();
    }
    if (exec.end instanceof BatonError) throw exec.end;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void> {
    for await (const chunk of this.chunks()) {
      if (chunk.kind === "data") yield chunk.data;
      if (chunk.kind === "lost") throw new OutputGapError(this.#stream, chunk.start, chunk.end);
    }
  }

  /** The lines, without their line ends. */
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

  /** Everything until the end of the stream. */
  async bytes(): Promise<Uint8Array> {
    const collected = new Collected();
    for await (const data of this) collected.push({ kind: "data", data });
    return collected.bytes();
  }

  /** Everything until the end of the stream, as text. */
  async text(): Promise<string> {
    return new TextDecoder().decode(await this.bytes());
  }

  /** Discards the rest, so that the command never waits for a reader. */
  discard(): void {
    this.#running._exec.discard(this.#stream);
  }
}
