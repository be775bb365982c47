//! The first message on `/create`: what kind of sandbox to create.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value, json};

use super::{
    Refusal,
    fields::{Fields, Wrong, wrong},
};
use crate::{
    event::{Status, Token},
    id::{CheckpointId, SnapshotName},
    limits::Limits,
    metadata::OnIncompatible,
    sandbox_network::SandboxNetwork,
};

/// The properties of a new sandbox. The default requests nothing in particular.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxConfig {
    /// `None` uses the server's default.
    pub idle_timeout: Option<Idle>,
    /// `None`: only `enable_checkpoint` decides.
    pub persistent: Option<Persistence>,
    /// Stores the sandbox, so that it survives its instance.
    pub enable_checkpoint: bool,
    /// `None`: same as `enable_checkpoint`, unless the server uses the predecessor's vocabulary.
    pub enable_sandbox_handoff: Option<bool>,
    /// `None`: same as `enable_checkpoint`, unless the server uses the predecessor's vocabulary.
    pub enable_idle_timeout_auto_checkpoint: Option<bool>,
    /// The snapshot to start from; `None` uses the base root file system.
    pub filesystem_snapshot_name: Option<SnapshotName>,
    /// For filtering listings; without meaning to the server.
    pub labels: BTreeMap<String, String>,
    /// The environment of every command.
    pub env: BTreeMap<String, String>,
    /// The default working directory of commands, an absolute path; `None` uses the image's.
    pub cwd: Option<String>,
    /// What the sandbox may use; a limit that is not set has the operator's default.
    pub limits: Limits,
    /// What the sandbox may reach; what is not set has the operator's default.
    pub network: SandboxNetwork,
    /// When to delete the sandbox, counted from its creation; `None` uses the operator's default.
    pub ttl: Option<Duration>,
    /// What to do if an instance cannot restore the sandbox's memory.
    pub on_incompatible: OnIncompatible,
    /// The checkpoint of another sandbox to start from, as a copy.
    pub from_checkpoint: Option<CheckpointId>,
    /// The token of the sandbox that `from_checkpoint` belongs to.
    pub source_token: Option<Token>,
    /// A plain client wants every field and every event, not only the documented ones.
    pub details: bool,
}

/// Whether a sandbox outlives its instance: it is stored, can move, and is checkpointed when it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Refused where the server has no storage.
    Yes,
    /// It lives as long as its instance.
    No,
    /// Where the server has storage.
    Auto,
}

impl From<bool> for Persistence {
    fn from(is_persistent: bool) -> Self {
        if is_persistent { Self::Yes } else { Self::No }
    }
}

/// When a sandbox without activity is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// It runs until it is deleted.
    Never,
    /// After this much time in which no client was active and no command ran.
    After(Duration),
}

impl From<Duration> for Idle {
    fn from(span: Duration) -> Self {
        Self::After(span)
    }
}

impl Idle {
    pub(super) fn to_json(self) -> Value {
        match self {
            Self::Never => Value::Null,
            Self::After(span) => seconds(span),
        }
    }
}

