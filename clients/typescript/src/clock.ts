/** Time and randomness: the rest of the package does not ask the system for them. */

/** The shortest and the longest pause between two attempts to connect, in milliseconds. */
export const SHORTEST_PAUSE = 100;
export const LONGEST_PAUSE = 5_000;

export function now(): number {
  return performance.now();
}

/** How long to wait before attempt number `attempt`, counted from 0. `jitter` is between 0 and 1. */
export function backoff(attempt: number, jitter = Math.random()): number {
  const ceiling = Math.min(LONGEST_PAUSE, SHORTEST_PAUSE * 2 ** Math.min(attempt + 1, 16));
  return SHORTEST_PAUSE + (ceiling - SHORTEST_PAUSE) * jitter;
}

export function newExecId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `x${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
