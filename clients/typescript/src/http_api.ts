/** Requests over HTTP, without attaching: the list of sandboxes, and the deletion of one. */

import { type Connection, normalizeUrl, platform } from "./connect.js";
import { variable } from "./environment.js";
import { ConnectionError, NotFoundError, PermissionDeniedError, ProtocolError, TimeoutError, describe } from "./errors.js";

/** The longest wait for one response; a server gives up a listing after half of it. */
const RESPONSE_WITHIN_MS = 60_000;
/** How long a server may wait until a killed sandbox is gone. */
const GONE_WITHIN_S = 30;

/** One sandbox in the list of a server. */
export interface SandboxSummary {
  id: string;
  /**
   * `pending`, `running`, `checkpointed`, `failed`, or `unresponsive` if its instance stopped renewing its lease.
   * `undefined` if the sandbox could not be read: see `error`.
   */
  phase: string | undefined;
  /** Why it is in this phase; `baton explain` knows the words. */
  reason: string;
  /** The same in a sentence. */
  message: string | undefined;
  /** The instance that has it. */
  instance: string | undefined;
  /** The labels that it was created with. */
  labels: Readonly<Record<string, string>>;
  /** When it was created, in RFC 3339. */
  created: string;
  /** How long ago that was. */
  ageMs: number | undefined;
  /** Whether it outlives its instance. */
  persistent: boolean;
  /** The tenant that it belongs to. */
  tenant: string | undefined;
  /** Why the server knows only its id. */
  error: string | undefined;
}

export interface ListOptions extends Connection {
  /** Only sandboxes that have all of these labels. */
  labels?: Record<string, string>;
  /** Cancels the request under way. */
  signal?: AbortSignal;
}

export interface KillOptions extends Connection {
  /** The sandbox's token; without it `apiKey` must be a key of its tenant or the admin key. */
  token?: string;
  /** Ends the waiting; the sandbox may still be killed. */
  signal?: AbortSignal;
}

/** The server's address, by default that of the environment. */
export function serverOf(url: string | undefined): string {
  const server = url ?? variable("BATON_URL");
  if (!server) throw new ConnectionError("no address: pass one, or set BATON_URL");
  return server;
}

export async function* list(url: string | undefined, { labels = {}, signal, ...connection }: ListOptions): AsyncGenerator<SandboxSummary, void, undefined> {
  const wanted = Object.entries(labels);
  // A server filters by one label, up to its first `=`; the rest is done here.
  const label = wanted.find(([name]) => !name.includes("="));
  let after: string | undefined;
  do {
    const query = new URLSearchParams(label && { label: label.join("=") });
    if (after !== undefined) query.set("after", after);
    const path = `/sandboxes?${query}`.replace(/\?$/, "");
    const { code, body } = await request("GET", url, path, connection, {}, signal);
    if (code !== 200) throw refusal(code, body, "the server lists sandboxes only for its admin key or an API key");
    const page = json(body) as { sandboxes?: Record<string, unknown>[]; next?: string | null } | undefined;
    if (!Array.isArray(page?.sandboxes)) throw new ProtocolError("the list of sandboxes cannot be read");
    const found = page.sandboxes.map(summary);
    yield* found.filter((one) => wanted.every(([name, value]) => one.labels[name] === value));
    after = page.next ?? undefined;
  } while (after !== undefined);
}

export async function killById(url: string | undefined, id: string, { token, signal, ...connection }: KillOptions): Promise<void> {
  const secret: Record<string, string> = token === undefined ? {} : { "X-Sandbox-Token": token };
  const path = `/sandboxes/${encodeURIComponent(id)}?wait=${GONE_WITHIN_S}`;
  const { code, body } = await request("DELETE", url, path, connection, secret, signal);
  if (code === 404) throw new NotFoundError(`there is no sandbox ${id}`);
  if (code !== 204 && code !== 202) throw refusal(code, body, "the token or the key does not match the sandbox");
}

async function request(
  method: string,
  url: string | undefined,
  path: string,
  connection: Connection,
  secret: Record<string, string>,
  signal: AbortSignal | undefined,
): Promise<{ code: number; body: string }> {
  const address = normalizeUrl(serverOf(url));
  const headers = { ...connection.headers, ...(await platform().credentials(connection.auth, address)()), ...secret };
  if (connection.apiKey !== undefined) headers["X-API-Key"] = connection.apiKey;
  const withinMs = Math.min(connection.answerWithinMs ?? RESPONSE_WITHIN_MS, RESPONSE_WITHIN_MS);
  const timeout = AbortSignal.timeout(withinMs);
  try {
    // Keys are for this server only: a redirect is an error.
    const init: RequestInit = { method, headers, redirect: "error", signal: signal ? AbortSignal.any([timeout, signal]) : timeout };
    const response = await fetch(address.replace(/^ws/, "http") + path, init);
    return { code: response.status, body: await response.text() };
  } catch (error) {
    signal?.throwIfAborted();
    if (timeout.aborted) throw new TimeoutError(`no answer within ${withinMs} ms`);
    const { cause } = error as { cause?: unknown };
    throw new ConnectionError(describe(cause ?? error), { cause: error });
  }
}

function json(body: string): unknown {
  try {
    return JSON.parse(body);
  } catch {
    return undefined;
  }
}

function summary(view: Record<string, unknown>): SandboxSummary {
  const text = (name: string) => (typeof view[name] === "string" ? (view[name] as string) : undefined);
  const age = view["age_seconds"];
  return {
    id: text("sandbox_id") ?? "",
    phase: text("phase"),
    reason: text("reason") ?? "",
    message: text("message"),
    instance: text("instance"),
    labels: (view["labels"] ?? {}) as Record<string, string>,
    created: text("created") ?? "",
    ageMs: typeof age === "number" ? age * 1000 : undefined,
    persistent: view["persistent"] === true,
    tenant: text("tenant"),
    error: text("error"),
  };
}

/** `forbidden` is what 403 means if the server does not say it. */
function refusal(code: number, body: string, forbidden: string): Error {
  const { message } = (json(body) ?? {}) as { message?: unknown };
  const said = typeof message === "string" ? message : body.trim();
  if (code === 401) return new PermissionDeniedError(said || "the server requires a key, and this one is wrong or missing (HTTP 401)");
  if (code === 403) return new PermissionDeniedError(said || `${forbidden} (HTTP 403)`);
  const Kind = [408, 425, 429].includes(code) || code >= 500 ? ConnectionError : ProtocolError;
  return new Kind(said || `HTTP ${code}`);
}