impl SandboxConfig {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        Self::read_fields(fields).map_err(|wrong| Refusal::of(Status::CreationError, wrong.message))
    }

    fn read_fields(fields: &Fields<'_>) -> Result<Self, Wrong> {
        let on_incompatible = match fields.string("on_incompatible")?.as_deref() {
            None | Some("fail") => OnIncompatible::Fail,
            Some("files") => OnIncompatible::Files,
            Some(_) => return Err(wrong("on_incompatible", "\"fail\" or \"files\"")),
        };
        let env = fields.strings("env")?;
        check_env(&env)?;
        let cwd = fields.string("cwd")?;
        if cwd.as_ref().is_some_and(|cwd| !cwd.starts_with('/') || cwd.contains('\0')) {
            return Err(wrong("cwd", "an absolute path"));
        }
        let (persistent, enable_checkpoint) = read_persistence(fields)?;
        Ok(Self {
            idle_timeout: fields.idle_timeout()?,
            persistent,
            enable_checkpoint,
            enable_sandbox_handoff: fields.optional("enable_sandbox_handoff", "true or false")?,
            enable_idle_timeout_auto_checkpoint: fields
                .optional("enable_idle_timeout_auto_checkpoint", "true or false")?,
            filesystem_snapshot_name: fields.name("filesystem_snapshot_name")?,
            labels: fields.strings("labels")?,
            env,
            cwd,
            limits: fields.limits()?,
            network: fields.network()?,
            ttl: fields.duration("ttl")?,
            on_incompatible,
            from_checkpoint: fields.name("from_checkpoint")?,
            source_token: fields.string("source_token")?.map(Token),
            details: fields.flag("details")?,
        })
    }

    /// Whether the client sent a flag that only the predecessor's clients use.
    pub fn has_predecessor_flags(&self) -> bool {
        self.enable_sandbox_handoff.is_some() || self.enable_idle_timeout_auto_checkpoint.is_some()
    }

    pub(super) fn to_json(&self) -> Map<String, Value> {
        let mut map = Map::new();
        let mut set = |name: &str, value: Value| map.insert(name.to_owned(), value);
        if let Some(idle) = self.idle_timeout {
            set("idle_timeout", idle.to_json());
        }
        match self.persistent {
            None => {}
            Some(Persistence::Yes) => drop(set("persistent", json!(true))),
            Some(Persistence::No) => drop(set("persistent", json!(false))),
            Some(Persistence::Auto) => drop(set("persistent", json!("auto"))),
        }
        for (name, flag) in [
            ("enable_checkpoint", self.enable_checkpoint.then_some(true)),
            ("enable_sandbox_handoff", self.enable_sandbox_handoff),
            ("enable_idle_timeout_auto_checkpoint", self.enable_idle_timeout_auto_checkpoint),
            ("details", self.details.then_some(true)),
        ] {
            if let Some(flag) = flag {
                set(name, json!(flag));
            }
        }
        if let Some(name) = &self.filesystem_snapshot_name {
            set("filesystem_snapshot_name", json!(name));
        }
        if !self.labels.is_empty() {
            set("labels", json!(self.labels));
        }
        if !self.env.is_empty() {
            set("env", json!(self.env));
        }
        if let Some(cwd) = &self.cwd {
            set("cwd", json!(cwd));
        }
        if !self.limits.is_empty() {
            set("limits", json!(self.limits));
        }
        if !self.network.is_empty() {
            set("network", json!(self.network));
        }
        if let Some(ttl) = self.ttl {
            set("ttl", seconds(ttl));
        }
        if self.on_incompatible == OnIncompatible::Files {
            set("on_incompatible", json!("files"));
        }
        if let Some(id) = &self.from_checkpoint {
            set("from_checkpoint", json!(id));
        }
        if let Some(token) = &self.source_token {
            set("source_token", json!(token));
        }
        map
    }
}

/// Reads `persistent` and `enable_checkpoint`. An explicit `enable_checkpoint: false` wins over `persistent`.
fn read_persistence(fields: &Fields<'_>) -> Result<(Option<Persistence>, bool), Wrong> {
    const EXPECTED: &str = "true, false or \"auto\"";
    let persistent = match fields.optional::<Value>("persistent", EXPECTED)? {
        None => None,
        Some(Value::Bool(is_persistent)) => Some(is_persistent.into()),
        Some(Value::String(word)) if word == "auto" => Some(Persistence::Auto),
        Some(_) => return Err(wrong("persistent", EXPECTED)),
    };
    match (persistent, fields.optional("enable_checkpoint", "true or false")?) {
        (Some(Persistence::No), Some(true)) => {
            Err(wrong("persistent", "true, \"auto\" or left out where `enable_checkpoint` is true"))
        }
        (Some(_), Some(false)) => Ok((Some(Persistence::No), false)),
        (persistent, flag) => Ok((persistent, flag.unwrap_or(false))),
    }
}

/// Writes whole seconds as an integer, as people do.
pub(super) fn seconds(span: Duration) -> Value {
    if span.subsec_nanos() == 0 { json!(span.as_secs()) } else { json!(span.as_secs_f64()) }
}

/// Refuses names and values that the kernel cannot represent.
pub(super) fn check_env(env: &BTreeMap<String, String>) -> Result<(), Wrong> {
    let bad = |(name, value): (&String, &String)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0');
    if env.iter().any(bad) { Err(wrong("env", "an object of strings without NUL, names without `=`")) } else { Ok(()) }
}
