//! Contexts: servers by name, each with its address, its keys and its storage, in a file that only its owner can read.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{context::UsageError, private_file::PrivateFile};
use crate::config::variables::{
    CHECKPOINT_AND_RESTORE_PATH, FILESYSTEM_SNAPSHOT_BUCKET, FILESYSTEM_SNAPSHOT_MOUNT_PATH, GCS_ENDPOINT, HMAC_KEY,
    HOLD, KEEP_CHECKPOINTS, RENEW, SANDBOX_CHECKPOINT_BUCKET, SANDBOX_CHECKPOINT_MOUNT_PATH, SANDBOX_LOCK_BUCKET,
    SANDBOX_METADATA_BUCKET, SANDBOX_METADATA_MOUNT_PATH, STORAGE_EMULATOR_HOST, TAKEOVER, TIME_SCALE,
};

/// The variables that say where the storage is. They belong together: those of a context and those of the environment
/// are never mixed.
pub const STORAGE_PLACES: [&str; 10] = [
    SANDBOX_METADATA_BUCKET.name,
    SANDBOX_METADATA_MOUNT_PATH.name,
    SANDBOX_LOCK_BUCKET.name,
    SANDBOX_CHECKPOINT_BUCKET.name,
    SANDBOX_CHECKPOINT_MOUNT_PATH.name,
    FILESYSTEM_SNAPSHOT_BUCKET.name,
    FILESYSTEM_SNAPSHOT_MOUNT_PATH.name,
    CHECKPOINT_AND_RESTORE_PATH.name,
    GCS_ENDPOINT.name,
    STORAGE_EMULATOR_HOST.name,
];

/// The other variables that commands on the storage use.
pub const STORAGE_DETAILS: [&str; 6] =
    [HMAC_KEY.name, KEEP_CHECKPOINTS.name, RENEW.name, HOLD.name, TAKEOVER.name, TIME_SCALE.name];

/// Whether a context may set the variable.
pub fn is_storage_variable(name: &str) -> bool {
    STORAGE_PLACES.contains(&name) || STORAGE_DETAILS.contains(&name)
}

/// One server, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedContext {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_key: Option<String>,
    /// Variables of the storage, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub storage: BTreeMap<String, String>,
}

impl SavedContext {
    /// Whether it says where the storage is.
    pub fn has_storage(&self) -> bool {
        STORAGE_PLACES.iter().any(|name| self.storage.contains_key(*name))
    }

    /// Whether `url` is the address of this context's server, so that its keys may be sent there.
    pub fn is_at(&self, url: &str) -> bool {
        self.url.as_deref().is_some_and(|own| normalized(own) == normalized(url))
    }
}

/// The address without what does not matter: `ws` and `http` are one server.
fn normalized(url: &str) -> String {
    let url = url.trim_end_matches('/').to_ascii_lowercase();
    match url.split_once("://") {
        Some(("http", rest)) => format!("ws://{rest}"),
        Some(("https", rest)) => format!("wss://{rest}"),
        _ => url,
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextFile {
    /// The one that counts where none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    #[serde(default)]
    pub contexts: BTreeMap<String, SavedContext>,
}

impl ContextFile {
    pub fn get(&self, name: &str) -> Result<&SavedContext, UsageError> {
        self.contexts.get(name).ok_or_else(|| unknown(name))
    }

    pub fn select(&mut self, name: &str) -> Result<(), UsageError> {
        self.get(name)?;
        self.current = Some(name.to_owned());
        Ok(())
    }

    pub fn remove(&mut self, name: &str) -> Result<(), UsageError> {
        self.contexts.remove(name).ok_or_else(|| unknown(name))?;
        if self.current.as_deref() == Some(name) {
            self.current = None;
        }
        Ok(())
    }
}

fn unknown(name: &str) -> UsageError {
    UsageError(format!("there is no context `{}`: `baton context list` shows them", baton_files::plain(name)))
}

/// Where contexts are stored.
#[derive(Clone, Debug)]
pub struct SavedContexts(PrivateFile);

impl SavedContexts {
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(PrivateFile::new(path, "contexts"))
    }

    pub fn read(&self) -> Result<ContextFile> {
        let found = self.0.read::<ContextFile>();
        found.with_context(|| "contexts cannot be used: correct the file, or remove it and set them again")
    }

    pub fn edit<R>(&self, change: impl FnOnce(&mut ContextFile) -> Result<R>) -> Result<R> {
        self.0.edit(change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn every_variable_of_a_context_is_one_of_the_server() {
        for name in STORAGE_PLACES.iter().chain(&STORAGE_DETAILS) {
            assert!(config::find(name).is_some(), "{name}");
        }
    }

    #[test]
    fn keys_go_to_the_server_of_their_context_alone() {
        let context = SavedContext { url: Some("wss://a.example/".into()), ..SavedContext::default() };
        for url in ["wss://a.example", "https://A.example/", "wss://a.example/"] {
            assert!(context.is_at(url), "{url}");
        }
        for url in ["ws://a.example", "wss://a.example.net", "wss://b.example", "wss://a.example:8443"] {
            assert!(!context.is_at(url), "{url}");
        }
        assert!(!SavedContext::default().is_at("ws://127.0.0.1:8080"));
    }

    #[test]
    fn a_context_that_is_removed_is_no_longer_selected() {
        let mut file = ContextFile::default();
        for name in ["a", "b"] {
            file.contexts.insert(name.into(), SavedContext::default());
        }
        assert!(file.select("c").is_err() && file.remove("c").is_err());
        file.select("a").unwrap();
        file.remove("b").unwrap();
        assert_eq!(file.current.as_deref(), Some("a"));
        file.remove("a").unwrap();
        assert_eq!(file, ContextFile::default());
    }

    #[test]
    fn a_file_that_is_not_understood_is_an_error_that_names_it() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("contexts.json");
        for text in ["{", "[]", r#"{"contexts": {"a": {"urll": "ws://x"}}}"#] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", SavedContexts::at(&path).read().unwrap_err());
            assert!(error.contains("contexts.json is damaged") && error.contains("remove it"), "{error}");
        }
    }
}
