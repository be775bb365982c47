/** Waiting for a condition on shared state. */

import { now } from "./clock.js";

/** Wakes every waiter after a change, so that each of them checks its condition again. */
export class Notifier {
  #waiters = new Set<() => void>();

  notify(): void {
    const waiters = this.#waiters;
    this.#waiters = new Set();
    for (const wake of waiters) wake();
  }

  /** Waits for a change, the deadline, or the abort of the caller. */
  async wait(deadline?: number, signal?: AbortSignal): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let wake: () => void = () => {};
    try {
      await new Promise<void>((done) => {
        wake = done;
        this.#waiters.add(done);
        signal?.addEventListener("abort", wake, { once: true });
        if (deadline !== undefined) timer = setTimeout(done, Math.max(0, deadline - now()));
      });
    } finally {
      clearTimeout(timer);
      this.#waiters.delete(wake);
      signal?.removeEventListener("abort", wake);
    }
  }

  /** The first result of `check` that is not `undefined`; `undefined` after the deadline. Rejects when `signal` aborts. */
  async until<T>(check: () => T | undefined, deadline?: number, signal?: AbortSignal): Promise<T | undefined> {
    for (;;) {
      signal?.throwIfAborted();
      const found = check();
      if (found !== undefined || (deadline !== undefined && now() >= deadline)) return found;
      await this.wait(deadline, signal);
    }
  }
}
