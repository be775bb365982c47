//! How the session reacts to the reconciler's lifecycle events.

use baton_protocol::event::{Event, Status, Update};

use super::{Session, spec_edits::EditPurpose};
use crate::{
    api::{
        close_code::{Close, SessionEnd},
        intent,
        status_machine::{OpenStage, Reaction},
    },
    bus::{LifecycleEvent, StartKind},
};

impl Session {
    pub(super) fn handle_lifecycle(&mut self, event: &LifecycleEvent) -> Option<SessionEnd> {
        if let LifecycleEvent::Running { boot: start } = event {
            self.sandbox.start = Some(start.clone());
            self.api.occupancy.note(&self.sandbox.id, self.sandbox.spec.tenant.as_ref());
        }
        if let LifecycleEvent::Left { .. } = event {
            self.api.occupancy.note(&self.sandbox.id, None);
            self.status_machine.features.is_expired = self.sandbox.has_expired(self.api.clock.wall());
        }
        if let LifecycleEvent::Probe { number } = event {
            self.probes.add_reconciler(self.execs.ping(&mut *self.client), *number);
        }
        if self.client.is_one_shot() && matches!(event, LifecycleEvent::Left { .. } | LifecycleEvent::LeaseLost { .. })
        {
            // The sandbox has no other client to which its end would mean anything.
            return Some(SessionEnd::Close(Close::Restart));
        }
        self.status_machine.unanswered = self.spec_edits.unanswered();
        let answer = self.status_machine.handle(event);
        self.client.send_all(&answer.events);
        if self.status_machine.stage != OpenStage::Open && self.status_machine.is_acquired() {
            // The lease is ours and work is in progress: from here on the reconciler's own time limits apply.
            self.sandbox.start_deadline = Some(self.api.start_deadline());
        }
        match answer.reaction {
            Reaction::Stay => None,
            Reaction::Open => {
                // Published just before this session saw for itself that the sandbox runs: nothing new.
                let is_known = self.status_machine.stage == OpenStage::Open && self.execs.is_linked();
                if !is_known && let Some(link) = self.api.execs.open(&self.sandbox.id) {
                    self.execs.open(link, &mut *self.client);
                }
                None
            }
            Reaction::RequestAgain => {
                self.execs.unlink();
                self.sandbox.start = None;
                let (here, is_v1) = (self.api.settings.instance.clone(), self.client.is_v1());
                self.edit(EditPurpose::Attach, move |spec| intent::attach(spec, &here, is_v1, false));
                None
            }
            Reaction::PollAnswers => {
                self.spec_edits.poll_now(self.api.clock.now());
                None
            }
            Reaction::Revert => {
                let here = self.api.settings.instance.clone();
                self.edit(EditPurpose::Revert, move |spec| intent::revert_checkpoint(spec, &here));
                None
            }
            Reaction::InUse => {
                self.sandbox.is_declined = true;
                Some(SessionEnd::Close(Close::Unavailable))
            }
            Reaction::Close(close) => {
                if self.status_machine.stage == OpenStage::Open {
                    tracing::info!(code = close.code(), "the session ended because the sandbox left");
                }
                Some(SessionEnd::Close(close))
            }
        }
    }

    /// The agent has answered: the session is open.
    pub(super) fn handle_opened(&mut self) -> Option<SessionEnd> {
        self.sandbox.start_deadline = None;
        self.client.opened();
        let mut running = Update::new(Status::Running);
        match std::mem::replace(&mut self.status_machine.stage, OpenStage::Open) {
            OpenStage::Creating => {
                self.send_id();
                // A copy starts with the commands of its source.
                if self.client.is_v1() && self.sandbox.spec.from_checkpoint.is_some() {
                    running.execs = Some(self.execs.views());
                }
            }
            OpenStage::Attaching | OpenStage::Open => {
                if self.client.is_v1() {
                    running.execs = Some(self.execs.views());
                }
                match self.sandbox.start.take() {
                    None | Some(StartKind::Fresh | StartKind::Restored { rolled_back: false, .. }) => {}
                    Some(StartKind::Restored { checkpoint_id, age_ms, rolled_back: true }) => {
                        self.client.send(&Event::RolledBack { checkpoint_id, age_ms });
                    }
                    Some(StartKind::Files { .. }) => {
                        let message =
                            "The sandbox was restarted from the files of its last checkpoint; no command survived.";
                        running.message = Some(message.to_owned());
                        running.boot = Some("files".to_owned());
                    }
                }
            }
        }
        tracing::info!("session opened");
        self.client.send(&Event::StatusUpdate(running));
        while let Some(waiting) = self.requests.pop() {
            if let Some(end) = self.handle_or_keep(waiting, 0) {
                return Some(end);
            }
        }
        None
    }

    /// Sends the id and the token, once.
    pub(super) fn send_id(&mut self) {
        if let Some(event) = self.sandbox.take_id_event() {
            self.client.send(&event);
        }
    }

    /// Sends RESTORING, unless that was sent before.
    pub(super) fn send_restoring(&mut self) {
        let restoring = self.status_machine.restoring();
        self.client.send_all(&restoring);
    }

    /// The container has ended. The bus reports why and what follows, unless another container has started already.
    pub(super) fn handle_link_closed(&mut self) -> Option<SessionEnd> {
        self.execs.unlink();
        if self.client.is_one_shot() {
            return Some(SessionEnd::Close(Close::Restart));
        }
        if !self.sandbox.is_slot_taken()
            && let Some(link) = self.api.execs.open(&self.sandbox.id)
        {
            self.execs.open(link, &mut *self.client);
            return None;
        }
        if self.status_machine.stage == OpenStage::Attaching {
            self.send_restoring();
        }
        self.sandbox.start_deadline.get_or_insert(self.api.start_deadline());
        None
    }

    /// Ends the session because its deadline has passed.
    pub(super) fn give_up(&mut self) -> SessionEnd {
        let (status, message) = match self.status_machine.stage {
            OpenStage::Creating => (Status::CreationError, "The sandbox did not start in time."),
            OpenStage::Attaching => (Status::RestoreError, "The sandbox was not released or restored in time."),
            OpenStage::Open => (Status::Error, "The sandbox has ended."),
        };
        if self.status_machine.stage == OpenStage::Attaching {
            self.send_restoring();
        }
        self.client.send_all(&Event::refusal(status, message));
        SessionEnd::Close(Close::Fatal)
    }
}
