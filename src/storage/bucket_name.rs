//! The name that records use for a bucket, even if its objects are accessed through a mount. Pure.
//!
//! A mount does not know which bucket it shows. An operator states it by setting both variables of an artifact: bytes
//! go through the mount, the bucket's name is recorded. Otherwise the name is unknown, and an unknown name rules
//! nothing out: checkpoint ids are unique and the lock holds the manifest's SHA-256, so an instance that uses another
//! bucket finds nothing rather than the wrong object.

use super::layout::{Artifact, ArtifactRoot, root_for};
use crate::config::StorageSettings;

/// The name of the bucket that holds an artifact under these settings; `None` if it is unknown.
pub fn of(artifact: Artifact, settings: &StorageSettings) -> Option<String> {
    match root_for(artifact, settings)? {
        ArtifactRoot::Bucket(name) => Some(name),
        // `all_mount` is about mounts in general and implies no bucket.
        ArtifactRoot::Mounted(_) => match artifact {
            Artifact::Lock | Artifact::Metadata => None,
            Artifact::Checkpoints => settings.checkpoint_bucket.clone().filter(|_| settings.checkpoint_mount.is_some()),
            Artifact::Snapshots => settings.snapshot_bucket.clone().filter(|_| settings.snapshot_mount.is_some()),
        },
    }
}

/// Whether a record and an instance may refer to the same bucket: not if both names are known and differ.
pub fn may_be_one(recorded: Option<&String>, own: Option<&String>) -> bool {
    match (recorded, own) {
        (Some(recorded), Some(own)) => recorded == own,
        (None, _) | (_, None) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(change: impl FnOnce(&mut StorageSettings)) -> [Option<String>; 2] {
        let mut settings = StorageSettings::default();
        change(&mut settings);
        [Artifact::Checkpoints, Artifact::Snapshots].map(|artifact| of(artifact, &settings))
    }

    #[test]
    fn a_mount_has_the_name_that_its_own_bucket_variable_gives_it() {
        let (bucket, mount) = (Some("b".to_owned()), Some("/m".into()));
        let named = Some("b".to_owned());
        let both = names(|settings| {
            (settings.checkpoint_bucket, settings.checkpoint_mount) = (bucket.clone(), mount.clone());
            (settings.snapshot_bucket, settings.snapshot_mount) = (bucket.clone(), mount.clone());
        });
        assert_eq!(both, [named.clone(), named.clone()]);
        assert_eq!(names(|settings| settings.checkpoint_mount.clone_from(&mount)), [None, None]);
        assert_eq!(names(|settings| settings.checkpoint_bucket.clone_from(&bucket)), [named.clone(), None]);
        let apart = names(|settings| {
            (settings.checkpoint_bucket, settings.snapshot_mount) = (bucket.clone(), mount.clone());
        });
        assert_eq!(apart, [named, None], "the bucket of one artifact says nothing about the mount of another");
        let everything = names(|settings| (settings.checkpoint_bucket, settings.all_mount) = (bucket, mount));
        assert_eq!(everything, [None, None]);
    }

    #[test]
    fn only_two_names_that_differ_are_two_buckets() {
        let (one, other) = ("one".to_owned(), "other".to_owned());
        for (recorded, own, may) in [
            (Some(&one), Some(&one), true),
            (Some(&one), Some(&other), false),
            (Some(&one), None, true),
            (None, Some(&one), true),
            (None, None, true),
        ] {
            assert_eq!(may_be_one(recorded, own), may, "{recorded:?} and {own:?}");
        }
    }
}
