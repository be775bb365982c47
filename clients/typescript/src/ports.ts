/** Ports inside a sandbox: a link for a browser, raw connections, and local ports that lead there. */

import type { Server } from "node:net";
import type { Duplex } from "node:stream";

import { backoff, now } from "./clock.js";
import { Cookies, type HeaderSource, normalizeUrl, platform } from "./connect.js";
import type { Link } from "./link.js";
import type { Identity } from "./protocol.js";

/** A port in a sandbox. Using it needs no session: it works while another client is attached, too. */
export class Port {
  #address: string;
  #identity: Identity;
  #port: number;
  #settings: Link["settings"];
  #credentials: HeaderSource;
  #cookies = new Cookies();

  /** @internal */
  constructor(url: string, identity: Identity, port: number, settings: Link["settings"]) {
    this.#address = normalizeUrl(url);
    this.#identity = identity;
    this.#port = port;
    this.#settings = settings;
    this.#credentials = platform().credentials(settings.auth, this.#address);
  }

  /**
   * A link for a browser. It contains the token: who has it has the sandbox. The first request replaces the token by a
   * cookie.
   */
  get url(): string {
    const { sandboxId, sandboxToken } = this.#identity;
    return `${this.#address.replace(/^ws/, "http")}/sandboxes/${sandboxId}/ports/${this.#port}/?sandbox_token=${sandboxToken}`;
  }

  /**
   * Opens a TCP connection to the port. Node only.
   *
   * A sandbox that is stored or on another instance comes first. While that is not possible the attempt is repeated,
   * for as long as `reconnectForMs` says. The stream is destroyed with an error when the connection is reset, as when
   * the sandbox moves.
   */
  async connect(): Promise<Duplex> {
    const { open } = await platform().ports();
    // Restoring a sandbox may take longer than a handshake.
    const { reconnectForMs, apiKey, startWithinMs } = this.#settings;
    const deadline = reconnectForMs === null ? undefined : now() + reconnectForMs;
    for (let attempt = 0; ; attempt += 1) {
      const opened = await open({
        url: `${this.#address}/sandboxes/${this.#identity.sandboxId}/port-forward/${this.#port}`,
        identity: this.#identity,
        apiKey,
        headers: { ...this.#settings.headers, ...(await this.#credentials()) },
        cookies: this.#cookies,
        withinMs: startWithinMs,
      });
      if ("stream" in opened) return opened.stream;
      if (!opened.isRetry || deadline === undefined || now() >= deadline) throw opened.error;
      await new Promise((done) => setTimeout(done, backoff(attempt)));
    }
  }

  /**
   * Listens on a local port, any free one by default; every connection to it reaches the port in the sandbox. Node
   * only. `close` of the server ends the listening.
   */
  async forward(local = 0, host = "127.0.0.1"): Promise<Server> {
    const { listen } = await platform().ports();
    return listen(() => this.connect(), local, host);
  }
}
