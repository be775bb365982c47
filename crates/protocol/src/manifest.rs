//! `manifest.json` of checkpoints and snapshots: describes the other files and is written last.
//!
//! Read one with [`versioned::parse`](crate::versioned::parse), which upgrades those of older versions.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::{
    id::{CheckpointId, Invalid, Nonce, SandboxId, Sha256Name},
    snapshot_key::SnapshotKey,
    versioned::{UpgradeFn, Versioned},
};

/// Deserializers of digests whose errors name the field.
macro_rules! fields {
    ($($reader:ident, $type:ty, $field:literal;)*) => {
        $(pub(crate) fn $reader<'de, D: Deserializer<'de>>(from: D) -> Result<$type, D::Error> {
            <$type>::deserialize(from).map_err(|error| D::Error::custom(format!("{}: {error}", $field)))
        })*
    };
}

pub(crate) mod field {
    use super::*;

    fields! {
        file_sha256, Sha256Name, "files.sha256";
        layer_base, Option<Sha256Name>, "layer.base_digest";
        runsc_sha256, Option<Sha256Name>, "runsc.sha256";
        rootfs_digest, Sha256Name, "rootfs.digest";
        rootfs_base, Sha256Name, "rootfs.base_digest";
        archive_path, ArchivePath, "rootfs.archive.path";
        archive_sha256, Sha256Name, "rootfs.archive.sha256";
        snapshot_base, Option<Sha256Name>, "base_digest";
        snapshot_sha256, Sha256Name, "sha256";
        manifest_sha256, Sha256Name, "head.manifest_sha256";
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// The file's name below the checkpoint's prefix.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// The digest of the content, verified before the file is used.
    #[serde(deserialize_with = "field::file_sha256")]
    pub sha256: Sha256Name,
    /// The checksum of the content, which the bucket verifies too.
    pub crc32c: u32,
}

/// The manifest of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointManifest {
    /// The format version; see [`versioned`](crate::versioned).
    pub version: u32,
    /// The checkpoint, as a check against a misplaced object.
    pub checkpoint_id: CheckpointId,
    /// The sandbox that was checkpointed.
    pub sandbox_id: SandboxId,
    /// The epoch of the lease under which it was made.
    pub epoch: u64,
    /// The position among the sandbox's checkpoints.
    pub seq: u64,
    /// The head before this checkpoint.
    pub parent: Option<CheckpointId>,
    /// Every other file of the checkpoint.
    pub files: Vec<File>,
    /// The runtime that a restore needs.
    pub runsc: RunscBuild,
    /// The CPU features that the sandbox has seen; a restore needs all of them.
    pub cpu_features: Vec<String>,
    /// SHA-256 of the OCI spec without the parts that may differ.
    pub oci_sha256: String,
    /// The marker that the agent looks for, in hex.
    pub agent_marker: String,
    /// When the manifest was written, in RFC 3339.
    pub created: String,
    /// The root file system that the sandbox runs on.
    pub rootfs: Rootfs,
    /// A second copy of the file system, for instances that cannot use the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Layer>,
}

impl Versioned for CheckpointManifest {
    const UPGRADES: &'static [UpgradeFn] = &[];
}

impl CheckpointManifest {
    /// The total size of its files in bytes; saturates, because a manifest may claim any size.
    pub fn size(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }
}

/// Describes `files.tar` of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The root file system below the layer; `None` if the archive is complete.
    #[serde(default, deserialize_with = "field::layer_base")]
    pub base_digest: Option<Sha256Name>,
}

/// The build of runsc that made a checkpoint. Only the same one restores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunscBuild {
    /// The version that the binary reports.
    pub version: String,
    /// The gVisor platform, such as `systrap`.
    pub platform: String,
    /// The flags that must be the same at a restore.
    pub flags: Vec<String>,
    /// The digest of the binary, if it is stored; `None` in older checkpoints.
    #[serde(default, deserialize_with = "field::runsc_sha256")]
    pub sha256: Option<Sha256Name>,
}

/// Where an instance can get the root file system if it does not have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    /// The digest of the root file system that the sandbox started from.
    #[serde(deserialize_with = "field::rootfs_digest")]
    pub digest: Sha256Name,
    /// The digest of the root file system below; the same as `digest` unless the sandbox started from a layer.
    #[serde(deserialize_with = "field::rootfs_base")]
    pub base_digest: Sha256Name,
    /// The archive that it was made from; `None` for a base root file system.
    #[serde(default)]
    pub archive: Option<Archive>,
}

/// An archive of files in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Archive {
    /// The bucket; `None` where archives are stored under a mount.
    pub bucket: Option<String>,
    /// The object's name.
    #[serde(deserialize_with = "field::archive_path")]
    pub path: ArchivePath,
    /// The digest of the archive.
    #[serde(deserialize_with = "field::archive_sha256")]
    pub sha256: Sha256Name,
}

/// The name of the archive from which a root file system was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ArchivePath {
    /// The files that a checkpoint carries.
    Checkpoint(CheckpointId),
    /// A snapshot, and the extension of its archive.
    Snapshot(SnapshotKey, ArchiveEnd),
    /// A base root file system. No instance fetches it by this name, so it needs no archive of its own.
    Rootfs(Sha256Name),
}

/// The extension of a snapshot's archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveEnd {
    /// Not compressed.
    Tar,
    /// Compressed with gzip.
    Gzip,
    /// Compressed with Zstandard.
    Zstd,
}

impl ArchiveEnd {
    /// Every extension that a snapshot can have.
    pub const ALL: [Self; 3] = [Self::Tar, Self::Gzip, Self::Zstd];

    /// The extension, with its dot.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tar => ".tar",
            Self::Gzip => ".tar.gz",
            Self::Zstd => ".tar.zst",
        }
    }
}

