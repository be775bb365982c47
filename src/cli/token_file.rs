//! The tokens of the sandboxes that were created here, in a file that only its owner can read.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use baton_client::{SandboxId, Token};
use serde::{Deserialize, Serialize};

use super::{private_file::PrivateFile, sandbox_name::SandboxName};

/// What is needed to attach to a sandbox again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedToken {
    pub id: SandboxId,
    pub token: Token,
    pub url: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct TokenFile {
    #[serde(default)]
    sandboxes: BTreeMap<SandboxId, Line>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    token: Token,
    url: String,
}

#[derive(Debug)]
pub struct SavedTokens {
    file: PrivateFile,
}

impl SavedTokens {
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { file: PrivateFile::new(path, "tokens") }
    }

    pub fn keep(&self, kept: &SavedToken) -> Result<()> {
        self.file.edit(|book: &mut TokenFile| {
            book.sandboxes.insert(kept.id.clone(), Line { token: kept.token.clone(), url: kept.url.clone() });
            Ok(())
        })
    }

    /// Removes a token. A missing one is not an error.
    pub fn forget(&self, id: &SandboxId) -> Result<()> {
        if !self.file.path().exists() {
            return Ok(());
        }
        self.file.edit(|book: &mut TokenFile| {
            book.sandboxes.remove(id);
            Ok(())
        })
    }

    /// The ids of all sandboxes whose tokens are saved.
    pub fn ids(&self) -> Result<Vec<SandboxId>> {
        Ok(self.file.read::<TokenFile>()?.sandboxes.into_keys().collect())
    }

    /// Finds the sandbox that `text` names.
    pub fn find(&self, text: &str) -> Result<Option<SavedToken>> {
        let mut sandboxes = self.file.read::<TokenFile>()?.sandboxes;
        let Ok(name) = SandboxName::parse(text) else { return Ok(None) };
        let found = name.choose(sandboxes.keys().cloned())?;
        let found = found.and_then(|id| sandboxes.remove_entry(&id));
        Ok(found.map(|(id, line)| SavedToken { id, token: line.token, url: line.url }))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn kept(last: char) -> SavedToken {
        let id = format!("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789a{last}");
        SavedToken { id: SandboxId::parse(&id).unwrap(), token: Token("secret".into()), url: "ws://a".into() }
    }

    #[test]
    fn tokens_are_kept_found_by_their_beginning_and_forgotten() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("new/tokens.json");
        let tokens = SavedTokens::at(&path);
        assert_eq!(tokens.find("0b9").unwrap(), None);
        tokens.keep(&kept('a')).unwrap();
        tokens.keep(&kept('b')).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(space.path().join("new")).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(tokens.find(kept('a').id.as_str()).unwrap(), Some(kept('a')));
        assert!(tokens.find("0b9f").unwrap_err().to_string().contains("ambiguous"));
        tokens.forget(&kept('b').id).unwrap();
        tokens.forget(&kept('b').id).unwrap();
        assert_eq!(tokens.find("0b9f").unwrap(), Some(kept('a')));
    }

    #[test]
    fn a_whole_id_is_found_also_where_another_begins_with_it() {
        let space = tempfile::tempdir().unwrap();
        let tokens = SavedTokens::at(space.path().join("tokens.json"));
        let named = |id: &str| SavedToken { id: SandboxId::parse(id).unwrap(), ..kept('a') };
        for id in ["sandbox-abc-123", "sandbox-abc"] {
            tokens.keep(&named(id)).unwrap();
        }
        assert_eq!(tokens.find("abc").unwrap(), Some(named("sandbox-abc")));
        assert_eq!(tokens.find("abc-").unwrap(), Some(named("sandbox-abc-123")));
        assert!(tokens.find("ab").is_err());
    }
}
