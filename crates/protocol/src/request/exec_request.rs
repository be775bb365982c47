//! What to run: a command, code, or work with files.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value, json};

use super::{
    Refusal,
    fields::{Fields, Wrong, wrong},
    sandbox_config::{check_env, seconds},
};
use crate::{agent::Pty, event::Status, file_work, id::ExecId, printable::printable_start};

/// A request to start a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecRequest {
    /// The client's name for the command; `None` lets the server choose one.
    pub exec_id: Option<ExecId>,
    /// What to run.
    pub command: Command,
    /// Added to the environment of the sandbox.
    pub env: BTreeMap<String, String>,
    /// The working directory; `None` uses the sandbox's.
    pub cwd: Option<String>,
    /// A user name or number inside the sandbox; `None` means root.
    pub user: Option<String>,
    /// Keeps stdin open for input; otherwise it is empty.
    pub stdin: bool,
    /// Runs the command on a terminal of this size.
    pub pty: Option<Pty>,
    /// Kills the command after this much time in which the sandbox ran; `None` means never.
    pub timeout: Option<Duration>,
    /// A plain client wants to receive the exec's id, exit code and duration.
    pub details: bool,
}

/// The three kinds of work that an exec can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A program and its arguments, without a shell.
    Argv(Vec<String>),
    /// Source code, run by the interpreter of its language.
    Code {
        /// Selects the interpreter.
        language: Language,
        /// The source code.
        code: String,
    },
    /// Of the fields of the longer form, it supports `exec_id`, `user`, `cwd` and `timeout`.
    File(file_work::Work),
}

/// The languages that the base image has an interpreter for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Language {
    /// Runs with `python3`.
    Python,
    /// Runs with `bash`.
    Bash,
}

impl Language {
    /// Returns `None` for an unsupported language.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "python" => Some(Self::Python),
            "bash" => Some(Self::Bash),
            _ => None,
        }
    }

    /// The error text that existing clients expect.
    pub fn unsupported(text: &str) -> String {
        let shown = printable_start(text, 64);
        format!("Unsupported language: '{shown}'. Supported languages are: python, bash")
    }

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Bash => "bash",
        }
    }
}

impl ExecRequest {
    /// The exec that a message of the plain dialect starts.
    pub fn plain(language: Language, code: String) -> Self {
        Self {
            exec_id: None,
            command: Command::Code { language, code },
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            stdin: true,
            pty: None,
            timeout: None,
            details: false,
        }
    }

    /// Reads `{"language", "code"}`; every other field belongs to the longer form.
    pub(super) fn read_plain(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let error = |wrong: Wrong| Refusal::of(Status::ExecutionError, wrong.message);
        let (language, code) = read_code(fields)?;
        let (exec_id, details) = (fields.name("exec_id").map_err(error)?, fields.flag("details").map_err(error)?);
        Ok(Self { exec_id, details, ..Self::plain(language, code) })
    }

    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let error = |wrong: Wrong| Refusal::of(Status::ExecutionError, wrong.message);
        let command = if fields.has("argv") {
            Command::Argv(read_argv(fields).map_err(error)?)
        } else {
            let (language, code) = read_code(fields)?;
            Command::Code { language, code }
        };
        Self::read_rest(fields, command).map_err(error)
    }

    fn read_rest(fields: &Fields<'_>, command: Command) -> Result<Self, Wrong> {
        let env = fields.strings("env")?;
        check_env(&env)?;
        let text = |field| {
            let text = fields.string(field)?;
            if text.as_ref().is_some_and(|text| text.is_empty() || text.contains('\0')) {
                return Err(wrong(field, "a text without NUL"));
            }
            Ok(text)
        };
        let pty: Option<Pty> = fields.optional("pty", "an object with `cols` and `rows` from 1 to 65535")?;
        if pty.is_some_and(|pty| pty.cols == 0 || pty.rows == 0) {
            return Err(wrong("pty", "an object with `cols` and `rows` from 1 to 65535"));
        }
        Ok(Self {
            exec_id: fields.name("exec_id")?,
            command,
            env,
            cwd: text("cwd")?,
            user: text("user")?,
            stdin: fields.flag("stdin")?,
            pty,
            timeout: fields.duration("timeout")?,
            details: fields.flag("details")?,
        })
    }

    /// Reads `{"action":"read_file"}` and the other file actions.
    pub(super) fn read_file(action: &str, fields: &Fields<'_>) -> Result<Self, Refusal> {
        let error = |wrong: Wrong| Refusal::of(Status::ExecutionError, wrong.message);
        let work = read_work(action, fields).map_err(error)?;
        let stdin = work.has_stdin();
        let exec = Self::read_rest(fields, Command::File(work)).map_err(error)?;
        Ok(Self { env: BTreeMap::new(), pty: None, stdin, ..exec })
    }

    pub(super) fn to_json(&self) -> Map<String, Value> {
        let mut map = Map::new();
        let mut set = |name: &str, value: Value| map.insert(name.to_owned(), value);
        match &self.command {
            Command::Argv(argv) => drop(set("argv", json!(argv))),
            Command::Code { language, code } => {
                set("language", json!(language.as_str()));
                set("code", json!(code));
            }
            Command::File(work) => {
                let work = serde_json::to_value(work).unwrap_or_default();
                work.as_object().into_iter().flatten().for_each(|(name, value)| drop(set(name, value.clone())));
            }
        }
        if let Some(exec_id) = &self.exec_id {
            set("exec_id", json!(exec_id));
        }
        if self.details {
            set("details", json!(true));
        }
        let code = matches!(self.command, Command::Code { .. });
        let bare = self.env.is_empty() && self.cwd.is_none() && self.user.is_none();
        if code && bare && self.stdin && self.pty.is_none() && self.timeout.is_none() {
            return map;
        }
        let mut set = |name: &str, value: Value| map.insert(name.to_owned(), value);
        let is_file = matches!(self.command, Command::File(_));
        if !is_file {
            set("action", json!("exec"));
        }
        if !self.env.is_empty() {
            set("env", json!(self.env));
        }
        if let Some(cwd) = &self.cwd {
            set("cwd", json!(cwd));
        }
        if let Some(user) = &self.user {
            set("user", json!(user));
        }
        if self.stdin && !is_file {
            set("stdin", json!(true));
        }
        if let Some(pty) = &self.pty {
            set("pty", json!(pty));
        }
        if let Some(timeout) = self.timeout {
            set("timeout", seconds(timeout));
        }
        map
    }
}

