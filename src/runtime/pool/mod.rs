//! Warm containers: started, with an agent that answers, and not assigned to a sandbox yet. A create takes one
//! and only has to assign it. The pool replaces it once no sandbox is starting.
//!
//! ```text
//!   making ──▶ ready ──create──▶ assigned to a sandbox, for good
//!     │          └─broken, no capacity, drain──▶ removed
//!     └─a create waits for it──▶ assigned to a sandbox
//! ```
//!
//! The guard watches each of them from before its start. A warm container holds nothing of a sandbox before it
//! is taken, and never returns to the pool.

mod offer;
mod pool_rules;

use std::{collections::VecDeque, sync::Arc};

use baton_protocol::{id::Sha256Name, limits::Limits};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use self::pool_rules::{Backoff, PoolAction, PoolState, WarmSpec, next_action};
use super::{
    Error, Result,
    argv::RunscCommand,
    bundle::Layout,
    cgroup::Group,
    containers::RuntimeContext,
    guard_link::NONE_YET,
    launch::{self, Begun, COMMAND_TIMEOUT},
    runtime_settings::RuntimeSettings,
};
use crate::{
    clock::{Moment, SharedClock},
    metrics::Metrics,
};
pub(super) use offer::{OFFER_TIMEOUT, PoolSlot};

/// A container not assigned to a sandbox.
#[derive(Debug)]
pub(super) struct WarmContainer {
    pub begun: Begun,
    pub group: Option<Group>,
}

/// What is left of a container whose processes are dead.
#[derive(Debug)]
pub(super) struct Remains {
    pub name: String,
    pub group: Option<Group>,
}

#[derive(Debug)]
pub(super) struct Pool {
    wanted: usize,
    room: usize,
    usual: WarmSpec,
    clock: SharedClock,
    metrics: Metrics,
    state: Mutex<State>,
    stirred: Notify,
    closing: CancellationToken,
    closed: CancellationToken,
}

#[derive(Debug)]
struct State {
    ready: VecDeque<WarmContainer>,
    remains: Vec<Remains>,
    /// Sandboxes with any local state, and those among them that are starting.
    here: usize,
    starting: usize,
    quiet_at: Moment,
    is_making: bool,
    /// A create waiting for the container being made.
    waiter: Option<oneshot::Sender<WarmContainer>>,
    trouble: Backoff,
    /// That the pool is ready was logged.
    is_told: bool,
}

impl Pool {
    pub fn new(
        settings: &RuntimeSettings,
        runsc_sha256: &Sha256Name,
        holds_cpus: bool,
        clock: SharedClock,
    ) -> Arc<Self> {
        let warm = &settings.warm;
        // As for a sandbox that requests no limits.
        let limits = Limits { cpus: warm.limits.cpus.filter(|_| holds_cpus), ..warm.limits.clone() };
        let usual =
            WarmSpec { rootfs_digest: settings.rootfs_digest.clone(), runsc_sha256: runsc_sha256.clone(), limits };
        let state = State {
            ready: VecDeque::new(),
            remains: Vec::new(),
            here: 0,
            starting: 0,
            quiet_at: clock.now(),
            is_making: false,
            waiter: None,
            trouble: Backoff::default(),
            is_told: false,
        };
        let pool = Self {
            wanted: warm.count,
            room: warm.room,
            usual,
            clock,
            metrics: settings.metrics.clone(),
            state: Mutex::new(state),
            stirred: Notify::new(),
            closing: CancellationToken::new(),
            closed: CancellationToken::new(),
        };
        Arc::new(pool)
    }

    /// Hands over what is left of a failed container for removal.
    pub fn remove_later(&self, remains: Remains, why: &Error) {
        let mut state = self.state.lock();
        state.remains.push(remains);
        self.complain(&mut state, why);
        drop(state);
        self.stirred.notify_one();
    }

    fn complain(&self, state: &mut State, why: &Error) {
        state.is_told = false;
        if state.trouble.note(self.clock.now()) && !self.closing.is_cancelled() {
            tracing::warn!(error = %why, "a warm container failed; sandboxes start cold until the pool is refilled");
        }
    }

    fn show(&self, state: &State) {
        self.metrics.warm_ready(state.ready.len());
    }

    /// Stops making containers and has the ready ones removed. Returns at once.
    pub fn drain(&self) {
        self.closing.cancel();
    }

    /// Like [`drain`](Self::drain), but waits until all of them are gone.
    pub async fn close(&self) {
        self.drain();
        if self.wanted > 0 && self.clock.timeout(3 * COMMAND_TIMEOUT, self.closed.cancelled()).await.is_err() {
            tracing::warn!("warm containers could not be removed in time");
        }
    }

