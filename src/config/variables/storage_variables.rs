//! Where state is kept, for how long, and the timing of the lease.

use super::{
    Preset::{Is, Time, Unset},
    Section, ValueKind, Variable,
};
use crate::config::LeaseTimes;

section! {
    STORAGE, "Storage",
    SANDBOX_METADATA_BUCKET = (
        "SANDBOX_METADATA_BUCKET", Text, Unset,
        "Bucket of locks and metadata; overrides the mount",
    );
    SANDBOX_METADATA_MOUNT_PATH = (
        "SANDBOX_METADATA_MOUNT_PATH", Path, Unset,
        "Directory of locks and metadata, on a local file system",
    );
    SANDBOX_LOCK_BUCKET = (
        "SANDBOX_LOCK_BUCKET", Text, Unset,
        "Bucket of locks, if they have one of their own",
    );
    SANDBOX_CHECKPOINT_BUCKET = (
        "SANDBOX_CHECKPOINT_BUCKET", Text, Unset,
        "Bucket of checkpoints; together with a mount, the name of the mounted bucket",
    );
    SANDBOX_CHECKPOINT_MOUNT_PATH = (
        "SANDBOX_CHECKPOINT_MOUNT_PATH", Path, Unset,
        "Directory of checkpoints, or a mount of their bucket; overrides the bucket",
    );
    FILESYSTEM_SNAPSHOT_BUCKET = (
        "FILESYSTEM_SNAPSHOT_BUCKET", Text, Unset,
        "Bucket of snapshots; together with a mount, the name of the mounted bucket",
    );
    FILESYSTEM_SNAPSHOT_MOUNT_PATH = (
        "FILESYSTEM_SNAPSHOT_MOUNT_PATH", Path, Unset,
        "Directory of snapshots, or a mount of their bucket; overrides the bucket",
    );
    CHECKPOINT_AND_RESTORE_PATH = (
        "CHECKPOINT_AND_RESTORE_PATH", Path, Unset,
        "Directory used for every mount above that is unset",
    );
    GCS_ENDPOINT = (
        "BATON_GCS_ENDPOINT", Url, Unset,
        "Cloud Storage server to use instead of the real one, without credentials",
    );
    STORAGE_EMULATOR_HOST = (
        "STORAGE_EMULATOR_HOST", Url, Unset,
        "The same as read by Google's clients, also as host and port; used if BATON_GCS_ENDPOINT is unset",
    );
    HMAC_KEY = (
        "BATON_HMAC_KEY", Keys, Unset,
        "Keys that sign locks, checkpoints and snapshots, the same for every instance: the first key signs, every key verifies, and nothing is started from an object without a valid signature. Unset, nothing is signed",
    );
    KEEP_CHECKPOINTS = (
        "BATON_KEEP_CHECKPOINTS", Count, Is("2"),
        "Committed checkpoints kept per sandbox",
    );
    CHECKPOINT_EVERY = (
        "BATON_CHECKPOINT_EVERY", SpanOrOff, Is("off"),
        "How often to checkpoint running sandboxes, so that less is lost if an instance crashes",
    );
    SWEEP = (
        "BATON_SWEEP", SpanOrOff, Is("60s"),
        "How often to scan the store for sandboxes that no instance manages",
    );
    RETENTION = (
        "BATON_RETENTION", SpanOrOff, Is("off"),
        "Age at which sandboxes without a ttl are deleted",
    );
}

section! {
    LEASE, "Lease",
    RENEW = (
        "BATON_RENEW", Span, Time(LeaseTimes::DEFAULT.renew),
        "How often an instance renews its lease on a sandbox",
    );
    HOLD = (
        "BATON_HOLD", Span, Time(LeaseTimes::DEFAULT.hold),
        "How long a sandbox may run after its last successful renewal",
    );
    TAKEOVER = (
        "BATON_TAKEOVER", Span, Time(LeaseTimes::DEFAULT.takeover),
        "How long a lease must be unchanged before another instance may take it over",
    );
    HANDOFF_WAIT = (
        "BATON_HANDOFF_WAIT", Span, Time(LeaseTimes::DEFAULT.handoff_wait),
        "How long an attach waits for a live owner to release the sandbox",
    );
    TIME_SCALE = (
        "BATON_TIME_SCALE", Factor, Is("1"),
        "For tests: factor for all lease and storage timeouts",
    );
}
