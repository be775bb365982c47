//! The handle of one sandbox.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_protocol::{
    event::{ExecView, Status, Token, Update},
    id::{CheckpointId, ExecId, InstanceId, SandboxId, SnapshotName},
    request::{Idle, Language, Offsets, Request},
};
use tokio::{
    sync::{Notify, broadcast, mpsc, oneshot, watch},
    task::JoinSet,
};

use crate::{
    Collected, Error, Exec, Options, RollBack, Running, client_clock,
    client_exec::{self, ExecStage},
    client_state::{SandboxRef, SandboxState},
    connect::{Address, Cookies},
    connection::{ConnectionCommand, ConnectionContext, SentMark},
    options::Connection,
};

/// How many requests may wait for a connection.
const COMMANDS: usize = 64;
/// How many updates are kept for a slow reader.
const UPDATES: usize = 256;

/// One sandbox, over one connection that reconnects by itself.
///
/// Dropping it closes the connection; the sandbox lives on until its idle timeout.
#[derive(Debug)]
pub struct Sandbox {
    pub(crate) place: SandboxRef,
    pub(crate) address: Address,
    pub(crate) options: Connection,
    answer_within: Duration,
    commands: mpsc::Sender<ConnectionCommand>,
    look: Arc<Notify>,
    mirror: watch::Receiver<SandboxState>,
    updates: broadcast::Sender<Update>,
    /// Owns the connection's task, which ends with this handle.
    _link: JoinSet<()>,
}

/// How to take a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// Includes running commands. Without this, the checkpoint is refused while a command runs.
    pub live: bool,
    /// Keeps the sandbox running here afterwards. Without this, the session ends.
    pub keep_running: bool,
}

impl Sandbox {
    /// Creates a sandbox and waits until it runs.
    pub async fn create(url: &str, options: Options) -> Result<Self, Error> {
        Self::open(url, None, options).await
    }

    /// Attaches to an existing sandbox, wherever it is, and waits until it runs.
    pub async fn attach(url: &str, id: SandboxId, token: Token) -> Result<Self, Error> {
        Self::attach_with(url, id, token, Connection::default()).await
    }

    /// Like [`attach`](Self::attach), with its own timeouts, credentials and callbacks.
    pub async fn attach_with(url: &str, id: SandboxId, token: Token, connection: Connection) -> Result<Self, Error> {
        let options = Options { connection, ..Options::default() };
        Self::open(url, Some(SandboxRef { id, token }), options).await
    }

    async fn open(url: &str, place: Option<SandboxRef>, options: Options) -> Result<Self, Error> {
        let Connection { start_within, answer_within, .. } = options.connection;
        let (commands, receiver) = mpsc::channel(COMMANDS);
        let (sender, mut mirror) = watch::channel(SandboxState::of(place));
        let updates = broadcast::Sender::new(UPDATES);
        let look = Arc::new(Notify::new());
        let (address, connection) = (Address::parse(url)?, options.connection.clone());
        let link = ConnectionContext {
            address: address.clone(),
            config: options.sent_config(),
            options: options.connection,
            cookies: Cookies::default(),
            commands: receiver,
            look: look.clone(),
            mirror: sender,
            updates: updates.clone(),
            execs: BTreeMap::new(),
        };
        let mut task = JoinSet::new();
        task.spawn(link.run());
        let started = mirror.wait_for(|mirror| mirror.sessions > 0 || mirror.end.is_some());
        let place = match client_clock::timeout(start_within, started).await {
            None => return Err(Error::Timeout(start_within)),
            Some(Err(_)) => return Err(Error::Ended("its task stopped".into())),
            Some(Ok(mirror)) => match (&mirror.end, &mirror.place) {
                (Some(error), _) => return Err(error.clone()),
                (None, Some(place)) => place.clone(),
                (None, None) => return Err(Error::Protocol("the sandbox runs but has no id".into())),
            },
        };
        Ok(Self { place, address, options: connection, answer_within, commands, look, mirror, updates, _link: task })
    }

    /// The id under which the sandbox can be attached again.
    pub fn id(&self) -> &SandboxId {
        &self.place.id
    }

    /// The token grants access to the sandbox: protect it like a password.
    pub fn token(&self) -> &Token {
        &self.place.token
    }

    /// The status that the server reported last.
    pub fn status(&self) -> Option<Status> {
        self.mirror.borrow().status()
    }

    /// The instance that the sandbox is on.
    pub fn instance(&self) -> Option<InstanceId> {
        self.mirror.borrow().instance.clone()
    }

    /// Whether a sandbox created here outlives its instance. `None` after an attach, and with servers that do not tell.
    pub fn is_persistent(&self) -> Option<bool> {
        self.mirror.borrow().is_persistent
    }

    /// Whether there is a connection right now. Callers need not check: requests wait for one.
    pub fn is_connected(&self) -> bool {
        self.mirror.borrow().is_open
    }

    /// How often the sandbox went back to an older checkpoint while this handle followed it.
    pub fn roll_backs(&self) -> Vec<RollBack> {
        self.mirror.borrow().roll_backs.clone()
    }

