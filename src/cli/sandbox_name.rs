//! How a user names a sandbox: by its id or the beginning of it, with or without `sandbox-`.

use anyhow::{Result, bail};
use baton_protocol::id::SandboxId;

use super::context::UsageError;

/// The length of the ids that servers generate: `sandbox-` and a UUID.
const GENERATED_LENGTH: usize = 44;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxName {
    given: String,
    /// With `sandbox-`.
    beginning: String,
}

impl SandboxName {
    /// Refuses what no id begins with.
    pub fn parse(text: &str) -> Result<Self, UsageError> {
        let beginning = if text.starts_with("sandbox-") { text.to_owned() } else { format!("sandbox-{text}") };
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if text.is_empty() || beginning.len() > GENERATED_LENGTH || !text.chars().all(is_allowed) {
            return Err(UsageError(format!("`{}` is not a sandbox id", baton_files::plain(text))));
        }
        Ok(Self { given: text.to_owned(), beginning })
    }

    /// What the ids in question begin with.
    pub fn beginning(&self) -> &str {
        &self.beginning
    }

    /// The id, if no longer one can begin with it.
    pub fn whole(&self) -> Option<SandboxId> {
        SandboxId::parse(&self.beginning).ok().filter(|id| id.as_str().len() == GENERATED_LENGTH)
    }

    /// The one of `ids` that is meant. An exact match wins, even if another id begins with it.
    pub fn choose(&self, ids: impl IntoIterator<Item = SandboxId>) -> Result<Option<SandboxId>> {
        let mut found: Option<SandboxId> = None;
        let mut other = None;
        for id in ids.into_iter().filter(|id| id.as_str().starts_with(&self.beginning)) {
            if id.as_str() == self.beginning {
                return Ok(Some(id));
            }
            match &found {
                Some(_) => other = Some(id),
                None => found = Some(id),
            }
        }
        match (found, other) {
            (Some(one), Some(two)) => bail!("`{}` is ambiguous ({one}, {two}): give more characters", self.given),
            (found, _) => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SandboxId {
        SandboxId::parse(text).unwrap()
    }

    #[test]
    fn an_id_is_named_by_its_beginning_and_an_exact_match_wins() {
        let ids = ["sandbox-abc", "sandbox-abc-123", "sandbox-b"].map(id);
        let choose = |text: &str| SandboxName::parse(text).unwrap().choose(ids.clone());
        assert_eq!(choose("abc").unwrap(), Some(id("sandbox-abc")));
        assert_eq!(choose("abc-").unwrap(), Some(id("sandbox-abc-123")));
        assert_eq!(choose("sandbox-b").unwrap(), Some(id("sandbox-b")));
        assert_eq!(choose("c").unwrap(), None);
        assert!(choose("ab").unwrap_err().to_string().contains("is ambiguous"));
    }

    #[test]
    fn what_no_id_begins_with_is_a_mistake_and_only_a_generated_id_is_whole() {
        for text in ["", "A", "a b", "../x", &"a".repeat(40)] {
            assert!(SandboxName::parse(text).is_err(), "{text}");
        }
        let whole = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
        assert_eq!(SandboxName::parse(&whole[8..]).unwrap().whole(), Some(id(whole)));
        assert_eq!(SandboxName::parse("sandbox-abc").unwrap().whole(), None);
    }
}
