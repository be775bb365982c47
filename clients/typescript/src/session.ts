/** One connection, from its handshake to its end: routes events to commands and callers. */

import type { Socket } from "./connect.js";
import { BatonError, EndedError, ExecLostError, ProtocolError, RefusedError, ofUpdate, textOf } from "./errors.js";
import type { Exec } from "./exec.js";
import type { Link } from "./link.js";
import { Hole } from "./pipe.js";
import * as protocol from "./protocol.js";
import type { Event, ExecView, Offsets, Request, Update } from "./protocol.js";
import { now } from "./seam.js";
import { Heard, type Verdict, fatal } from "./verdict.js";

/** After its last word the server closes at once. */
const LAST_WORDS = 2_000;
/** Above this nothing more is taken from callers. */
const QUEUE_BYTES = 512 << 10;
/** How often deadlines are looked at, and a full socket for room. */
const TICK = 250;
const ROOM_TICK = 10;

export class Session {
  #link: Link;
  #socket: Socket;
  #heard = new Heard();
  /** RUNNING came: requests may go. */
  #isRunning = false;
  #isOver = false;
  #byNumber = new Map<number, Exec>();
  #numbers = new Map<string, number>();
  /** Commands asked for in this session and not answered yet, in order. */
  #asked: string[] = [];
  /** The text of a refusal that named nobody. */
  #unclear: string | undefined;
  /** The reader of this one must catch up before anything more is read. */
  #flooded: Exec | undefined;
  #giveUp: number | undefined;
  #silentAt = 0;
  #leaveAt: number | undefined;
  #waitsForRoom = false;
  #done: (verdict: Verdict) => void = () => {};

  constructor(link: Link, socket: Socket, isNew: boolean, giveUp: number | undefined) {
    this.#link = link;
    this.#socket = socket;
    this.#giveUp = giveUp;
    if (isNew) this.#say(link.config);
  }

  run(): Promise<Verdict> {
    return new Promise((done) => {
      const timer = setInterval(() => this.#watch(), TICK);
      this.#done = (verdict) => {
        if (this.#isOver) return;
        this.#isOver = true;
        clearInterval(timer);
        done(verdict);
      };
      this.#alive();
      this.#socket.onAlive = () => this.#alive();
      this.#socket.onMessage = (data) => this.#message(data);
      this.#socket.onEnd = (code, cause) => this.#done(this.#heard.verdict(code, cause));
    });
  }

  /** Somebody does not want to wait for a polite end. */
  leave(): void {
    this.#leaveWith(fatal(new EndedError("it was closed")));
  }

  #leaveWith(verdict: Verdict): void {
    this.#done(verdict);
    this.#socket.close();
  }

  // What comes.

