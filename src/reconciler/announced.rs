//! What was announced to sessions, so that no event is repeated or out of order.

use baton_protocol::id::CheckpointId;

use super::{observe::Observation, plan::LockState, worker::Worker};
use crate::{
    bus::{LeaveReason, LifecycleEvent, StartKind},
    runtime::Container,
    storage::records::StoreKind,
};

#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    pub(super) acquiring: bool,
    pub(super) running: bool,
    fenced: bool,
    /// Why the sandbox leaves, if it does.
    pub(super) leave_reason: LeaveReason,
}

impl Announced {
    pub(super) fn new() -> Self {
        Self { acquiring: false, running: false, fenced: false, leave_reason: LeaveReason::HandedOff }
    }

    /// The sandbox is no longer here.
    fn reset(&mut self) {
        *self = Self { leave_reason: self.leave_reason, ..Self::new() };
    }
}

impl Worker {
    /// Announces what was observed and not caused by an action of this pass.
    pub(super) async fn announce(&mut self, observation: &Observation) {
        let container = observation.seen.container;
        self.telemetry.container.set(&container);
        self.announce_fence(container);
        if self.lease.is_held() && !self.announced.acquiring {
            // The sandbox was created under an initial lease: clients receive the same events as for any other lease.
            self.announce_acquiring();
            self.post(LifecycleEvent::Acquired);
        }
        let runs = observation.observed.lock == LockState::Ours && container == Container::Running;
        // A start that was interrupted may have succeeded all the same.
        if runs && let Some(kind) = self.start.kind.take() {
            self.announce_running(kind).await;
        }
        self.context.bus.set_held(&self.id, observation.inputs.held || container != Container::Absent);
    }

    pub(super) fn post(&self, event: LifecycleEvent) {
        self.context.bus.post(&self.id, event);
    }

    pub(super) fn announce_acquiring(&mut self) {
        if !std::mem::replace(&mut self.announced.acquiring, true) {
            self.post(LifecycleEvent::Acquiring);
        }
    }

    /// Announces a change between fenced and running, whatever caused it.
    fn announce_fence(&mut self, container: Container) {
        let is_fenced = match container {
            Container::Fenced => true,
            Container::Running => false,
            Container::Absent | Container::Partial | Container::Paused | Container::Stopped => return,
        };
        if self.announced.running && is_fenced != self.announced.fenced {
            self.announced.fenced = is_fenced;
            let message = "The sandbox is paused until its lease can be renewed.".to_owned();
            self.post(if is_fenced { LifecycleEvent::Fenced { message } } else { LifecycleEvent::Unfenced });
        }
    }

    pub(super) async fn announce_running(&mut self, kind: StartKind) {
        self.start.kind = None;
        self.activity.attach_guard = None;
        self.checkpoints.due = self.next_checkpoint();
        self.contention.has_registered = false;
        // Time spent waiting for the start does not count as idle.
        self.context.bus.touch(&self.id);
        self.announced.running = true;
        if self.record.store_kind() == Some(StoreKind::Durable) {
            self.context.base_upload.begin();
        }
        self.post(LifecycleEvent::Running { boot: kind });
        self.report_running().await;
    }

    /// Another instance has the sandbox.
    pub(super) fn announce_lost(&mut self) {
        let was_running = self.announced.running;
        self.announced.reset();
        if was_running {
            let message = "Another instance took over the sandbox.".to_owned();
            self.post(LifecycleEvent::LeaseLost { message });
        }
    }

    pub(super) fn announce_left(&mut self, checkpoint_id: Option<CheckpointId>) {
        self.announced.reset();
        self.contention.has_registered = false;
        let why = self.announced.leave_reason;
        if why == LeaveReason::Idle {
            self.refuse_until_asked();
        }
        match &checkpoint_id {
            Some(checkpoint) => tracing::info!(sandbox = %self.id, ?why, %checkpoint, "the sandbox left this instance"),
            None => tracing::info!(sandbox = %self.id, ?why, "the sandbox ended without a checkpoint"),
        }
        self.context.metrics.sandbox_left(&why);
        self.post(LifecycleEvent::Left { why, checkpoint_id });
    }
}
