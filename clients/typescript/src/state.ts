/** What the server reported last, and what callers asked for. */

import type { BatonError } from "./errors.js";
import type { Exec } from "./exec.js";
import { Notifier } from "./notifier.js";
import type { ExecView, Identity, Status, Update } from "./protocol.js";
import type { Request } from "./requests.js";
import type { Rollback } from "./rollback.js";

/** When a request was sent: after which event, and in which session. */
export interface Sent {
  events: number;
  session: number;
}

export type Command =
  | { kind: "exec"; exec: Exec }
  /** A request to send. `sent` is set if the caller waits for an answer. */
  | { kind: "request"; request: Request; sent?: (sent: Sent | undefined) => void }
  /** The caller closed the handle. */
  | { kind: "close" };

/** What the server reported last. It decides nothing: callers wait until a condition on it holds. */
export class SandboxState {
  readonly changed = new Notifier();
  /** The number of events so far. */
  events = 0;
  status: Status | undefined;
  /** How many sessions have reached RUNNING. */
  sessions = 0;
  /** Whether there is a session that has reached RUNNING. */
  isOpen = false;
  identity: Identity | undefined;
  instance: string | undefined;
  /** The commands that the sandbox knew when the session started. */
  execs: readonly ExecView[] = [];
  readonly rollbacks: Rollback[] = [];
  /** A roll-back was reported, and RUNNING has not followed yet. */
  isRollingBack = false;
  /** Why the session ended, once it has. */
  end: BatonError | undefined;
  /** The last update of each status, and its number. */
  #latest = new Map<Status, { number: number; update: Update }>();
  #idleTimeout: { number: number; ms: number | null } | undefined;
  #forked: { number: number; copies: Identity[] } | undefined;

  constructor(identity: Identity | undefined) {
    this.identity = identity;
  }

  update(update: Update): void {
    this.events += 1;
    this.status = update.status;
    this.#latest.set(update.status, { number: this.events, update });
    this.changed.notify();
  }

  forked(copies: Identity[]): void {
    this.events += 1;
    this.#forked = { number: this.events, copies };
    this.changed.notify();
  }

  idleTimeoutChanged(ms: number | null): void {
    this.events += 1;
    this.#idleTimeout = { number: this.events, ms };
    this.changed.notify();
  }

  /** The newest update with one of these statuses that came after event number `events`. */
  since(events: number, ...statuses: Status[]): Update | undefined {
    const found = statuses.map((status) => this.#latest.get(status)).filter((item) => item && item.number > events);
    return found.sort((one, two) => (two?.number ?? 0) - (one?.number ?? 0))[0]?.update;
  }

  idleTimeoutSince(events: number): { ms: number | null } | undefined {
    return this.#idleTimeout && this.#idleTimeout.number > events ? this.#idleTimeout : undefined;
  }

  forkedSince(events: number): Identity[] | undefined {
    return this.#forked && this.#forked.number > events ? this.#forked.copies : undefined;
  }
}
