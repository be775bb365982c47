//! The tokens of the sandboxes that were created here, in a file that only its owner can read.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use baton_client::{SandboxId, Token};
use serde::{Deserialize, Serialize};

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
    path: PathBuf,
}

impl SavedTokens {
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn keep(&self, kept: &SavedToken) -> anyhow::Result<()> {
        self.edit(|book| {
            book.sandboxes.insert(kept.id.clone(), Line { token: kept.token.clone(), url: kept.url.clone() });
        })
    }

    /// Removes a token. A missing one is not an error.
    pub fn forget(&self, id: &SandboxId) -> anyhow::Result<()> {
        if !self.path.exists() {
            return Ok(());
        }
        self.edit(|book| drop(book.sandboxes.remove(id)))
    }

    /// Finds the sandbox whose id is or begins with `text`, with or without `sandbox-`.
    pub fn find(&self, text: &str) -> anyhow::Result<Option<SavedToken>> {
        let book = self.read()?;
        let full = if text.starts_with("sandbox-") { text.to_owned() } else { format!("sandbox-{text}") };
        let mut sandboxes = book.sandboxes;
        // A complete id means that sandbox, even if another id begins with it.
        if let Some((id, line)) = SandboxId::parse(&full).ok().and_then(|id| sandboxes.remove_entry(&id)) {
            return Ok(Some(SavedToken { id, token: line.token, url: line.url }));
        }
        let mut found = sandboxes.into_iter().filter(|(id, _)| id.as_str().starts_with(&full));
        match (found.next(), found.next()) {
            (None, _) => Ok(None),
            (Some((id, line)), None) => Ok(Some(SavedToken { id, token: line.token, url: line.url })),
            (Some((one, _)), Some((two, _))) => bail!("`{text}` is ambiguous ({one}, {two}): give more characters"),
        }
    }

    fn read(&self) -> anyhow::Result<TokenFile> {
        let named = || format!("the file of tokens {}", self.path.display());
        match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", named())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(TokenFile::default()),
            Err(error) => Err(error).with_context(named),
        }
    }

    /// One writer at a time; a reader sees the old or the new file.
    fn edit(&self, change: impl FnOnce(&mut TokenFile)) -> anyhow::Result<()> {
        let named = || format!("the file of tokens {} cannot be written", self.path.display());
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).with_context(named)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.path.with_extension("lock"))
            .with_context(named)?;
        lock.set_permissions(fs::Permissions::from_mode(0o600)).with_context(named)?;
        lock.lock().with_context(named)?;
        let mut book = self.read()?;
        change(&mut book);
        let text = serde_json::to_vec_pretty(&book)?;
        let how = baton_files::How { mode: Some(0o600), ..baton_files::How::default() };
        baton_files::write(&self.path, &mut text.as_slice(), &how).with_context(named)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
        assert!(tokens.find("0b9f").unwrap_err().to_string().contains("write more"));
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

    #[test]
    fn others_cannot_read_it_after_a_write_even_if_they_could_before() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("tokens.json");
        fs::write(&path, "{}").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        SavedTokens::at(&path).keep(&kept('a')).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("tokens.json");
        fs::write(&path, "{").unwrap();
        let error = SavedTokens::at(&path).keep(&kept('a')).unwrap_err();
        assert!(format!("{error:#}").contains("damaged"), "{error:#}");
        assert_eq!(fs::read(&path).unwrap(), b"{");
    }
}
