//! The workers of this instance: at most one per sandbox, started when something wakes it or the sweep assigns it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use baton_protocol::id::SandboxId;
use tokio::{
    sync::Notify,
    task::{self, JoinSet},
};

use super::{ReconcilerContext, sweep::Assignment, worker::Worker};

/// Wakes one worker and remembers the wake-up, so that a worker that is just ending is started again.
#[derive(Debug, Default)]
pub(super) struct Wakeup {
    is_pending: AtomicBool,
    notify: Notify,
}

impl Wakeup {
    fn wake(&self) {
        self.is_pending.store(true, Ordering::SeqCst);
        self.notify.notify_one();
    }

    pub(super) async fn woken(&self) {
        self.notify.notified().await;
        self.is_pending.store(false, Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub(super) struct Workers {
    context: Arc<ReconcilerContext>,
    tasks: JoinSet<()>,
    ids: HashMap<task::Id, SandboxId>,
    wakeups: HashMap<SandboxId, Arc<Wakeup>>,
}

impl Workers {
    pub(super) fn new(context: Arc<ReconcilerContext>) -> Self {
        Self { context, tasks: JoinSet::new(), ids: HashMap::new(), wakeups: HashMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Wakes the worker of the sandbox, or starts one.
    pub(super) fn wake(&mut self, id: SandboxId) {
        match self.wakeups.get(&id) {
            Some(wakeup) => wakeup.wake(),
            None => {
                let context = self.context.clone();
                self.spawn(id.clone(), |wakeup| Worker::new(id, context, wakeup).run());
            }
        }
    }

    /// Starts what the sweep has found to do, unless a worker already takes care of the sandbox.
    pub(super) fn assign(&mut self, assignment: Assignment) {
        if !self.wakeups.contains_key(&assignment.id) {
            let context = self.context.clone();
            self.spawn(assignment.id.clone(), |wakeup| assignment.run(context, wakeup));
        }
    }

    /// Waits until a worker has ended. Returns its sandbox if it has to be woken again: something woke the worker
    /// while it was ending, or it panicked. `None` if there is no worker.
    pub(super) async fn join_next(&mut self) -> Option<Option<SandboxId>> {
        let ended = self.tasks.join_next_with_id().await?;
        let task = match &ended {
            Ok((task, ())) => *task,
            Err(error) => error.id(),
        };
        let Some(id) = self.ids.remove(&task) else { return Some(None) };
        if let Err(error) = &ended {
            tracing::error!(sandbox = %id, %error, "a worker panicked; starting another");
        }
        let is_pending = self.wakeups.remove(&id).is_some_and(|wakeup| wakeup.is_pending.load(Ordering::SeqCst));
        Some((is_pending || ended.is_err()).then_some(id))
    }

    fn spawn<F>(&mut self, id: SandboxId, work: impl FnOnce(Arc<Wakeup>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let wakeup = Arc::new(Wakeup::default());
        self.ids.insert(self.tasks.spawn(work(wakeup.clone())).id(), id.clone());
        self.wakeups.insert(id, wakeup);
    }
}