    /// Subscribes to every update from now on.
    pub fn updates(&self) -> broadcast::Receiver<Update> {
        self.updates.subscribe()
    }

    /// The commands that the sandbox knew when the connection began.
    pub fn execs(&self) -> Vec<ExecView> {
        self.mirror.borrow().execs.clone()
    }

    /// Starts a command. Returns [`Error::Refused`] if it cannot be started.
    pub async fn exec(&self, exec: Exec) -> Result<Running, Error> {
        let mut request = exec.0;
        let id = match &request.exec_id {
            Some(id) => id.clone(),
            None => {
                let text = format!("x{:016x}", client_clock::dice());
                ExecId::parse(&text).map_err(|error| Error::Protocol(error.to_string()))?
            }
        };
        request.exec_id = Some(id.clone());
        self.begin(client_exec::ClientExec::new(id, Some(request), Offsets::default(), self.look.clone())).await
    }

    /// Runs a command to its end and collects its output. Non-zero exit codes are outcomes, not errors.
    pub async fn run(&self, exec: Exec) -> Result<Collected, Error> {
        self.exec(exec).await?.collect().await
    }

    /// Like [`run`](Self::run), but for code.
    pub async fn run_code(&self, language: Language, code: impl Into<String>) -> Result<Collected, Error> {
        self.run(Exec::code(language, code)).await
    }

    /// Follows a command that is running already, or has ended unread, starting at these offsets.
    pub async fn follow(&self, id: &ExecId, from: Offsets) -> Result<Running, Error> {
        self.resume(id, from, false).await
    }

    /// Like [`follow`](Self::follow), but its output stays buffered and can be read again: the last 3 MiB of each
    /// stream of a running command, and all that is buffered of one that has ended.
    pub async fn peek(&self, id: &ExecId, from: Offsets) -> Result<Running, Error> {
        self.resume(id, from, true).await
    }

    async fn resume(&self, id: &ExecId, from: Offsets, is_peek: bool) -> Result<Running, Error> {
        if !self.mirror.borrow().execs.iter().any(|view| view.exec_id == *id) {
            let message = "the sandbox knows no such command".to_owned();
            return Err(Error::Refused { status: Status::ExecutionError, message });
        }
        let mut exec = client_exec::ClientExec::new(id.clone(), None, from, self.look.clone());
        exec.is_peek = is_peek;
        self.begin(exec).await
    }

    async fn begin(&self, exec: client_exec::ClientExec) -> Result<Running, Error> {
        let exec = Arc::new(exec);
        let mut stage = exec.stage.subscribe();
        let running = Running::new(exec.clone(), self.commands.clone());
        self.command(ConnectionCommand::Exec(exec)).await?;
        let answered = stage.wait_for(|stage| !matches!(stage, ExecStage::Asked));
        match client_clock::timeout(self.answer_within, answered).await {
            None => Err(Error::Timeout(self.answer_within)),
            Some(Ok(stage)) => match &*stage {
                ExecStage::Ended(Err(error)) => Err(error.clone()),
                ExecStage::Asked | ExecStage::Started | ExecStage::Ended(Ok(_)) => Ok(running),
            },
            Some(Err(_)) => Err(self.end()),
        }
    }

    /// Saves memory and files; the session ends, and the sandbox can be attached again anywhere.
    pub async fn checkpoint(&self) -> Result<CheckpointId, Error> {
        self.checkpoint_with(CheckpointOptions::default()).await
    }

    /// Like [`checkpoint`](Self::checkpoint), with options.
    pub async fn checkpoint_with(&self, how: CheckpointOptions) -> Result<CheckpointId, Error> {
        let request = Request::Checkpoint { live: how.live, keep_running: how.keep_running };
        let answers = [Status::Checkpointed, Status::CheckpointError, Status::ExecutionInProgressError];
        let answer = self.ask(request, |mirror, sent| mirror.since(sent.heard, &answers).cloned()).await?;
        match answer {
            Update { status: Status::Checkpointed, checkpoint_id: Some(id), .. } => Ok(id),
            Update { status: Status::Checkpointed, .. } => Err(Error::Protocol("a checkpoint without an id".into())),
            refused => Err(Error::of(&refused)),
        }
    }

    /// Saves the file system under a name, from which new sandboxes can start.
    pub async fn snapshot(&self, name: &SnapshotName) -> Result<(), Error> {
        self.snapshot_with(name, false).await
    }

    /// Like [`snapshot`](Self::snapshot); a full one contains everything, not only the changes to the base.
    pub async fn snapshot_with(&self, name: &SnapshotName, full: bool) -> Result<(), Error> {
        let request = Request::Snapshot { name: name.clone(), full };
        let answer = self
            .ask(request, |mirror, sent| {
                let made = mirror
                    .since(sent.heard, &[Status::FilesystemSnapshotCreated])
                    .filter(|update| update.snapshot.as_ref().is_none_or(|made| made == name));
                made.or_else(|| mirror.since(sent.heard, &[Status::FilesystemSnapshotError])).cloned()
            })
            .await?;
        if answer.status == Status::FilesystemSnapshotCreated { Ok(()) } else { Err(Error::of(&answer)) }
    }

