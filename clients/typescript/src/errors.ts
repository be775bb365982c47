/** The errors of this package, by what the caller can do about them. */

import type { Update } from "./protocol.js";
import type { Result } from "./result.js";

/** Every error of this package. */
export class BatonError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The sandbox does not exist, or it was deleted. */
export class NotFoundError extends BatonError {}
/** Another client is attached to the sandbox and responds. */
export class InUseError extends BatonError {}
/** The token or the API key is wrong or missing. */
export class PermissionDeniedError extends BatonError {}
/** The sandbox could not be created. */
export class CreationError extends BatonError {}
/** The sandbox could not be restored. */
export class RestoreError extends BatonError {}
/** The checkpoint failed. The sandbox keeps running. */
export class CheckpointError extends BatonError {}

/** The server refused one request. The sandbox keeps running. */
export class RefusedError extends BatonError {
  readonly status: string;
  constructor(message: string, status: string) {
    super(message);
    this.status = status;
  }
}

/** The snapshot failed. The sandbox keeps running. */
export class SnapshotError extends RefusedError {}
/** No answer arrived in time. */
export class TimeoutError extends BatonError {}
/** The server cannot be reached, or the connection was lost for too long. */
export class ConnectionError extends BatonError {}
/** The server does not speak `baton.v1`, or violates it. */
export class ProtocolError extends BatonError {}
/** The session ended normally; the message says why. */
export class EndedError extends BatonError {
  /** What happened to the sandbox, such as `"idle"`, `"checkpoint"` or `"expired"`, if the server said so. */
  readonly reason: string | undefined;
  constructor(message: string, reason?: string) {
    super(reason === undefined ? message : `${message} (reason: ${reason})`);
    this.reason = reason;
  }
}
/** No credentials for the server could be obtained. */
export class AuthError extends BatonError {}

/** A command is lost: its outcome is not known. */
export class ExecLostError extends BatonError {
  /** It is lost because the sandbox was rolled back to an older checkpoint. */
  readonly rolledBack: boolean;
  constructor(message: string, rolledBack = false) {
    super(message);
    this.rolledBack = rolledBack;
  }
}

/** A command failed, and `check: true` was given. */
export class ExecFailedError extends BatonError {
  readonly result: Result;
  constructor(result: Result) {
    const last = result.stderr.trim().split("\n").at(-1);
    super(last ? `${result.ending}: ${last}` : result.ending);
    this.result = result;
  }
}

/** Output was dropped because the command had no reader for too long. You can keep reading after it. */
export class OutputGapError extends BatonError {
  readonly start: number;
  readonly end: number;
  constructor(stream: string, start: number, end: number) {
    super(`bytes ${start} to ${end} of ${stream} were dropped`);
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

/** The error that an update reports. */
export function fromUpdate(update: Pick<Update, "status" | "message">): BatonError {
  const message = update.message ?? update.status;
  const Kind = KINDS[update.status];
  if (Kind) return new Kind(message);
  if (update.status === "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR") return new SnapshotError(message, update.status);
  return new RefusedError(message, update.status);
}

/** The message of an error, or its type if it has none. */
export function describe(error: unknown): string {
  return error instanceof Error ? error.message || error.name : String(error);
}
