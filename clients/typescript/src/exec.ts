/** One command, as the connection and its handle share it. */

import type { BatonError } from "./errors.js";
import { Notifier } from "./notifier.js";
import { OUTPUTS, type Output } from "./protocol.js";
import type { Offsets, Request } from "./requests.js";
import type { Outcome } from "./result.js";
import { StdinBuffer } from "./stdin.js";
import { type Chunk, StreamBuffer } from "./stream.js";

export class Exec {
  readonly id: string;
  /** `undefined` for a command that an earlier client started. */
  readonly request: Request | undefined;
  phase: "requested" | "started" | "ended";
  end: Outcome | BatonError | undefined;
  readonly changed = new Notifier();
  readonly streams: Record<Output, StreamBuffer>;
  readonly stdin = new StdinBuffer();
  /** Whether the command still reads its stdin. */
  isReading = true;
  killRequested = false;
  /** The sandbox was rolled back while the command ran. */
  rolledBack = false;
  /** Wakes the connection. */
  readonly wake: () => void;

  constructor(id: string, request: Request | undefined, from: Offsets, wake: () => void) {
    this.id = id;
    this.request = request;
    this.phase = request ? "requested" : "started";
    this.wake = wake;
    const notify = () => this.changed.notify();
    this.streams = { stdout: new StreamBuffer(from.stdout, notify), stderr: new StreamBuffer(from.stderr, notify) };
  }

  started(): void {
    if (this.phase === "requested") {
      this.phase = "started";
      this.changed.notify();
    }
  }

  /** Only the first end counts. */
  ended(end: Outcome | BatonError): void {
    if (this.phase !== "ended") {
      this.phase = "ended";
      this.end = end;
    }
    this.isReading = false;
    for (const stream of OUTPUTS) this.streams[stream].end();
    this.changed.notify();
  }

  /** Takes one chunk, and wakes the connection if an acknowledgement is due or if it waits for free space. */
  pop(stream: Output): Chunk | undefined {
    const buffer = this.streams[stream];
    const wasFull = buffer.isFull;
    const chunk = buffer.pop();
    if (chunk && (buffer.isAckDue || wasFull)) this.wake();
    return chunk;
  }

  async read(stream: Output): Promise<Chunk | undefined> {
    for (;;) {
      const chunk = this.pop(stream);
      if (chunk || this.streams[stream].isOver) return chunk;
      await this.changed.wait();
    }
  }

  discard(...streams: Output[]): void {
    for (const stream of streams) this.streams[stream].discard();
    this.wake();
  }

  get isFull(): boolean {
    return OUTPUTS.some((stream) => this.streams[stream].isFull);
  }

  takeAck(): Offsets | undefined {
    const { stdout, stderr } = this.streams;
    return stdout.isAckDue || stderr.isAckDue ? { stdout: stdout.ack(), stderr: stderr.ack() } : undefined;
  }

  get received(): Offsets {
    return { stdout: this.streams.stdout.received, stderr: this.streams.stderr.received };
  }

  /** The offsets to name in a reconnect. */
  resumeOffsets(): Offsets {
    return { stdout: this.streams.stdout.resumeOffset(), stderr: this.streams.stderr.resumeOffset() };
  }

  stdinAck(offset: number): void {
    this.stdin.ack(offset);
    this.changed.notify();
  }

  stdinResume(accepted: number, crc32?: number): void {
    this.stdin.resume(accepted, crc32);
    this.changed.notify();
  }

  /** The command no longer reads its stdin. */
  stdinOver(): void {
    this.isReading = false;
    this.changed.notify();
  }
}
