/** One connection, from its handshake to its end: routes events to commands and callers. */

import { now } from "./clock.js";
import type { Socket } from "./connect.js";
import { BatonError, EndedError, ExecLostError, ProtocolError, RefusedError, describe, fromUpdate } from "./errors.js";
import type { Exec } from "./exec.js";
import type { Link } from "./link.js";
import * as protocol from "./protocol.js";
import type { Event, ExecView, Update } from "./protocol.js";
import * as requests from "./requests.js";
import type { Offsets, Request } from "./requests.js";
import { ConnectionSummary, type RetryPolicy, fatal } from "./retry_policy.js";
import { StdinConflict } from "./stdin.js";
import { MissingBytes } from "./stream.js";

/** How long to wait for the close frame after the last event. */
const CLOSE_WITHIN = 2_000;
/** Above this many queued bytes no more work is taken from callers. */
const MAX_QUEUED = 512 << 10;
/** How often deadlines are checked, and whether a full socket has space again. */
const CHECK_EVERY = 250;
const SPACE_CHECK_EVERY = 10;

export class Session {
  #link: Link;
  #socket: Socket;
  #summary = new ConnectionSummary();
  /** RUNNING has arrived: requests may be sent. */
  #isRunning = false;
  /** The sandbox was rolled back right before this session. */
  #rolledBack = false;
  #isOver = false;
  #byNumber = new Map<number, Exec>();
  #numbers = new Map<string, number>();
  /** Commands requested in this session and not answered yet, in order. */
  #requested: string[] = [];
  /** The message of a refusal that named no command. */
  #unclear: string | undefined;
  /** The command whose reader must catch up before the socket is read again. */
  #full: Exec | undefined;
  #deadline: number | undefined;
  #silenceAt = 0;
  #closeAt: number | undefined;
  #waitsForSpace = false;
  #done: (policy: RetryPolicy) => void = () => {};

  constructor(link: Link, socket: Socket, isNew: boolean, deadline: number | undefined) {
    this.#link = link;
    this.#socket = socket;
    this.#deadline = deadline;
    if (isNew) this.#send(link.config);
  }

  run(): Promise<RetryPolicy> {
    return new Promise((done) => {
      const timer = setInterval(() => this.#watch(), CHECK_EVERY);
      this.#done = (policy) => {
        if (this.#isOver) return;
        this.#isOver = true;
        clearInterval(timer);
        done(policy);
      };
      this.#alive();
      this.#socket.onAlive = () => this.#alive();
      this.#socket.onMessage = (data) => this.#message(data);
      this.#socket.onEnd = (code, cause) => this.#done(this.#summary.policy(code, cause));
    });
  }

  /** Ends the session for the caller. */
  close(): void {
    this.#closeWith(fatal(new EndedError("the connection was closed")));
  }

  #closeWith(policy: RetryPolicy): void {
    this.#done(policy);
    this.#socket.close();
  }

  // Receiving.

