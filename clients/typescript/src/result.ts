/** How a command ended, and what it wrote. */

import { ExecFailedError } from "./errors.js";

/** How many characters of each stream `toString` shows. */
const SHOWN = 2_000;

/** How a command ended. */
export interface Outcome {
  exitCode?: number | undefined;
  /** The number of the signal that killed the command. */
  signal?: number | undefined;
  /** The command was killed because it ran longer than its `timeoutMs`. */
  timedOut: boolean;
  /** How long it ran, without the time in which the sandbox was paused. */
  durationMs?: number | undefined;
}

/**
 * How a command ended, and what it wrote. A non-zero exit code is a result, not an error.
 * `String(result)` and `console.log(result)` show the exit code and the output.
 */
export class Result implements Outcome {
  /** The exact output, except for what was read from the streams. */
  readonly stdoutBytes: Uint8Array;
  readonly stderrBytes: Uint8Array;
  readonly exitCode: number | undefined;
  readonly signal: number | undefined;
  readonly timedOut: boolean;
  readonly durationMs: number | undefined;
  /** How many bytes of output were dropped and are missing here. */
  readonly lost: number;
  /** The sandbox was rolled back to an older checkpoint while the command ran, so parts of it ran twice. */
  readonly rolledBack: boolean;

  constructor(outcome: Outcome, stdoutBytes: Uint8Array, stderrBytes: Uint8Array, lost: number, rolledBack: boolean) {
    this.exitCode = outcome.exitCode;
    this.signal = outcome.signal;
    this.timedOut = outcome.timedOut;
    this.durationMs = outcome.durationMs;
    this.stdoutBytes = stdoutBytes;
    this.stderrBytes = stderrBytes;
    this.lost = lost;
    this.rolledBack = rolledBack;
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

  /** How the command ended, for people: `"exit code 3"`. */
  get ending(): string {
    if (this.timedOut) return "timed out";
    return this.signal === undefined ? `exit code ${this.exitCode}` : `killed by signal ${this.signal}`;
  }

  /** Returns the result if the command succeeded, and throws `ExecFailedError` otherwise. */
  check(): this {
    if (!this.ok) throw new ExecFailedError(this);
    return this;
  }

  toString(): string {
    const notes = [this.ending];
    if (this.lost) notes.push(`${this.lost} bytes of output lost`);
    if (this.rolledBack) notes.push("rolled back to an older checkpoint");
    const lines = [notes.join("; ")];
    for (const name of ["stdout", "stderr"] as const) {
      const text = lastPart(this[name].replace(/\n+$/, ""));
      if (text) lines.push(text.includes("\n") ? `${name}:\n${text}` : `${name}: ${text}`);
    }
    return lines.join("\n");
  }

  /** For `console.log` in Node. */
  [Symbol.for("nodejs.util.inspect.custom")](): string {
    return `Result: ${this.toString()}`;
  }
}

function lastPart(text: string): string {
  return text.length <= SHOWN ? text : `… ${text.length - SHOWN} characters …\n${text.slice(-SHOWN)}`;
}
