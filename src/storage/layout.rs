//! Where objects are stored: maps settings and typed names to a path or an object name. Pure.

use std::path::PathBuf;

pub use baton_protocol::id::Sha256Name;
use baton_protocol::{
    id::{CheckpointId, SandboxId, Tenant},
    snapshot_key::SnapshotKey,
};

use crate::config::StorageSettings;

/// A kind of object that is configured and stored as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Artifact {
    Lock,
    Metadata,
    /// Includes base root file systems and runtimes.
    Checkpoints,
    Snapshots,
}

impl Artifact {
    pub const ALL: [Artifact; 4] = [Artifact::Lock, Artifact::Metadata, Artifact::Checkpoints, Artifact::Snapshots];
}

/// The root of an artifact's objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArtifactRoot {
    Mounted(PathBuf),
    Bucket(String),
}

/// The location of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    Mounted(PathBuf),
    Gcs { bucket: String, name: String },
}

/// The place of an artifact; `None` if it is not configured.
///
/// Lock and metadata prefer the bucket, since only a bucket can be shared; the other artifacts prefer the mount, since
/// an operator who configures a mount wants it used.
pub fn root_for(artifact: Artifact, settings: &StorageSettings) -> Option<ArtifactRoot> {
    let bucket = |name: &Option<String>| name.clone().map(ArtifactRoot::Bucket);
    let mount = |path: &Option<PathBuf>| path.clone().or_else(|| settings.all_mount.clone()).map(ArtifactRoot::Mounted);
    let metadata = || bucket(&settings.metadata_bucket).or_else(|| mount(&settings.metadata_mount));
    match artifact {
        Artifact::Lock => bucket(&settings.lock_bucket).or_else(metadata),
        Artifact::Metadata => metadata(),
        Artifact::Checkpoints => mount(&settings.checkpoint_mount).or_else(|| bucket(&settings.checkpoint_bucket)),
        Artifact::Snapshots => mount(&settings.snapshot_mount).or_else(|| bucket(&settings.snapshot_bucket)),
    }
}

/// The files of a checkpoint, besides its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    Checkpoint,
    PagesMeta,
    Pages,
    /// The file system alone; only if the sandbox asked for it.
    Files,
}

impl Image {
    /// The files that every checkpoint has.
    pub const ALL: [Image; 3] = [Image::Checkpoint, Image::PagesMeta, Image::Pages];

    pub fn file_name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint.img",
            Self::PagesMeta => "pages_meta.img",
            Self::Pages => "pages.img",
            Self::Files => "files.tar",
        }
    }
}

