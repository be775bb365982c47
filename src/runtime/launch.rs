//! Starts a container, from nothing to an agent on its pipes, and ends it, whether it is a sandbox's or warm.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton_protocol::{id::SandboxId, limits::Limits};
use rustix::process::Signal;
use tokio::{
    io::AsyncReadExt,
    process::{Child, ChildStderr},
    sync::watch,
};
use tokio_util::sync::CancellationToken;

use super::{
    Error, Result, StartSpec,
    argv::RunscCommand,
    bundle::{self, Layout},
    cgroup::{self, Group},
    channel::Channel,
    container::{Live, all_ended},
    containers::RuntimeContext,
    guard_link::{Fence, seek},
    memory_watch::Subject,
    sentry::SentryControl,
    spawner::NOT_TAKEN,
};
use crate::{
    guard::process_handle::{self, ProcessHandle},
    network::SandboxConnections,
};

pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);
/// Size of both pipes of the agent; large ones need fewer reads.
const PIPE: usize = 1 << 20;
const STDERR_READ: u64 = 64 << 10;
/// How often to poll the state file that runsc writes.
const SEEK: Duration = Duration::from_millis(2);

/// A container that has been started.
#[derive(Debug)]
pub(super) struct Begun {
    pub name: String,
    pub channel: Arc<Channel>,
    /// Cancelled when the container must end now.
    pub doomed: CancellationToken,
    /// Sentry and gofer, once they are known.
    processes: Vec<ProcessHandle>,
    child: Child,
    log: PathBuf,
    paused: watch::Sender<bool>,
    ended: CancellationToken,
}

pub(super) fn new_name(context: &RuntimeContext) -> String {
    baton_protocol::id::hex(&context.clock.bits()[..8])
}

/// Makes the cgroup of a container, if its limits need one and cgroups are available.
pub(super) fn make_group(context: &RuntimeContext, name: &str, limits: &Limits) -> Result<Option<Group>> {
    let bounds = cgroup::CgroupLimits::of(limits);
    match &context.cgroups {
        Ok(cgroups) if bounds != cgroup::CgroupLimits::default() => {
            cgroups.make(name, &bounds).map(Some).map_err(|error| no_group("create", &error))
        }
        Ok(_) | Err(_) => Ok(None),
    }
}

pub(super) fn no_group(what: &'static str, error: &std::io::Error) -> Error {
    Error::Failed { what, why: format!("its limits cannot be set: {error}") }
}

/// Whether programs of the sandbox may reach anything at all.
pub(super) fn has_egress(context: &RuntimeContext, start: &StartSpec) -> bool {
    start.layout.has_network() && context.settings.network.is_open(&start.egress)
}

pub(super) async fn make_bundle(
    context: &RuntimeContext,
    name: &str,
    layout: Layout,
    rootfs: &Path,
) -> std::io::Result<()> {
    let settings = &context.settings;
    let bundle = settings.bundle(name);
    let agent_dir = bundle.join("agent");
    tokio::fs::create_dir_all(&agent_dir).await?;
    // A private copy, because the original may be replaced while sandboxes run.
    let agent = agent_dir.join("agent");
    tokio::fs::copy(&settings.agent, &agent).await?;
    tokio::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o555)).await?;
    let spec = bundle::spec(layout, rootfs, &agent_dir, settings.cpu_features.as_deref());
    tokio::fs::write(bundle.join("config.json"), spec.to_string()).await
}

