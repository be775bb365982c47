/** What the end of a connection means: follow the sandbox, or tell the caller. Pure. */

import {
  type BatonError,
  ConnectionError,
  EndedError,
  InUseError,
  PermissionDeniedError,
  ProtocolError,
  RefusedError,
  ofUpdate,
} from "./errors.js";
import type { Status, Update } from "./protocol.js";

/** Come back, or not. With a retry the error is for the case that coming back fails for too long. */
export interface Verdict {
  error: BatonError;
  isRetry: boolean;
  isElsewhere?: boolean;
}

export const fatal = (error: BatonError): Verdict => ({ error, isRetry: false });
export const lost = (text: string): Verdict => ({ error: new ConnectionError(text), isRetry: true });

const FINAL: readonly Status[] = [
  "SANDBOX_NOT_FOUND",
  "SANDBOX_PERMISSION_DENIAL_ERROR",
  "SANDBOX_RESTORE_ERROR",
  "SANDBOX_CREATION_ERROR",
];

/** What one connection said that matters at its end. */
export class Heard {
  #deleted: string | undefined;
  #seen = new Set<Status>();
  /** The last error, for a close that explains nothing. */
  error: string | undefined;

  /** Some answers are final whatever comes after them. */
  update(update: Update): Verdict | undefined {
    if (FINAL.includes(update.status)) return fatal(ofUpdate(update));
    this.#seen.add(update.status);
    if (update.status === "SANDBOX_DELETED") this.#deleted = update.message ?? "";
    return undefined;
  }

  /** Only the close is still to come. */
  get isLast(): boolean {
    return this.#deleted !== undefined || this.#seen.has("SANDBOX_IN_USE");
  }

  /** The connection is over: closed with a code, or cut. */
  verdict(code: number | undefined, cause: string): Verdict {
    if (this.#deleted !== undefined) {
      let what = "the sandbox was deleted";
      if (this.#seen.has("SANDBOX_KILLED")) what = "the sandbox was killed";
      else if (this.#seen.has("SANDBOX_CHECKPOINTED")) what = "the sandbox was checkpointed";
      return fatal(new EndedError(this.#deleted ? `${what}: ${this.#deleted}` : what));
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
        return fatal(new EndedError("the server closed it"));
      case 1007:
      case 1009:
        return fatal(new ProtocolError("the server refused what it was sent"));
      case undefined:
        return lost(cause);
      default:
        return lost(`closed with code ${code}`);
    }
  }
}

/** What an HTTP answer instead of a WebSocket means. */
export function ofHttp(code: number): Verdict {
  if (code === 401) return fatal(new PermissionDeniedError("the server wants an API key (HTTP 401)"));
  if (code === 403) return fatal(new PermissionDeniedError("HTTP 403"));
  if ([408, 425, 429].includes(code) || code < 400 || code > 499) return lost(`HTTP ${code}`);
  return fatal(new ProtocolError(`HTTP ${code} instead of a WebSocket`));
}