/// Every kind of stored object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object<'a> {
    Lock(&'a SandboxId),
    Metadata(&'a SandboxId),
    Image(&'a CheckpointId, Image),
    CheckpointManifest(&'a CheckpointId),
    /// The signature beside the manifest, if instances have keys.
    CheckpointSeal(&'a CheckpointId),
    Pin(&'a CheckpointId, &'a SandboxId),
    Rootfs(&'a Sha256Name),
    Runtime(&'a Sha256Name),
    SnapshotArchive(&'a SnapshotKey),
    SnapshotMaking(&'a SnapshotKey),
    SnapshotManifest(&'a SnapshotKey),
    /// The signature beside the manifest or, without one, the archive.
    SnapshotSeal(&'a SnapshotKey),
}

impl Object<'_> {
    pub fn artifact(&self) -> Artifact {
        match self {
            Self::Lock(_) => Artifact::Lock,
            Self::Metadata(_) => Artifact::Metadata,
            Self::Image(..)
            | Self::CheckpointManifest(_)
            | Self::CheckpointSeal(_)
            | Self::Pin(..)
            | Self::Rootfs(_)
            | Self::Runtime(_) => Artifact::Checkpoints,
            Self::SnapshotArchive(_) | Self::SnapshotMaking(_) | Self::SnapshotManifest(_) | Self::SnapshotSeal(_) => {
                Artifact::Snapshots
            }
        }
    }

    /// Its key in the store of its artifact.
    pub fn key(&self) -> String {
        match self {
            // These two are read most often.
            Self::Lock(sandbox) => [SANDBOXES, sandbox.as_str(), "/lock.json"].concat(),
            Self::Metadata(sandbox) => [SANDBOXES, sandbox.as_str(), "/metadata.json"].concat(),
            Self::Image(checkpoint, image) => format!("{}{}", checkpoint_prefix(checkpoint), image.file_name()),
            Self::CheckpointManifest(checkpoint) => format!("{}manifest.json", checkpoint_prefix(checkpoint)),
            Self::CheckpointSeal(checkpoint) => format!("{}seal.hmac", checkpoint_prefix(checkpoint)),
            Self::Pin(checkpoint, sandbox) => format!("{}{sandbox}", pins_prefix(checkpoint)),
            Self::Rootfs(digest) => format!("rootfs/{}.tar.zst", digest.as_str()),
            Self::Runtime(digest) => format!("runtimes/{}", digest.as_str()),
            Self::SnapshotArchive(name) => format!("{}{name}.tar", snapshot_prefix(name)),
            Self::SnapshotMaking(name) => format!("{}making.json", snapshot_prefix(name)),
            Self::SnapshotManifest(name) => format!("{}manifest.json", snapshot_prefix(name)),
            Self::SnapshotSeal(name) => format!("{}seal.hmac", snapshot_prefix(name)),
        }
    }

    /// The location of the object under these settings.
    pub fn resolve(&self, settings: &StorageSettings) -> Option<Resolved> {
        root_for(self.artifact(), settings).map(|place| match place {
            ArtifactRoot::Mounted(root) => Resolved::Mounted(root.join(self.key())),
            ArtifactRoot::Bucket(bucket) => Resolved::Gcs { bucket, name: self.key() },
        })
    }
}

/// The common prefix of all sandboxes.
pub const SANDBOXES: &str = "sandboxes/";

pub fn sandbox_prefix(sandbox: &SandboxId) -> String {
    format!("{SANDBOXES}{sandbox}/")
}

pub fn checkpoint_prefix(checkpoint: &CheckpointId) -> String {
    format!("sandbox_checkpoints/{checkpoint}/")
}

/// The prefix of a sandbox's checkpoints; it may also match those of a sandbox whose id begins with this id.
pub fn checkpoints_of(sandbox: &SandboxId) -> String {
    format!("sandbox_checkpoints/{sandbox}-")
}

pub fn pins_prefix(checkpoint: &CheckpointId) -> String {
    format!("{}pins/", checkpoint_prefix(checkpoint))
}

/// The common prefix of all snapshots.
pub const SNAPSHOTS: &str = "filesystem_snapshots/";

/// The snapshot that a listed key belongs to; `None` if it belongs to none.
pub fn snapshot_of(key: &str) -> Option<SnapshotKey> {
    let (name, _) = key.strip_prefix(SNAPSHOTS)?.split_once('/')?;
    SnapshotKey::parse(name).ok()
}

pub fn snapshot_prefix(snapshot: &SnapshotKey) -> String {
    format!("{SNAPSHOTS}{snapshot}/")
}

/// The prefix of all snapshots of a tenant, and of no others.
pub fn snapshots_of(tenant: &Tenant) -> String {
    format!("{SNAPSHOTS}{}", SnapshotKey::prefix_of(tenant))
}

/// The sandbox that a listed key belongs to; `None` if it belongs to none.
pub fn sandbox_of(key: &str) -> Option<SandboxId> {
    let (id, _) = key.strip_prefix(SANDBOXES)?.split_once('/')?;
    SandboxId::parse(id).ok()
}

/// The checkpoint that a listed key belongs to; `None` if it belongs to none.
pub fn checkpoint_of(key: &str) -> Option<CheckpointId> {
    let (id, _) = key.strip_prefix("sandbox_checkpoints/")?.split_once('/')?;
    CheckpointId::parse(id).ok()
}

#[cfg(test)]
mod tests {
    use baton_protocol::id::Nonce;

    use super::*;
    use crate::storage::store::check_key;

    fn bucket(name: &str) -> Option<ArtifactRoot> {
        Some(ArtifactRoot::Bucket(name.to_owned()))
    }

    fn mounted(path: &str) -> Option<ArtifactRoot> {
        Some(ArtifactRoot::Mounted(path.into()))
    }

    fn places(settings: &StorageSettings) -> [Option<ArtifactRoot>; 4] {
        Artifact::ALL.map(|artifact| root_for(artifact, settings))
    }

    #[test]
    fn the_documented_configurations_resolve_as_documented() {
        let none = StorageSettings::default;
        let text = |text: &str| Some(text.to_owned());
        let path = |text: &str| Some(PathBuf::from(text));
        let table = [
            ("nothing", none(), [None, None, None, None]),
            (
                "buckets",
                StorageSettings {
                    metadata_bucket: text("m"),
                    checkpoint_bucket: text("c"),
                    snapshot_bucket: text("s"),
                    ..none()
                },
                [bucket("m"), bucket("m"), bucket("c"), bucket("s")],
            ),
            (
                "mounts",
                StorageSettings {
                    metadata_mount: path("/m"),
                    checkpoint_mount: path("/c"),
                    snapshot_mount: path("/s"),
                    ..none()
                },
                [mounted("/m"), mounted("/m"), mounted("/c"), mounted("/s")],
            ),
            (
                "both: the bucket for lock and metadata, the mount for artifacts",
                StorageSettings {
                    metadata_bucket: text("m"),
                    metadata_mount: path("/m"),
                    checkpoint_bucket: text("c"),
                    checkpoint_mount: path("/c"),
                    snapshot_bucket: text("s"),
                    snapshot_mount: path("/s"),
                    ..none()
                },
                [bucket("m"), bucket("m"), mounted("/c"), mounted("/s")],
            ),
            (
                "one directory for all",
                StorageSettings { all_mount: path("/a"), ..none() },
                [mounted("/a"), mounted("/a"), mounted("/a"), mounted("/a")],
            ),
            (
                "one directory for what has no mount of its own",
                StorageSettings { all_mount: path("/a"), checkpoint_mount: path("/c"), ..none() },
                [mounted("/a"), mounted("/a"), mounted("/c"), mounted("/a")],
            ),
            (
                "the lock moves alone",
                StorageSettings { lock_bucket: text("l"), metadata_mount: path("/m"), ..none() },
                [bucket("l"), mounted("/m"), None, None],
            ),
            (
                "a lock bucket gives metadata no home",
                StorageSettings { lock_bucket: text("l"), ..none() },
                [bucket("l"), None, None, None],
            ),
        ];
        for (name, settings, expected) in table {
            assert_eq!(places(&settings), expected, "{name}");
        }
    }

    #[test]
    fn every_combination_of_the_eight_variables_follows_the_four_rules() {
        for bits in 0..256_u32 {
            let set = |bit: u32| bits >> bit & 1 == 1;
            let text = |bit: u32, name: &str| set(bit).then(|| name.to_owned());
            let path = |bit: u32, name: &str| set(bit).then(|| PathBuf::from(name));
            let settings = StorageSettings {
                metadata_bucket: text(0, "mb"),
                metadata_mount: path(1, "/mm"),
                lock_bucket: text(2, "lb"),
                checkpoint_bucket: text(3, "cb"),
                checkpoint_mount: path(4, "/cm"),
                snapshot_bucket: text(5, "sb"),
                snapshot_mount: path(6, "/sm"),
                all_mount: path(7, "/all"),
                ..StorageSettings::default()
            };
            // In order of precedence, like the columns of the table of variables from left to right.
            let first = |ranks: &[(bool, Option<ArtifactRoot>)]| {
                ranks.iter().find(|(set, _)| *set).and_then(|(_, place)| place.clone())
            };
            let metadata = [(set(0), bucket("mb")), (set(1), mounted("/mm")), (set(7), mounted("/all"))];
            let lock = [(set(2), bucket("lb")), metadata[0].clone(), metadata[1].clone(), metadata[2].clone()];
            let expected = [
                first(&lock),
                first(&metadata),
                first(&[(set(4), mounted("/cm")), (set(7), mounted("/all")), (set(3), bucket("cb"))]),
                first(&[(set(6), mounted("/sm")), (set(7), mounted("/all")), (set(5), bucket("sb"))]),
            ];
            assert_eq!(places(&settings), expected, "{settings:?}");
        }
    }

    #[test]
    fn every_object_has_its_documented_name_in_both_modes() {
        let sandbox = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let checkpoint = CheckpointId::new(&sandbox, 7, 12, &Nonce::from_bits([0xab; 16]));
        let [snapshot, owned] = ["numpy", "team-a~numpy"].map(|text| SnapshotKey::parse(text).unwrap());
        let digest = Sha256Name::parse(&"0a".repeat(32)).unwrap();
        let images = Image::ALL.map(|image| Object::Image(&checkpoint, image));
        let at = format!("sandbox_checkpoints/{checkpoint}/");
        let table = [
            (Object::Lock(&sandbox), "l", format!("sandboxes/{sandbox}/lock.json")),
            (Object::Metadata(&sandbox), "m", format!("sandboxes/{sandbox}/metadata.json")),
            (images[0], "c", format!("{at}checkpoint.img")),
            (images[1], "c", format!("{at}pages_meta.img")),
            (images[2], "c", format!("{at}pages.img")),
            (Object::CheckpointManifest(&checkpoint), "c", format!("{at}manifest.json")),
            (Object::CheckpointSeal(&checkpoint), "c", format!("{at}seal.hmac")),
            (Object::Pin(&checkpoint, &sandbox), "c", format!("{at}pins/{sandbox}")),
            (Object::Rootfs(&digest), "c", format!("rootfs/{}.tar.zst", digest.as_str())),
            (Object::Runtime(&digest), "c", format!("runtimes/{}", digest.as_str())),
            (Object::SnapshotArchive(&snapshot), "s", "filesystem_snapshots/numpy/numpy.tar".to_owned()),
            (Object::SnapshotMaking(&snapshot), "s", "filesystem_snapshots/numpy/making.json".to_owned()),
            (Object::SnapshotManifest(&snapshot), "s", "filesystem_snapshots/numpy/manifest.json".to_owned()),
            (Object::SnapshotSeal(&snapshot), "s", "filesystem_snapshots/numpy/seal.hmac".to_owned()),
            (Object::SnapshotArchive(&owned), "s", "filesystem_snapshots/team-a~numpy/team-a~numpy.tar".to_owned()),
            (Object::SnapshotManifest(&owned), "s", "filesystem_snapshots/team-a~numpy/manifest.json".to_owned()),
        ];
        let text = |text: &str| Some(text.to_owned());
        let buckets = StorageSettings {
            metadata_bucket: text("m"),
            lock_bucket: text("l"),
            checkpoint_bucket: text("c"),
            snapshot_bucket: text("s"),
            ..StorageSettings::default()
        };
        let mount = StorageSettings { all_mount: Some("/data".into()), ..StorageSettings::default() };
        for (object, home, name) in table {
            check_key(&object.key()).unwrap();
            let gcs = Resolved::Gcs { bucket: home.to_owned(), name: name.clone() };
            assert_eq!(object.resolve(&buckets), Some(gcs), "{object:?}");
            assert_eq!(object.resolve(&mount), Some(Resolved::Mounted(format!("/data/{name}").into())), "{object:?}");
            assert_eq!(object.resolve(&StorageSettings::default()), None, "{object:?}");
        }
        assert!(images[0].key().starts_with(&checkpoints_of(&sandbox)));
        let manifest = Object::SnapshotManifest(&owned).key();
        assert_eq!(snapshot_of(&manifest), Some(owned.clone()));
        assert!(manifest.starts_with(&snapshots_of(owned.tenant.as_ref().unwrap())));
        assert_eq!(sandbox_of(&Object::Lock(&sandbox).key()), Some(sandbox.clone()));
        assert_eq!(checkpoint_of(&images[0].key()), Some(checkpoint.clone()));
        for strange in ["sandboxes/x/lock.json", "sandboxes/lock.json", "other/x", "sandbox_checkpoints/x/y"] {
            assert_eq!((sandbox_of(strange), checkpoint_of(strange)), (None, None), "{strange}");
        }
    }

    #[test]
    fn a_digest_in_a_name_cannot_climb() {
        for bad in ["", "..", &"0A".repeat(32), &"0".repeat(63), &format!("{}/", "0".repeat(63))] {
            assert!(Sha256Name::parse(bad).is_err(), "{bad:?}");
        }
    }
}