    /// Makes copies of this sandbox, each of which can be attached to.
    pub async fn fork(&self, count: u32) -> Result<Vec<SandboxRef>, Error> {
        let refusals = [Status::Error, Status::CheckpointError, Status::CreationError];
        self.ask(Request::Fork { count }, |mirror, sent| {
            let copies = mirror.forked_since(sent.heard).map(|copies| {
                let place = |copy: &baton_protocol::event::Copied| SandboxRef {
                    id: copy.sandbox_id.clone(),
                    token: copy.sandbox_token.clone(),
                };
                Ok(copies.iter().map(place).collect())
            });
            copies.or_else(|| mirror.since(sent.heard, &refusals).map(|update| Err(Error::of(update))))
        })
        .await?
    }

    /// Sets how long the sandbox may be idle, counted from now, and returns what was set: whole seconds.
    pub async fn set_idle_timeout(&self, idle: Idle) -> Result<Idle, Error> {
        self.ask(Request::SetIdleTimeout(idle), |mirror, sent| {
            let set = mirror.idle_timeout_since(sent.heard).map(Ok);
            set.or_else(|| mirror.since(sent.heard, &[Status::Error]).map(|update| Err(Error::of(update))))
        })
        .await?
    }

    /// Leaves the current instance; when this returns, the sandbox runs again, on whichever instance.
    pub async fn handoff(&self) -> Result<(), Error> {
        let refusals = [Status::Error, Status::CheckpointError];
        self.wait(Request::Handoff, |mirror, sent| {
            if mirror.sessions > sent.session {
                return Some(Ok(()));
            }
            let refused = mirror.since(sent.heard, &refusals).map(Error::of);
            refused.or_else(|| mirror.end.clone()).map(Err)
        })
        .await
    }

    /// Kills and deletes the sandbox, and ends this session. A sandbox that is gone already is not an error.
    pub async fn kill(&self) -> Result<(), Error> {
        loop {
            let ended = self.wait(Request::KillSandbox, |mirror, sent| match &mirror.end {
                Some(Error::Ended(_) | Error::NotFound) => Some(Ok(true)),
                Some(error) => Some(Err(error.clone())),
                None => match mirror.since(sent.heard, &[Status::KillError]) {
                    Some(refused) => Some(Err(Error::of(refused))),
                    // The request may be lost with its connection. Sending it twice does no harm.
                    None => (mirror.sessions > sent.session).then_some(Ok(false)),
                },
            });
            match ended.await {
                Ok(true) | Err(Error::Ended(_) | Error::NotFound) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes the connection cleanly and leaves the sandbox as it is.
    pub async fn close(mut self) {
        if self.command(ConnectionCommand::Close).await.is_ok() {
            let closed = self.mirror.wait_for(|mirror| mirror.end.is_some());
            let _ = client_clock::timeout(Duration::from_secs(5), closed).await;
        }
    }

    /// Sends a request that only the current session can answer.
    async fn ask<T>(
        &self,
        request: Request,
        answer: impl Fn(&SandboxState, SentMark) -> Option<T>,
    ) -> Result<T, Error> {
        self.wait(request, |mirror, sent| {
            if let Some(answer) = answer(mirror, sent) {
                return Some(Ok(answer));
            }
            if let Some(error) = &mirror.end {
                return Some(Err(error.clone()));
            }
            let is_lost = !mirror.is_open || mirror.sessions > sent.session;
            let why = match &mirror.lost {
                Some(Error::Connection(why)) => format!("it broke before the answer came ({why})"),
                Some(_) | None => "it broke before the answer came".to_owned(),
            };
            is_lost.then_some(Err(Error::Connection(why)))
        })
        .await
    }

    /// Sends a request, then waits until `answer` returns a result.
    async fn wait<T>(
        &self,
        request: Request,
        answer: impl Fn(&SandboxState, SentMark) -> Option<Result<T, Error>>,
    ) -> Result<T, Error> {
        let answered = async {
            let (sent, was_sent) = oneshot::channel();
            self.command(ConnectionCommand::Ask { request, sent }).await?;
            let Ok(sent) = was_sent.await else { return Err(self.end()) };
            let mut mirror = self.mirror.clone();
            let mut found = None;
            let waited = mirror
                .wait_for(|mirror| {
                    found = answer(mirror, sent);
                    found.is_some()
                })
                .await
                .is_ok();
            if waited { found.unwrap_or_else(|| Err(self.end())) } else { Err(self.end()) }
        };
        client_clock::timeout(self.answer_within, answered).await.unwrap_or(Err(Error::Timeout(self.answer_within)))
    }

    async fn command(&self, command: ConnectionCommand) -> Result<(), Error> {
        self.commands.send(command).await.map_err(|_| self.end())
    }

    fn end(&self) -> Error {
        self.mirror.borrow().end.clone().unwrap_or_else(|| Error::Ended("its task stopped".into()))
    }
}
