/**
 * What stands behind a sandbox's handle: connects, follows the sandbox, ends for a reason.
 *
 * ```text
 *   connect ──▶ session ──▶ verdict ──fatal──▶ end: everybody who waits is told
 *      ▲                       │
 *      └─── pause, jittered ◀──┘ retry
 * ```
 */

import { type Connection, Cookies, type HeaderSource, addressOf, platform } from "./connect.js";
import { AuthError, BatonError, EndedError, textOf } from "./errors.js";
import type { Exec } from "./exec.js";
import { type Command, Mirror } from "./mirror.js";
import type { Found, Request } from "./protocol.js";
import { Bell, now, pause } from "./seam.js";
import { Session } from "./session.js";
import type { Verdict } from "./verdict.js";

export const DEFAULTS = {
  reconnectForMs: 300_000 as number | null,
  connectWithinMs: 15_000,
  startWithinMs: 120_000,
  answerWithinMs: 600_000,
  silenceMs: 30_000,
};
export type Settings = Connection & typeof DEFAULTS;

export class Link {
  readonly settings: Settings;
  /** For a sandbox that does not exist yet. */
  readonly config: Request;
  readonly mirror: Mirror;
  readonly execs = new Map<string, Exec>();
  readonly commands: Command[] = [];
  #address: string;
  #cookies = new Cookies();
  #credentials: HeaderSource;
  #looks = new Bell();
  #session: Session | undefined;

  constructor(url: string, place: Found | undefined, config: Request, options: Connection) {
    const given = Object.entries(options).filter(([, value]) => value !== undefined);
    this.settings = { ...DEFAULTS, ...Object.fromEntries(given) };
    this.#address = addressOf(url);
    this.#credentials = platform().credentials(options.auth, this.#address);
    this.config = config;
    this.mirror = new Mirror(place);
  }

  /** Never rejects. */
  async run(): Promise<void> {
    let end: BatonError;
    try {
      end = await this.#follow();
    } catch (error) {
      end = error instanceof BatonError ? error : new EndedError(`it failed: ${textOf(error)}`);
    }
    this.#end(end);
  }

  /** Some handle read, wrote or let go. */
  look(): void {
    this.#session?.feed();
    this.#looks.ring();
  }

  command(command: Command): void {
    if (this.mirror.end) throw this.mirror.end;
    this.commands.push(command);
    this.look();
  }

  /** Ends at once, without a word to the server. */
  stop(): void {
    this.#end(new EndedError("it was closed"));
    this.#session?.leave();
    this.#looks.ring();
  }

  get #isLeaving(): boolean {
    return this.mirror.end !== undefined || this.commands.some((command) => command.kind === "leave");
  }

  async #follow(): Promise<BatonError> {
    let attempt = 0;
    let giveUp: number | undefined;
    const { mirror, settings } = this;
    for (;;) {
      const { sessions } = mirror;
      const verdict = await this.#once(giveUp);
      if (!verdict.isRetry) return verdict.error;
      mirror.isOpen = false;
      mirror.bell.ring();
      const patience = settings.reconnectForMs;
      // Whoever asks for a sandbox wants to hear at once that there is no server; only
      // an instance on its way out asks to come back.
      if (patience === null || !mirror.place || (mirror.sessions === 0 && !verdict.isElsewhere)) return verdict.error;
      if (verdict.isElsewhere) this.#cookies.forget();
      if (mirror.sessions > sessions) {
        attempt = 0;
        giveUp = undefined;
      }
      giveUp ??= now() + patience;
      if (now() >= giveUp) return verdict.error;
      await this.#looks.until(() => this.#isLeaving || undefined, now() + pause(attempt));
      if (this.#isLeaving) return new EndedError("it was closed");
      attempt += 1;
    }
  }

  async #once(giveUp: number | undefined): Promise<Verdict> {
    const { settings } = this;
    const { place } = this.mirror;
    let headers: Record<string, string>;
    try {
      headers = { ...settings.headers, ...(await this.#credentials()) };
    } catch (error) {
      return { error: error instanceof BatonError ? error : new AuthError(textOf(error)), isRetry: true };
    }
    const opened = await platform().open({
      url: this.#address + (place ? `/attach/${place.sandboxId}` : "/create"),
      place,
      apiKey: settings.apiKey,
      headers,
      cookies: this.#cookies,
      withinMs: settings.connectWithinMs,
    });
    if (!("socket" in opened)) return opened;
    if (this.mirror.end) {
      opened.socket.close();
      return { error: this.mirror.end, isRetry: false };
    }
    this.#session = new Session(this, opened.socket, place === undefined, giveUp);
    try {
      return await this.#session.run();
    } finally {
      this.#session = undefined;
    }
  }

  #end(error: BatonError): void {
    this.mirror.end ??= error;
    this.mirror.isOpen = false;
    const waiting = this.commands.splice(0);
    for (const exec of this.execs.values()) exec.ended(error);
    for (const command of waiting) {
      if (command.kind === "exec") command.exec.ended(error);
      if (command.kind === "ask") command.sent?.(undefined);
    }
    this.execs.clear();
    this.mirror.bell.ring();
  }
}
