/** The handle of one sandbox. */

import { newExecId, now } from "./clock.js";
import type { Connection } from "./connect.js";
import { EndedError, NotFoundError, ProtocolError, RefusedError, TimeoutError, fromUpdate } from "./errors.js";
import { Exec } from "./exec.js";
import { Files } from "./files.js";
import { type KillOptions, type ListOptions, type SandboxSummary, killById, list, serverOf } from "./http_api.js";
import { Link } from "./link.js";
import { Port } from "./ports.js";
import type { Identity } from "./protocol.js";
import { SandboxRef, type View } from "./reference.js";
import * as requests from "./requests.js";
import type { Config, Offsets, Request } from "./requests.js";
import type { Result } from "./result.js";
import type { Rollback } from "./rollback.js";
import { Running, type WaitOptions } from "./running.js";
import type { SandboxState, Sent } from "./state.js";

export interface AttachOptions extends Connection {
  /** Cancels the attempt. */
  signal?: AbortSignal;
}

export interface CreateOptions extends Config, AttachOptions {
  /** Leave the sandbox as it is at the end of `await using`, instead of killing it. */
  keep?: boolean;
}

export interface ExecOptions {
  /** The language of code: `"bash"` (the default) or `"python"`. */
  language?: string;
  /** The id of the command; a random one by default. */
  execId?: string;
  env?: Record<string, string>;
  cwd?: string;
  /** A user's name or number inside the sandbox. */
  user?: string;
  /** The whole input, or `true` to write it with `writeStdin`. */
  stdin?: boolean | Uint8Array | string;
  /** Runs the command on a terminal of this size; all its output is then stdout. Opens stdin, too. */
  pty?: { cols: number; rows: number };
  /** Kills the command after this much running time. */
  timeoutMs?: number;
  /** Kills the command. */
  signal?: AbortSignal;
}

export interface RunOptions extends ExecOptions {
  /** Throw `ExecFailedError` unless the exit code is 0. */
  check?: boolean;
}

export interface AskOptions {
  /** Ends the waiting; the request may still be carried out. */
  signal?: AbortSignal;
}

/**
 * One sandbox, over one connection that reconnects by itself.
 *
 * `await using` kills a sandbox that it created, unless it was created with `keep: true` or detached.
 * A sandbox that was attached is never killed by leaving the block.
 */
export class Sandbox extends Files implements AsyncDisposable {
  /** `sandbox.commands.run("…")`: the same as `sandbox.run`. */
  readonly commands: { run: (command: string | readonly string[], options?: RunOptions) => Promise<Result> };
  #url: string;
  #link: Link;
  #identity: Identity;
  #isKilledAtExit: boolean;

  private constructor(url: string, link: Link, identity: Identity, isKilledAtExit: boolean) {
    super();
    this.#url = url;
    this.#link = link;
    this.#identity = identity;
    this.#isKilledAtExit = isKilledAtExit;
    this.commands = { run: (command, options) => this.run(command, options) };
  }

  /** Creates a sandbox and waits until it runs. Without `url` the server is `BATON_URL`. */
  static async create(url?: string, options: CreateOptions = {}): Promise<Sandbox> {
    const config = requests.config({ ...options, persistent: options.persistent ?? "auto" });
    return Sandbox.#open(url, undefined, config, options, !options.keep);
  }

  /** Attaches to an existing sandbox, wherever it is, and waits until it runs. Without `url` the server is `BATON_URL`. */
  static async attach(url: string | undefined, id: string, token: string, options: AttachOptions = {}): Promise<Sandbox> {
    return Sandbox.#open(url, { sandboxId: id, sandboxToken: token }, {}, options, false);
  }

  /** The same as `attach`. */
  static connect(url: string | undefined, id: string, token: string, options: AttachOptions = {}): Promise<Sandbox> {
    return Sandbox.attach(url, id, token, options);
  }

  /**
   * Iterates over the sandboxes of a server, without attaching to them; it is asked for one page at a time.
   *
   * With the admin key of the server as `apiKey` these are all sandboxes, with an API key those of its tenant.
   */
  static list(url?: string, options: ListOptions = {}): AsyncGenerator<SandboxSummary, void, undefined> {
    return list(url, options);
  }

  /**
   * Kills and deletes a sandbox without attaching to it, also while another client is attached.
   *
   * Needs the sandbox's `token`, or as `apiKey` a key of its tenant or the admin key. Resolves when the sandbox is gone,
   * or after half a minute if only its deletion is recorded by then. An unknown id is a `NotFoundError`.
   */
  static killById(url: string | undefined, id: string, options: KillOptions = {}): Promise<void> {
    return killById(url, id, options);
  }

