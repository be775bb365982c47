//! The server's side of the guard: starts it, sends it orders and reads its reports.
//!
//! The guard is the only child that must outlive the server: it has no death signal and its own process group,
//! and exits when its stdin closes. Without a guard no container would be stopped in time, so if it dies, all
//! containers are stopped at once and a new guard takes over.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{mpsc, oneshot, watch},
};
use tokio_util::task::TaskTracker;

use super::{Error, Result, runtime_settings::RuntimeSettings};
use crate::{
    clock::{Moment, SharedClock},
    guard::{
        guard_wire::{GuardOutcome, GuardReport, Order},
        process_handle::{self, ProcessHandle},
    },
};

/// What the guard did to a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// It did nothing.
    Running,
    Fenced,
    Killed,
}

/// An order for the guard, and where to send its answer.
#[derive(Debug)]
struct GuardRequest {
    order: Order,
    answered: Option<oneshot::Sender<watch::Receiver<Fence>>>,
}

#[derive(Debug)]
struct Entry {
    state_file: PathBuf,
    deadline: Duration,
    synced: bool,
    fence: watch::Sender<Fence>,
    /// The action waiting for `armed`, `taken` or `disarmed`.
    awaited: Option<Awaited>,
}

/// The expected report of the guard, and where to send it.
type Awaited = (GuardOutcome, oneshot::Sender<watch::Receiver<Fence>>);

#[derive(Clone, Debug)]
pub struct GuardLink {
    requests: mpsc::UnboundedSender<GuardRequest>,
    clock: SharedClock,
    settings: Arc<RuntimeSettings>,
}

/// Timeout for an answer of the guard, which is one line through two pipes.
const ANSWER: Duration = Duration::from_secs(5);
/// The deadline of a warm container: it runs nothing yet, and dies with the server.
pub const NONE_YET: Moment = Moment(Duration::from_secs(u32::MAX as u64));

impl GuardLink {
    /// Starts the guard. It exits when the last link is dropped.
    pub fn start(settings: Arc<RuntimeSettings>, clock: SharedClock, tasks: &TaskTracker) -> io::Result<Self> {
        let (requests, queue) = mpsc::unbounded_channel();
        let first = start(&settings)?;
        let keeper =
            GuardSupervisor { settings: settings.clone(), clock: clock.clone(), queue, entries: BTreeMap::new() };
        tasks.spawn(keeper.supervise(first));
        Ok(Self { requests, clock, settings })
    }

    /// Has the guard watch a container, before the container starts.
    pub async fn arm(&self, container: &str, state_file: PathBuf, deadline: Moment) -> Result<watch::Receiver<Fence>> {
        let (container, confirm) = (container.to_owned(), self.settings.confirm);
        self.ask(Order::Arm { container, deadline: deadline.0, confirm, state_file }).await
    }

    /// Gives a warm container a deadline. Returns once the guard has confirmed it.
    pub async fn arm_warm(&self, container: &str, deadline: Moment) -> Result<watch::Receiver<Fence>> {
        self.ask(Order::Take { container: container.to_owned(), deadline: deadline.0 }).await
    }

    pub async fn disarm(&self, container: &str) -> Result<()> {
        self.ask(Order::Disarm { container: container.to_owned() }).await.map(drop)
    }

    pub fn extend(&self, container: &str, deadline: Moment) {
        self.send_order(Order::Extend { container: container.to_owned(), deadline: deadline.0 }, None);
    }

    pub fn synced(&self, container: &str) {
        self.send_order(Order::Synced { container: container.to_owned() }, None);
    }

    /// Returns once the container is stopped or dead.
    pub async fn fence(&self, container: &str, mut fence: watch::Receiver<Fence>) -> Result<Fence> {
        self.send_order(Order::Fence { container: container.to_owned() }, None);
        let limit = self.settings.confirm + ANSWER;
        let told = self.clock.timeout(limit, fence.wait_for(|fence| *fence != Fence::Running)).await;
        match told {
            Ok(Ok(told)) => Ok(*told),
            Ok(Err(_)) => Err(Error::NotIn("guarded")),
            Err(elapsed) => Err(Error::TimedOut { what: "fence", after: elapsed.0 }),
        }
    }

