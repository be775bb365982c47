/**
 * Sandboxes from TypeScript: create or attach, run commands, move, over one WebSocket that mends itself.
 *
 * A dropped connection is taken up again where it was: commands go on, and each byte of their output
 * and input arrives once. What cannot be taken up ends with a typed error.
 */

import "./seam.js";

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
export { OutputStream, Result, Running, type WaitOptions } from "./exec.js";
export type { FileEntry, FileOptions, Source } from "./files.js";
export type { Chunk } from "./pipe.js";
export type { Config, ExecView, Limits, Progress, Status, Update } from "./protocol.js";
export {
  type AskOptions,
  type AttachOptions,
  type CreateOptions,
  type ExecOptions,
  Place,
  type RunOptions,
  Sandbox,
  type View,
} from "./sandbox.js";
