//! Messages from the client: one enum, parsed from one JSON text.
//!
//! The messages carry no common tag: `{"language","code"}` starts a command,
//! `{"event":"stdin"}` feeds it, `{"action":…}` is any other request, and a message with none
//! of these is the config of a new sandbox. Unknown fields are ignored; a known field
//! of the wrong type is refused by name.

mod exec_request;
mod fields;
mod query;
mod sandbox_config;

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::fields::{Fields, Wrong, wrong};
pub use self::{
    exec_request::{Command, ExecRequest, Language},
    sandbox_config::{Idle, Persistence, SandboxConfig},
};
use crate::{
    event::Status,
    id::{ExecId, SnapshotName},
};

/// The maximum number of copies that one fork makes.
pub const MAX_FORKS: u32 = 64;

/// A message from the client.
#[derive(Clone, PartialEq, Eq)]
pub enum Request {
    /// Valid only as the first message on `/create`.
    Config(Box<SandboxConfig>),
    /// Starts a command.
    Exec(Box<ExecRequest>),
    /// Input for a command.
    Stdin(StdinRequest),
    /// Kills a command and all its descendants.
    KillProcess {
        /// The command; `None` means the only one.
        exec_id: Option<ExecId>,
    },
    /// Sends a signal to a command's process group; on a terminal, to the foreground job.
    Signal {
        /// The command.
        exec_id: ExecId,
        /// The signal's name, with or without `SIG`.
        signal: String,
    },
    /// Changes the size of a command's terminal.
    Resize {
        /// The command.
        exec_id: ExecId,
        /// Columns, at least 1.
        cols: u16,
        /// Rows, at least 1.
        rows: u16,
    },
    /// Commits a checkpoint.
    Checkpoint {
        /// Includes running commands; otherwise the request is refused while one runs.
        live: bool,
        /// Keeps the sandbox running afterwards; otherwise the session ends.
        keep_running: bool,
    },
    /// Stores the file system under a name.
    Snapshot {
        /// The name, in the tenant's name space.
        name: SnapshotName,
        /// The complete file system, instead of the difference to the base.
        full: bool,
    },
    /// Makes copies of the running sandbox.
    Fork {
        /// The number of copies, from 1 to [`MAX_FORKS`].
        count: u32,
    },
    /// Checkpoints the sandbox and releases its lease, so that another instance can run it.
    Handoff,
    /// Changes the idle timeout, counted from now.
    SetIdleTimeout(Idle),
    /// Deletes the sandbox.
    KillSandbox,
    /// Continues where an earlier session ended.
    Reconnect {
        /// What the client has received, by command; output continues from there.
        offsets: BTreeMap<ExecId, Offsets>,
        /// Observe only: output stays buffered for the next client that reconnects.
        peek: bool,
    },
    /// Confirms output, so that it need not be buffered any longer.
    Ack {
        /// The command.
        exec_id: ExecId,
        /// How much of its output the client has received.
        offsets: Offsets,
    },
}

/// Bytes for a command's stdin.
#[derive(Clone, PartialEq, Eq)]
pub struct StdinRequest {
    /// The command; `None` means the only one.
    pub exec_id: Option<ExecId>,
    /// The input.
    pub data: Data,
    /// Stdin ends after these bytes.
    pub eof: bool,
    /// The bytes' offset in the command's stdin; without it, they follow the bytes received before.
    pub offset: Option<u64>,
}

/// Input as sent by the client.
#[derive(Clone, PartialEq, Eq)]
pub enum Data {
    /// The text's UTF-8 bytes.
    Text(String),
    /// Base64 that is not decoded yet.
    Base64(String),
}

/// How much of a command's output a client has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offsets {
    /// Bytes of stdout.
    #[serde(default)]
    pub stdout: u64,
    /// Bytes of stderr.
    #[serde(default)]
    pub stderr: u64,
}

/// A typed refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The error status that the client receives.
    pub status: Status,
    /// A sentence for people.
    pub message: String,
    /// The message could not be parsed as a request; ten of these end the session.
    pub malformed: bool,
}

impl Refusal {
    /// A refusal of a request that was understood.
    pub fn of(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), malformed: false }
    }

    /// A refusal of a message that could not be parsed as a request.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { status: Status::Error, message: message.into(), malformed: true }
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        Self::of(Status::Error, wrong.message)
    }
}

