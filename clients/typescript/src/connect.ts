/** What one handshake needs; how it is made is the platform's. */

import { ConnectionError } from "./errors.js";
import type { Found, Update } from "./protocol.js";
import type { Verdict } from "./verdict.js";

/** Gives headers before each handshake. */
export type HeaderSource = () => Record<string, string> | Promise<Record<string, string>>;

/** How to reach the server, and how patiently. */
export interface Connection {
  /** Sent as `X-API-Key`, from a browser as a subprotocol. */
  apiKey?: string;
  /** Sent with every handshake, as for a proxy in front of the server. Not in a browser. */
  headers?: Record<string, string>;
  /** `"google"`, or a function that gives further headers before each handshake. Not in a browser. */
  auth?: "google" | "none" | HeaderSource;
  /** After a drop: for how long to try again. `null` never tries. 5 minutes. */
  reconnectForMs?: number | null;
  /** One handshake may take so long. 15 s. */
  connectWithinMs?: number;
  /** From the call of create or attach to a running sandbox. 2 minutes. */
  startWithinMs?: number;
  /** A checkpoint, snapshot, fork, handoff or kill may take so long. 10 minutes. */
  answerWithinMs?: number;
  /** The server pings every ten seconds: after so much silence it is gone. 30 s. A browser does not show pings. */
  silenceMs?: number;
  /** Called with every update, as it comes. */
  onStatus?: (update: Update) => void;
}

/** One WebSocket, as much of it as is needed here. */
export interface Socket {
  send(data: string | Uint8Array): void;
  /** Bytes that were given to `send` and are not on their way yet. */
  readonly buffered: number;
  /** Closes politely, within a bounded time. */
  close(): void;
  /** Lets it go at once. */
  drop(): void;
  /** Stops reading until `resume`, where that is possible. */
  pause(): void;
  resume(): void;
  /** Whether pings of the server are seen, so that silence means something. */
  readonly hearsPings: boolean;
  onMessage: (data: string | Uint8Array) => void;
  onAlive: () => void;
  /** Without a code it was cut. */
  onEnd: (code: number | undefined, cause: string) => void;
}

export interface Handshake {
  url: string;
  place: Found | undefined;
  apiKey: string | undefined;
  headers: Record<string, string>;
  cookies: Cookies;
  withinMs: number;
}

/** What Node and browsers do differently. */
export interface Platform {
  open(handshake: Handshake): Promise<{ socket: Socket } | Verdict>;
  /** Headers that prove who calls; throws `AuthError`. */
  credentials(auth: Connection["auth"], address: string): HeaderSource;
  /** What copies files of the machine. */
  transfer(): Promise<typeof import("./transfer.js")>;
}

let chosen: Platform | undefined;

/** The entry module of the package says where it runs. */
export function runOn(platform: Platform): void {
  chosen = platform;
}

export function platform(): Platform {
  if (!chosen) throw new ConnectionError("import the package by its name, or its browser.js");
  return chosen;
}

/** The server's address, without what comes after its own path. */
export function addressOf(url: string): string {
  const [, scheme = "", rest = ""] = /^([a-z]+):\/\/(.*?)\/*$/.exec(url) ?? [];
  const wire = { ws: "ws", http: "ws", wss: "wss", https: "wss" }[scheme];
  if (!wire) throw new ConnectionError(`the address \`${url}\` must begin with ws:// or wss://`);
  let parsed: URL | undefined;
  try {
    parsed = new URL(`${wire}://${rest}`);
  } catch {
    // Said below.
  }
  if (!parsed?.hostname || parsed.search || parsed.hash || /\s/.test(rest)) {
    throw new ConnectionError(`\`${url}\` is not the address of a server`);
  }
  return `${wire}://${rest}`;
}

/** What load balancers gave us to find the same instance again. */
export class Cookies {
  #values = new Map<string, string>();

  /** Values of later handshakes replace earlier ones. */
  take(headers: readonly string[]): void {
    for (const header of headers) {
      const [, name, value] = /^\s*([^=;]+?)\s*=\s*([^;]*?)\s*(?:;|$)/.exec(header) ?? [];
      if (name !== undefined && value !== undefined) this.#values.set(name, value);
    }
  }

  forget(): void {
    this.#values.clear();
  }

  header(): string | undefined {
    return Array.from(this.#values, ([name, value]) => `${name}=${value}`).join("; ") || undefined;
  }
}
