/** What can go wrong, by what the caller can do about it. */

import type { Result } from "./exec.js";
import type { Update } from "./protocol.js";

/** Every error of this package. */
export class BatonError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The sandbox never was, or it was deleted. */
export class NotFoundError extends BatonError {}
/** Somebody else is attached to the sandbox, and alive. */
export class InUseError extends BatonError {}
/** The token or the API key does not open this. */
export class PermissionDeniedError extends BatonError {}
/** The sandbox could not be created. */
export class CreationError extends BatonError {}
/** The sandbox could not be restored. */
export class RestoreError extends BatonError {}
/** No checkpoint was made. The sandbox goes on as it was. */
export class CheckpointError extends BatonError {}

/** The server's no to one request. The sandbox goes on as it was. */
export class RefusedError extends BatonError {
  readonly status: string;
  constructor(message: string, status: string) {
    super(message);
    this.status = status;
  }
}

/** No snapshot was made. The sandbox goes on as it was. */
export class SnapshotError extends RefusedError {}
/** No answer came in time. */
export class TimeoutError extends BatonError {}
/** The server cannot be reached, or not any more. */
export class ConnectionError extends BatonError {}
/** The other side does not speak `baton.v1`, or not well. */
export class ProtocolError extends BatonError {}
/** The session is over as it should be; the text says why. */
export class EndedError extends BatonError {}
/** A command is gone, and nobody knows how it ended. */
export class ExecLostError extends BatonError {}
/** No credentials for the server could be had. */
export class AuthError extends BatonError {}

/** A command did not succeed, and `check: true` asked to hear of it so. */
export class ExecFailedError extends BatonError {
  readonly result: Result;
  constructor(result: Result) {
    const last = result.stderr.trim().split("\n").at(-1);
    super(last ? `${result.ending}: ${last}` : result.ending);
    this.result = result;
  }
}

/** Bytes of a command's output were not kept: nobody listened for too long. Reading can go on after it. */
export class OutputGapError extends BatonError {
  readonly start: number;
  readonly end: number;
  constructor(stream: string, start: number, end: number) {
    super(`bytes ${start} to ${end} of ${stream} were not kept`);
    this.start = start;
    this.end = end;
  }
}

/** A file could not be read, written or listed; `code` is the name of an errno, such as `ENOENT`. */
export class FileError extends BatonError {
  readonly code: string;
  constructor(message: string, code: string) {
    super(message);
    this.code = code;
  }
}

const KINDS: Record<string, new (message: string) => BatonError> = {
  SANDBOX_NOT_FOUND: NotFoundError,
  SANDBOX_IN_USE: InUseError,
  SANDBOX_PERMISSION_DENIAL_ERROR: PermissionDeniedError,
  SANDBOX_CREATION_ERROR: CreationError,
  SANDBOX_RESTORE_ERROR: RestoreError,
  SANDBOX_CHECKPOINT_ERROR: CheckpointError,
  SANDBOX_EXECUTION_IN_PROGRESS_ERROR: CheckpointError,
};

/** The error an update stands for. */
export function ofUpdate(update: Pick<Update, "status" | "message">): BatonError {
  const message = update.message ?? update.status;
  const Kind = KINDS[update.status];
  if (Kind) return new Kind(message);
  if (update.status === "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR") return new SnapshotError(message, update.status);
  return new RefusedError(message, update.status);
}

export function textOf(error: unknown): string {
  return error instanceof Error ? error.message || error.name : String(error);
}
