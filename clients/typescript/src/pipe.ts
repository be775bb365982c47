/**
 * The streams of one command between the connection and its reader or writer: in order, once, bounded.
 *
 * ```text
 *   acked ≤ taken ≤ received        offsets in an output stream
 *           └ queue ┘
 *   acked ≤ sent ≤ end              offsets in the command's stdin
 *   └──── chunks ────┘
 * ```
 * The server sends at most a window past what was acknowledged, and only what the reader took is
 * acknowledged: a slow reader slows the command down, not the connection.
 */

/** An acknowledgement goes out after this much. */
export const ACK_EVERY = 256 << 10;
/** More than any window the server grants: past this the socket is not read until the reader caught up. */
export const FLOOD = 4 << 20;
/** So much stdin may be on its way; a writer waits for room. */
export const WINDOW = 1 << 20;
/** The largest part of stdin sent at once. */
export const PART = 256 << 10;

/** Bytes; or where some were not kept; or where the bytes from `to` on come again, after a restore from an older checkpoint. */
export type Chunk =
  | { kind: "data"; data: Uint8Array }
  | { kind: "lost"; start: number; end: number }
  | { kind: "again"; to: number };

/** Bytes between what came and this frame are missing, and nobody said so. */
export class Hole extends Error {}

interface Item {
  chunk: Chunk;
  /** Where the reader stands after it. */
  end: number;
  /** How often the stream had been rewound when it came. */
  rewinds: number;
}

/** One stream of output. */
export class Pipe {
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

  /** What was there before is simply left out; repeated bytes are dropped. */
  push(offset: number, data: Uint8Array): void {
    if (offset > this.received) throw new Hole();
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
    // An item from before a rewind moves the reader, but not what counts for the server.
    if (item.rewinds === this.#rewinds) this.taken = item.end;
    return item.chunk;
  }

  /** Nobody will read it: the command must not wait for that. */
  discard(): void {
    this.isDiscarded = true;
    this.#queue = [];
    this.#head = 0;
    this.buffered = 0;
    this.taken = this.received;
    this.#notify();
  }

  /** No more will come. */
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

  /** After a reconnect the server counts from what was named to it. */
  named(): number {
    this.acked = this.received;
    return this.received;
  }

  get isFlooded(): boolean {
    return this.buffered > FLOOD;
  }
}

/** What was written to a command and not yet taken by it, so that it can be sent again. */
export class Stdin {
  #chunks: Uint8Array[] = [];
  #sent = 0;
  #end = 0;
  #eofSent = false;
  acked = 0;
  isClosed = false;

  get room(): number {
    return WINDOW - (this.#end - this.acked);
  }

  write(data: Uint8Array): void {
    if (data.length) this.#chunks.push(data);
    this.#end += data.length;
  }

  close(): void {
    this.isClosed = true;
  }

  /** The next thing to send: an offset and bytes, or an offset alone for the end. */
  next(): { offset: number; data?: Uint8Array } | undefined {
    if (this.#sent < this.#end) {
      if (this.#sent - this.acked >= WINDOW) return undefined;
      let skip = this.#sent - this.acked;
      for (const chunk of this.#chunks) {
        if (skip < chunk.length) {
          const offset = this.#sent;
          const data = chunk.subarray(skip, skip + PART);
          this.#sent += data.length;
          return { offset, data };
        }
        skip -= chunk.length;
      }
    }
    if (this.isClosed && !this.#eofSent) {
      this.#eofSent = true;
      return { offset: this.#end };
    }
    return undefined;
  }

  /** Everything below `offset` was taken. */
  ack(offset: number): void {
    let left = Math.max(0, Math.min(offset, this.#end) - this.acked);
    this.acked += left;
    this.#sent = Math.max(this.#sent, this.acked);
    while (left > 0) {
      const chunk = this.#chunks[0];
      if (!chunk) return;
      if (chunk.length > left) {
        this.#chunks[0] = chunk.subarray(left);
        return;
      }
      left -= chunk.length;
      this.#chunks.shift();
    }
  }

  /** Something was sent of which nothing was heard. */
  get isUnderWay(): boolean {
    return this.#sent > this.acked || this.#eofSent;
  }

  /** A new connection: what was not taken goes again, and so does the end. */
  resend(): void {
    this.#sent = this.acked;
    this.#eofSent = false;
  }
}
