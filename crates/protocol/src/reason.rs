//! Why something is not as requested: every reason, each with its cause and its remedy.
//!
//! A reason appears by name in `status.reason` and in answers. Records store it as text, so that a reason of a later
//! version is preserved; code that reports a reason takes it from here.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident { cause: $cause:literal, remedy: $remedy:literal })*) => {
        /// Why something is not as requested.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Reason {
            $($(#[$doc])* #[doc = ""] #[doc = $cause] $name,)*
        }

        impl Reason {
            /// Every reason.
            pub const ALL: &[Reason] = &[$(Reason::$name),*];

            /// The name in records, answers and messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// The cause, in sentences for an operator.
            pub fn cause(self) -> &'static str {
                match self {
                    $(Self::$name => $cause,)*
                }
            }

            /// What the operator can do about it.
            pub fn remedy(self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)*
                }
            }
        }
    };
}

reasons! {
    /// The metadata is invalid.
    InvalidSpec {
        cause: "metadata.json is not a JSON object, is too large, names another sandbox, or has a field with an invalid value. The last valid spec stays in force; nothing was changed.",
        remedy: "Correct the object: `baton edit ID` shows what is wrong and checks the result before writing it. status.message names the field. If the text is not a JSON object, replace it: undelete its last valid version in the bucket, or use `baton repair ID --replace-metadata`."
    }
    /// The sandbox is in a store that this instance does not use.
    OtherStore {
        cause: "The metadata or the lock name a bucket that this instance is not configured with; or only one of lock and instance names the checkpoint's bucket, and the checkpoint was not found.",
        remedy: "Compare `lock_bucket` in the metadata and `head.bucket` in the lock with `baton config`, and give every instance the same storage variables. An instance that mounts the bucket learns its name from the bucket variable, which must be set too."
    }
    /// The metadata exists, but the lock does not.
    LockMissing {
        cause: "lock.json was deleted, or the sandbox was added to the store by hand and never had one. Instances do not create a new lock on their own, since two of them could then run the sandbox; a container that was running is paused and kept.",
        remedy: "Recover the object from the bucket's soft delete. If that is not possible, or if there never was one, make sure that no instance runs the sandbox and use `baton repair ID --nobody-runs-it`."
    }
    /// The lock exists, but cannot be parsed.
    InvalidLock {
        cause: "lock.json is not a JSON object, lacks a field, has an invalid value, names another sandbox, or is an earlier version that replaced a later one. Instances do not overwrite it, since they would lose what it says about the holder and the checkpoint; a container that was running is paused and kept.",
        remedy: "Recover the last valid version of the object from the bucket's soft delete. If that is not possible, make sure that no instance runs the sandbox and use `baton repair ID --nobody-runs-it`, which replaces the lock."
    }
    /// The metadata is valid, but without a token no client could attach.
    TokenMissing {
        cause: "metadata.json has no `token_sha256`: it was written by hand, to restore a sandbox, or the key was removed. No client can attach; an instance that runs the sandbox continues with the last valid spec.",
        remedy: "`baton repair ID` gives the sandbox a new token and prints it once; with --nobody-runs-it it also creates a missing lock. If you already have a token, put its SHA-256 into `token_sha256` instead."
    }
    /// Appears in views only: no instance could write it.
    Unresponsive {
        cause: "The instance that holds the lease has not renewed it for BATON_TAKEOVER: it died, hangs, or cannot reach the store. In the last case its container is paused.",
        remedy: "You don't need to do anything: the next attach takes over the lease and restores the last checkpoint. `baton handoff ID` takes it over now, and `baton edit ID --set placement=null` has another instance start it. If the instance only lost the store and no other instance takes over, it continues where it was."
    }
    /// The sandbox ran and left no checkpoint.
    Lost {
        cause: "The sandbox ended without a committed checkpoint: its instance died, its container ended by itself, or the drain time was up.",
        remedy: "Nothing can be recovered: `baton delete ID`. For sandboxes that matter, set BATON_CHECKPOINT_EVERY or let clients request checkpoints."
    }
    /// A checkpoint was requested of a sandbox that cannot be checkpointed.
    NotCheckpointable {
        cause: "The sandbox was created without `enable_checkpoint`, or the server has no storage for checkpoints. It keeps running.",
        remedy: "Set `desired_state` back to `running`, or end it with `deleted`. A server needs SANDBOX_METADATA_BUCKET and SANDBOX_CHECKPOINT_BUCKET, or CHECKPOINT_AND_RESTORE_PATH."
    }
    /// The checkpoint could not be made; it may succeed later.
    CheckpointFailed {
        cause: "Pausing, saving or storing the sandbox failed. It keeps running, and the request is retried.",
        remedy: "status.message has the error. If it is the store, run `baton config --check`; otherwise look at the instance's log."
    }
    /// The instance's disk is full.
    NoSpace {
        cause: "The local disk has no space for the sandbox's checkpoint (its memory and changed files), beside the transfers in progress.",
        remedy: "Give the instance more disk (BATON_STATE_DIR) or memory, or fewer sandboxes (BATON_MAX_SANDBOXES)."
    }
    /// The first start failed.
    CreateFailed {
        cause: "The container could not be started.",
        remedy: "status.message has the error of runsc. Creating it again is safe. If every create fails, the instance's `runsc` or root file system is broken: see `baton config`."
    }
    /// The start from a checkpoint failed.
    RestoreFailed {
        cause: "The checkpoint is intact, but fetching it or starting from it failed. It is kept unchanged.",
        remedy: "Attach again, on another instance if there is one. If it never succeeds, `baton rollback ID` returns to the previous checkpoint."
    }
    OtherRuntime {
        cause: "The checkpoint was made with another version or platform of runsc than this instance has; only the same one can restore it.",
        remedy: "Attach on an instance with that version. Instances store their runsc for later ones unless BATON_STORE_RUNTIME is false; BATON_RUNTIMES must list it, unless this build knows it. A sandbox created with `on_incompatible: files` restarts from its files."
    }
    OtherRootfs {
        cause: "The checkpoint was made on a root file system that this instance does not have and that is not stored.",
        remedy: "Instances store theirs for others unless BATON_STORE_RUNTIME is false. Deploy instances with the same root file system (BATON_ROOTFS), or attach on one that has it."
    }
    OtherCpu {
        cause: "The sandbox has seen CPU features that this machine lacks.",
        remedy: "Attach on an instance with the same kind of CPU, and set BATON_CPU_FEATURES to what all your instances have, so that new sandboxes can move to any of them."
    }
    OtherSpec {
        cause: "The checkpoint was made by a server that lays out containers in another way.",
        remedy: "Attach on an instance of the version that made it."
    }
    OtherVersion {
        cause: "The checkpoint or the snapshot was written by a later version of this server.",
        remedy: "Attach on an instance of that version or a later one."
    }
    /// A stored file does not have the expected content.
    Damaged {
        cause: "A file of the checkpoint does not match its manifest, or the manifest does not match the lock. Nothing was started from it.",
        remedy: "Recover the object from soft delete or a backup, or return to the previous checkpoint: `baton rollback ID`."
    }
    /// The object was not signed with any of our keys.
    Unsigned {
        cause: "BATON_HMAC_KEY is set, and the lock, the checkpoint or the snapshot has no signature, or one made with another key. Nothing was started from it, and it is kept unchanged.",
        remedy: "If one of your instances wrote it, before it had a key or with an older key: put that key last in the list, or sign the object with `baton repair ID --sign`. Otherwise someone else writes to the bucket: compare `head` in the lock with the last commit in the logs of your instances."
    }
    /// A stored file is missing.
    CheckpointMissing {
        cause: "The lock names a checkpoint, and one of its files is missing from the store.",
        remedy: "Recover the objects from soft delete, or return to the previous checkpoint: `baton rollback ID`. Check that the bucket has no lifecycle rules that delete by age."
    }
    /// This server does not support the request.
    NotSupported {
        cause: "The server is not configured for this request.",
        remedy: "status.message or the answer says what is missing; `baton config` shows what is set."
    }
    Deleted {
        cause: "The sandbox was deleted. That is final.",
        remedy: "Create a new one."
    }
    /// A later attach on another instance won.
    Superseded {
        cause: "A later attach on another instance took precedence.",
        remedy: "Nothing is wrong: the last client with the token gets the sandbox. Two clients that keep attaching take it from each other."
    }
    /// The client that is attached is alive.
    InUse {
        cause: "Another client is attached to the sandbox on another instance, and it answered a ping.",
        remedy: "Attach again when that client has left. A client of `baton.v1` gets the sandbox at once; see the table in `docs/protocol.md`."
    }
    /// An operator named an instance that has not asked for the sandbox yet.
    PlacementPending {
        cause: "`placement` names another instance, and that instance has not asked for the sandbox yet: its next sweep is still due, it is full, or it no longer exists. The sandbox keeps running where it is.",
        remedy: "It moves as soon as that instance asks, within two sweeps (BATON_SWEEP). If it never does, name an instance that is in `baton list`: `baton handoff ID --to INSTANCE`."
    }
    RunningElsewhere {
        cause: "The sandbox runs on another instance, and it was created without `enable_sandbox_handoff`.",
        remedy: "Attach there, or release it with `baton checkpoint ID` or `baton handoff ID`."
    }
    HandoffTimeout {
        cause: "The instance that runs the sandbox did not release it within BATON_HANDOFF_WAIT.",
        remedy: "`baton get ID` shows the owner; its log says why its checkpoint takes so long or fails. If the instance is gone, attach again: its lease is taken over."
    }
    TooLarge {
        cause: "The environment of the sandbox is too large to be passed to it, or an archive of its changed files would be larger than its `disk` limit, BATON_ARCHIVE_SIZE or BATON_ARCHIVE_ENTRIES allows.",
        remedy: "Make `env` smaller. For a snapshot, remove files that it does not need; holes in sparse files count as written."
    }
    /// The snapshot does not exist or is incomplete.
    SnapshotMissing {
        cause: "There is no filesystem snapshot of that name, it is unfinished, or its archive is missing.",
        remedy: "`baton snapshot list` shows those that exist. `baton snapshot delete NAME` removes an unfinished one that is no longer being made."
    }
    /// Snapshots are never overwritten.
    SnapshotExists {
        cause: "A filesystem snapshot of that name exists, or another request is making one.",
        remedy: "Choose another name, or delete the old one: `baton snapshot delete NAME`."
    }
    /// A tenant has reached its quota.
    QuotaExceeded {
        cause: "The tenant has as many snapshots as `snapshots` in BATON_QUOTAS allows. Nothing was stored.",
        remedy: "Delete one of the tenant's (`baton snapshot list --tenant NAME`, `baton snapshot delete NAME --tenant NAME`), or raise its quota."
    }
    SnapshotFailed {
        cause: "Pausing the sandbox, writing its file system or storing it failed. It keeps running, and the name is free again.",
        remedy: "The answer has the error. If it is the store, run `baton config --check`; otherwise request it again."
    }
    /// The archive cannot become a root file system.
    BadArchive {
        cause: "The archive is damaged, hostile, or exceeds a limit. Nothing of it was kept.",
        remedy: "The message says what is wrong. The limits are BATON_ARCHIVE_SIZE, BATON_ARCHIVE_ENTRIES and BATON_ARCHIVE_DEPTH."
    }
    RootfsMissing {
        cause: "The root file system that sandboxes start from was not found.",
        remedy: "Run `scripts/setup`, or set BATON_ROOTFS."
    }
    /// Reported when a server starts.
    NotRoot {
        cause: "The server does not run as root, which containers require.",
        remedy: "Start it as root."
    }
    /// Reported when a server starts.
    StateDir {
        cause: "The state directory cannot be used.",
        remedy: "Set BATON_STATE_DIR to a short path on a local disk that root may write."
    }
    /// Reported when a server starts.
    StateDirHeld {
        cause: "Another server uses this state directory.",
        remedy: "Give each server its own BATON_STATE_DIR."
    }
    /// Reported when a server starts.
    Runsc {
        cause: "The runsc that was found does not run, or has another version than this server requires.",
        remedy: "Run `scripts/setup`, or set BATON_RUNSC."
    }
    /// Reported when a server starts.
    Missing {
        cause: "A program or directory that the server needs is missing.",
        remedy: "Run `scripts/setup`; `baton config` shows the expected paths."
    }
    /// Reported when a server starts.
    CpuFeatures {
        cause: "BATON_CPU_FEATURES names a feature that this machine lacks or runsc does not know.",
        remedy: "Remove it from the list."
    }
}

impl Reason {
    /// Finds a reason by its name, ignoring case.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.name().eq_ignore_ascii_case(name))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> String {
        reason.name().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_name_of_its_own_a_cause_and_a_remedy() {
        for reason in Reason::ALL {
            assert_eq!(Reason::find(reason.name()), Some(*reason));
            assert_eq!(Reason::find(&reason.name().to_lowercase()), Some(*reason));
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
            for sentence in [reason.cause(), reason.remedy()] {
                assert!(sentence.len() > 10 && sentence.ends_with('.'), "{reason}: {sentence}");
            }
        }
        assert_eq!(Reason::find("Nonsense"), None);
    }
}
