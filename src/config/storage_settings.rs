//! The settings of the storage, as given.

use std::{path::PathBuf, time::Duration};

use super::{Error, LeaseTimes, Reader, parse, variables::*};

/// The storage settings from the environment. Empty by default: everything is ephemeral.
/// `storage` decides what they mean in combination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageSettings {
    pub metadata_bucket: Option<String>,
    pub metadata_mount: Option<PathBuf>,
    pub lock_bucket: Option<String>,
    pub checkpoint_bucket: Option<String>,
    pub checkpoint_mount: Option<PathBuf>,
    pub snapshot_bucket: Option<String>,
    pub snapshot_mount: Option<PathBuf>,
    pub all_mount: Option<PathBuf>,
    /// A custom Cloud Storage endpoint, used without credentials.
    pub gcs_endpoint: Option<String>,
    /// Timeout of a call on a small object.
    pub call_timeout: Duration,
    /// A transfer fails after this long without progress.
    pub stall_timeout: Duration,
}

impl Default for StorageSettings {
    fn default() -> Self {
        Self {
            metadata_bucket: None,
            metadata_mount: None,
            lock_bucket: None,
            checkpoint_bucket: None,
            checkpoint_mount: None,
            snapshot_bucket: None,
            snapshot_mount: None,
            all_mount: None,
            gcs_endpoint: None,
            call_timeout: LeaseTimes::DEFAULT.call,
            stall_timeout: Duration::from_secs(30),
        }
    }
}

impl StorageSettings {
    /// `call` is the timeout of a call on a small object.
    pub(super) fn read(from: &mut Reader<'_>, call: Duration) -> Result<Self, Error> {
        let own_endpoint = from.optional(GCS_ENDPOINT, parse::url)?;
        // Shared by all Google clients.
        let shared_endpoint = from.optional(STORAGE_EMULATOR_HOST, parse::url_or_host)?;
        Ok(Self {
            metadata_bucket: from.optional(SANDBOX_METADATA_BUCKET, parse::text)?,
            metadata_mount: from.optional(SANDBOX_METADATA_MOUNT_PATH, parse::path)?,
            lock_bucket: from.optional(SANDBOX_LOCK_BUCKET, parse::text)?,
            checkpoint_bucket: from.optional(SANDBOX_CHECKPOINT_BUCKET, parse::text)?,
            checkpoint_mount: from.optional(SANDBOX_CHECKPOINT_MOUNT_PATH, parse::path)?,
            snapshot_bucket: from.optional(FILESYSTEM_SNAPSHOT_BUCKET, parse::text)?,
            snapshot_mount: from.optional(FILESYSTEM_SNAPSHOT_MOUNT_PATH, parse::path)?,
            all_mount: from.optional(CHECKPOINT_AND_RESTORE_PATH, parse::path)?,
            gcs_endpoint: own_endpoint.or(shared_endpoint),
            call_timeout: call,
            ..Self::default()
        })
    }

    /// Whether anything is stored in Cloud Storage, directly or through a mount.
    pub fn uses_a_bucket(&self) -> bool {
        // With `all_mount` alone it is unknown whether writes go to the bucket.
        let is_used = |bucket: &Option<String>, mount: &Option<PathBuf>| {
            bucket.is_some() && (mount.is_some() || self.all_mount.is_none())
        };
        self.metadata_bucket.is_some()
            || self.lock_bucket.is_some()
            || is_used(&self.checkpoint_bucket, &self.checkpoint_mount)
            || is_used(&self.snapshot_bucket, &self.snapshot_mount)
    }
}
