/** What is known of a sandbox, and how to attach to it again. */

import type { Connection } from "./connect.js";
import type { ExecView, Identity, Status } from "./protocol.js";
import type { AttachOptions, Sandbox } from "./sandbox.js";

/** The current state of a sandbox, as far as the client knows it. */
export interface View {
  id: string;
  status: Status | undefined;
  /** The instance that runs it. */
  instance: string | undefined;
  /** Whether there is a connection right now. You need not check it: requests wait for a connection. */
  isConnected: boolean;
  /** The commands that the sandbox knew when the connection started. */
  execs: readonly ExecView[];
  /** Whether the sandbox is stored; `undefined` if the client attached to it, or if the server does not say. */
  persistent: boolean | undefined;
}

type Attach = (url: string, id: string, token: string, options: AttachOptions) => Promise<Sandbox>;

/** A sandbox that can be attached: its id, its token and the server. */
export class SandboxRef {
  readonly id: string;
  readonly token: string;
  #url: string;
  #options: Connection;
  #attach: Attach;

  /** @internal */
  constructor(identity: Identity, url: string, options: Connection, attach: Attach) {
    this.id = identity.sandboxId;
    // Printing a reference must not print the token.
    this.token = identity.sandboxToken;
    Object.defineProperty(this, "token", { enumerable: false });
    this.#url = url;
    this.#options = options;
    this.#attach = attach;
  }

  /** Attaches to the sandbox, with the connection options of the sandbox that the reference comes from. */
  attach(options: AttachOptions = {}): Promise<Sandbox> {
    return this.#attach(this.#url, this.id, this.token, { ...this.#options, ...options });
  }
}

/** @deprecated Use `SandboxRef`. */
export type Place = SandboxRef;
/** @deprecated Use `SandboxRef`. */
export const Place = SandboxRef;
