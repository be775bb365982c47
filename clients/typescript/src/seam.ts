/** Time, dice and waiting of a client: nothing else here asks the system for them. */

// Older browsers have no symbol for `await using`; a compiler's output looks for this one.
if (!Symbol.asyncDispose) {
  Object.defineProperty(Symbol, "asyncDispose", { value: Symbol.for("Symbol.asyncDispose") });
}

/** The shortest and the longest pause before another try, in milliseconds. */
export const SHORTEST = 100;
export const LONGEST = 5_000;

export function now(): number {
  return performance.now();
}

/** How long to wait before try number `attempt`, counted from 0. */
export function pause(attempt: number, share = Math.random()): number {
  const ceiling = Math.min(LONGEST, SHORTEST * 2 ** Math.min(attempt + 1, 16));
  return SHORTEST + (ceiling - SHORTEST) * share;
}

export function execId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `x${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** A setting of the process; a browser has none. */
export function setting(name: string): string | undefined {
  return typeof process === "undefined" ? undefined : process.env?.[name] || undefined;
}

export function sleep(span: number): Promise<void> {
  return new Promise((done) => setTimeout(done, span));
}

/** Something changed: everybody who waits looks again. */
export class Bell {
  #waiters = new Set<() => void>();

  ring(): void {
    const waiters = this.#waiters;
    this.#waiters = new Set();
    for (const wake of waiters) wake();
  }

  /** Until it rings, the time is over, or the caller gave up. */
  async wait(until?: number, signal?: AbortSignal): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let wake: () => void = () => {};
    try {
      await new Promise<void>((done) => {
        wake = done;
        this.#waiters.add(done);
        signal?.addEventListener("abort", wake, { once: true });
        if (until !== undefined) timer = setTimeout(done, Math.max(0, until - now()));
      });
    } finally {
      clearTimeout(timer);
      this.#waiters.delete(wake);
      signal?.removeEventListener("abort", wake);
    }
  }

  /** What `find` finds, once it finds something; `undefined` after `until`. Rejects when `signal` aborts. */
  async until<T>(find: () => T | undefined, until?: number, signal?: AbortSignal): Promise<T | undefined> {
    for (;;) {
      signal?.throwIfAborted();
      const found = find();
      if (found !== undefined || (until !== undefined && now() >= until)) return found;
      await this.wait(until, signal);
    }
  }
}
