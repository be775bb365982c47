/**
 * The background work of a sandbox's handle: connects, reconnects, and ends with a reason.
 *
 * ```text
 *   connect ──▶ session ──▶ retry policy ──fatal──▶ end: every waiting caller gets the error
 *      ▲                         │
 *      └────── backoff ◀─────────┘ retry
 * ```
 */

import { backoff, now } from "./clock.js";
import { type Connection, Cookies, type HeaderSource, normalizeUrl, platform } from "./connect.js";
import { AuthError, BatonError, ConnectionError, EndedError, TimeoutError, describe } from "./errors.js";
import type { Exec } from "./exec.js";
import { Notifier } from "./notifier.js";
import type { EgressDenied, Identity } from "./protocol.js";
import type { Request } from "./requests.js";
import type { RetryPolicy } from "./retry_policy.js";
import { type Rollback, report } from "./rollback.js";
import { Session } from "./session.js";
import { type Command, SandboxState, type Sent } from "./state.js";

export const DEFAULTS = {
  reconnectForMs: 300_000 as number | null,
  connectWithinMs: 15_000,
  startWithinMs: 120_000,
  answerWithinMs: 600_000,
  silenceMs: 30_000,
};
export type Settings = Connection & typeof DEFAULTS;
/** Looks for the answer to a request in the state. Throws if the request was refused. */
export type FindAnswer<T> = (state: SandboxState, sent: Sent) => T | undefined;

export class Link {
  readonly settings: Settings;
  /** Sent first if the sandbox does not exist yet. */
  readonly config: Request;
  readonly state: SandboxState;
  readonly execs = new Map<string, Exec>();
  readonly commands: Command[] = [];
  #address: string;
  #cookies = new Cookies();
  #credentials: HeaderSource;
  #woken = new Notifier();
  #session: Session | undefined;

  constructor(url: string, identity: Identity | undefined, config: Request, options: Connection) {
    const given = Object.entries(options).filter(([, value]) => value !== undefined);
    this.settings = { ...DEFAULTS, ...Object.fromEntries(given) };
    this.#address = normalizeUrl(url);
    this.#credentials = platform().credentials(options.auth, this.#address);
    this.config = config;
    this.state = new SandboxState(identity);
  }

  /** Never rejects. */
  async run(): Promise<void> {
    let end: BatonError;
    try {
      end = await this.#keepConnected();
    } catch (error) {
      end = error instanceof BatonError ? error : new EndedError(`the connection failed: ${describe(error)}`);
    }
    this.#end(end);
  }

  /** There may be something to send. */
  wake(): void {
    this.#session?.feed();
    this.#woken.notify();
  }

  command(command: Command): void {
    if (this.state.end) throw this.state.end;
    this.commands.push(command);
    this.wake();
  }

  /** Sends a request and waits for its answer, which may arrive in a later session. */
  async request<T>(request: Request, find: FindAnswer<T>, signal: AbortSignal | undefined): Promise<T> {
    const { state, settings } = this;
    const deadline = now() + settings.answerWithinMs;
    let sent: Sent | "ended" | undefined;
    const noteSent = (when: Sent | undefined) => {
      sent = when ?? "ended";
      state.changed.notify();
    };
    signal?.throwIfAborted();
    this.command({ kind: "request", request, sent: noteSent });
    const answer = () => {
      if (sent === "ended") throw state.end ?? new EndedError("the connection was closed");
      return sent && find(state, sent);
    };
    const found = await state.changed.until(answer, deadline, signal);
    if (found === undefined) throw new TimeoutError(`no answer within ${settings.answerWithinMs} ms`);
    return found;
  }

  /** Sends a request whose answer arrives in the same session or never. */
  requestInSession<T>(request: Request, find: FindAnswer<T>, signal: AbortSignal | undefined): Promise<T> {
    const findNow = (state: SandboxState, sent: Sent) => {
      const found = find(state, sent);
      if (found === undefined && state.end) throw state.end;
      if (found === undefined && (!state.isOpen || state.sessions > sent.session)) {
        throw new ConnectionError("the connection broke before the answer arrived");
      }
      return found;
    };
    return this.request(request, findNow, signal);
  }

  rolledBack(rollback: Rollback): void {
    this.state.rollbacks.push(rollback);
    this.state.isRollingBack = true;
    report(rollback, this.settings.onRollback);
  }

  egressDenied(denied: EgressDenied): void {
    const { host, port, reason } = denied;
    const where = port === undefined ? host : `${host}:${port}`;
    const warn = () => console.warn(`baton-sandbox: the sandbox may not reach ${where} (${reason})`);
    (this.settings.onEgressDenied ?? warn)(denied);
  }

  /** Ends at once, without telling the server. */
  stop(): void {
    this.#end(new EndedError("the connection was closed"));
    this.#session?.close();
    this.#woken.notify();
  }

  get #isClosing(): boolean {
    return this.state.end !== undefined || this.commands.some((command) => command.kind === "close");
  }

  async #keepConnected(): Promise<BatonError> {
    let attempt = 0;
    let deadline: number | undefined;
    const { state, settings } = this;
    for (;;) {
      const { sessions } = state;
      const policy = await this.#connectOnce(deadline);
      if (!policy.isRetry) return policy.error;
      state.isOpen = false;
      state.changed.notify();
      const { reconnectForMs } = settings;
      // A first connection that fails is reported at once, unless the instance is shutting down and asks the client to
      // connect again.
      if (reconnectForMs === null || !state.identity || (state.sessions === 0 && !policy.isElsewhere)) return policy.error;
      if (policy.isElsewhere) this.#cookies.clear();
      if (state.sessions > sessions) {
        attempt = 0;
        deadline = undefined;
      }
      deadline ??= now() + reconnectForMs;
      if (now() >= deadline) return policy.error;
      await this.#woken.until(() => this.#isClosing || undefined, now() + backoff(attempt));
      if (this.#isClosing) return new EndedError("the connection was closed");
      attempt += 1;
    }
  }

  async #connectOnce(deadline: number | undefined): Promise<RetryPolicy> {
    const { settings } = this;
    const { identity } = this.state;
    let headers: Record<string, string>;
    try {
      headers = { ...settings.headers, ...(await this.#credentials()) };
    } catch (error) {
      return { error: error instanceof BatonError ? error : new AuthError(describe(error)), isRetry: true };
    }
    const opened = await platform().open({
      url: this.#address + (identity ? `/attach/${identity.sandboxId}` : "/create"),
      identity,
      apiKey: settings.apiKey,
      headers,
      cookies: this.#cookies,
      withinMs: settings.connectWithinMs,
    });
    if (!("socket" in opened)) return opened;
    if (this.state.end) {
      opened.socket.close();
      return { error: this.state.end, isRetry: false };
    }
    this.#session = new Session(this, opened.socket, identity === undefined, deadline);
    try {
      return await this.#session.run();
    } finally {
      this.#session = undefined;
    }
  }

  #end(error: BatonError): void {
    this.state.end ??= error;
    this.state.isOpen = false;
    const waiting = this.commands.splice(0);
    for (const exec of this.execs.values()) exec.ended(error);
    for (const command of waiting) {
      if (command.kind === "exec") command.exec.ended(error);
      if (command.kind === "request") command.sent?.(undefined);
    }
    this.execs.clear();
    this.state.changed.notify();
  }
}
