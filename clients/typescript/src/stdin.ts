/**
 * Input that was written to a command and not yet accepted by it, so that it can be sent again.
 *
 * ```text
 *   acked ≤ sent ≤ reached ≤ end        offsets in the command's stdin
 *   └───────── chunks ─────────┘
 * ```
 */

import { crc32 } from "./crc32.js";

/** The maximum number of unacknowledged bytes; a writer waits for free space. */
export const WINDOW = 1 << 20;
/** The largest part sent at once. */
export const PART = 256 << 10;

/** Input cannot continue on a new connection. */
export class StdinConflict extends Error {
  readonly isRolledBack: boolean;
  constructor(message: string, isRolledBack: boolean) {
    super(message);
    this.isRolledBack = isRolledBack;
  }
}

export class StdinBuffer {
  #chunks: Uint8Array[] = [];
  #sent = 0;
  /** The highest offset sent so far, on any connection. */
  #reached = 0;
  /** The CRC-32 of everything below `acked`; `undefined` if the server does not tell that of earlier clients. */
  #crc32: number | undefined = 0;
  #end = 0;
  #eofSent = false;
  acked = 0;
  isClosed = false;

  get freeSpace(): number {
    return WINDOW - (this.#end - this.acked);
  }

  write(data: Uint8Array): void {
    if (data.length) this.#chunks.push(data);
    this.#end += data.length;
  }

  close(): void {
    this.isClosed = true;
  }

  /** The next part to send: an offset and bytes, or an offset alone for the end. */
  next(): { offset: number; data?: Uint8Array } | undefined {
    if (this.#sent < this.#end) {
      if (this.#sent - this.acked >= WINDOW) return undefined;
      let skip = this.#sent - this.acked;
      for (const chunk of this.#chunks) {
        if (skip < chunk.length) {
          const offset = this.#sent;
          const data = chunk.subarray(skip, skip + PART);
          this.#sent += data.length;
          this.#reached = Math.max(this.#reached, this.#sent);
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

  /** Everything below `offset` was accepted. */
  ack(offset: number): void {
    let left = Math.max(0, Math.min(offset, this.#end) - this.acked);
    this.acked += left;
    this.#sent = Math.max(this.#sent, this.acked);
    this.#reached = Math.max(this.#reached, this.acked);
    while (left > 0) {
      const chunk = this.#chunks[0];
      if (!chunk) return;
      const accepted = chunk.subarray(0, left);
      if (this.#crc32 !== undefined) this.#crc32 = crc32(accepted, this.#crc32);
      if (chunk.length > left) this.#chunks[0] = chunk.subarray(left);
      else this.#chunks.shift();
      left -= accepted.length;
    }
  }

  /** Whether something was sent and not acknowledged yet. */
  get isInFlight(): boolean {
    return this.#sent > this.acked || this.#eofSent;
  }

  /**
   * Prepares for a new connection, on which the command has accepted `accepted` bytes with this CRC-32: the rest is
   * sent again.
   *
   * Bytes that were never sent from here are another client's; what was not sent yet comes after them.
   */
  resume(accepted: number, crc?: number): void {
    const unknown = "it is not known whether the last input from here arrived";
    const interleaved = () => new StdinConflict(`another client wrote input while the connection was down; ${unknown}`, false);
    if (accepted < this.acked) {
      throw new StdinConflict("the sandbox was rolled back to before input that the command had accepted", true);
    } else if (accepted <= this.#reached) {
      this.ack(accepted);
      if (this.#crc32 !== undefined && crc !== undefined && this.#crc32 !== crc) throw interleaved();
    } else if (this.acked < this.#reached) {
      throw interleaved();
    } else {
      this.#end += accepted - this.acked;
      this.acked = this.#reached = accepted;
    }
    this.#crc32 = crc;
    this.#sent = this.acked;
    this.#eofSent = false;
  }
}