    /// Keeps the wanted number ready until the pool is drained.
    pub async fn refill(self: Arc<Self>, context: Arc<RuntimeContext>) {
        while !self.closing.is_cancelled() {
            let (due, wake) = self.next_action();
            match due {
                PoolAction::Remove => self.remove(&context).await,
                PoolAction::Clear => self.clear(&context).await,
                PoolAction::Make => self.make(&context).await,
                PoolAction::Later | PoolAction::Rest => {
                    let at = async {
                        match wake {
                            Some(at) => self.clock.sleep_until(at).await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = self.stirred.notified() => {}
                        () = self.closing.cancelled() => {}
                        () = at => {}
                    }
                }
            }
        }
        self.empty(&context).await;
        self.closed.cancel();
    }

    /// The next action, and when to check again even if nothing changes.
    fn next_action(&self) -> (PoolAction, Option<Moment>) {
        let mut state = self.state.lock();
        let now = self.clock.now();
        // A broken container is useless; it is removed first.
        if let Some(at) = state.ready.iter().position(|warm| warm.begun.channel.is_broken()) {
            let broken = state.ready.remove(at);
            state.ready.extend(broken);
            self.complain(&mut state, &launch::gone());
            return (PoolAction::Remove, None);
        }
        let calm_at = state.trouble.until().unwrap_or(now);
        let standing = PoolState {
            wanted: self.wanted,
            room: self.room,
            here: state.here,
            ready: state.ready.len(),
            starting: state.starting,
            has_remains: !state.remains.is_empty(),
            is_quiet: now >= state.quiet_at,
            is_calm: now >= calm_at,
        };
        let due = next_action(&standing);
        state.is_making = due == PoolAction::Make;
        (due, (due == PoolAction::Later).then(|| calm_at.max(state.quiet_at)))
    }

    /// Removes the last ready container.
    async fn remove(&self, context: &RuntimeContext) {
        let warm = {
            let mut state = self.state.lock();
            let warm = state.ready.pop_back();
            self.show(&state);
            warm
        };
        let Some(WarmContainer { begun, group }) = warm else { return };
        let remains = Remains { name: begun.name.clone(), group };
        begun.end(context).await;
        self.wipe(context, remains).await;
    }

    async fn clear(&self, context: &RuntimeContext) {
        let remains = self.state.lock().remains.pop();
        if let Some(remains) = remains {
            self.wipe(context, remains).await;
        }
    }

    /// Wipes what is left of a container, or retries later.
    async fn wipe(&self, context: &RuntimeContext, remains: Remains) {
        if let Err(error) = launch::clear(context, &remains.name, remains.group.as_ref()).await {
            self.remove_later(remains, &error);
        }
    }

    async fn make(&self, context: &Arc<RuntimeContext>) {
        let made = self.begin(context).await;
        let mut state = self.state.lock();
        state.is_making = false;
        let waiter = state.waiter.take();
        match made {
            Ok(warm) => {
                let news = warm.begun.channel.status();
                let kept = match waiter {
                    Some(waiter) => waiter.send(warm).err(),
                    None => Some(warm),
                };
                let Some(warm) = kept else { return };
                state.ready.push_back(warm);
                self.show(&state);
                if state.ready.len() == self.wanted.min(self.room) && !std::mem::replace(&mut state.is_told, true) {
                    tracing::info!(ready = state.ready.len(), "the warm pool is ready");
                }
                drop(state);
                let pool = Arc::downgrade(&context.pool);
                context.tasks.spawn(async move {
                    let mut news = news;
                    let _ = news.wait_for(|news| news.broken.is_some()).await;
                    if let Some(pool) = pool.upgrade() {
                        pool.stirred.notify_one();
                    }
                });
            }
            Err(error) => {
                // Releases the waiter: the container will not come.
                drop(waiter);
                self.complain(&mut state, &error);
            }
        }
    }

    async fn begin(&self, context: &RuntimeContext) -> Result<WarmContainer> {
        let name = launch::new_name(context);
        let limits = &self.usual.limits;
        let group = launch::make_group(context, &name, limits)?;
        let verb =
            RunscCommand::Run { bundle: &context.settings.bundle(&name), layout: Layout::default(), disk: limits.disk };
        let begun = async {
            let bundled = launch::make_bundle(context, &name, Layout::default(), &context.settings.rootfs).await;
            bundled.map_err(|error| Error::Failed { what: verb.name(), why: error.to_string() })?;
            context.guard.arm(&name, context.settings.state_file(&name), NONE_YET).await?;
            let mut begun = Begun::start(context, &name, verb, group.as_ref()).await?;
            let greeted = tokio::select! {
                greeted = begun.channel.wait_ready(COMMAND_TIMEOUT) => greeted,
                () = self.closing.cancelled() => Err(Error::NotIn("wanted any more")),
            };
            let found = begun.find_processes(context).await;
            match greeted.and(found) {
                Ok(()) => Ok(begun),
                Err(error) => Err(begun.discard(context, verb.name(), error).await),
            }
        };
        match begun.await {
            Ok(begun) => Ok(WarmContainer { begun, group }),
            Err(error) => {
                self.state.lock().remains.push(Remains { name, group });
                Err(error)
            }
        }
    }

    /// Removes all containers. What cannot be removed dies with the process and is wiped at the next start.
    pub async fn empty(&self, context: &RuntimeContext) {
        while !self.state.lock().ready.is_empty() {
            self.remove(context).await;
        }
        let remains = std::mem::take(&mut self.state.lock().remains);
        for Remains { name, group } in remains {
            if let Err(error) = launch::clear(context, &name, group.as_ref()).await {
                tracing::warn!(container = name, %error, "a warm container could not be cleaned up");
            }
        }
    }
}
