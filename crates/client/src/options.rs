//! What a caller can configure: the sandbox, the connection, one command.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use baton_protocol::{
    agent::Pty,
    event::Update,
    file_work::Work,
    id::{CheckpointId, ExecId},
    limits::Cpus,
    request::{self, Command, Idle, Language, Persistence, SandboxConfig},
};

use crate::Auth;

/// How [`Sandbox::create`](crate::Sandbox::create) makes a sandbox and connects to it.
///
/// ```
/// # use baton_client::Options;
/// # use std::time::Duration;
/// let small = Options::default().memory(512 << 20).cpus(1.5).idle_timeout(Duration::from_secs(3600));
/// let found_later = Options::default().label("team", "blue").persistent(true);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What kind of sandbox to create.
    pub config: SandboxConfig,
    /// How to reach the server, now and when reconnecting.
    pub connection: Connection,
}

impl Options {
    /// Whether the sandbox outlives its instance. By default it does where the server has storage.
    pub fn persistent(mut self, persistence: impl Into<Persistence>) -> Self {
        self.config.persistent = Some(persistence.into());
        self
    }

    /// How long it may be idle; by default the server chooses. [`Idle::Never`] never ends it.
    pub fn idle_timeout(mut self, idle: impl Into<Idle>) -> Self {
        self.config.idle_timeout = Some(idle.into());
        self
    }

    /// How long it lives at most.
    pub fn ttl(mut self, span: Duration) -> Self {
        self.config.ttl = Some(span);
        self
    }

    /// Sets one label, by which it can be found on the server.
    pub fn label(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.labels.insert(name.into(), value.into());
        self
    }

    /// Sets one environment variable of all its commands.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.env.insert(name.into(), value.into());
        self
    }

    /// Sets the directory in which its commands start.
    pub fn cwd(mut self, directory: impl Into<String>) -> Self {
        self.config.cwd = Some(directory.into());
        self
    }

    /// Limits the memory of all its commands, in bytes.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.config.limits.memory = Some(bytes);
        self
    }

    /// Limits its CPU time, in CPUs.
    pub fn cpus(mut self, cpus: f64) -> Self {
        self.config.limits.cpus = Some(Cpus((cpus * 1000.0).round() as u32));
        self
    }

    /// Limits its processes and threads.
    pub fn pids(mut self, count: u32) -> Self {
        self.config.limits.pids = Some(count);
        self
    }

    /// Limits what it writes to files, in bytes.
    pub fn disk(mut self, bytes: u64) -> Self {
        self.config.limits.disk = Some(bytes);
        self
    }

    /// Limits the open files of one process.
    pub fn files(mut self, count: u32) -> Self {
        self.config.limits.files = Some(count);
        self
    }

    /// The config to send: a sandbox is persistent where that is possible, unless the caller said otherwise.
    pub(crate) fn sent_config(&self) -> SandboxConfig {
        let mut config = self.config.clone();
        if !config.enable_checkpoint && !config.has_predecessor_flags() {
            config.persistent.get_or_insert(Persistence::Auto);
        }
        config
    }
}

/// How to reach the server, and with which timeouts.
#[derive(Clone)]
pub struct Connection {
    /// Sent as `X-API-Key`.
    pub api_key: Option<String>,
    /// Sent with every handshake, for example for a proxy in front of the server.
    pub headers: Vec<(String, String)>,
    /// Provides further headers before each handshake.
    pub auth: Option<Auth>,
    /// How long to retry after a lost connection. `None` never retries.
    pub reconnect_for: Option<Duration>,
    /// The timeout of one handshake.
    pub connect_within: Duration,
    /// The timeout from the call of create or attach to a running sandbox.
    pub start_within: Duration,
    /// The timeout of a checkpoint, snapshot, fork, handoff or kill.
    pub answer_within: Duration,
    /// The server pings every ten seconds: after this much silence the connection counts as lost.
    pub silence: Duration,
    /// Called with every update on arrival, even before there is a [`Sandbox`](crate::Sandbox). It must not block.
    pub on_status: Option<OnStatus>,
    /// Called when the sandbox was restored from a checkpoint that is older than its last moment: work is lost. A
    /// warning is logged in any case. It must not block.
    pub on_roll_back: Option<OnRollBack>,
}

