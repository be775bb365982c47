//! The JSON payloads of the rare frames. Fields are only added, each with a default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{file, id::ExecId};

/// Most commands the agent keeps at once, running or not yet forgotten.
pub const MAX_EXECS: usize = 1024;
/// How much of a stream is held while somebody reads it.
pub const RING_ATTACHED: u64 = 4 << 20;
/// How much of a stream is held while nobody does.
pub const RING_DETACHED: u64 = 8 << 20;
/// How many ended commands are remembered although nobody took their exit status.
pub const KEPT_EXITS: usize = 100;

/// `Assign`: what makes a fresh agent the agent of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assign {
    /// The sandbox's marker, in hex, each byte inverted: the marker itself is never inside a payload.
    pub marker_inverted: String,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where commands start that do not say where.
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub hostname: Option<String>,
    /// Processes and threads of one user at one time. It holds for the sandbox's whole life, also after a restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Open files of one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u32>,
}

/// `Relieve`: the sandbox is over a limit of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relieve {
    /// Bytes of memory that are in use, of which the largest part is to be ended; 0 is everything, at once.
    #[serde(default)]
    pub used: u64,
    /// For whoever started what is ended now.
    pub why: String,
}

/// `Exec`: one command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub exec_id: ExecId,
    pub argv: Vec<String>,
    /// Added to the environment of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// A user's name or number inside the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Without it stdin is empty from the start.
    #[serde(default)]
    pub stdin: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// Counts only time in which the sandbox really ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// No program of the sandbox's: the agent's own work with files. `argv` only names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<file::Work>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pty {
    pub cols: u16,
    pub rows: u16,
}

/// `Resync`: the server that restored the sandbox introduces itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// 16 fresh bytes in hex. The answer begins with these bytes, raw, so that all before them can be thrown away.
    pub nonce: String,
}

/// `Restored` and `Forked`: what the sandbox may want to know about its move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// `Hello`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The newest frame version the agent speaks.
    pub version: u8,
    /// The agent's own version, for the log.
    #[serde(default)]
    pub build: String,
}

/// `Exit`: exactly one of the first three is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The command never started, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// It was killed because its time was up.
    #[serde(default)]
    pub timed_out: bool,
    /// It was killed because the sandbox was over a limit, which this says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long it ran, without the time the sandbox stood still.
    #[serde(default)]
    pub duration_ms: u64,
}

/// `ResyncAck` and `AgentLinks`: all the agent knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub version: u8,
    /// The highest request number it has taken.
    pub last_request: u64,
    /// The highest exec number it has taken.
    #[serde(default)]
    pub last_exec: u32,
    pub execs: Vec<ExecState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecState {
    pub exec: u32,
    pub exec_id: ExecId,
    pub pid: i32,
    #[serde(default)]
    pub pty: bool,
    /// Bytes of stdin taken so far.
    pub stdin: u64,
    /// Nobody reads its stdin (any more).
    #[serde(default)]
    pub stdin_closed: bool,
    pub stdout: Range,
    pub stderr: Range,
    pub exit: Option<Exit>,
}

/// What of a stream is still there: the bytes `from..to`, and whether more can come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub from: u64,
    pub to: u64,
    #[serde(default)]
    pub eof: bool,
}

impl Range {
    /// The place in it nearest to `offset`, also if it ends before it begins: a hostile agent may say so.
    pub fn nearest(&self, offset: u64) -> u64 {
        offset.min(self.to).max(self.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_range_has_a_nearest_place() {
        let nearest = |from, to, offset| Range { from, to, eof: false }.nearest(offset);
        assert_eq!([0, 4, 9].map(|offset| nearest(2, 5, offset)), [2, 4, 5]);
        assert_eq!([0, 4, 9].map(|offset| nearest(5, 2, offset)), [5, 5, 5]);
        assert_eq!(nearest(u64::MAX, u64::MAX, 0), u64::MAX);
    }
}
