//! Checkpoints that were put into the store by hand, perhaps under another name: what their folder contains, what is
//! missing, and how they are copied to their proper place.

use std::path::Path;

use baton_protocol::{
    id::{CheckpointId, Invalid, Sha256Name},
    manifest::CheckpointManifest,
};

use super::{
    checkpoint_io::{self, put_once, retry},
    checkpoints::Checkpoints,
    layout::{Image, Object},
    store::{PollResult, Result},
};

const CHECKPOINTS: &str = "sandbox_checkpoints/";
const MANIFEST: &str = "manifest.json";
const SEAL: &str = "seal.hmac";
const LONGEST_NAME: usize = 128;

/// A checkpoint folder as named by `latest_sandbox_checkpoint.path`: `sandbox_checkpoints/<name>/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(String);

impl Folder {
    pub fn parse(path: &str) -> std::result::Result<Self, Invalid> {
        let name = path.strip_prefix(CHECKPOINTS).map(|rest| rest.strip_suffix('/').unwrap_or(rest));
        let is_sound = |name: &&str| {
            name.len() <= LONGEST_NAME
                && name.starts_with(|c: char| c.is_ascii_alphanumeric())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
        };
        let rule = "it is `sandbox_checkpoints/`, one name of letters, digits, `.`, `_` or `-`, and `/`";
        name.filter(is_sound).map(|name| Self(name.to_owned())).ok_or(Invalid { what: "path of a checkpoint", rule })
    }

    /// The checkpoint this folder belongs to; `None` if the name is not a checkpoint id.
    pub fn checkpoint(&self) -> Option<CheckpointId> {
        CheckpointId::parse(&self.0).ok()
    }

    pub fn path(&self) -> String {
        format!("{CHECKPOINTS}{}/", self.0)
    }

    fn key(&self, file: &str) -> String {
        format!("{CHECKPOINTS}{}/{file}", self.0)
    }
}

impl From<&CheckpointId> for Folder {
    fn from(id: &CheckpointId) -> Self {
        Self(id.as_str().to_owned())
    }
}

impl Checkpoints {
    /// The manifest in a folder, and its digest.
    pub async fn manifest_in(&self, folder: &Folder) -> Result<Option<(CheckpointManifest, Sha256Name)>> {
        self.manifest_at(folder.key(MANIFEST)).await
    }

    /// The files of a checkpoint that are missing in a folder or differ in size from the manifest.
    pub async fn missing_in(&self, folder: &Folder, manifest: Option<&CheckpointManifest>) -> Result<Vec<String>> {
        let wanted: Vec<(String, Option<u64>)> = match manifest {
            Some(manifest) => manifest.files.iter().map(|file| (file.name.clone(), Some(file.size))).collect(),
            None => {
                let images = Image::ALL.map(Image::file_name).into_iter();
                images.chain([MANIFEST]).map(|name| (name.to_owned(), None)).collect()
            }
        };
        let (path, mut there, mut after) = (folder.path(), Vec::new(), None);
        loop {
            let page = retry(&self.clock, || self.store.list(&path, after.as_deref())).await?;
            after = page.entries.last().map(|entry| entry.key.clone());
            there.extend(page.entries);
            if !page.more {
                break;
            }
        }
        let is_there = |name: &str, size: Option<u64>| {
            let key = folder.key(name);
            there.iter().any(|entry| entry.key == key && size.is_none_or(|size| entry.size == size))
        };
        Ok(wanted.into_iter().filter(|(name, size)| !is_there(name, *size)).map(|(name, _)| name).collect())
    }

    /// Copies a complete checkpoint from a folder to its proper place, verifying each file on its way through the empty
    /// directory `through`; the folder is left as it is. Returns the digest of the new manifest. Idempotent.
    pub async fn adopt(&self, folder: &Folder, manifest: &CheckpointManifest, through: &Path) -> Result<Sha256Name> {
        let (store, clock) = (&*self.store, &self.clock);
        for (image, digest) in checkpoint_io::images(manifest)? {
            let file = through.join(image.file_name());
            checkpoint_io::fetch(store, clock, &folder.key(image.file_name()), &file, &digest, &|_| {}).await?;
        }
        let sha256 = checkpoint_io::upload(store, clock, through, manifest, &|_, _| {}).await?;
        if let PollResult::Changed(seal, _) = store.get_if_changed(&folder.key(SEAL), None).await? {
            put_once(store, clock, &Object::CheckpointSeal(&manifest.checkpoint_id).key(), &seal).await?;
        }
        Ok(sha256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_folder_of_checkpoints_and_never_leads_elsewhere() {
        for good in ["sandbox_checkpoints/checkpoint-xyz/", "sandbox_checkpoints/checkpoint-xyz"] {
            let folder = Folder::parse(good).unwrap();
            assert_eq!(folder.path(), "sandbox_checkpoints/checkpoint-xyz/");
            assert_eq!((folder.checkpoint(), folder.key("a")), (None, "sandbox_checkpoints/checkpoint-xyz/a".into()));
        }
        let long = format!("sandbox_checkpoints/{}/", "a".repeat(129));
        for bad in [
            "",
            "sandbox_checkpoints/",
            "sandbox_checkpoints//",
            "sandbox_checkpoints/../x/",
            "sandbox_checkpoints/.x/",
            "sandbox_checkpoints/a/b/",
            "sandbox_checkpoints/a\\b/",
            "sandboxes/a/",
            "/sandbox_checkpoints/a/",
            "gs://b/sandbox_checkpoints/a/",
            "sandbox_checkpoints/é/",
            long.as_str(),
        ] {
            assert!(Folder::parse(bad).is_err(), "{bad:?}");
        }
    }
}
