/** The handle of one sandbox. */

import { type Connection } from "./connect.js";
import { type BatonError, ConnectionError, EndedError, NotFoundError, ProtocolError, RefusedError, TimeoutError, ofUpdate } from "./errors.js";
import { Exec, type Result, Running, type WaitOptions } from "./exec.js";
import { Files } from "./files.js";
import { Link } from "./link.js";
import type { Mirror, Sent } from "./mirror.js";
import * as protocol from "./protocol.js";
import type { Config, ExecView, Found, Offsets, Request, Status } from "./protocol.js";
import { execId, now, setting } from "./seam.js";

export interface AttachOptions extends Connection {
  /** Gives up. */
  signal?: AbortSignal;
}
export interface CreateOptions extends Config, AttachOptions {}

export interface ExecOptions {
  /** What a text is code of: `"bash"` (if not said otherwise) or `"python"`. */
  language?: string;
  /** Its name; without one it gets a random one. */
  execId?: string;
  env?: Record<string, string>;
  cwd?: string;
  /** A user's name or number inside the sandbox. */
  user?: string;
  /** Keep it open for `writeStdin`, or all of it. */
  stdin?: boolean | Uint8Array | string;
  /** It runs on a terminal of this size; all its output is then stdout. Opens stdin too. */
  pty?: { cols: number; rows: number };
  /** It is killed after this much time in which the sandbox really ran. */
  timeoutMs?: number;
  /** Kills the command. */
  signal?: AbortSignal;
}

export interface RunOptions extends ExecOptions {
  /** Throw `ExecFailedError` unless the exit code is 0. */
  check?: boolean;
}

export interface AskOptions {
  /** Ends the waiting; what was asked for may still happen. */
  signal?: AbortSignal;
}

/** What is known of a sandbox just now. */
export interface View {
  id: string;
  status: Status | undefined;
  /** The instance it is on. */
  instance: string | undefined;
  /** Whether there is a connection just now. Nobody needs to look: requests wait for one. */
  isConnected: boolean;
  /** The commands it knew when the connection began. */
  execs: readonly ExecView[];
}

/** Where a sandbox can be found again. */
export class Place {
  readonly id: string;
  readonly token: string;
  #url: string;
  #options: Connection;

  /** @internal */
  constructor(found: Found, url: string, options: Connection) {
    this.id = found.sandboxId;
    // Whoever prints a place should not print what opens it.
    this.token = found.sandboxToken;
    Object.defineProperty(this, "token", { enumerable: false });
    this.#url = url;
    this.#options = options;
  }

  attach(options: AttachOptions = {}): Promise<Sandbox> {
    return Sandbox.attach(this.#url, this.id, this.token, { ...this.#options, ...options });
  }
}

/**
 * One sandbox, over one connection that mends itself.
 *
 * Closing it leaves the sandbox as it is, until its idle time is over; `kill` deletes it.
 * `await using` closes at the end, and kills a sandbox it created unless that can be attached again.
 */
export class Sandbox extends Files implements AsyncDisposable {
  /** `sandbox.commands.run("…")`: the same as `sandbox.run`. */
  readonly commands: { run: (command: string | readonly string[], options?: RunOptions) => Promise<Result> };
  #url: string;
  #link: Link;
  #place: Found;
  #isKept: boolean;

  private constructor(url: string, link: Link, place: Found, isKept: boolean) {
    super();
    this.#url = url;
    this.#link = link;
    this.#place = place;
    this.#isKept = isKept;
    this.commands = { run: (command, options) => this.run(command, options) };
  }

  /** A new sandbox, running. Without `url` the one in `BATON_URL`. */
  static async create(url?: string, options: CreateOptions = {}): Promise<Sandbox> {
    const isKept = Boolean(options.enableCheckpoint || options.enableSandboxHandoff);
    return Sandbox.#open(url, undefined, protocol.config(options), options, isKept);
  }

  /** An existing one, wherever it is, running. */
  static async attach(url: string | undefined, id: string, token: string, options: AttachOptions = {}): Promise<Sandbox> {
    return Sandbox.#open(url, { sandboxId: id, sandboxToken: token }, {}, options, true);
  }

  /** The same as `attach`. */
  static connect(url: string | undefined, id: string, token: string, options: AttachOptions = {}): Promise<Sandbox> {
    return Sandbox.attach(url, id, token, options);
  }

