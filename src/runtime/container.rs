//! One running container and the task that watches it.
//!
//! Its observed state has one source, [`Live::look`], which is recomputed after every change.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::{process::Child, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{
    Container, ContainerView,
    channel::Channel,
    containers::{RuntimeContext, Slot},
    guard_link::Fence,
    sentry::SentryControl,
};
use crate::{
    clock::{Moment, SharedClock},
    guard::process_handle::ProcessHandle,
    network::SandboxConnections,
};

/// The log of runsc is truncated when it grows beyond this size.
const LOG_KEPT: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Live {
    /// The container's name in runsc.
    pub name: String,
    pub channel: Arc<Channel>,
    /// `None`: its layout is older than the network.
    pub connections: Option<SandboxConnections>,
    pub fence: watch::Receiver<Fence>,
    /// Sentry and gofer.
    pub processes: Vec<ProcessHandle>,
    pub control: SentryControl,
    pub paused: watch::Sender<bool>,
    pub deadline: Mutex<Moment>,
    /// How many bytes it may write to its files; `None` means no limit.
    pub disk: Option<u64>,
    /// Cancelled when the container must end now.
    pub doomed: CancellationToken,
    /// Cancelled when the attached runsc has exited and its children are reaped.
    pub ended: CancellationToken,
    /// Set when the end was requested, so that it is not reported as an unexpected one.
    pub unwanted: AtomicBool,
    pub log: PathBuf,
}

impl Live {
    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    pub fn is_fenced(&self) -> bool {
        *self.fence.borrow() != Fence::Running
    }

    pub fn is_paused(&self) -> bool {
        *self.paused.borrow()
    }

    pub fn sentry(&self) -> Option<&ProcessHandle> {
        self.processes.first()
    }

    /// Also truncates the log: this runs on every lease renewal.
    pub fn extend(&self, context: &RuntimeContext, deadline: Moment) {
        *self.deadline.lock() = deadline;
        context.guard.extend(&self.name, deadline);
        let log = self.log.clone();
        context.tasks.spawn_blocking(move || {
            if std::fs::metadata(&log).is_ok_and(|file| file.len() > LOG_KEPT) {
                let _ = std::fs::OpenOptions::new().write(true).truncate(true).open(&log);
            }
        });
    }

    pub fn view(&self) -> ContainerView {
        let container = match (self.has_ended(), *self.fence.borrow(), self.is_paused()) {
            (true, _, _) | (_, Fence::Killed, _) => Container::Stopped,
            (false, Fence::Fenced, _) => Container::Fenced,
            (false, Fence::Running, true) => Container::Paused,
            (false, Fence::Running, false) => Container::Running,
        };
        let running = self.channel.status().borrow().running.len();
        let running_execs =
            if container == Container::Stopped { 0 } else { u32::try_from(running).unwrap_or(u32::MAX) };
        ContainerView { container, running_execs }
    }
}

/// Publishes every change until the container has ended.
pub(super) async fn watch_over(context: Arc<RuntimeContext>, slot: Arc<Slot>, live: Arc<Live>, mut child: Child) {
    let (mut news, mut fence, mut paused) = (live.channel.status(), live.fence.clone(), live.paused.subscribe());
    let mut stirred = false;
    loop {
        let seen = live.view();
        live.channel.set_gate(seen.container == Container::Running);
        slot.seen.send_if_modified(|shown| std::mem::replace(shown, seen) != seen);
        // The guard may resume a container without an action: a new guard does, so quickly that the stop may
        // never have been observed.
        if std::mem::take(&mut stirred) && seen.container == Container::Running {
            live.channel.ping();
        }
        tokio::select! {
            _ = child.wait() => break,
            () = live.doomed.cancelled() => break,
            Ok(()) = news.changed() => {
                let broken = news.borrow_and_update().broken;
                if let Some(why) = broken {
                    if !live.unwanted.load(Ordering::Relaxed) {
                        tracing::error!(sandbox = %slot.id, why, "the agent connection broke; ending the container");
                    }
                    break;
                }
            }
            Ok(()) = fence.changed() => stirred = true,
            Ok(()) = paused.changed() => {}
        }
    }
    // Whichever process exits first takes the others with it. The container counts as ended only once every
    // process is dead, however long that takes, because another copy of the sandbox may start afterwards.
    kill(&live, &mut child);
    let _ = child.wait().await;
    all_ended(&live.processes, &context.clock).await;
    live.ended.cancel();
    live.channel.close();
    let seen = live.view();
    slot.seen.send_if_modified(|shown| std::mem::replace(shown, seen) != seen);
}

/// Waits until the last process is dead, and reaps them all.
pub(super) async fn all_ended(processes: &[ProcessHandle], clock: &SharedClock) {
    while !processes.iter().all(ProcessHandle::has_ended) {
        clock.sleep(Duration::from_millis(2)).await;
    }
    processes.iter().for_each(ProcessHandle::reap);
}

fn kill(live: &Live, child: &mut Child) {
    for process in &live.processes {
        let _ = process.signal(Signal::KILL);
    }
    let _ = child.start_kill();
}