impl Request {
    /// Parses one text message.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        let Some(fields) = Fields::parse(text) else {
            return Err(Refusal::malformed("A message must be one JSON object."));
        };
        if fields.has("action") {
            return Self::read_action(&fields);
        }
        if fields.has("event") {
            let event: String = fields.required("event", "a string")?;
            return match event.as_str() {
                "stdin" => Self::read_stdin(&fields),
                _ => Err(Refusal::of(Status::Error, "Unknown event: the only one a client sends is \"stdin\".")),
            };
        }
        if fields.has("language") || fields.has("code") {
            return Ok(Self::Exec(Box::new(ExecRequest::read_plain(&fields)?)));
        }
        Ok(Self::Config(Box::new(SandboxConfig::read(&fields)?)))
    }

    fn read_action(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let action: String = fields.required("action", "a string")?;
        Ok(match action.as_str() {
            "exec" => Self::Exec(Box::new(ExecRequest::read(fields)?)),
            "read_file" | "write_file" | "list_files" | "remove_file" | "rename_file" | "make_directory"
            | "watch_files" => Self::Exec(Box::new(ExecRequest::read_file(&action, fields)?)),
            "kill_process" => Self::KillProcess {
                exec_id: fields
                    .name("exec_id")
                    .map_err(|wrong| Refusal::of(Status::ExecutionForceKillError, wrong.message))?,
            },
            "signal" => Self::Signal {
                exec_id: exec_id(fields)?,
                signal: fields.required("signal", "a signal's name such as \"INT\"")?,
            },
            "resize" => {
                let size = |field| match fields.required::<u16>(field, "a number from 1 to 65535")? {
                    0 => Err(wrong(field, "a number from 1 to 65535")),
                    size => Ok(size),
                };
                Self::Resize { exec_id: exec_id(fields)?, cols: size("cols")?, rows: size("rows")? }
            }
            "checkpoint" => {
                let flag =
                    |name| fields.flag(name).map_err(|wrong| Refusal::of(Status::CheckpointError, wrong.message));
                Self::Checkpoint { live: flag("live")?, keep_running: flag("keep_running")? }
            }
            "snapshot_filesystem" => {
                let error = |wrong: Wrong| Refusal::of(Status::FilesystemSnapshotError, wrong.message);
                let Some(name) = fields.name("name").map_err(error)? else {
                    return Err(Refusal::of(Status::FilesystemSnapshotError, "`name` is missing."));
                };
                Self::Snapshot { name, full: fields.flag("full").map_err(error)? }
            }
            "fork" => {
                let expected = "a number from 1 to 64";
                match fields.optional::<u32>("count", expected)?.unwrap_or(1) {
                    count @ 1..=MAX_FORKS => Self::Fork { count },
                    _ => return Err(wrong("count", expected).into()),
                }
            }
            "handoff" => Self::Handoff,
            "set_idle_timeout" => match fields.idle_timeout()? {
                Some(idle) => Self::SetIdleTimeout(idle),
                None => return Err(Refusal::of(Status::Error, "`idle_timeout` is missing.")),
            },
            "kill_sandbox" => Self::KillSandbox,
            "reconnect" => Self::Reconnect {
                offsets: fields
                    .optional("offsets", "an object of `{\"stdout\": N, \"stderr\": M}` by exec id")?
                    .unwrap_or_default(),
                peek: fields.flag("peek")?,
            },
            "ack" => Self::Ack {
                exec_id: exec_id(fields)?,
                offsets: Offsets {
                    stdout: fields.optional("stdout", "an offset")?.unwrap_or(0),
                    stderr: fields.optional("stderr", "an offset")?.unwrap_or(0),
                },
            },
            _ => return Err(Refusal::of(Status::Error, "Unknown action.")),
        })
    }

    fn read_stdin(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let error = |wrong: Wrong| Refusal::of(Status::StdinError, wrong.message);
        let eof = fields.flag("eof").map_err(error)?;
        let data = fields.string("data").map_err(error)?;
        let data = match (data, eof) {
            (Some(data), _) => data,
            (None, true) => String::new(),
            (None, false) => return Err(Refusal::of(Status::StdinError, "`data` is missing.")),
        };
        let data = match fields.string("encoding").map_err(error)?.as_deref() {
            None | Some("utf-8") => Data::Text(data),
            Some("base64") => Data::Base64(data),
            Some(_) => return Err(error(wrong("encoding", "\"utf-8\" or \"base64\""))),
        };
        let exec_id = fields.name("exec_id").map_err(error)?;
        let offset = fields.optional("offset", "an offset").map_err(error)?;
        Ok(Self::Stdin(StdinRequest { exec_id, data, eof, offset }))
    }

    /// The message that [`parse`](Self::parse) reads as this request.
    pub fn to_json(&self) -> String {
        let mut map = Map::new();
        let mut set = |name: &str, value: Value| map.insert(name.to_owned(), value);
        match self {
            Self::Config(config) => map = config.to_json(),
            Self::Exec(exec) => map = exec.to_json(),
            Self::Stdin(stdin) => {
                set("event", json!("stdin"));
                match &stdin.data {
                    Data::Text(text) => drop(set("data", json!(text))),
                    Data::Base64(text) => {
                        set("data", json!(text));
                        set("encoding", json!("base64"));
                    }
                }
                if stdin.eof {
                    set("eof", json!(true));
                }
                if let Some(offset) = stdin.offset {
                    set("offset", json!(offset));
                }
                if let Some(exec_id) = &stdin.exec_id {
                    set("exec_id", json!(exec_id));
                }
            }
            Self::KillProcess { exec_id } => {
                set("action", json!("kill_process"));
                if let Some(exec_id) = exec_id {
                    set("exec_id", json!(exec_id));
                }
            }
            Self::Signal { exec_id, signal } => {
                set("action", json!("signal"));
                set("exec_id", json!(exec_id));
                set("signal", json!(signal));
            }
            Self::Resize { exec_id, cols, rows } => {
                set("action", json!("resize"));
                set("exec_id", json!(exec_id));
                set("cols", json!(cols));
                set("rows", json!(rows));
            }
            Self::Checkpoint { live, keep_running } => {
                set("action", json!("checkpoint"));
                if *live {
                    set("live", json!(true));
                }
                if *keep_running {
                    set("keep_running", json!(true));
                }
            }
            Self::Snapshot { name, full } => {
                set("action", json!("snapshot_filesystem"));
                set("name", json!(name));
                if *full {
                    set("full", json!(true));
                }
            }
            Self::Fork { count } => {
                set("action", json!("fork"));
                set("count", json!(count));
            }
            Self::Handoff => drop(set("action", json!("handoff"))),
            Self::SetIdleTimeout(idle) => {
                set("action", json!("set_idle_timeout"));
                set("idle_timeout", idle.to_json());
            }
            Self::KillSandbox => drop(set("action", json!("kill_sandbox"))),
            Self::Reconnect { offsets, peek } => {
                set("action", json!("reconnect"));
                if !offsets.is_empty() {
                    set("offsets", json!(offsets));
                }
                if *peek {
                    set("peek", json!(true));
                }
            }
            Self::Ack { exec_id, offsets } => {
                set("action", json!("ack"));
                set("exec_id", json!(exec_id));
                set("stdout", json!(offsets.stdout));
                set("stderr", json!(offsets.stderr));
            }
        }
        Value::Object(map).to_string()
    }

    /// The kind of request, for the log; contains nothing that the client sent.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Config(_) => "config",
            Self::Exec(exec) => match &exec.command {
                Command::Argv(_) | Command::Code { .. } => "exec",
                Command::File(work) => work.word(),
            },
            Self::Stdin(_) => "stdin",
            Self::KillProcess { .. } => "kill_process",
            Self::Signal { .. } => "signal",
            Self::Resize { .. } => "resize",
            Self::Checkpoint { .. } => "checkpoint",
            Self::Snapshot { .. } => "snapshot_filesystem",
            Self::Fork { .. } => "fork",
            Self::Handoff => "handoff",
            Self::SetIdleTimeout(_) => "set_idle_timeout",
            Self::KillSandbox => "kill_sandbox",
            Self::Reconnect { .. } => "reconnect",
            Self::Ack { .. } => "ack",
        }
    }
}

/// Does not print the client's code and input, which must not be logged.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({})", self.word())
    }
}

impl fmt::Debug for StdinRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stdin(…)")
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Data(…)")
    }
}

fn exec_id(fields: &Fields<'_>) -> Result<ExecId, Refusal> {
    fields.name("exec_id")?.ok_or_else(|| Refusal::of(Status::Error, "`exec_id` is missing."))
}

#[cfg(test)]
mod tests;
