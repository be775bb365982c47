//! The JSON payloads of the less frequent frames. Fields are only ever added, each with a default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{file_work, id::ExecId};

/// The maximum number of commands that the agent keeps at once, running or not yet forgotten.
pub const MAX_EXECS: usize = 1024;
/// How much of a stream is buffered while a client is attached.
pub const RING_ATTACHED: u64 = 4 << 20;
/// How much of a stream is buffered while no client is attached.
pub const RING_DETACHED: u64 = 8 << 20;
/// How many ended commands are remembered although their exit status was not acknowledged.
pub const KEPT_EXITS: usize = 100;
/// The maximum number of connections of a sandbox at once, to and from programs inside.
pub const MAX_CONNECTIONS: usize = 2048;
/// Connections that the server opens to ports inside have numbers with this bit; those of programs do not.
pub const PORT_CONNECTION: u32 = 1 << 31;
/// The number of connection bytes in a frame never exceeds this: other frames must not wait long.
pub const MAX_CONNECTION_PAYLOAD: usize = 64 << 10;
/// The longest name in a query.
pub const MAX_NAME: usize = 253;
/// How many listening ports are reported.
pub const MAX_PORTS: usize = 256;
/// How many bytes of a command line are remembered, for lists of commands.
pub const SHOWN_COMMAND: usize = 120;

/// `Assign`: makes a fresh agent the agent of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assign {
    /// The sandbox's marker, in hex, each byte inverted: the marker itself never occurs inside a payload.
    pub marker_inverted: String,
    /// The environment of every command, below what a command sets itself.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The default working directory of commands.
    #[serde(default)]
    pub cwd: Option<String>,
    /// The host name inside the sandbox; `None` keeps `sandbox`.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Concurrent processes and threads of one user. Applies for the sandbox's whole life, also after a restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Open files per process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u32>,
}

/// `Relieve`: the sandbox exceeds one of its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relieve {
    /// Bytes of memory in use; the agent ends the largest consumer. 0 ends everything at once.
    #[serde(default)]
    pub used: u64,
    /// The explanation for the client whose command is ended.
    pub why: String,
}

/// `Network`: whether programs may reach out of the sandbox. What exactly they may reach is the server's to decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkAccess {
    /// Connections to any address are taken by the agent, and it answers name queries.
    #[serde(default)]
    pub egress: bool,
}

/// `Resolved`: what became of a name query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum NameResolution {
    /// The name exists and may be reached, at least at some port: the agent makes up an address for it.
    Found {},
    /// The policy forbids every connection to it. Programs are told that the name does not exist.
    Denied {},
    /// The name does not exist.
    Missing {},
    /// The server could not find out. Programs may ask again.
    Failed {},
}

/// `Dial`: where a program wants to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dial {
    /// The name, if the program connected to an address that the agent made up for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The address that the program connected to; it means nothing if there is a name.
    pub address: core::net::Ipv4Addr,
    /// The TCP port.
    pub port: u16,
}

/// `Ports`: the TCP ports on which programs inside listen, on any address, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListeningPorts {
    /// At most [`MAX_PORTS`] of them.
    #[serde(default)]
    pub ports: Vec<u16>,
}

/// `Exec`: one command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentExec {
    /// The client's name for the command; unique in the sandbox.
    pub exec_id: ExecId,
    /// The program and its arguments; the program is looked up in `PATH`.
    pub argv: Vec<String>,
    /// Added to the environment of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// The working directory; `None` uses the sandbox's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// A user name or number inside the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// If false, stdin is empty from the start.
    #[serde(default)]
    pub stdin: bool,
    /// Runs the command on a terminal of this size; `None` connects three pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// Counts only time in which the sandbox ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// File work that the agent does itself instead of running a program; `argv` then only names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<file_work::Work>,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pty {
    /// Columns, at least 1.
    pub cols: u16,
    /// Rows, at least 1.
    pub rows: u16,
}

/// `Resync`: the server that restored the sandbox introduces itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// 16 fresh bytes in hex. The answer begins with these raw bytes, so that everything before them can be discarded.
    pub nonce: String,
}

