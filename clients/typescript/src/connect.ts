/** What a handshake needs. Node and browsers each implement it. */

import { ConnectionError } from "./errors.js";
import type { EgressDenied, Identity, Update } from "./protocol.js";
import type { RetryPolicy } from "./retry_policy.js";
import type { Rollback } from "./rollback.js";

/** Returns headers before each handshake. */
export type HeaderSource = () => Record<string, string> | Promise<Record<string, string>>;

/** How to reach the server, and how long to wait for it. */
export interface Connection {
  /** Sent as `X-API-Key`, from a browser as a subprotocol. */
  apiKey?: string;
  /** Sent with every handshake, for example for a proxy in front of the server. Not in a browser. */
  headers?: Record<string, string>;
  /** `"google"`, or a function that returns further headers before each handshake. Not in a browser. */
  auth?: "google" | "none" | HeaderSource;
  /** How long to try to reconnect after a drop. `null` never tries. 5 minutes. */
  reconnectForMs?: number | null;
  /** The time limit of one handshake. 15 s. */
  connectWithinMs?: number;
  /** From the call of create or attach to a running sandbox. 2 minutes. */
  startWithinMs?: number;
  /** The time limit of a checkpoint, snapshot, fork, handoff or kill. 10 minutes. */
  answerWithinMs?: number;
  /** The server pings every ten seconds: after this much silence the connection counts as dead. 30 s. Browsers hide pings. */
  silenceMs?: number;
  /** Called with every status update. */
  onStatus?: (update: Update) => void;
  /** Called when the sandbox was restored from an older checkpoint; without it `console.warn` is. */
  onRollback?: (rollback: Rollback) => void;
  /** Called when the network policy of the sandbox refused a connection; without it `console.warn` is. */
  onEgressDenied?: (denied: EgressDenied) => void;
}

/** The part of a WebSocket that the client needs. */
export interface Socket {
  send(data: string | Uint8Array): void;
  /** Bytes that were passed to `send` and not sent yet. */
  readonly buffered: number;
  /** Closes with a close frame, within a limited time. */
  close(): void;
  /** Drops the connection at once. */
  drop(): void;
  /** Stops reading until `resume`, where that is possible. */
  pause(): void;
  resume(): void;
  /** Whether pings of the server are visible, so that silence means a dead connection. */
  readonly seesPings: boolean;
  onMessage: (data: string | Uint8Array) => void;
  onAlive: () => void;
  /** Without a code the connection was cut. */
  onEnd: (code: number | undefined, cause: string) => void;
}

export interface Handshake {
  url: string;
  identity: Identity | undefined;
  apiKey: string | undefined;
  headers: Record<string, string>;
  cookies: Cookies;
  withinMs: number;
}

/** What Node and browsers do differently. */
export interface Platform {
  open(handshake: Handshake): Promise<{ socket: Socket } | RetryPolicy>;
  /** Headers that authenticate the caller; throws `AuthError`. */
  credentials(auth: Connection["auth"], address: string): HeaderSource;
  /** Copies local files. */
  transfer(): Promise<typeof import("./transfer.js")>;
  /** Opens raw connections to ports. */
  ports(): Promise<typeof import("./port_stream.js")>;
}

let chosen: Platform | undefined;

/** Called by the entry module of the package. */
export function setPlatform(platform: Platform): void {
  chosen = platform;
}

export function platform(): Platform {
  if (!chosen) throw new ConnectionError("import the package by its name, or its browser.js");
  return chosen;
}

/** The server's address with the scheme `ws` or `wss`, and without a slash at the end. */
export function normalizeUrl(url: string): string {
  const [, scheme = "", rest = ""] = /^([a-z]+):\/\/(.*?)\/*$/.exec(url) ?? [];
  const target = { ws: "ws", http: "ws", wss: "wss", https: "wss" }[scheme];
  if (!target) throw new ConnectionError(`the address \`${url}\` must begin with ws:// or wss://`);
  let parsed: URL | undefined;
  try {
    parsed = new URL(`${target}://${rest}`);
  } catch {
    // Reported below.
  }
  if (!parsed?.hostname || parsed.search || parsed.hash || /\s/.test(rest)) {
    throw new ConnectionError(`\`${url}\` is not the address of a server`);
  }
  return `${target}://${rest}`;
}

/** Cookies of a load balancer, sent back so that the next connection reaches the same instance. */
export class Cookies {
  #values = new Map<string, string>();

  /** Values of later handshakes replace earlier ones. */
  store(headers: readonly string[]): void {
    for (const header of headers) {
      const [, name, value] = /^\s*([^=;]+?)\s*=\s*([^;]*?)\s*(?:;|$)/.exec(header) ?? [];
      if (name !== undefined && value !== undefined) this.#values.set(name, value);
    }
  }

  clear(): void {
    this.#values.clear();
  }

  header(): string | undefined {
    return Array.from(this.#values, ([name, value]) => `${name}=${value}`).join("; ") || undefined;
  }
}