impl ArchivePath {
    /// Parses an object name; any other path is refused.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let checkpoint = |text: &str| {
            let id = text.strip_prefix("sandbox_checkpoints/")?.strip_suffix("/files.tar")?;
            CheckpointId::parse(id).ok().map(Self::Checkpoint)
        };
        let snapshot = |text: &str| {
            let (name, file) = text.strip_prefix("filesystem_snapshots/")?.split_once('/')?;
            let end = file.strip_prefix(name)?;
            let end = ArchiveEnd::ALL.into_iter().find(|known| known.as_str() == end)?;
            SnapshotKey::parse(name).ok().map(|snapshot| Self::Snapshot(snapshot, end))
        };
        let rootfs = |text: &str| {
            let digest = text.strip_prefix("rootfs/")?.strip_suffix(".tar.zst")?;
            Sha256Name::parse(digest).ok().map(Self::Rootfs)
        };
        checkpoint(text).or_else(|| snapshot(text)).or_else(|| rootfs(text)).ok_or(Invalid {
            what: "path of an archive",
            rule: "it is that of a snapshot's archive, of the files of a checkpoint or of a root file system",
        })
    }
}

impl ArchivePath {
    /// The extension of such a file.
    pub fn end(&self) -> &'static str {
        match self {
            Self::Checkpoint(_) => ArchiveEnd::Tar,
            Self::Snapshot(_, end) => *end,
            Self::Rootfs(_) => ArchiveEnd::Zstd,
        }
        .as_str()
    }
}

impl fmt::Display for ArchivePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checkpoint(id) => write!(f, "sandbox_checkpoints/{id}/files.tar"),
            Self::Rootfs(digest) => write!(f, "rootfs/{digest}.tar.zst"),
            Self::Snapshot(snapshot, end) => write!(f, "filesystem_snapshots/{snapshot}/{snapshot}{}", end.as_str()),
        }
    }
}

impl TryFrom<String> for ArchivePath {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        Self::parse(&text)
    }
}

impl From<ArchivePath> for String {
    fn from(path: ArchivePath) -> String {
        path.to_string()
    }
}

/// The manifest of a filesystem snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotManifest {
    /// The format version; see [`versioned`](crate::versioned).
    pub version: u32,
    /// What the archive contains.
    pub kind: SnapshotKind,
    /// The root file system below a layer.
    #[serde(default, deserialize_with = "field::snapshot_base")]
    pub base_digest: Option<Sha256Name>,
    /// The size of the archive in bytes.
    pub size: u64,
    /// The digest of the archive.
    #[serde(deserialize_with = "field::snapshot_sha256")]
    pub sha256: Sha256Name,
    /// The number of members in the archive.
    pub entries: u64,
    /// The nonce of the request that made it.
    pub nonce: Nonce,
    /// When the manifest was written, in RFC 3339.
    pub created: String,
}

impl Versioned for SnapshotManifest {
    const UPGRADES: &'static [UpgradeFn] = &[];
}

/// What a snapshot's archive contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Only what differs from the root file system below.
    Layer,
    /// A complete root file system.
    Rootfs,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_path_of_an_archive_is_of_one_kind_and_comes_back_as_it_was() {
        let checkpoint = format!("sandbox-abc-1-2-{}", "0".repeat(32));
        let files = format!("sandbox_checkpoints/{checkpoint}/files.tar");
        for good in [files.as_str(), "filesystem_snapshots/a/a.tar", "filesystem_snapshots/team~a/team~a.tar.zst"] {
            assert_eq!(ArchivePath::parse(good).unwrap().to_string(), good);
        }
        let pages = format!("sandbox_checkpoints/{checkpoint}/pages.img");
        for bad in [
            "",
            "/etc/shadow",
            "filesystem_snapshots/../x",
            "filesystem_snapshots/../...tar",
            "filesystem_snapshots/a/b.tar",
            "filesystem_snapshots/a/a.tar/../../x",
            "filesystem_snapshots/a/a.zip",
            "sandbox_checkpoints/../files.tar",
            "sandboxes/a/lock.json",
            pages.as_str(),
        ] {
            assert!(ArchivePath::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_digest_that_is_none_is_refused_with_the_name_of_its_field() {
        let text = include_str!("../fixtures/manifests/checkpoint_v1.json");
        let good: Value = serde_json::from_str(text).unwrap();
        let archive = json!({"bucket": null, "path": "filesystem_snapshots/a/a.tar", "sha256": "0".repeat(64)});
        let mut whole = good;
        whole["rootfs"]["archive"] = archive;
        whole["layer"] = json!({"base_digest": "0".repeat(64)});
        whole["runsc"]["sha256"] = json!("0".repeat(64));
        serde_json::from_value::<CheckpointManifest>(whole.clone()).unwrap();
        for (pointer, field) in [
            ("/files/0/sha256", "files.sha256"),
            ("/layer/base_digest", "layer.base_digest"),
            ("/runsc/sha256", "runsc.sha256"),
            ("/rootfs/digest", "rootfs.digest"),
            ("/rootfs/base_digest", "rootfs.base_digest"),
            ("/rootfs/archive/path", "rootfs.archive.path"),
            ("/rootfs/archive/sha256", "rootfs.archive.sha256"),
        ] {
            for wrong in ["", "/bin/sh", "../x", &"0A".repeat(32)] {
                let mut manifest = whole.clone();
                *manifest.pointer_mut(pointer).unwrap() = json!(wrong);
                let error = serde_json::from_value::<CheckpointManifest>(manifest).unwrap_err().to_string();
                assert!(error.starts_with(field), "{error}");
            }
        }
    }
}