    /// Resumes a fenced container until `deadline`.
    pub async fn resume(&self, container: &str, deadline: Moment, mut fence: watch::Receiver<Fence>) -> Result<()> {
        self.send_order(Order::Resume { container: container.to_owned(), deadline: deadline.0 }, None);
        match self.clock.timeout(ANSWER, fence.wait_for(|fence| *fence != Fence::Fenced)).await {
            Ok(Ok(told)) if *told == Fence::Running => Ok(()),
            Ok(_) => Err(Error::NotIn("alive")),
            Err(elapsed) => Err(Error::TimedOut { what: "resume", after: elapsed.0 }),
        }
    }

    async fn ask(&self, order: Order) -> Result<watch::Receiver<Fence>> {
        let (answered, answer) = oneshot::channel();
        self.send_order(order, Some(answered));
        match self.clock.timeout(ANSWER, answer).await {
            Ok(Ok(fence)) => Ok(fence),
            Ok(Err(_)) => Err(Error::Failed { what: "guard", why: "the guard is gone".to_owned() }),
            Err(elapsed) => Err(Error::TimedOut { what: "guard", after: elapsed.0 }),
        }
    }

    fn send_order(&self, order: Order, answered: Option<oneshot::Sender<watch::Receiver<Fence>>>) {
        // The receiver is gone only when this instance is shutting down.
        let _ = self.requests.send(GuardRequest { order, answered });
    }
}

#[derive(Debug)]
struct Running {
    child: Child,
    stdin: ChildStdin,
    reports: Lines<BufReader<ChildStdout>>,
}

fn start(settings: &RuntimeSettings) -> io::Result<Running> {
    let mut command = Command::new(&settings.exe);
    // The working directory shows operators which server the guard belongs to.
    command.arg("guard").env_clear().current_dir(&settings.state_dir).process_group(0);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let missing = || io::Error::other("the guard has no pipes");
    let (stdin, stdout) = (child.stdin.take().ok_or_else(missing)?, child.stdout.take().ok_or_else(missing)?);
    Ok(Running { child, stdin, reports: BufReader::new(stdout).lines() })
}

impl Running {
    async fn send_order(&mut self, order: &Order) -> io::Result<()> {
        self.stdin.write_all(format!("{order}\n").as_bytes()).await
    }
}

/// The task that talks to the guard.
#[derive(Debug)]
struct GuardSupervisor {
    settings: Arc<RuntimeSettings>,
    clock: SharedClock,
    queue: mpsc::UnboundedReceiver<GuardRequest>,
    entries: BTreeMap<String, Entry>,
}

impl GuardSupervisor {
    async fn supervise(mut self, mut guard: Running) {
        loop {
            if self.serve(&mut guard).await.is_ok() {
                // The instance is shutting down: the guard sees its stdin close, kills what is left and exits.
                drop(guard.stdin);
                let _ = self.clock.timeout(ANSWER, guard.child.wait()).await;
                return;
            }
            tracing::error!("the guard died; every container is stopped until a new one has started");
            let _ = guard.child.kill().await;
            let ran = self.fence_all().await;
            guard = self.start_again().await;
            if self.take_over(&mut guard, &ran).await.is_ok() {
                tracing::info!(containers = self.entries.len(), "a new guard has started");
            }
        }
    }