impl Begun {
    /// Starts a container that the guard already watches.
    pub async fn start(
        context: &RuntimeContext,
        name: &str,
        verb: RunscCommand<'_>,
        group: Option<&Group>,
    ) -> Result<Self> {
        let log = context.settings.bundle(name).join("log");
        let mut child = context.runsc.attach(verb, name, &log, group.map_or(&[], Group::directories)).await?;
        let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::Failed { what: verb.name(), why: "runsc has no pipes".to_owned() });
        };
        // Best-effort: smaller pipes are only slower.
        let _ = rustix::pipe::fcntl_setpipe_size(&stdin, PIPE);
        let _ = rustix::pipe::fcntl_setpipe_size(&stdout, PIPE);
        context.tasks.spawn(drain(stderr));
        Ok(Self {
            name: name.to_owned(),
            channel: Arc::new(Channel::start(stdin, stdout, context)),
            doomed: CancellationToken::new(),
            processes: Vec::new(),
            child,
            log,
            paused: watch::channel(false).0,
            ended: CancellationToken::new(),
        })
    }

    /// Waits until runsc has recorded the process ids, which it does before anything runs in them.
    pub async fn appear(&mut self, context: &RuntimeContext) {
        let state_file = context.settings.state_file(&self.name);
        while self.processes.is_empty() {
            let pids = process_handle::pids(&state_file).into_iter().flat_map(|pids| [pids.sentry, pids.gofer]);
            self.processes = pids.filter_map(|pid| ProcessHandle::open(pid).ok()).collect();
            context.clock.sleep(SEEK).await;
        }
    }

    /// Waits until runsc has recorded that commands run in the container.
    pub async fn runs(&self, context: &RuntimeContext) {
        let state_file = context.settings.state_file(&self.name);
        while !process_handle::is_running(&state_file) {
            context.clock.sleep(SEEK).await;
        }
    }

    /// What the memory watch needs to enforce the limits; `None` while the container has no processes.
    pub fn subject(
        &self,
        context: &RuntimeContext,
        id: &SandboxId,
        group: Option<&Group>,
        fence: &watch::Receiver<Fence>,
    ) -> Option<Subject> {
        Some(Subject {
            id: id.clone(),
            sentry: self.processes.first()?.pid(),
            group: group.cloned(),
            channel: self.channel.clone(),
            control: SentryControl::new(context.settings.control_socket(&self.name)),
            fence: fence.clone(),
            paused: self.paused.subscribe(),
            doomed: self.doomed.clone(),
            ended: self.ended.clone(),
        })
    }

    /// Finds the processes. Once the agent has answered, runsc has recorded their ids.
    pub async fn find_processes(&mut self, context: &RuntimeContext) -> Result<()> {
        let found = seek(&context.settings.state_file(&self.name), &context.clock, COMMAND_TIMEOUT).await;
        let pids = found.iter().flat_map(|pids| [pids.sentry, pids.gofer]);
        self.processes = pids.filter_map(|pid| ProcessHandle::open(pid).ok()).collect();
        if self.processes.is_empty() { Err(gone()) } else { Ok(()) }
    }

    /// Turns it into the running container of a sandbox.
    pub fn into_live(
        self,
        context: &RuntimeContext,
        id: &SandboxId,
        fence: watch::Receiver<Fence>,
        start: &StartSpec,
    ) -> (Live, Child) {
        let network = self.channel.take_network().filter(|_| start.layout.has_network());
        let connections = network
            .map(|link| SandboxConnections::start(id, link, &start.egress, &context.settings.network, &context.tasks));
        let live = Live {
            connections,
            control: SentryControl::new(context.settings.control_socket(&self.name)),
            name: self.name,
            channel: self.channel,
            fence,
            processes: self.processes,
            paused: self.paused,
            deadline: start.deadline.into(),
            disk: start.limits.disk,
            doomed: self.doomed,
            ended: self.ended,
            unwanted: false.into(),
            log: self.log,
        };
        (live, self.child)
    }

    /// Ends a container that started but did not answer. The reason runsc logged is preferred over `error`.
    pub async fn discard(mut self, context: &RuntimeContext, what: &'static str, error: Error) -> Error {
        let by_itself = context.clock.timeout(Duration::from_millis(100), self.child.wait()).await;
        let why = match by_itself {
            Ok(Ok(status)) if status.code() == Some(128) => Some(context.runsc.why(&self.log).await),
            Ok(Ok(status)) if status.code() == Some(NOT_TAKEN.into()) => Some("its cgroup does not take it".to_owned()),
            Ok(_) | Err(_) => None,
        };
        tracing::debug!(container = self.name, %error, "a container start was abandoned");
        self.end(context).await;
        why.map_or(error, |why| Error::Failed { what, why })
    }

    /// Returns once every process is dead, however long that takes, because another copy of a sandbox may start
    /// afterwards.
    pub async fn end(mut self, context: &RuntimeContext) {
        // Processes that the state file does not name yet are still children of runsc.
        self.processes.extend(self.child.id().into_iter().flat_map(ProcessHandle::children_of));
        for process in &self.processes {
            let _ = process.signal(Signal::KILL);
        }
        let _ = self.child.kill().await;
        all_ended(&self.processes, &context.clock).await;
        self.ended.cancel();
    }
}

/// Deletes what is left of a container whose processes are dead. Idempotent.
pub(super) async fn clear(context: &RuntimeContext, name: &str, group: Option<&Group>) -> Result<()> {
    if tokio::fs::try_exists(context.settings.state_file(name)).await.unwrap_or(true) {
        context.runsc.call(RunscCommand::Delete, name, COMMAND_TIMEOUT, None).await?;
    }
    context.guard.disarm(name).await?;
    if let Some(group) = group {
        let removed = group.remove(&context.clock).await;
        removed.map_err(|error| Error::Failed { what: "remove", why: format!("its cgroup stays: {error}") })?;
    }
    match tokio::fs::remove_dir_all(context.settings.bundle(name)).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::Failed { what: "remove", why: error.to_string() });
        }
        Ok(()) | Err(_) => {}
    }
    context.runsc.forget(name);
    Ok(())
}

/// Logs the beginning of the agent's stderr. The pipe is read to its end, so that the writer never blocks.
async fn drain(mut stderr: ChildStderr) {
    let mut text = Vec::new();
    let _ = (&mut stderr).take(STDERR_READ).read_to_end(&mut text).await;
    if !text.is_empty() {
        tracing::debug!(text = %String::from_utf8_lossy(&text).escape_debug(), "container stderr");
    }
    let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
}

pub(super) fn gone() -> Error {
    Error::NotIn("there any more")
}
