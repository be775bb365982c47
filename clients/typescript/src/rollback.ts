/** Roll-backs: the sandbox was restored from a checkpoint that is older than what its client has seen. */

/** The sandbox went back to a checkpoint. Work that it did after that checkpoint is lost. */
export interface Rollback {
  checkpointId: string;
  /** How old the checkpoint was when it was restored. */
  ageMs: number;
}

/** Calls the callback, or warns. An error in the callback must not break the connection that reports the roll-back. */
export function report(rollback: Rollback, callback: ((rollback: Rollback) => void) | undefined): void {
  if (!callback) {
    const age = (rollback.ageMs / 1000).toFixed(1);
    const what = `the sandbox was rolled back to checkpoint ${rollback.checkpointId}, which is ${age} s old`;
    console.warn(`baton-sandbox: ${what}; its work since then is lost`);
    return;
  }
  try {
    callback(rollback);
  } catch (error) {
    console.error("baton-sandbox: onRollback failed", error);
  }
}
