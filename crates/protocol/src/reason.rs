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
        cause: "metadata.json is no JSON object, is too large, names another sandbox, or a field of it has a value that is not allowed. The last good spec stays in force; nothing was changed.",
        remedy: "Mend the object: `baton edit ID` shows what is wrong and checks it before it is written. status.message says which field it is."
    }
    /// The sandbox is in a store that this instance does not use.
    OtherStore {
        cause: "The metadata or the lock name another bucket than this instance is configured with; or only one of lock and instance names the bucket of the checkpoint, and it is not there.",
        remedy: "Compare `lock_bucket` in the metadata and `head.bucket` in the lock with `baton config`, and give every instance the same storage variables. An instance that mounts the bucket is told its name by the bucket variable beside the mount's."
    }
    /// The metadata exists, but the lock does not.
    LockMissing {
        cause: "lock.json was deleted, or the sandbox was put into the store by hand and never had one. Instances do not make a new one by themselves, since two of them could then run the sandbox; a container that ran stands still and is kept.",
        remedy: "Bring the object back from the bucket's soft delete. If that is not possible, or if there never was one, make sure that no instance runs the sandbox and use `baton repair ID --nobody-runs-it`."
    }
    /// The lock exists, but cannot be parsed.
    InvalidLock {
        cause: "lock.json is no JSON object, lacks a field, has a value that is not allowed, names another sandbox, or is an earlier version that was put back over a later one. Instances write nothing over it, since what it said about the holder and the checkpoint is not known; a container that ran stands still and is kept.",
        remedy: "Bring the last good version of the object back from the bucket's soft delete. If that is not possible, make sure that no instance runs the sandbox and use `baton repair ID --nobody-runs-it`, which replaces the lock."
    }
    /// The metadata is valid, but without a token no client could attach.
    TokenMissing {
        cause: "metadata.json has no `token_sha256`: it was written by hand, to restore a sandbox, or the key was removed. Nobody can attach; an instance that runs the sandbox goes on by the last good spec.",
        remedy: "`baton repair ID` gives the sandbox a new token and prints it once; with --nobody-runs-it it makes the lock too, where there is none. If you have a token already, put its SHA-256 into `token_sha256` instead."
    }
    /// Appears in views only: no instance could write it.
    Unresponsive {
        cause: "The instance that holds the lease has not renewed it for BATON_TAKEOVER: it died, hangs, or is cut off from the store. In that case its container stands still.",
        remedy: "You don't need to do anything: the next attach takes the lease over and restores the last checkpoint. `baton handoff ID` takes it over now, and `baton edit ID --set placement=null` has another instance start it. If the instance is only cut off and nobody takes over, it goes on where it was."
    }
    /// The sandbox ran and left no checkpoint.
    Lost {
        cause: "The sandbox ended without a committed checkpoint: its instance died, its container ended by itself, or the drain time was up.",
        remedy: "There is nothing to bring back: `baton delete ID`. For sandboxes that matter, set BATON_CHECKPOINT_EVERY or let clients ask for checkpoints."
    }
    /// A checkpoint was requested of a sandbox that cannot be checkpointed.
    NotCheckpointable {
        cause: "The sandbox was created without `enable_checkpoint`, or the server has no place for checkpoints. It runs on.",
        remedy: "Set `desired_state` back to `running`, or end it with `deleted`. A server needs SANDBOX_METADATA_BUCKET and SANDBOX_CHECKPOINT_BUCKET, or CHECKPOINT_AND_RESTORE_PATH."
    }
    /// The checkpoint could not be made; it may succeed later.
    CheckpointFailed {
        cause: "Pausing, saving or storing the sandbox failed. It runs on as before, and the wish is tried again.",
        remedy: "status.message has the error. If it is the store, `baton config --check`; otherwise look at the log of the instance."
    }
    /// The instance's disk is full.
    NoSpace {
        cause: "The local disk has no room for the image of the sandbox: its memory and changed files, and what else is on its way.",
        remedy: "Give the instance more disk (BATON_STATE_DIR) or memory, or fewer sandboxes (BATON_MAX_SANDBOXES)."
    }
    /// The first start failed.
    CreateFailed {
        cause: "The container could not be started.",
        remedy: "status.message has what runsc said. Creating it again is safe. If all creates fail, `runsc` or the root file system of the instance is broken: `baton config`."
    }
    /// The start from a checkpoint failed.
    RestoreFailed {
        cause: "The checkpoint is whole, but fetching it or starting from it failed. It is kept and was not changed.",
        remedy: "Attach again, on another instance if there is one. If it never succeeds, `baton rollback ID` goes back to the checkpoint before it."
    }
    OtherRuntime {
        cause: "The checkpoint was made with another version or platform of runsc than this instance has; it restores with the same one only.",
        remedy: "Attach on an instance with that version. Instances store their runsc for later ones unless BATON_STORE_RUNTIME is false; BATON_RUNTIMES must list it, unless this build knows it. A sandbox created with `on_incompatible: files` starts anew on its files."
    }
    OtherRootfs {
        cause: "The checkpoint was made on another root file system than this instance has, and none is stored beside it.",
        remedy: "Instances store theirs for later ones unless BATON_STORE_RUNTIME is false. Deploy instances with the same one (BATON_ROOTFS), or attach on one that has it."
    }
    OtherCpu {
        cause: "The sandbox has seen CPU features that this machine lacks.",
        remedy: "Attach on an instance with the same kind of CPU, and set BATON_CPU_FEATURES to what all of them have, so that new sandboxes can move everywhere."
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
        cause: "A file of the checkpoint is not what its manifest says, or the manifest is not the one the lock names. Nothing was started from it.",
        remedy: "Bring the object back from soft delete or a backup, or go back to the checkpoint before it: `baton rollback ID`."
    }
    /// The object was not signed with any of our keys.
    Unsigned {
        cause: "BATON_HMAC_KEY is set, and the lock, the checkpoint or the snapshot has no signature, or one of another key. Nothing was started from it, and it stays as it is.",
        remedy: "If it was written by an instance of yours, before it had a key or with an older one: put that key last in the list, or sign it with `baton repair ID --sign`. If not, somebody else writes to the bucket: compare `head` in the lock with what the log of your instances says was committed last."
    }
    /// A stored file is missing.
    CheckpointMissing {
        cause: "The lock names a checkpoint of which a file is not in the store.",
        remedy: "Bring the objects back from soft delete, or go back to the checkpoint before it: `baton rollback ID`. Look for lifecycle rules that delete by age: there must be none."
    }
    /// This server does not support the request.
    NotSupported {
        cause: "The server is not configured for what was asked.",
        remedy: "status.message or the answer says what is missing; `baton config` shows what is set."
    }
    Deleted {
        cause: "The sandbox was deleted. That is final.",
        remedy: "Create a new one."
    }
    /// A later attach on another instance won.
    Superseded {
        cause: "A later attach on another instance took precedence.",
        remedy: "Nothing is wrong: the last client with the token has the sandbox. Two clients that attach again and again take it from each other."
    }
    /// The client that is attached is alive.
    InUse {
        cause: "Another client is attached to the sandbox on another instance, and answered when it was asked for a sign of life.",
        remedy: "Attach again when that client has left. A client that speaks `baton.v1` gets the sandbox at once; `docs/protocol.md` has the table."
    }
    /// An operator named an instance that has not asked for the sandbox yet.
    PlacementPending {
        cause: "`placement` names another instance, and that instance has not asked for the sandbox yet: its next sweep has not come, it has no room, or there is no such instance any more. The sandbox runs on where it is.",
        remedy: "It moves as soon as that instance asks, within two sweeps (BATON_SWEEP). If it never does, name an instance that `baton list` shows: `baton handoff ID --to INSTANCE`."
    }
    RunningElsewhere {
        cause: "The sandbox runs on another instance, and it was created without `enable_sandbox_handoff`.",
        remedy: "Attach there, or have it let go with `baton checkpoint ID` or `baton handoff ID`."
    }
    HandoffTimeout {
        cause: "The instance that runs the sandbox did not let go within BATON_HANDOFF_WAIT.",
        remedy: "`baton get ID` shows the owner; its log says why its checkpoint takes so long or fails. If the instance is gone, attach again: its lease is taken over."
    }
    TooLarge {
        cause: "The environment of the sandbox is larger than what can be handed to it, or an archive of its changed files would be larger than its `disk` limit, BATON_ARCHIVE_SIZE or BATON_ARCHIVE_ENTRIES allows.",
        remedy: "Make `env` smaller. For a snapshot, remove files that it need not hold; holes in sparse files count as if they were written."
    }
    /// The snapshot does not exist or is incomplete.
    SnapshotMissing {
        cause: "There is no filesystem snapshot of that name, it is not finished, or its archive is gone.",
        remedy: "`baton snapshot list` shows those there are. An unfinished one that nobody makes any more goes with `baton snapshot delete NAME`."
    }
    /// Snapshots are never overwritten.
    SnapshotExists {
        cause: "A filesystem snapshot of that name exists, or another request makes one.",
        remedy: "Take another name, or delete the old one: `baton snapshot delete NAME`."
    }
    /// A tenant has reached its quota.
    QuotaExceeded {
        cause: "The tenant has as many snapshots as `snapshots` in BATON_QUOTAS allows. Nothing was stored.",
        remedy: "Delete one of the tenant's (`baton snapshot list --tenant NAME`, `baton snapshot delete NAME --tenant NAME`), or raise its quota."
    }
    SnapshotFailed {
        cause: "Pausing the sandbox, writing its file system or storing it failed. It runs on as before; the name is free again.",
        remedy: "The answer has the error. If it is the store, `baton config --check`; otherwise ask again."
    }
    /// The archive cannot become a root file system.
    BadArchive {
        cause: "The archive is damaged, hostile, or holds more than it may. Nothing was kept of it.",
        remedy: "The message says what is wrong with it. BATON_ARCHIVE_SIZE, BATON_ARCHIVE_ENTRIES and BATON_ARCHIVE_DEPTH are the limits."
    }
    RootfsMissing {
        cause: "The root file system a sandbox starts from is not where it should be.",
        remedy: "Run `scripts/setup`, or set BATON_ROOTFS."
    }
    /// Reported when a server starts.
    NotRoot {
        cause: "The server does not run as root, and containers need it.",
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
        remedy: "Give each server a BATON_STATE_DIR of its own."
    }
    /// Reported when a server starts.
    Runsc {
        cause: "The runsc that was found does not run, or is not the one this server is made for.",
        remedy: "Run `scripts/setup`, or set BATON_RUNSC."
    }
    /// Reported when a server starts.
    Missing {
        cause: "A program or directory the server needs is not there.",
        remedy: "Run `scripts/setup`; `baton config` shows where it is looked for."
    }
    /// Reported when a server starts.
    CpuFeatures {
        cause: "BATON_CPU_FEATURES names a feature that this machine lacks or runsc does not know.",
        remedy: "Leave it out of the list."
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
