/** Files of a sandbox: a transfer is a command without a program, and outlasts drops as one does. */

import { platform } from "./connect.js";
import { ExecLostError, FileError, ProtocolError } from "./errors.js";
import { type Running } from "./exec.js";
import * as protocol from "./protocol.js";
import type { Request } from "./protocol.js";
import { execId } from "./seam.js";

export interface FileOptions {
  /** As whom; without it as commands run. */
  user?: string;
  /** Where a relative path begins. */
  cwd?: string;
  timeoutMs?: number;
  /** Gives up. */
  signal?: AbortSignal;
}

/** One line of a listing. */
export interface FileEntry {
  /** Relative to the path asked for; of that path itself, its last part. */
  name: string;
  kind: "file" | "directory" | "symlink" | "other";
  size: number;
  /** Permission bits. */
  mode: number;
  mtimeMs: number;
  /** Where a symbolic link points. */
  target?: string;
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

  /** A file's bytes, or a part of them. */
  async readFile(path: string, options: FileOptions & { offset?: number; length?: number } = {}): Promise<Uint8Array> {
    const { signal, ...rest } = options;
    const id = execId();
    const running = await this._start(protocol.readFile({ ...rest, path, execId: id }), id, undefined, signal);
    const result = await running.wait(signal ? { signal } : {});
    if (result.exitCode !== 0) throw faultOf(result.stderr, path);
    if (result.lost) throw new ExecLostError(`${result.lost} bytes of ${path} were not kept on the way`);
    return result.stdoutBytes;
  }

  /** A file as a text. */
  async readText(path: string, options: FileOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.readFile(path, options));
  }

  /** A file, or with `archive` a tar archive of a directory, piece by piece with bounded memory. */
  async *readStream(
    path: string,
    options: FileOptions & { offset?: number; length?: number; archive?: boolean } = {},
  ): AsyncGenerator<Uint8Array, void, void> {
    const { signal, ...rest } = options;
    const id = execId();
    const running = await this._start(protocol.readFile({ ...rest, path, execId: id }), id, undefined, signal);
    let isWhole = false;
    try {
      for await (const chunk of running.stdout.chunks()) {
        if (chunk.kind !== "data") throw new ExecLostError(`${path} was not kept on the way: begin again`);
        yield chunk.data;
      }
      isWhole = true;
    } finally {
      if (!isWhole) await running.kill().catch(() => {});
    }
    const result = await running.wait(signal ? { signal } : {});
    if (result.exitCode !== 0) throw faultOf(result.stderr, path);
  }

  /**
   * Writes a file, all at once: a reader sees the old or the new one. Missing directories are made.
   * With `archive` the source is a tar archive, unpacked into the directory `path`.
   */
  async writeFile(
    path: string,
    source: Source,
    options: FileOptions & { mode?: number; mtimeMs?: number; size?: number; archive?: boolean } = {},
  ): Promise<void> {
    const { signal, ...rest } = options;
    const id = execId();
    const whole = typeof source === "string" ? new TextEncoder().encode(source) : source instanceof Uint8Array ? source : undefined;
    const size = whole && !options.archive ? { size: whole.length } : {};
    const request = protocol.writeFile({ ...size, ...rest, path, execId: id });
    const running = await this._start(request, id, whole, signal);
    if (!whole) await this.#send(running, source as AsyncIterable<Uint8Array>);
    const result = await running.wait(signal ? { signal } : {});
    if (result.exitCode !== 0) throw faultOf(result.stderr, path);
  }

  async #send(running: Running, source: AsyncIterable<Uint8Array> | Iterable<Uint8Array>): Promise<void> {
    let isWhole = false;
    try {
      for await (const part of source) {
        // One that ended early says why itself.
        if (running._exec.end || !running._exec.isRead) return;
        await running.writeStdin(part);
      }
      isWhole = true;
    } catch (error) {
      if (!running._exec.end) throw error;
    } finally {
      // Half a file must not become one.
      if (isWhole) await running.closeStdin();
      else await running.signal("TERM").catch(() => {});
    }
  }

  /** Copies a file or directory of this machine to `path`, with modes and times. Node only. */
  async upload(local: string, path: string, options: FileOptions = {}): Promise<void> {
    await (await platform().transfer()).upload(this, local, path, options);
  }

  /**
   * Copies the file or directory at `path` to this machine: `local` becomes what is there. Node only.
   *
   * The sandbox is not trusted: nothing outside `local` is written, linked or touched. Of a directory, members that cannot be
   * unpacked are left out, all others are there, and `FileError` names the first ones. On Windows directories are refused (`ENOTSUP`).
   */
  async download(path: string, local: string, options: FileOptions = {}): Promise<void> {
    await (await platform().transfer()).download(this, path, local, options);
  }

  /** What is in a directory; `depth` 0 tells of `path` itself, more than 1 of what is below. */
  async listFiles(path: string, options: FileOptions & { depth?: number } = {}): Promise<FileEntry[]> {
    const { signal, ...rest } = options;
    const id = execId();
    const running = await this._start(protocol.listFiles({ ...rest, path, execId: id }), id, undefined, signal);
    const result = await running.wait(signal ? { signal } : {});
    if (result.exitCode !== 0) throw faultOf(result.stderr, path);
    return parseListing(result.stdout);
  }
}

export function parseListing(text: string): FileEntry[] {
  return text.split("\n").filter(Boolean).map(entryOf);
}

function entryOf(line: string): FileEntry {
  let fields: Record<string, unknown>;
  try {
    fields = { ...(JSON.parse(line) as object) };
  } catch {
    throw new ProtocolError("a listing is damaged");
  }
  const { name, kind, size = 0, mode = 0, mtime_ms: mtimeMs = 0, target } = fields;
  const isWhole = typeof name === "string" && typeof kind === "string" && ["string", "undefined"].includes(typeof target);
  if (!isWhole || ![size, mode, mtimeMs].every(Number.isFinite)) throw new ProtocolError("a listing is damaged");
  const known = ["file", "directory", "symlink"].includes(kind) ? kind : "other";
  return { name, kind: known, size, mode, mtimeMs, ...(target !== undefined && { target }) } as FileEntry;
}

/** The first fault that stderr names, as in `ENOENT: No such file or directory: /data/x`. */
export function faultOf(stderr: string, path: string): FileError {
  const [line = ""] = stderr.trim().split("\n");
  const [, code, text] = /^(E[A-Z0-9]+): (.*)$/.exec(line) ?? [];
  return code ? new FileError(text ?? line, code) : new FileError(line || `${path}: it did not work`, "EIO");
}
