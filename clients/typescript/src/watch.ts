/** Watching files of a sandbox. */

import { ExecLostError, ProtocolError } from "./errors.js";
import { fileError } from "./file_results.js";
import type { Running } from "./running.js";

/** One change below a watched path. */
export interface FileChange {
  /** `overflow` means that changes are missing. */
  type: "create" | "write" | "remove" | "rename" | "chmod" | "overflow";
  /** Relative to the watched path. */
  name: string;
  /** The new name, after a rename. */
  to?: string;
}

/** The changes below a watched path. Ends with `close`, `await using`, or when the watched path is removed. */
export class FileWatch implements AsyncIterable<FileChange>, AsyncDisposable {
  #running: Running;
  #path: string;
  #isClosed = false;
  #changes: AsyncGenerator<FileChange, void, void>;

  private constructor(running: Running, path: string) {
    this.#running = running;
    this.#path = path;
    this.#changes = this.#read() as AsyncGenerator<FileChange, void, void>;
  }

  /** @internal Waits until the sandbox watches the path. */
  static async _start(running: Running, path: string): Promise<FileWatch> {
    const watch = new FileWatch(running, path);
    const { value } = await watch.#changes.next();
    if ((value as { type?: string } | undefined)?.type !== "ready") throw new ProtocolError("the watch did not start");
    return watch;
  }

  /** Leaving a loop does not end the watch. */
  [Symbol.asyncIterator](): AsyncIterator<FileChange, void, void> {
    return { next: () => this.#changes.next() };
  }

  async *#read(): AsyncGenerator<{ type: string; name: string; to?: string }, void, void> {
    const decoder = new TextDecoder();
    let rest = "";
    let isPartial = false;
    for await (const chunk of this.#running.stdout.chunks()) {
      if (chunk.kind === "data") {
        const lines = (rest + decoder.decode(chunk.data, { stream: true })).split("\n");
        rest = lines.pop() ?? "";
        // After a gap the first line may be incomplete.
        if (isPartial && lines.length) {
          lines.shift();
          isPartial = false;
        }
        for (const line of lines) yield parseChange(line);
      } else {
        // Some lines were dropped, or the sandbox was rolled back.
        rest = "";
        isPartial = true;
        yield { type: "overflow", name: "" };
      }
    }
    try {
      const result = await this.#running.wait();
      if (result.exitCode !== 0 && !this.#isClosed) throw fileError(result.stderr, this.#path);
    } catch (error) {
      if (!(this.#isClosed && error instanceof ExecLostError)) throw error;
    }
  }

  /** Ends the watch. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#running.kill();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

function parseChange(line: string): { type: string; name: string; to?: string } {
  let fields: Record<string, unknown> = {};
  try {
    fields = { ...(JSON.parse(line) as object) };
  } catch {
    // Reported below.
  }
  const { type, name, to } = fields;
  const isValid = typeof type === "string" && typeof name === "string" && ["string", "undefined"].includes(typeof to);
  if (!isValid) throw new ProtocolError("the watch sent a malformed line");
  return { type, name, ...(to !== undefined && { to: to as string }) };
}