  #alive(): void {
    this.#silentAt = now() + this.#link.settings.silenceMs;
  }

  #message(data: string | Uint8Array): void {
    if (this.#isOver) return;
    this.#alive();
    try {
      const verdict = typeof data === "string" ? this.#event(protocol.parse(data)) : this.#output(data);
      if (verdict) this.#leaveWith(verdict);
    } catch (error) {
      const text = error instanceof Hole ? "bytes of the output are missing" : textOf(error);
      this.#leaveWith(fatal(error instanceof BatonError ? error : new ProtocolError(text)));
    }
  }

  #output(frame: Uint8Array): undefined {
    const { stream, exec: number, offset, payload } = protocol.decodeChunk(frame);
    const exec = this.#byNumber.get(number);
    if (!exec || stream === "stdin") return;
    exec.pipes[stream].push(offset, payload);
    if (exec.isFlooded) {
      this.#flooded = exec;
      this.#socket.pause();
    }
  }

  #event(event: Event | undefined): Verdict | undefined {
    const { mirror, execs } = this.#link;
    switch (event?.event) {
      case "status_update":
        return this.#update(event);
      case "sandbox_id":
        mirror.place = { sandboxId: event.sandboxId, sandboxToken: event.sandboxToken };
        break;
      case "hello":
        if (event.protocol !== protocol.VERSION) {
          return fatal(new ProtocolError(`the server speaks version ${event.protocol}`));
        }
        mirror.instance = event.instance;
        break;
      case "error":
        this.#heard.error = event.message;
        break;
      case "forked":
        mirror.forked(event.sandboxes);
        break;
      case "stdin_ack":
        execs.get(event.execId)?.stdinAck(event.offset);
        this.feed();
        break;
      case "output_gap":
        execs.get(event.execId)?.pipes[event.stream].gap(event.to);
        break;
      case "output_rewound":
        execs.get(event.execId)?.pipes[event.stream].rewind(event.to);
        break;
      // What it means for each command is said of each; and in this dialect output is binary.
      case "rolled_back":
      case "stdout":
      case "stderr":
      case undefined:
    }
    return undefined;
  }

  #update(update: Update): Verdict | undefined {
    const verdict = this.#heard.update(update);
    if (this.#heard.isLast) this.#leaveAt ??= now() + LAST_WORDS;
    if (update.status === "SANDBOX_RUNNING" && !this.#isRunning) this.#begin(update.execs);
    else if (update.status === "SANDBOX_EXECUTION_RUNNING") this.#started(update);
    else if (update.status === "SANDBOX_EXECUTION_DONE") this.#execDone(update);
    else if (update.status === "SANDBOX_EXECUTION_ERROR") this.#refused(update);
    else if (update.status === "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR") this.#refused(update);
    else if (update.status === "SANDBOX_STDIN_ERROR") this.#stdinRefused(update);
    try {
      this.#link.settings.onStatus?.(update);
    } catch (error) {
      // A caller's mistake must not cut its own connection.
      console.error("baton-sandbox: onStatus failed", error);
    }
    this.#link.mirror.update(update);
    return verdict;
  }

  // What goes.

  #say(request: Request): void {
    this.#socket.send(JSON.stringify(request));
  }

  get #hasRoom(): boolean {
    if (this.#socket.buffered < QUEUE_BYTES) return true;
    if (!this.#waitsForRoom) {
      this.#waitsForRoom = true;
      setTimeout(() => {
        this.#waitsForRoom = false;
        this.feed();
      }, ROOM_TICK);
    }
    return false;
  }

  /** Takes what callers want and what became due: acknowledgements and stdin. */
  feed(): void {
    if (this.#flooded && !this.#flooded.isFlooded) {
      this.#flooded = undefined;
      this.#alive();
      this.#socket.resume();
    }
    const { commands, execs, mirror } = this.#link;
    while (this.#isRunning && !this.#isOver && commands.length && this.#hasRoom) {
      const command = commands.shift();
      if (command?.kind === "leave") this.leave();
      else if (command?.kind === "exec") this.#exec(command.exec);
      else if (command?.kind === "ask") {
        command.sent?.({ heard: mirror.heard, session: mirror.sessions });
        this.#say(command.request);
      }
    }
    if (!this.#isRunning || this.#isOver) return;
    for (const exec of execs.values()) {
      const offsets = exec.takeAck();
      if (offsets) this.#say(protocol.ack(exec.id, offsets));
      const number = this.#numbers.get(exec.id);
      while (number !== undefined && this.#hasRoom) {
        const part = exec.stdin.next();
        if (!part) break;
        const { offset, data } = part;
        if (data) this.#socket.send(protocol.encodeChunk({ stream: "stdin", exec: number, offset, payload: data }));
        else this.#say(protocol.stdin(exec.id, "", { eof: true, offset }));
      }
    }
  }

  /** Silence and other deadlines. */
  #watch(): void {
    if (this.#flooded) this.#alive();
    const isSilent = this.#socket.hearsPings && now() >= this.#silentAt;
    const mustLeave = this.#leaveAt !== undefined && now() >= this.#leaveAt;
    const givesUp = this.#giveUp !== undefined && !this.#isRunning && now() >= this.#giveUp;
    if (isSilent || mustLeave || givesUp) {
      this.#done(this.#heard.verdict(undefined, "the server fell silent"));
      this.#socket.drop();
    }
  }

  // The commands of this connection: asked for, taken up, ended, refused.

  #exec(exec: Exec): void {
    const { execs, mirror } = this.#link;
    if (execs.has(exec.id)) {
      exec.ended(new RefusedError("the exec id is in use", "SANDBOX_EXECUTION_ERROR"));
      return;
    }
    execs.set(exec.id, exec);
    if (exec.request) {
      this.#ask(exec, exec.request);
      return;
    }
    const view = mirror.execs.find((known) => known.execId === exec.id);
    if (view) this.#number(view.exec, exec);
    this.#say(protocol.reconnect({ [exec.id]: exec.resume() }));
  }

  #ask(exec: Exec, request: Request): void {
    this.#asked.push(exec.id);
    this.#say(request);
  }

  #number(number: number, exec: Exec): void {
    this.#byNumber.set(number, exec);
    this.#numbers.set(exec.id, number);
  }

  /** RUNNING: takes up every command where it was left. */
  #begin(views: readonly ExecView[] | undefined): void {
    this.#isRunning = true;
    const { execs, mirror } = this.#link;
    const offsets: Record<string, Offsets> = {};
    for (const exec of [...execs.values()]) {
      const view = views?.find((known) => known.execId === exec.id);
      if (view) {
        this.#number(view.exec, exec);
        exec.started();
        if (view.stdin < exec.stdin.acked) {
          this.#loseNow(exec, "the sandbox went back to before input that it had taken");
          continue;
        }
        exec.stdinAck(view.stdin);
      } else if (exec.stage === "asked" && exec.request) {
        // The request was lost with the last connection: ask again.
        this.#ask(exec, exec.request);
        continue;
      } else if (views) {
        this.#loseNow(exec, "the sandbox does not know the command any more");
        continue;
      }
      offsets[exec.id] = exec.resume();
      if (exec.killWanted) this.#say(protocol.killProcess(exec.id));
    }
    if (Object.keys(offsets).length) this.#say(protocol.reconnect(offsets));
    mirror.sessions += 1;
    mirror.isOpen = true;
    mirror.execs = views ?? [];
    // The update that says so rings; those who wait hear of it then.
    queueMicrotask(() => this.feed());
  }

  #loseNow(exec: Exec, text: string): void {
    this.#link.execs.delete(exec.id);
    this.#forget(exec);
    exec.ended(new ExecLostError(text));
  }

  #started(update: Update): void {
    const exec = update.execId === undefined ? undefined : this.#link.execs.get(update.execId);
    if (!exec || update.exec === undefined) return;
    this.#asked = this.#asked.filter((id) => id !== exec.id);
    this.#number(update.exec, exec);
    exec.started();
    this.feed();
  }

  #execDone(update: Update): void {
    const exec = update.execId === undefined ? undefined : this.#link.execs.get(update.execId);
    if (!exec) return;
    this.#link.execs.delete(exec.id);
    this.#forget(exec);
    // Everything is here: the server need not keep it.
    this.#say(protocol.ack(exec.id, exec.received));
    const { exitCode, signal, durationMs } = update;
    exec.ended({ exitCode, signal, durationMs, timedOut: update.timedOut ?? false });
  }

  /** A command did not start, or is gone; or, without a name, something else was not right. */
  #refused(update: Update): void {
    const [first] = this.#asked;
    if (update.execId !== undefined) this.#lost(update.execId, update);
    // There is nothing else it could be about.
    else if (first !== undefined && this.#asked.length === 1 && this.#link.execs.size === 1) this.#lost(first, update);
    else if (first !== undefined) {
      // It may be about any of them, or about input. Of those named now the server names what it does not know.
      this.#unclear = update.message;
      this.#say(protocol.reconnect(Object.fromEntries(this.#asked.map((id) => [id, { stdout: 0, stderr: 0 }]))));
    }
  }

  #lost(id: string, update: Update): void {
    const exec = this.#link.execs.get(id);
    if (!exec) return;
    this.#link.execs.delete(id);
    this.#asked = this.#asked.filter((asked) => asked !== id);
    this.#forget(exec);
    if (exec.stage === "asked") {
      const message = this.#unclear ?? update.message;
      this.#unclear = undefined;
      exec.ended(ofUpdate(message === undefined ? { status: update.status } : { status: update.status, message }));
    } else {
      exec.ended(new ExecLostError(update.message ?? "the command is gone"));
    }
  }

  /** Nobody reads it any more. Without a name it is about the only one that has input under way, if that is so. */
  #stdinRefused(update: Update): void {
    const isMeant = (exec: Exec) => (update.execId === undefined ? exec.stdin.isUnderWay : exec.id === update.execId);
    const about = [...this.#link.execs.values()].filter(isMeant);
    if (about.length === 1) about[0]?.stdinOver();
  }

  #forget(exec: Exec): void {
    const number = this.#numbers.get(exec.id);
    this.#numbers.delete(exec.id);
    if (number !== undefined) this.#byNumber.delete(number);
  }
}