  static async #open(
    url: string | undefined,
    identity: Identity | undefined,
    config: Request,
    { signal, ...connection }: AttachOptions,
    isKilledAtExit: boolean,
  ): Promise<Sandbox> {
    const address = serverOf(url);
    signal?.throwIfAborted();
    const link = new Link(address, identity, config, connection);
    const { state, settings } = link;
    void link.run();
    try {
      const deadline = now() + settings.startWithinMs;
      const started = () => (state.sessions > 0 || state.end ? true : undefined);
      const isStarted = await state.changed.until(started, deadline, signal);
      if (state.end) throw state.end;
      if (!isStarted) throw new TimeoutError(`no sandbox within ${settings.startWithinMs} ms`);
      if (!state.identity) throw new ProtocolError("the sandbox runs, but the server sent no id");
      return new Sandbox(address, link, state.identity, isKilledAtExit);
    } catch (error) {
      link.stop();
      throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    try {
      if (this.#isKilledAtExit && !this.#link.state.end) await this.kill();
    } finally {
      await this.close();
    }
  }

  get id(): string {
    return this.#identity.sandboxId;
  }

  /** Everybody who has it can attach: keep it like a password. */
  get token(): string {
    return this.#identity.sandboxToken;
  }

  /** The id and the token, with which the sandbox can be attached again. */
  get ref(): SandboxRef {
    return this.#refTo(this.#identity);
  }

  /** @deprecated Use `ref`. */
  get place(): SandboxRef {
    return this.ref;
  }

  #refTo(identity: Identity): SandboxRef {
    return new SandboxRef(identity, this.#url, this.#link.settings, Sandbox.attach);
  }

  /** The times the sandbox was restored from an older checkpoint while this handle was in use. */
  get rollbacks(): readonly Rollback[] {
    return [...this.#link.state.rollbacks];
  }

  /** The current state of the sandbox, as far as the client knows it. */
  info(): View {
    const { status, instance, isOpen, execs } = this.#link.state;
    return { id: this.id, status, instance, isConnected: isOpen, execs, persistent: this.#identity.persistent };
  }

  // Ports.

  /** A link to a web server in the sandbox, for a browser. It contains the token: see `Port.url`. */
  url(port: number): string {
    return this.port(port).url;
  }

  /** A port in the sandbox: `await sandbox.port(5432).connect()`, `await sandbox.port(80).forward()`. */
  port(port: number): Port {
    return new Port(this.#url, this.#identity, port, this.#link.settings);
  }

  // Commands.

  /** Starts a command: a list is a program and its arguments, a string is code in `language`. */
  async exec(command: string | readonly string[], options: ExecOptions = {}): Promise<Running> {
    const { language = "bash", stdin, pty, signal, ...rest } = options;
    const wholeInput = typeof stdin === "boolean" ? undefined : stdin;
    const start: requests.ExecRequest = {
      ...rest,
      execId: options.execId ?? newExecId(),
      stdin: stdin === true || pty !== undefined || wholeInput !== undefined,
      ...(pty && { pty }),
      ...(typeof command === "string" ? { language, code: command } : { argv: command }),
    };
    return this._start(requests.exec(start), start.execId, wholeInput, signal);
  }

  /** Runs a command and waits for its end. */
  async run(command: string | readonly string[], options: RunOptions = {}): Promise<Result> {
    const { check, ...rest } = options;
    const running = await this.exec(command, rest);
    const wait: WaitOptions = {};
    if (check) wait.check = true;
    if (options.signal) wait.signal = options.signal;
    return running.wait(wait);
  }

  /** Runs code in a new interpreter and waits for its end. */
  runCode(code: string, language = "python", options: RunOptions = {}): Promise<Result> {
    return this.run(code, { ...options, language });
  }

  /** The handle of a command that an earlier client started, with its output from these offsets on. */
  async follow(id: string, from: Partial<Offsets> = {}): Promise<Running> {
    if (!this.#link.state.execs.some((view) => view.execId === id)) {
      throw new RefusedError("the sandbox does not know this command", "SANDBOX_EXECUTION_ERROR");
    }
    return this.#run(new Exec(id, undefined, { stdout: 0, stderr: 0, ...from }, () => this.#link.wake()));
  }

  /** @internal */
  protected async _start(
    request: Request,
    id: string,
    stdin: Uint8Array | string | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Running> {
    signal?.throwIfAborted();
    const exec = new Exec(id, request, { stdout: 0, stderr: 0 }, () => this.#link.wake());
    if (stdin !== undefined) {
      // The caller owns the bytes, so they may exceed the window.
      exec.stdin.write(typeof stdin === "string" ? new TextEncoder().encode(stdin) : stdin);
      exec.stdin.close();
    }
    return this.#run(exec, signal);
  }

  async #run(exec: Exec, signal?: AbortSignal): Promise<Running> {
    const running = new Running(exec, (request) => this.#link.command({ kind: "request", request }));
    const kill = () => void running.kill().catch(() => {});
    signal?.addEventListener("abort", kill, { once: true });
    const { answerWithinMs } = this.#link.settings;
    this.#link.command({ kind: "exec", exec });
    await exec.changed.until(() => exec.phase !== "requested" || undefined, now() + answerWithinMs, signal);
    if (exec.phase === "requested") throw new TimeoutError(`no answer within ${answerWithinMs} ms`);
    // Only a command that never started can have failed by now.
    if (exec.end instanceof Error) throw exec.end;
    return running;
  }

  // The sandbox as a whole.

  /**
   * Saves memory and files, and ends the session; the sandbox can be attached again on any instance.
   *
   * Running commands are a reason to refuse, unless `live` includes them. With `keepRunning` the sandbox and the session
   * continue. Resolves to the id of the checkpoint.
   */
  async checkpoint(options: AskOptions & { live?: boolean; keepRunning?: boolean } = {}): Promise<string> {
    const answers = ["SANDBOX_CHECKPOINTED", "SANDBOX_CHECKPOINT_ERROR", "SANDBOX_EXECUTION_IN_PROGRESS_ERROR"] as const;
    const answer = (state: SandboxState, sent: Sent) => state.since(sent.events, ...answers);
    const update = await this.#link.requestInSession(requests.checkpoint(options), answer, options.signal);
    if (update.status !== "SANDBOX_CHECKPOINTED") throw fromUpdate(update);
    if (update.checkpointId === undefined) throw new ProtocolError("the server sent a checkpoint without an id");
    return update.checkpointId;
  }

  /** Saves the file system under a name, from which new sandboxes can start. */
  async snapshot(name: string, options: AskOptions & { full?: boolean } = {}): Promise<string> {
    const answer = (state: SandboxState, sent: Sent) => {
      const created = state.since(sent.events, "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
      if (created && (created.snapshot ?? name) === name) return created;
      return state.since(sent.events, "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR");
    };
    const update = await this.#link.requestInSession(requests.snapshot(name, options.full), answer, options.signal);
    if (update.status !== "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED") throw fromUpdate(update);
    return name;
  }

  /** Copies the sandbox, its memory and running commands included. Each copy can be attached. */
  async fork(count = 1, options: AskOptions = {}): Promise<SandboxRef[]> {
    const answer = (state: SandboxState, sent: Sent) => {
      const copies = state.forkedSince(sent.events);
      const refused = state.since(sent.events, "SANDBOX_ERROR", "SANDBOX_CHECKPOINT_ERROR", "SANDBOX_CREATION_ERROR");
      if (!copies && refused) throw fromUpdate(refused);
      return copies;
    };
    const copies = await this.#link.requestInSession(requests.fork(count), answer, options.signal);
    return copies.map((copy) => this.#refTo(copy));
  }

  /** Changes how long the sandbox may be idle, from now on; `null` for never. Resolves to the new value. */
  async setIdleTimeout(idleTimeoutMs: number | null, options: AskOptions = {}): Promise<number | null> {
    const answer = (state: SandboxState, sent: Sent) => {
      const changed = state.idleTimeoutSince(sent.events);
      const refused = state.since(sent.events, "SANDBOX_ERROR");
      if (!changed && refused) throw fromUpdate(refused);
      return changed;
    };
    return (await this.#link.requestInSession(requests.setIdleTimeout(idleTimeoutMs), answer, options.signal)).ms;
  }

  /** Moves the sandbox away from its instance. Resolves when it runs again. */
  async handoff(options: AskOptions = {}): Promise<void> {
    const answer = (state: SandboxState, sent: Sent) => {
      if (state.sessions > sent.session) return true;
      const refused = state.since(sent.events, "SANDBOX_ERROR", "SANDBOX_CHECKPOINT_ERROR");
      if (refused) throw fromUpdate(refused);
      if (state.end) throw state.end;
      return undefined;
    };
    await this.#link.request(requests.handoff(), answer, options.signal);
  }

  /** Deletes the sandbox and ends the session. A sandbox that no longer exists is not an error. */
  async kill(options: AskOptions = {}): Promise<void> {
    const answer = (state: SandboxState, sent: Sent) => {
      if (state.end) throw state.end;
      const refused = state.since(sent.events, "SANDBOX_KILL_ERROR");
      if (refused) throw fromUpdate(refused);
      // The request may have been lost with its connection. Sending it twice does no harm.
      return state.sessions > sent.session ? true : undefined;
    };
    try {
      while (await this.#link.request(requests.killSandbox(), answer, options.signal));
    } catch (error) {
      if (!(error instanceof EndedError || error instanceof NotFoundError)) throw error;
    }
  }

  /** Closes the connection and leaves the sandbox as it is, also at the end of `await using`. */
  async detach(): Promise<SandboxRef> {
    this.#isKilledAtExit = false;
    await this.close();
    return this.ref;
  }

  /** Closes the connection. The sandbox stays as it is, until its idle timeout. */
  async close(): Promise<void> {
    const { state } = this.#link;
    if (state.end) return;
    this.#link.command({ kind: "close" });
    await state.changed.until(() => state.end, now() + 5_000);
    this.#link.stop();
  }
}