  static async #open(
    url: string | undefined,
    place: Found | undefined,
    config: Request,
    options: AttachOptions,
    isKept: boolean,
  ): Promise<Sandbox> {
    const address = url ?? setting("BATON_URL");
    if (!address) throw new ConnectionError("no address: give one, or set BATON_URL");
    options.signal?.throwIfAborted();
    const link = new Link(address, place, config, options);
    const { mirror, settings } = link;
    void link.run();
    try {
      const until = now() + settings.startWithinMs;
      const started = () => (mirror.sessions > 0 || mirror.end ? true : undefined);
      const isStarted = await mirror.bell.until(started, until, options.signal);
      if (mirror.end) throw mirror.end;
      if (!isStarted) throw new TimeoutError(`no sandbox within ${settings.startWithinMs} ms`);
      if (!mirror.place) throw new ProtocolError("the sandbox runs and has no id");
      return new Sandbox(address, link, mirror.place, isKept);
    } catch (error) {
      link.stop();
      throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    try {
      if (!this.#isKept && !this.#link.mirror.end) await this.kill();
    } finally {
      await this.close();
    }
  }

  get id(): string {
    return this.#place.sandboxId;
  }

  /** Whoever has it may attach: keep it like a password. */
  get token(): string {
    return this.#place.sandboxToken;
  }

  get place(): Place {
    return this.#at(this.#place);
  }

  #at(found: Found): Place {
    return new Place(found, this.#url, this.#link.settings);
  }

  info(): View {
    const { status, instance, isOpen, execs } = this.#link.mirror;
    return { id: this.id, status, instance, isConnected: isOpen, execs };
  }

  // Commands.

  /** Starts a command: a list is a program and its arguments, a text is code for `language`. */
  async exec(command: string | readonly string[], options: ExecOptions = {}): Promise<Running> {
    const { language = "bash", stdin, pty, signal, ...rest } = options;
    const all = typeof stdin === "boolean" ? undefined : stdin;
    const start: protocol.Start = {
      ...rest,
      execId: options.execId ?? execId(),
      stdin: stdin === true || pty !== undefined || all !== undefined,
      ...(pty && { pty }),
      ...(typeof command === "string" ? { language, code: command } : { argv: command }),
    };
    return this._start(protocol.exec(start), start.execId, all, signal);
  }

  /** Runs a command to its end. */
  async run(command: string | readonly string[], options: RunOptions = {}): Promise<Result> {
    const { check, ...rest } = options;
    const running = await this.exec(command, rest);
    const wait: WaitOptions = {};
    if (check) wait.check = true;
    if (options.signal) wait.signal = options.signal;
    return running.wait(wait);
  }

  /** Runs code to its end, in an interpreter of its own. */
  runCode(code: string, language = "python", options: RunOptions = {}): Promise<Result> {
    return this.run(code, { ...options, language });
  }

  /** Follows a command that runs already, or has ended unread, from these offsets on. */
  async follow(id: string, from: Partial<Offsets> = {}): Promise<Running> {
    if (!this.#link.mirror.execs.some((view) => view.execId === id)) {
      throw new RefusedError("the sandbox knows no such command", "SANDBOX_EXECUTION_ERROR");
    }
    return this.#run(new Exec(id, undefined, { stdout: 0, stderr: 0, ...from }, () => this.#link.look()));
  }

  /** @internal */
  protected async _start(
    request: Request,
    id: string,
    stdin: Uint8Array | string | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Running> {
    signal?.throwIfAborted();
    const exec = new Exec(id, request, { stdout: 0, stderr: 0 }, () => this.#link.look());
    if (stdin !== undefined) {
      // The bytes are the caller's: they need no room here, and are sent as the command takes them.
      exec.stdin.write(typeof stdin === "string" ? new TextEncoder().encode(stdin) : stdin);
      exec.stdin.close();
    }
    return this.#run(exec, signal);
  }

  async #run(exec: Exec, signal?: AbortSignal): Promise<Running> {
    const running = new Running(exec, (request) => this.#link.command({ kind: "ask", request }));
    const kill = () => void running.kill().catch(() => {});
    signal?.addEventListener("abort", kill, { once: true });
    const { answerWithinMs } = this.#link.settings;
    this.#link.command({ kind: "exec", exec });
    await exec.bell.until(() => exec.stage !== "asked" || undefined, now() + answerWithinMs, signal);
    if (exec.stage === "asked") throw new TimeoutError(`no answer within ${answerWithinMs} ms`);
    // Only a command that never started has ended with an error here.
    if (exec.end instanceof Error) throw exec.end;
    return running;
  }

  // The sandbox as a whole.

  /**
   * Saves memory and files; the session ends, and the sandbox can be attached again anywhere.
   *
   * `live` takes running commands along; without it they are a reason to refuse. With `keepRunning`
   * the sandbox goes on here. Resolves to the checkpoint's id.
   */
  async checkpoint(options: AskOptions & { live?: boolean; keepRunning?: boolean } = {}): Promise<string> {
    const answers = ["SANDBOX_CHECKPOINTED", "SANDBOX_CHECKPOINT_ERROR", "SANDBOX_EXECUTION_IN_PROGRESS_ERROR"] as const;
    const answer = (mirror: Mirror, sent: Sent) => mirror.since(sent.heard, ...answers);
    const update = await this.#ask(protocol.checkpoint(options), answer, options.signal);
    if (update.status !== "SANDBOX_CHECKPOINTED") throw ofUpdate(update);
    if (update.checkpointId === undefined) throw new ProtocolError("a checkpoint without an id");
    return update.checkpointId;
  }

  /** Keeps the file system under a name, for new sandboxes to start from. */
  async snapshot(name: string, options: AskOptions & { full?: boolean } = {}): Promise<string> {
    const answer = (mirror: Mirror, sent: Sent) => {
      const made = mirror.since(sent.heard, "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
      if (made && (made.snapshot ?? name) === name) return made;
      return mirror.since(sent.heard, "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR");
    };
    const update = await this.#ask(protocol.snapshot(name, options.full), answer, options.signal);
    if (update.status !== "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED") throw ofUpdate(update);
    return name;
  }

  /** Copies of this sandbox, each to be attached. */
  async fork(count = 1, options: AskOptions = {}): Promise<Place[]> {
    const answer = (mirror: Mirror, sent: Sent) => {
      const copies = mirror.forkedSince(sent.heard);
      const refused = mirror.since(sent.heard, "SANDBOX_ERROR", "SANDBOX_CHECKPOINT_ERROR", "SANDBOX_CREATION_ERROR");
      if (!copies && refused) throw ofUpdate(refused);
      return copies;
    };
    const copies = await this.#ask(protocol.fork(count), answer, options.signal);
    return copies.map((found) => this.#at(found));
  }

  /** Leaves the instance it is on, and is running again, wherever that is, when this resolves. */
  async handoff(options: AskOptions = {}): Promise<void> {
    const answer = (mirror: Mirror, sent: Sent) => {
      if (mirror.sessions > sent.session) return true;
      const refused = mirror.since(sent.heard, "SANDBOX_ERROR", "SANDBOX_CHECKPOINT_ERROR");
      if (refused) throw ofUpdate(refused);
      if (mirror.end) throw mirror.end;
      return undefined;
    };
    await this.#wait(protocol.handoff(), answer, options.signal);
  }

  /** Ends and deletes the sandbox, and this session with it. One that is gone already is no error. */
  async kill(options: AskOptions = {}): Promise<void> {
    const answer = (mirror: Mirror, sent: Sent) => {
      if (mirror.end) throw mirror.end;
      const refused = mirror.since(sent.heard, "SANDBOX_KILL_ERROR");
      if (refused) throw ofUpdate(refused);
      // The request may be lost with its connection. To ask twice does no harm.
      return mirror.sessions > sent.session ? true : undefined;
    };
    try {
      while (await this.#wait(protocol.killSandbox(), answer, options.signal));
    } catch (error) {
      if (!(error instanceof EndedError || error instanceof NotFoundError)) throw error;
    }
  }

  /** Closes the connection politely and leaves the sandbox as it is. */
  async close(): Promise<void> {
    const { mirror } = this.#link;
    if (mirror.end) return;
    this.#link.command({ kind: "leave" });
    await mirror.bell.until(() => mirror.end, now() + 5_000);
    this.#link.stop();
  }

  /** An answer that only the session can bring in which the question was asked. */
  #ask<T>(request: Request, answer: (mirror: Mirror, sent: Sent) => T | undefined, signal: AbortSignal | undefined): Promise<T> {
    const look = (mirror: Mirror, sent: Sent) => {
      const found = answer(mirror, sent);
      if (found === undefined && mirror.end) throw mirror.end;
      if (found === undefined && (!mirror.isOpen || mirror.sessions > sent.session)) {
        throw new ConnectionError("it broke before the answer came");
      }
      return found;
    };
    return this.#wait(request, look, signal);
  }

  /** Sends a request, then waits until something can be said about it. */
  async #wait<T>(request: Request, answer: (mirror: Mirror, sent: Sent) => T | undefined, signal: AbortSignal | undefined): Promise<T> {
    const { mirror, settings } = this.#link;
    const until = now() + settings.answerWithinMs;
    let sent: Sent | "ended" | undefined;
    const note = (when: Sent | undefined) => {
      sent = when ?? "ended";
      mirror.bell.ring();
    };
    signal?.throwIfAborted();
    this.#link.command({ kind: "ask", request, sent: note });
    const ended = (): BatonError => mirror.end ?? new EndedError("its connection ended");
    const look = () => {
      if (sent === "ended") throw ended();
      return sent && answer(mirror, sent);
    };
    const found = await mirror.bell.until(look, until, signal);
    if (found === undefined) throw new TimeoutError(`no answer within ${settings.answerWithinMs} ms`);
    return found;
  }
}