fn read_work(action: &str, fields: &Fields<'_>) -> Result<file_work::Work, Wrong> {
    const PATH: &str = "a text without NUL, not empty";
    let path: String = fields.required("path", PATH)?;
    if path.is_empty() || path.contains('\0') {
        return Err(wrong("path", PATH));
    }
    const MODE: &str = "a number from 0 to 4095 (octal 7777)";
    let mode = || match fields.optional("mode", MODE)? {
        Some(mode) if mode > 0o7777 => Err(wrong("mode", MODE)),
        mode => Ok(mode),
    };
    let number = |field| fields.optional::<u64>(field, "a number of bytes");
    let archive = || fields.flag("archive");
    Ok(match action {
        "read_file" => {
            let (offset, length, archive) = (number("offset")?.unwrap_or(0), number("length")?, archive()?);
            if archive && (offset > 0 || length.is_some()) {
                return Err(wrong("archive", "false where `offset` or `length` is given"));
            }
            file_work::Work::ReadFile { path, offset, length, archive }
        }
        "write_file" => {
            let mtime_ms = fields.optional("mtime_ms", "a whole number of milliseconds")?;
            file_work::Work::WriteFile { path, mode: mode()?, mtime_ms, size: number("size")?, archive: archive()? }
        }
        "remove_file" => file_work::Work::RemoveFile { path, recursive: fields.flag("recursive")? },
        "rename_file" => {
            let to: String = fields.required("to", PATH)?;
            if to.is_empty() || to.contains('\0') {
                return Err(wrong("to", PATH));
            }
            file_work::Work::RenameFile { path, to }
        }
        "make_directory" => file_work::Work::MakeDirectory { path, parents: fields.flag("parents")?, mode: mode()? },
        "watch_files" => file_work::Work::WatchFiles { path, recursive: fields.flag("recursive")? },
        _ => {
            let expected = format!("a number from 0 to {}", file_work::MAX_DEPTH);
            match fields.optional("depth", &expected)?.unwrap_or(1) {
                depth @ 0..=file_work::MAX_DEPTH => file_work::Work::ListFiles { path, depth },
                _ => return Err(wrong("depth", &expected)),
            }
        }
    })
}

fn read_argv(fields: &Fields<'_>) -> Result<Vec<String>, Wrong> {
    const EXPECTED: &str = "a list of at least one string, without NUL";
    let argv: Vec<String> = fields.required("argv", EXPECTED)?;
    if argv.is_empty() || argv[0].is_empty() || argv.iter().any(|word| word.contains('\0')) {
        return Err(wrong("argv", EXPECTED));
    }
    Ok(argv)
}

fn read_code(fields: &Fields<'_>) -> Result<(Language, String), Refusal> {
    let error = |wrong: Wrong| Refusal::of(Status::ExecutionError, wrong.message);
    let language: String = fields.required("language", "\"python\" or \"bash\"").map_err(error)?;
    let Some(language) = Language::parse(&language) else {
        return Err(Refusal::of(Status::ExecutionUnsupportedLanguageError, Language::unsupported(&language)));
    };
    let code: String = fields.required("code", "a string").map_err(error)?;
    if code.contains('\0') {
        return Err(error(wrong("code", "a text without NUL")));
    }
    Ok((language, code))
}
