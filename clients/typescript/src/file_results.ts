/** What the sandbox reports about its files: listings and errors. */

import { ExecLostError, FileError, ProtocolError } from "./errors.js";
import type { Result } from "./result.js";

/** One line of a listing. */
export interface FileEntry {
  /** Relative to the path that was listed; for that path itself, its last part. */
  name: string;
  kind: "file" | "directory" | "symlink" | "other";
  size: number;
  /** Permission bits. */
  mode: number;
  mtimeMs: number;
  /** The target of a symbolic link. */
  target?: string;
}

export function checked(result: Result, path: string): Result {
  if (result.exitCode !== 0) throw fileError(result.stderr, path);
  if (result.lost || result.rolledBack) throw interrupted(path, result.rolledBack);
  return result;
}

export function interrupted(path: string, rolledBack: boolean): ExecLostError {
  const why = rolledBack ? "the sandbox was rolled back" : "some bytes were lost";
  return new ExecLostError(`the transfer of ${path} is incomplete, because ${why}: start it again`, rolledBack);
}

export function parseListing(text: string): FileEntry[] {
  return text.split("\n").filter(Boolean).map(entryOf);
}

function entryOf(line: string): FileEntry {
  let fields: Record<string, unknown>;
  try {
    fields = { ...(JSON.parse(line) as object) };
  } catch {
    throw new ProtocolError("the listing is malformed");
  }
  const { name, kind, size = 0, mode = 0, mtime_ms: mtimeMs = 0, target } = fields;
  const isValid = typeof name === "string" && typeof kind === "string" && ["string", "undefined"].includes(typeof target);
  if (!isValid || ![size, mode, mtimeMs].every(Number.isFinite)) throw new ProtocolError("the listing is malformed");
  const known = ["file", "directory", "symlink"].includes(kind) ? kind : "other";
  return { name, kind: known, size, mode, mtimeMs, ...(target !== undefined && { target }) } as FileEntry;
}

/** The first error in stderr, such as `ENOENT: No such file or directory: /data/x`. */
export function fileError(stderr: string, path: string): FileError {
  const [line = ""] = stderr.trim().split("\n");
  const [, code, text] = /^(E[A-Z0-9]+): (.*)$/.exec(line) ?? [];
  return code ? new FileError(text ?? line, code) : new FileError(line || `${path}: unknown error`, "EIO");
}