  #alive(): void {
    this.#silenceAt = now() + this.#link.settings.silenceMs;
  }

  #message(data: string | Uint8Array): void {
    if (this.#isOver) return;
    this.#alive();
    try {
      const policy = typeof data === "string" ? this.#event(protocol.parse(data)) : this.#output(data);
      if (policy) this.#closeWith(policy);
    } catch (error) {
      const text = error instanceof MissingBytes ? "bytes of the output are missing" : describe(error);
      this.#closeWith(fatal(error instanceof BatonError ? error : new ProtocolError(text)));
    }
  }

  #output(frame: Uint8Array): undefined {
    const { stream, exec: number, offset, payload } = protocol.decodeChunk(frame);
    const exec = this.#byNumber.get(number);
    if (!exec || stream === "stdin") return;
    exec.streams[stream].push(offset, payload);
    if (exec.isFull) {
      this.#full = exec;
      this.#socket.pause();
    }
  }

  #event(event: Event | undefined): RetryPolicy | undefined {
    const { state, execs } = this.#link;
    switch (event?.event) {
      case "status_update":
        return this.#update(event);
      case "sandbox_id":
        state.identity = event;
        break;
      case "hello":
        if (event.protocol !== protocol.VERSION) {
          return fatal(new ProtocolError(`the server speaks version ${event.protocol}`));
        }
        state.instance = event.instance;
        break;
      case "error":
        this.#summary.error = event.message;
        break;
      case "forked":
        state.forked(event.sandboxes);
        break;
      case "idle_timeout":
        state.idleTimeoutChanged(event.idleTimeout && event.idleTimeout * 1000);
        break;
      case "stdin_ack":
        execs.get(event.execId)?.stdinAck(event.offset);
        this.feed();
        break;
      case "output_gap":
        execs.get(event.execId)?.streams[event.stream].gap(event.to);
        break;
      case "output_rewound": {
        const exec = execs.get(event.execId);
        if (exec) exec.rolledBack = true;
        exec?.streams[event.stream].rewind(event.to);
        break;
      }
      case "rolled_back":
        this.#link.rolledBack({ checkpointId: event.checkpointId, ageMs: event.ageMs });
        break;
      case "egress_denied":
        this.#link.egressDenied(event);
        break;
      // In `baton.v1` output is binary.
      case "stdout":
      case "stderr":
      case undefined:
    }
    return undefined;
  }

  #update(update: Update): RetryPolicy | undefined {
    const policy = this.#summary.update(update);
    if (this.#summary.isLast) this.#closeAt ??= now() + CLOSE_WITHIN;
    if (update.status === "SANDBOX_RUNNING" && !this.#isRunning) this.#begin(update.execs);
    else if (update.status === "SANDBOX_EXECUTION_RUNNING") this.#started(update);
    else if (update.status === "SANDBOX_EXECUTION_DONE") this.#execDone(update);
    else if (update.status === "SANDBOX_EXECUTION_ERROR") this.#refused(update);
    else if (update.status === "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR") this.#refused(update);
    else if (update.status === "SANDBOX_STDIN_ERROR") this.#stdinRefused(update);
    try {
      this.#link.settings.onStatus?.(update);
    } catch (error) {
      // An error in the callback must not break the connection.
      console.error("baton-sandbox: onStatus failed", error);
    }
    this.#link.state.update(update);
    return policy;
  }

  // Sending.

  #send(request: Request): void {
    this.#socket.send(JSON.stringify(request));
  }

  get #hasSpace(): boolean {
    if (this.#socket.buffered < MAX_QUEUED) return true;
    if (!this.#waitsForSpace) {
      this.#waitsForSpace = true;
      setTimeout(() => {
        this.#waitsForSpace = false;
        this.feed();
      }, SPACE_CHECK_EVERY);
    }
    return false;
  }

  /** Sends what callers asked for, and what became due: acknowledgements and stdin. */
  feed(): void {
    if (this.#full && !this.#full.isFull) {
      this.#full = undefined;
      this.#alive();
      this.#socket.resume();
    }
    const { commands, execs, state } = this.#link;
    while (this.#isRunning && !this.#isOver && commands.length && this.#hasSpace) {
      const command = commands.shift();
      if (command?.kind === "close") this.close();
      else if (command?.kind === "exec") this.#exec(command.exec);
      else if (command?.kind === "request") {
        command.sent?.({ events: state.events, session: state.sessions });
        this.#send(command.request);
      }
    }
    if (!this.#isRunning || this.#isOver) return;
    for (const exec of execs.values()) {
      const offsets = exec.takeAck();
      if (offsets) this.#send(requests.ack(exec.id, offsets));
      const number = this.#numbers.get(exec.id);
      while (number !== undefined && this.#hasSpace) {
        const part = exec.stdin.next();
        if (!part) break;
        const { offset, data } = part;
        if (data) this.#socket.send(protocol.encodeChunk({ stream: "stdin", exec: number, offset, payload: data }));
        else this.#send(requests.stdin(exec.id, "", { eof: true, offset }));
      }
    }
  }

  /** Silence and other deadlines. */
  #watch(): void {
    if (this.#full) this.#alive();
    const isSilent = this.#socket.seesPings && now() >= this.#silenceAt;
    const mustClose = this.#closeAt !== undefined && now() >= this.#closeAt;
    const isLate = this.#deadline !== undefined && !this.#isRunning && now() >= this.#deadline;
    if (isSilent || mustClose || isLate) {
      this.#done(this.#summary.policy(undefined, "the server stopped responding"));
      this.#socket.drop();
    }
  }

  // The commands of this connection: requested, resumed, ended, refused.

  #exec(exec: Exec): void {
    const { execs, state } = this.#link;
    if (execs.has(exec.id)) {
      exec.ended(new RefusedError("the exec id is in use", "SANDBOX_EXECUTION_ERROR"));
      return;
    }
    execs.set(exec.id, exec);
    if (exec.request) {
      this.#request(exec, exec.request);
      return;
    }
    const view = state.execs.find((known) => known.execId === exec.id);
    if (view) {
      this.#number(view.exec, exec);
      exec.stdinResume(view.stdin, view.stdinCrc32);
      exec.rolledBack = this.#rolledBack;
    }
    this.#send(requests.reconnect({ [exec.id]: exec.resumeOffsets() }));
  }

  #request(exec: Exec, request: Request): void {
    this.#requested.push(exec.id);
    this.#send(request);
  }

  #number(number: number, exec: Exec): void {
    this.#byNumber.set(number, exec);
    this.#numbers.set(exec.id, number);
  }

  /** RUNNING: resumes every command where it stopped. */
  #begin(views: readonly ExecView[] | undefined): void {
    this.#isRunning = true;
    const { execs, state } = this.#link;
    this.#rolledBack = state.isRollingBack;
    state.isRollingBack = false;
    const offsets: Record<string, Offsets> = {};
    for (const exec of [...execs.values()]) {
      const view = views?.find((known) => known.execId === exec.id);
      if (view) {
        this.#number(view.exec, exec);
        exec.started();
        exec.rolledBack ||= this.#rolledBack;
        try {
          exec.stdinResume(view.stdin, view.stdinCrc32);
        } catch (error) {
          if (!(error instanceof StdinConflict)) throw error;
          this.#lose(exec, error.message, error.isRolledBack || this.#rolledBack);
          continue;
        }
      } else if (exec.phase === "requested" && exec.request) {
        // The request was lost with the last connection: send it again.
        this.#request(exec, exec.request);
        continue;
      } else if (views) {
        this.#lose(exec, "the sandbox no longer knows the command", this.#rolledBack);
        continue;
      } else {
        exec.stdinResume(exec.stdin.acked);
      }
      offsets[exec.id] = exec.resumeOffsets();
      if (exec.killRequested) this.#send(requests.killProcess(exec.id));
    }
    if (Object.keys(offsets).length) this.#send(requests.reconnect(offsets));
    state.sessions += 1;
    state.isOpen = true;
    state.execs = views ?? [];
    // After the update of the state, which notifies the waiting callers.
    queueMicrotask(() => this.feed());
  }

  #lose(exec: Exec, text: string, rolledBack: boolean): void {
    this.#link.execs.delete(exec.id);
    this.#forget(exec);
    exec.ended(new ExecLostError(text, rolledBack));
  }

  #started(update: Update): void {
    const exec = update.execId === undefined ? undefined : this.#link.execs.get(update.execId);
    if (!exec || update.exec === undefined) return;
    this.#requested = this.#requested.filter((id) => id !== exec.id);
    this.#number(update.exec, exec);
    exec.started();
    this.feed();
  }

  #execDone(update: Update): void {
    const exec = update.execId === undefined ? undefined : this.#link.execs.get(update.execId);
    if (!exec) return;
    this.#link.execs.delete(exec.id);
    this.#forget(exec);
    // Everything has arrived: the server need not keep it.
    this.#send(requests.ack(exec.id, exec.received));
    const { exitCode, signal, durationMs } = update;
    exec.ended({ exitCode, signal, durationMs, timedOut: update.timedOut ?? false });
  }

  /** A command did not start or is lost; without an exec id, something else was refused. */
  #refused(update: Update): void {
    const [first] = this.#requested;
    if (update.execId !== undefined) this.#lost(update.execId, update);
    // Only this command can be meant.
    else if (first !== undefined && this.#requested.length === 1 && this.#link.execs.size === 1) this.#lost(first, update);
    else if (first !== undefined) {
      // Any of them, or input, may be meant. The reconnect makes the server name those that it does not know.
      this.#unclear = update.message;
      this.#send(requests.reconnect(Object.fromEntries(this.#requested.map((id) => [id, { stdout: 0, stderr: 0 }]))));
    }
  }

  #lost(id: string, update: Update): void {
    const exec = this.#link.execs.get(id);
    if (!exec) return;
    this.#link.execs.delete(id);
    this.#requested = this.#requested.filter((requested) => requested !== id);
    this.#forget(exec);
    if (exec.phase === "requested") {
      const message = this.#unclear ?? update.message;
      this.#unclear = undefined;
      exec.ended(fromUpdate(message === undefined ? { status: update.status } : { status: update.status, message }));
    } else {
      exec.ended(new ExecLostError(update.message ?? "the command is lost", this.#rolledBack));
    }
  }

  /** Stdin is no longer read. Without an exec id, the only command with unacknowledged input is meant, if any. */
  #stdinRefused(update: Update): void {
    const isMeant = (exec: Exec) => (update.execId === undefined ? exec.stdin.isInFlight : exec.id === update.execId);
    const about = [...this.#link.execs.values()].filter(isMeant);
    if (about.length === 1) about[0]?.stdinOver();
  }

  #forget(exec: Exec): void {
    const number = this.#numbers.get(exec.id);
    this.#numbers.delete(exec.id);
    if (number !== undefined) this.#byNumber.delete(number);
  }
}