/// `Restored` and `Forked`: what the sandbox is told about its handoff or fork.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// Added to the environment of commands that start from now on.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// `Hello`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The newest frame version that the agent supports.
    pub version: u8,
    /// The agent's own version, for the log.
    #[serde(default)]
    pub build: String,
}

/// `Started`; an empty payload means the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStarted {
    /// See [`ExecState::background`].
    #[serde(default)]
    pub background: bool,
}

/// `Exit`: exactly one of the first three is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code, if the command exited by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The number of the signal that killed the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Why the command never started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The command was killed at its timeout.
    #[serde(default)]
    pub timed_out: bool,
    /// The command was killed because the sandbox exceeded this limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long the command ran, excluding time in which the sandbox was stopped.
    #[serde(default)]
    pub duration_ms: u64,
}

/// `ResyncAck` and `Execs`: everything the agent knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentState {
    /// The newest frame version that the agent supports.
    pub version: u8,
    /// The highest request number that the agent has accepted.
    pub last_request: u64,
    /// The highest exec number that the agent has accepted.
    #[serde(default)]
    pub last_exec: u32,
    /// Every command that has not been forgotten, running or ended.
    pub execs: Vec<ExecState>,
}

/// One command as the agent knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecState {
    /// The command's number in frames.
    pub exec: u32,
    /// The client's name for the command.
    pub exec_id: ExecId,
    /// The process id inside the sandbox; 0 if the command never started.
    pub pid: i32,
    /// The command runs on a terminal, so all its output is stdout.
    #[serde(default)]
    pub pty: bool,
    /// The beginning of its command line; empty if the agent is of an older version.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub command: String,
    /// When it was started, in milliseconds since 1970; 0 if the agent is of an older version.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub started_ms: u64,
    /// It only waits for something to happen: it does not keep the sandbox from being idle.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub background: bool,
    /// Bytes of stdin accepted so far.
    pub stdin: u64,
    /// Their CRC-32; `None` if the agent is of an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_crc32: Option<u32>,
    /// Stdin is not read, or no longer read.
    #[serde(default)]
    pub stdin_closed: bool,
    /// The buffered part of stdout.
    pub stdout: Range,
    /// The buffered part of stderr.
    pub stderr: Range,
    /// How the command ended; `None` while it runs.
    pub exit: Option<Exit>,
}

/// Which part of a stream is still buffered: the bytes `from..to`, and whether more can follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The offset of the first buffered byte.
    pub from: u64,
    /// The offset after the last buffered byte.
    pub to: u64,
    /// The stream has ended at `to`.
    #[serde(default)]
    pub eof: bool,
}

/// A command line as lists show it: its words, and `…` where it is cut.
pub fn shown_command(argv: &[String]) -> String {
    let mut text = argv.join(" ");
    if text.len() > SHOWN_COMMAND {
        let end = (0..=SHOWN_COMMAND).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

impl Range {
    /// The offset in the range nearest to `offset`. A hostile agent may send a range that ends before it begins.
    pub fn nearest(&self, offset: u64) -> u64 {
        offset.min(self.to).max(self.from)
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_line_is_cut_between_characters() {
        assert_eq!(shown_command(&["make".into(), "-j2".into()]), "make -j2");
        let long = shown_command(&["ä".repeat(100)]);
        assert!(long.ends_with('…') && long.len() <= SHOWN_COMMAND + '…'.len_utf8(), "{long}");
    }

    #[test]
    fn every_range_has_a_nearest_place() {
        let nearest = |from, to, offset| Range { from, to, eof: false }.nearest(offset);
        assert_eq!([0, 4, 9].map(|offset| nearest(2, 5, offset)), [2, 4, 5]);
        assert_eq!([0, 4, 9].map(|offset| nearest(5, 2, offset)), [5, 5, 5]);
        assert_eq!(nearest(u64::MAX, u64::MAX, 0), u64::MAX);
    }
}
