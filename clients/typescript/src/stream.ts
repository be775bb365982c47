/**
 * One output stream of a command, between the connection and its reader: in order, once, bounded.
 *
 * ```text
 *   acked ≤ taken ≤ received        offsets in the stream
 *           └ queue ┘
 * ```
 *
 * The server sends at most a window past what was acknowledged, and only what the reader took is
 * acknowledged: a slow reader slows the command down, not the connection.
 */

/** An acknowledgement is sent after this many bytes. */
export const ACK_EVERY = 256 << 10;
/** More than any window the server grants: above this the socket is not read until the reader has caught up. */
export const MAX_BUFFERED = 4 << 20;

/** Bytes; or where some were dropped; or where the bytes from `to` on follow again, after a roll-back. */
export type Chunk =
  | { kind: "data"; data: Uint8Array }
  | { kind: "lost"; start: number; end: number }
  | { kind: "again"; to: number };

/** The server skipped bytes without reporting a gap. */
export class MissingBytes extends Error {}

interface Item {
  chunk: Chunk;
  /** The offset after it. */
  end: number;
  /** How often the stream had been rewound when it arrived. */
  rewinds: number;
}

export class StreamBuffer {
  #queue: Item[] = [];
  #head = 0;
  #rewinds = 0;
  #notify: () => void;
  buffered = 0;
  received: number;
  taken: number;
  acked: number;
  isDiscarded = false;
  isEnded = false;

  constructor(start: number, notify: () => void) {
    this.received = this.taken = this.acked = start;
    this.#notify = notify;
  }

  /** Adds the new part of `data`; repeated bytes are dropped. */
  push(offset: number, data: Uint8Array): void {
    if (offset > this.received) throw new MissingBytes();
    const known = this.received - offset;
    if (known >= data.length) return;
    const fresh = known ? data.subarray(known) : data;
    this.received += fresh.length;
    this.#put({ kind: "data", data: fresh });
  }

  gap(to: number): void {
    if (to > this.received) {
      const start = this.received;
      this.received = to;
      this.#put({ kind: "lost", start, end: to });
    }
  }

  rewind(to: number): void {
    if (to < this.received) {
      this.#rewinds += 1;
      this.received = to;
      this.taken = Math.min(this.taken, to);
      this.acked = Math.min(this.acked, to);
      this.#put({ kind: "again", to });
    }
  }

  #put(chunk: Chunk): void {
    if (this.isDiscarded || this.isEnded) {
      this.taken = this.received;
    } else {
      if (chunk.kind === "data") this.buffered += chunk.data.length;
      this.#queue.push({ chunk, end: this.received, rewinds: this.#rewinds });
    }
    this.#notify();
  }

  pop(): Chunk | undefined {
    const item = this.#queue[this.#head];
    if (!item) return undefined;
    this.#head += 1;
    if (this.#head === this.#queue.length || this.#head > 1024) {
      this.#queue.splice(0, this.#head);
      this.#head = 0;
    }
    if (item.chunk.kind === "data") this.buffered -= item.chunk.data.length;
    // An item from before a rewind moves the reader, but must not be acknowledged.
    if (item.rewinds === this.#rewinds) this.taken = item.end;
    return item.chunk;
  }

  /** Drops the output from now on, so that the command never waits for a reader. */
  discard(): void {
    this.isDiscarded = true;
    this.#queue = [];
    this.#head = 0;
    this.buffered = 0;
    this.taken = this.received;
    this.#notify();
  }

  /** No more output will come. */
  end(): void {
    this.isEnded = true;
    this.#notify();
  }

  get isOver(): boolean {
    return this.#queue.length === 0 && (this.isEnded || this.isDiscarded);
  }

  get isAckDue(): boolean {
    return this.taken >= this.acked + ACK_EVERY;
  }

  /** The offset to acknowledge now. */
  ack(): number {
    this.acked = Math.max(this.acked, this.taken);
    return this.acked;
  }

  /** The offset to name in a reconnect; the server counts its window from there. */
  resumeOffset(): number {
    this.acked = this.received;
    return this.received;
  }

  get isFull(): boolean {
    return this.buffered > MAX_BUFFERED;
  }
}