/// Called with every roll-back.
pub type OnRollBack = Arc<dyn Fn(&RollBack) + Send + Sync>;

/// The sandbox went back to an older state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollBack {
    /// The checkpoint that it was restored from.
    pub checkpoint_id: CheckpointId,
    /// How much older that state is.
    pub age: Duration,
}

/// Called with every status update.
pub type OnStatus = Arc<dyn Fn(&Update) + Send + Sync>;

impl Default for Connection {
    fn default() -> Self {
        Self {
            api_key: None,
            headers: Vec::new(),
            auth: None,
            reconnect_for: Some(Duration::from_secs(300)),
            connect_within: Duration::from_secs(15),
            start_within: Duration::from_secs(120),
            answer_within: Duration::from_secs(600),
            silence: Duration::from_secs(30),
            on_status: None,
            on_roll_back: None,
        }
    }
}

/// Does not print keys and headers, which are secrets.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("reconnect_for", &self.reconnect_for).finish_non_exhaustive()
    }
}

/// One command.
///
/// ```
/// # use baton_client::{Exec, Language};
/// # use std::time::Duration;
/// let build = Exec::argv(["make", "-j2"]).cwd("/src").env("CI", "1").timeout(Duration::from_secs(60));
/// let sum = Exec::code(Language::Python, "print(1 + 1)");
/// ```
#[derive(Clone)]
pub struct Exec(pub(crate) request::ExecRequest);

impl Exec {
    /// Runs a program with its arguments, without a shell.
    pub fn argv<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self::of(Command::Argv(argv.into_iter().map(Into::into).collect()))
    }

    /// Runs a piece of source code with the interpreter of its language.
    pub fn code(language: Language, code: impl Into<String>) -> Self {
        Self::of(Command::Code { language, code: code.into() })
    }

    pub(crate) fn file(work: Work) -> Self {
        let stdin = work.has_stdin();
        let exec = Self::of(Command::File(work));
        if stdin { exec.stdin() } else { exec }
    }

    fn of(command: Command) -> Self {
        Self(request::ExecRequest {
            exec_id: None,
            command,
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            stdin: false,
            pty: None,
            timeout: None,
            details: false,
        })
    }

    /// The exec id; random by default.
    pub fn id(mut self, id: ExecId) -> Self {
        self.0.exec_id = Some(id);
        self
    }

    /// Sets one variable, in addition to the sandbox's environment.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.env.insert(name.into(), value.into());
        self
    }

    /// Sets the working directory; by default that of the sandbox.
    pub fn cwd(mut self, directory: impl Into<String>) -> Self {
        self.0.cwd = Some(directory.into());
        self
    }

    /// A user name or number inside the sandbox.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.0.user = Some(user.into());
        self
    }

    /// Keeps stdin open for [`write_stdin`](crate::Running::write_stdin); by default it is empty.
    pub fn stdin(mut self) -> Self {
        self.0.stdin = true;
        self
    }

    /// Runs the command on a terminal of this size; all its output is then stdout. Opens stdin too.
    pub fn pty(mut self, cols: u16, rows: u16) -> Self {
        self.0.pty = Some(Pty { cols: cols.max(1), rows: rows.max(1) });
        self.stdin()
    }

    /// Kills the command after this much time in which the sandbox ran.
    pub fn timeout(mut self, span: Duration) -> Self {
        self.0.timeout = Some(span);
        self
    }
}

/// Does not print the caller's code and environment, which must not be logged.
impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec").field("exec_id", &self.0.exec_id).finish_non_exhaustive()
    }
}
