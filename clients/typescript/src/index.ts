/**
 * Sandboxes from TypeScript: run commands and move files over one WebSocket that reconnects by itself.
 *
 * A dropped connection is resumed where it stopped: commands keep running, and each byte of their output
 * and input arrives once. What cannot be resumed ends with a typed error.
 */

import "./environment.js";

export type { Connection, HeaderSource } from "./connect.js";
export {
  AuthError,
  BatonError,
  CheckpointError,
  ConnectionError,
  CreationError,
  EndedError,
  ExecFailedError,
  ExecLostError,
  FileError,
  InUseError,
  NotFoundError,
  OutputGapError,
  PermissionDeniedError,
  ProtocolError,
  RefusedError,
  RestoreError,
  SnapshotError,
  TimeoutError,
} from "./errors.js";
export type { FileEntry } from "./file_results.js";
export type { FileOptions, Source } from "./files.js";
export type { KillOptions, ListOptions, SandboxSummary } from "./http_api.js";
export { Port } from "./ports.js";
export type { EgressDenied, ExecView, Progress, Status, Update } from "./protocol.js";
export { Place, SandboxRef, type View } from "./reference.js";
export type { Config, Limits, Offsets } from "./requests.js";
export { Result } from "./result.js";
export type { Rollback } from "./rollback.js";
export { OutputStream, Running, type WaitOptions } from "./running.js";
export { type AskOptions, type AttachOptions, type CreateOptions, type ExecOptions, type RunOptions, Sandbox } from "./sandbox.js";
export type { Chunk } from "./stream.js";
export { type FileChange, FileWatch } from "./watch.js";
