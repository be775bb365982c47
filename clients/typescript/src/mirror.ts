/** What the server said last, and what callers want of it. */

import type { BatonError } from "./errors.js";
import type { Exec } from "./exec.js";
import type { ExecView, Found, Request, Status, Update } from "./protocol.js";
import { Bell } from "./seam.js";

/** When a request went out: what had been heard, and in which session. */
export interface Sent {
  heard: number;
  session: number;
}

export type Command =
  | { kind: "exec"; exec: Exec }
  /** A request somebody waits on, or one without an answer. */
  | { kind: "ask"; request: Request; sent?: (sent: Sent | undefined) => void }
  | { kind: "leave" };

/** Nothing is decided here: callers wait until a claim about it holds. */
export class Mirror {
  readonly bell = new Bell();
  /** Counts everything heard. */
  heard = 0;
  status: Status | undefined;
  /** How many sessions came as far as RUNNING. */
  sessions = 0;
  /** There is a session, and it came as far as RUNNING. */
  isOpen = false;
  place: Found | undefined;
  instance: string | undefined;
  /** The commands the sandbox knew when the session began. */
  execs: readonly ExecView[] = [];
  /** Nothing more will come. */
  end: BatonError | undefined;
  /** The last update of each status, and its number. */
  #latest = new Map<Status, { number: number; update: Update }>();
  #forked: { number: number; copies: Found[] } | undefined;

  constructor(place: Found | undefined) {
    this.place = place;
  }

  update(update: Update): void {
    this.heard += 1;
    this.status = update.status;
    this.#latest.set(update.status, { number: this.heard, update });
    this.bell.ring();
  }

  forked(copies: Found[]): void {
    this.heard += 1;
    this.#forked = { number: this.heard, copies };
    this.bell.ring();
  }

  /** The newest update with one of these statuses that came after number `heard`. */
  since(heard: number, ...statuses: Status[]): Update | undefined {
    const found = statuses.map((status) => this.#latest.get(status)).filter((item) => item && item.number > heard);
    return found.sort((one, two) => (two?.number ?? 0) - (one?.number ?? 0))[0]?.update;
  }

  forkedSince(heard: number): Found[] | undefined {
    return this.#forked && this.#forked.number > heard ? this.#forked.copies : undefined;
  }
}