    /// Returns when the last link is dropped, or an error when the guard is dead.
    async fn serve(&mut self, guard: &mut Running) -> io::Result<()> {
        loop {
            tokio::select! {
                request = self.queue.recv() => match request {
                    Some(request) => {
                        let order = self.note(request);
                        guard.send_order(&order).await?;
                    }
                    None => return Ok(()),
                },
                line = guard.reports.next_line() => match line? {
                    Some(line) => self.handle_line(&line),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
            }
        }
    }

    /// Records what a new guard would need to know.
    fn note(&mut self, GuardRequest { order, answered }: GuardRequest) -> Order {
        match &order {
            Order::Arm { container, deadline, state_file, .. } => {
                let (fence, _) = watch::channel(Fence::Running);
                let awaited = answered.map(|answered| (GuardOutcome::Armed, answered));
                let entry =
                    Entry { state_file: state_file.clone(), deadline: *deadline, synced: false, fence, awaited };
                self.entries.insert(container.clone(), entry);
            }
            Order::Extend { container, deadline } | Order::Resume { container, deadline } => {
                if let Some(entry) = self.entries.get_mut(container) {
                    entry.deadline = *deadline;
                }
            }
            Order::Take { container, deadline } => {
                if let Some(entry) = self.entries.get_mut(container) {
                    entry.deadline = *deadline;
                    entry.awaited = answered.map(|answered| (GuardOutcome::Taken, answered));
                }
            }
            Order::Synced { container } => {
                if let Some(entry) = self.entries.get_mut(container) {
                    entry.synced = true;
                }
            }
            Order::Fence { .. } => {}
            Order::Disarm { container } => {
                if let Some(entry) = self.entries.get_mut(container) {
                    entry.awaited = answered.map(|answered| (GuardOutcome::Disarmed, answered));
                } else if let Some(answered) = answered {
                    let _ = answered.send(watch::channel(Fence::Killed).1);
                }
            }
        }
        order
    }

    fn handle_line(&mut self, line: &str) {
        let Ok(GuardReport { what, container }) = line.parse() else { return };
        let Some(entry) = self.entries.get_mut(&container) else { return };
        match what {
            GuardOutcome::Armed | GuardOutcome::Taken => {}
            GuardOutcome::Fenced => {
                entry.fence.send_if_modified(|fence| {
                    *fence == Fence::Running && {
                        *fence = Fence::Fenced;
                        true
                    }
                });
            }
            GuardOutcome::Killed => drop(entry.fence.send_replace(Fence::Killed)),
            GuardOutcome::Resumed => drop(entry.fence.send_replace(Fence::Running)),
            GuardOutcome::Disarmed => {}
        }
        if let Some((_, answered)) = entry.awaited.take_if(|(awaited, _)| *awaited == what) {
            let _ = answered.send(entry.fence.subscribe());
        }
        if what == GuardOutcome::Disarmed {
            self.entries.remove(&container);
        }
    }

    /// Stops every container without the guard and returns those that were running.
    async fn fence_all(&self) -> Vec<String> {
        let running = self.entries.iter().filter(|(_, entry)| *entry.fence.borrow() == Fence::Running);
        let stopped = running.map(async |(name, entry)| (name.clone(), stop(&entry.state_file, &self.clock).await));
        let stopped = futures::future::join_all(stopped).await;
        let until = self.clock.now() + self.settings.confirm;
        for (container, sentry) in &stopped {
            if let Some(sentry) = sentry {
                while !sentry.is_stopped() && self.clock.now() < until {
                    self.clock.sleep(Duration::from_millis(1)).await;
                }
                if !sentry.is_stopped() {
                    let _ = sentry.signal(Signal::KILL);
                }
            }
            if let Some(entry) = self.entries.get(container) {
                entry.fence.send_replace(Fence::Fenced);
            }
        }
        stopped.into_iter().map(|(container, _)| container).collect()
    }

    async fn start_again(&self) -> Running {
        loop {
            match start(&self.settings) {
                Ok(guard) => return guard,
                Err(error) => tracing::error!(%error, "the guard could not be started"),
            }
            self.clock.sleep(Duration::from_millis(200)).await;
        }
    }

    async fn take_over(&self, guard: &mut Running, ran: &[String]) -> io::Result<()> {
        for (name, entry) in &self.entries {
            let (container, deadline, state_file) = (name.clone(), entry.deadline, entry.state_file.clone());
            let confirm = self.settings.confirm;
            guard.send_order(&Order::Arm { container: container.clone(), deadline, confirm, state_file }).await?;
            if matches!(entry.awaited, Some((GuardOutcome::Taken, _))) {
                guard.send_order(&Order::Take { container: container.clone(), deadline }).await?;
            }
            if entry.synced {
                guard.send_order(&Order::Synced { container: container.clone() }).await?;
            }
            let goes_on = ran.contains(name) && deadline > self.clock.now().0;
            let order = if goes_on { Order::Resume { container, deadline } } else { Order::Fence { container } };
            guard.send_order(&order).await?;
        }
        Ok(())
    }
}

/// Stops a container. Returns `None` if it has not started yet: the next guard finds it.
async fn stop(state_file: &Path, clock: &SharedClock) -> Option<ProcessHandle> {
    let pids = seek(state_file, clock, Duration::from_millis(200)).await?;
    let sentry = ProcessHandle::open(pids.sentry).ok()?;
    let _ = sentry.signal(Signal::STOP);
    Some(sentry)
}

/// Finds the processes of a started container. Retries, because runsc rewrites the file from time to time and it
/// is incomplete for a moment.
pub(super) async fn seek(state_file: &Path, clock: &SharedClock, limit: Duration) -> Option<process_handle::Pids> {
    let until = clock.now() + limit;
    loop {
        let found = process_handle::pids(state_file);
        if found.is_some() || clock.now() >= until || !state_file.exists() {
            return found;
        }
        clock.sleep(Duration::from_millis(1)).await;
    }
}
