/** Files of a sandbox. A transfer is a command without a program, and survives dropped connections as commands do. */

import { newExecId } from "./clock.js";
import { platform } from "./connect.js";
import { FileError, ProtocolError } from "./errors.js";
import { type FileEntry, checked, interrupted, parseListing } from "./file_results.js";
import * as requests from "./requests.js";
import type { Request } from "./requests.js";
import type { Running } from "./running.js";
import { FileWatch } from "./watch.js";

export interface FileOptions {
  /** The user inside the sandbox to work as. */
  user?: string;
  /** The directory that relative paths start from. */
  cwd?: string;
  timeoutMs?: number;
  /** Cancels the transfer. */
  signal?: AbortSignal;
}

export type Source = Uint8Array | string | AsyncIterable<Uint8Array> | Iterable<Uint8Array>;

export abstract class Files {
  /** @internal */
  protected abstract _start(
    request: Request,
    id: string,
    stdin: Uint8Array | string | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Running>;

  /** The bytes of a file, or a part of them. */
  async readFile(path: string, options: FileOptions & { offset?: number; length?: number } = {}): Promise<Uint8Array> {
    const { signal, ...rest } = options;
    const id = newExecId();
    const running = await this._start(requests.readFile({ ...rest, path, execId: id }), id, undefined, signal);
    return checked(await running.wait(signal ? { signal } : {}), path).stdoutBytes;
  }

  /** A file as text. Bytes that are not UTF-8 are replaced. */
  async readText(path: string, options: FileOptions & { offset?: number; length?: number } = {}): Promise<string> {
    return new TextDecoder().decode(await this.readFile(path, options));
  }

  /** A file, or with `archive` a tar archive of a directory, piece by piece and with bounded memory. */
  async *readStream(
    path: string,
    options: FileOptions & { offset?: number; length?: number; archive?: boolean } = {},
  ): AsyncGenerator<Uint8Array, void, void> {
    const { signal, ...rest } = options;
    const id = newExecId();
    const running = await this._start(requests.readFile({ ...rest, path, execId: id }), id, undefined, signal);
    let isComplete = false;
    try {
      for await (const chunk of running.stdout.chunks()) {
        if (chunk.kind !== "data") throw interrupted(path, running._exec.rolledBack);
        yield chunk.data;
      }
      isComplete = true;
    } finally {
      if (!isComplete) await running.kill().catch(() => {});
    }
    checked(await running.wait(signal ? { signal } : {}), path);
  }

  /**
   * Writes a file atomically: a reader sees the old or the new one. Missing directories are created.
   * With `archive` the source is a tar archive, which is unpacked into the directory `path`.
   */
  async writeFile(
    path: string,
    source: Source,
    options: FileOptions & { mode?: number; mtimeMs?: number; size?: number; archive?: boolean } = {},
  ): Promise<void> {
    const { signal, ...rest } = options;
    const id = newExecId();
    const whole = typeof source === "string" ? new TextEncoder().encode(source) : source instanceof Uint8Array ? source : undefined;
    const size = whole && !options.archive ? { size: whole.length } : {};
    const request = requests.writeFile({ ...size, ...rest, path, execId: id });
    const running = await this._start(request, id, whole, signal);
    if (!whole) await this.#send(running, source as AsyncIterable<Uint8Array>);
    checked(await running.wait(signal ? { signal } : {}), path);
  }

  async #send(running: Running, source: AsyncIterable<Uint8Array> | Iterable<Uint8Array>): Promise<void> {
    let isComplete = false;
    try {
      for await (const part of source) {
        // The result of a transfer that ended early says why.
        if (running._exec.end || !running._exec.isReading) return;
        await running.writeStdin(part);
      }
      isComplete = true;
    } catch (error) {
      if (!running._exec.end) throw error;
    } finally {
      // An incomplete file must not be written.
      if (isComplete) await running.closeStdin();
      else await running.signal("TERM").catch(() => {});
    }
  }

  /** Copies a local file or directory to `path`, with modes and times. Node only. */
  async upload(local: string, path: string, options: FileOptions = {}): Promise<void> {
    await (await platform().transfer()).upload(this, local, path, options);
  }

  /**
   * Copies the file or directory at `path` to `local`. Node only.
   *
   * The sandbox is not trusted: nothing outside `local` is written, linked or touched. Members of a directory that cannot be
   * unpacked are skipped, all others are copied, and `FileError` names the first skipped ones. On Windows directories are
   * refused (`ENOTSUP`).
   */
  async download(path: string, local: string, options: FileOptions = {}): Promise<void> {
    await (await platform().transfer()).download(this, path, local, options);
  }

  /** The entries of a directory. `depth` 0 lists only `path` itself, more than 1 also subdirectories. */
  async listFiles(path: string, options: FileOptions & { depth?: number } = {}): Promise<FileEntry[]> {
    const { signal, ...rest } = options;
    const id = newExecId();
    const running = await this._start(requests.listFiles({ ...rest, path, execId: id }), id, undefined, signal);
    return parseListing(checked(await running.wait(signal ? { signal } : {}), path).stdout);
  }

  /** The file, directory or link at `path` itself. Throws `FileError` with code `ENOENT` if there is none. */
  async statFile(path: string, options: FileOptions = {}): Promise<FileEntry> {
    const [entry] = await this.listFiles(path, { ...options, depth: 0 });
    if (!entry) throw new ProtocolError("the listing is empty");
    return entry;
  }

  /** Whether there is anything at `path`. A link counts, wherever it points. */
  async fileExists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.statFile(path, options);
      return true;
    } catch (error) {
      if (error instanceof FileError && ["ENOENT", "ENOTDIR"].includes(error.code)) return false;
      throw error;
    }
  }

  /** Removes a file, a link or an empty directory; with `recursive` a directory and everything in it. */
  async removeFile(path: string, options: FileOptions & { recursive?: boolean } = {}): Promise<void> {
    const { signal, ...rest } = options;
    await this.#finish(requests.removeFile({ ...rest, path, execId: newExecId() }), path, signal);
  }

  /** Renames a file or directory. A file at `to` is replaced atomically. */
  async renameFile(path: string, to: string, options: FileOptions = {}): Promise<void> {
    const { signal, ...rest } = options;
    await this.#finish(requests.renameFile({ ...rest, path, to, execId: newExecId() }), path, signal);
  }

  /** Creates a directory. With `parents` (the default) also the missing ones above it, and one that exists is not an error. */
  async makeDirectory(path: string, options: FileOptions & { parents?: boolean; mode?: number } = {}): Promise<void> {
    const { signal, ...rest } = options;
    await this.#finish(requests.makeDirectory({ parents: true, ...rest, path, execId: newExecId() }), path, signal);
  }

  /**
   * Watches a directory, or with `recursive` everything below it, or one file. When this resolves, every later change is
   * reported, also after a reconnect, a checkpoint and a handoff.
   */
  async watchFiles(path: string, options: FileOptions & { recursive?: boolean } = {}): Promise<FileWatch> {
    const { signal, ...rest } = options;
    const id = newExecId();
    return FileWatch._start(await this._start(requests.watchFiles({ ...rest, path, execId: id }), id, undefined, signal), path);
  }

  async #finish(request: Request, path: string, signal: AbortSignal | undefined): Promise<void> {
    const running = await this._start(request, String(request["exec_id"]), undefined, signal);
    checked(await running.wait(signal ? { signal } : {}), path);
  }
}
