/** What the end of a connection means: reconnect, or return the error to the caller. Pure. */

import {
  type BatonError,
  ConnectionError,
  EndedError,
  InUseError,
  PermissionDeniedError,
  ProtocolError,
  RefusedError,
  fromUpdate,
} from "./errors.js";
import type { Status, Update } from "./protocol.js";

/** Whether to reconnect. With `isRetry` the error is thrown only if reconnecting fails for too long. */
export interface RetryPolicy {
  error: BatonError;
  isRetry: boolean;
  /** The instance is shutting down: the next connection should reach another one. */
  isElsewhere?: boolean;
}

export const fatal = (error: BatonError): RetryPolicy => ({ error, isRetry: false });
export const lost = (text: string): RetryPolicy => ({ error: new ConnectionError(text), isRetry: true });

const FINAL: readonly Status[] = [
  "SANDBOX_NOT_FOUND",
  "SANDBOX_PERMISSION_DENIAL_ERROR",
  "SANDBOX_RESTORE_ERROR",
  "SANDBOX_CREATION_ERROR",
];

/** What a connection reported that matters at its end. */
export class ConnectionSummary {
  /** The message of DELETED, once it came. */
  #deleted: string | undefined;
  #reason: string | undefined;
  #seen = new Set<Status>();
  /** The last error, for a close frame without an explanation. */
  error: string | undefined;

  /** Some updates are final, whatever follows them. */
  update(update: Update): RetryPolicy | undefined {
    if (FINAL.includes(update.status)) return fatal(fromUpdate(update));
    this.#seen.add(update.status);
    if (update.status === "SANDBOX_DELETED") {
      this.#deleted = update.message ?? "";
      this.#reason = update.reason;
    }
    return undefined;
  }

  /** Whether only the close frame is still to come. */
  get isLast(): boolean {
    return this.#deleted !== undefined || this.#seen.has("SANDBOX_IN_USE");
  }

  /** The connection is over: closed with a code, or cut. */
  policy(code: number | undefined, cause: string): RetryPolicy {
    if (this.#deleted !== undefined) {
      let what = "the sandbox was deleted";
      if (this.#seen.has("SANDBOX_KILLED")) what = "the sandbox was killed";
      else if (this.#seen.has("SANDBOX_CHECKPOINTED")) what = "the sandbox was checkpointed";
      return fatal(new EndedError(this.#deleted ? `${what}: ${this.#deleted}` : what, this.#reason));
    }
    if (this.#seen.has("SANDBOX_IN_USE")) {
      return { error: new InUseError("another client is attached to the sandbox"), isRetry: true };
    }
    switch (code) {
      case 4000:
        // The sandbox keeps running; only the session that asked was closed.
        if (this.#seen.has("SANDBOX_CHECKPOINT_ERROR")) return lost("the session was closed after a failed checkpoint");
        return fatal(new RefusedError(this.error ?? "the server gave no reason", "SANDBOX_ERROR"));
      case 1012:
        return { error: new ConnectionError("the instance is shutting down"), isRetry: true, isElsewhere: true };
      case 1000:
        return fatal(new EndedError("the server closed the session"));
      case 1007:
      case 1009:
        return fatal(new ProtocolError("the server rejected a message of this client"));
      case undefined:
        return lost(cause);
      default:
        return lost(`closed with code ${code}`);
    }
  }
}

/** What an HTTP response instead of a WebSocket means. */
export function fromHttp(code: number): RetryPolicy {
  if (code === 401) return fatal(new PermissionDeniedError("the server requires an API key (HTTP 401)"));
  if (code === 403) return fatal(new PermissionDeniedError("HTTP 403"));
  if ([408, 425, 429].includes(code) || code < 400 || code > 499) return lost(`HTTP ${code}`);
  return fatal(new ProtocolError(`HTTP ${code} instead of a WebSocket`));
}
