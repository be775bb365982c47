//! How the session reacts to the reconciler's lifecycle events.

use baton_protocol::event::{Event, Status, Update};

use super::{End, Session, spec_edits::What};
use crate::{
    api::{
        close_code::Close,
        intent,
        status_machine::{Stage, Then},
    },
    bus::{LifecycleEvent, StartKind},
    metrics::Outcome,
};

impl Session {
    pub(super) fn posted(&mut self, passing: &LifecycleEvent) -> Option<End> {
        if let LifecycleEvent::Running { boot } = passing {
            self.boot = Some(boot.clone());
            self.api.occupancy.note(&self.id, self.spec.tenant.as_ref());
        }
        if let LifecycleEvent::Left { .. } = passing {
            self.api.occupancy.note(&self.id, None);
        }
        if let LifecycleEvent::Probe { number } = passing {
            self.probes.push((self.commands.ping(&mut self.writer), *number));
        }
        self.status_machine.wished = self.spec_edits.wished();
        let answer = self.status_machine.tell(passing);
        self.writer.say_all(&answer.events);
        if self.status_machine.stage != Stage::Open && self.status_machine.is_acquired() {
            // The lease is ours and work is in progress: from here on the reconciler's own time limits apply.
            self.patience = Some(self.api.clock.now() + self.api.settings.handoff_wait);
        }
        match answer.then {
            Then::Stay => None,
            Then::Enter => {
                // Published just before this session saw for itself that the sandbox runs: nothing new.
                let is_known = self.status_machine.stage == Stage::Open && self.commands.line.is_open();
                if !is_known && let Some(link) = self.api.execs.open(&self.id) {
                    self.commands.open(link, &mut self.writer);
                }
                None
            }
            Then::AskAgain => {
                self.commands.line.close();
                self.boot = None;
                let (here, is_v1) = (self.api.settings.instance.clone(), self.writer.is_v1());
                self.edit(What::AskAgain, move |spec| intent::attach(spec, &here, is_v1, false));
                None
            }
            Then::Look => {
                self.spec_edits.look_now(self.api.clock.now());
                None
            }
            Then::TakeBack => {
                let here = self.api.settings.instance.clone();
                self.edit(What::TakeBack, move |spec| intent::take_back(spec, &here));
                None
            }
            Then::InUse => {
                self.is_declined = true;
                Some(End::Close(Close::Unavailable))
            }
            Then::Close(close) => {
                if self.status_machine.stage == Stage::Open {
                    tracing::info!(code = close.code(), "a sandbox left its session");
                }
                Some(End::Close(close))
            }
        }
    }

    /// The agent has answered: the session is open.
    pub(super) fn opened(&mut self) -> Option<End> {
        self.patience = None;
        self.request.end(Outcome::Done);
        let mut running = Update::new(Status::Running);
        match std::mem::replace(&mut self.status_machine.stage, Stage::Open) {
            Stage::Creating => {
                self.tell_id();
                // A copy starts with the commands of its source.
                if self.writer.is_v1() && self.spec.from_checkpoint.is_some() {
                    running.execs = Some(self.commands.views());
                }
            }
            Stage::Attaching | Stage::Open => {
                if self.writer.is_v1() {
                    running.execs = Some(self.commands.views());
                }
                match self.boot.take() {
                    None | Some(StartKind::Fresh | StartKind::Restored { rolled_back: false, .. }) => {}
                    Some(StartKind::Restored { checkpoint_id, age_ms, rolled_back: true }) => {
                        self.writer.send(&Event::RolledBack { checkpoint_id, age_ms });
                    }
                    Some(StartKind::Files { .. }) => {
                        let message = "Only the files of the last checkpoint could be used; no command survived.";
                        running.message = Some(message.to_owned());
                        running.boot = Some("files".to_owned());
                    }
                }
            }
        }
        tracing::info!("a session is open");
        self.writer.send(&Event::StatusUpdate(running));
        while let Some(waiting) = self.waiting.pop() {
            if let Some(end) = self.take(waiting, 0) {
                return Some(end);
            }
        }
        None
    }

    /// Sends the id and the token, once.
    pub(super) fn tell_id(&mut self) {
        if let Some(sandbox_token) = self.token.take() {
            self.writer.send(&Event::SandboxId { sandbox_id: self.id.clone(), sandbox_token });
        }
    }

    /// The container has ended. The bus reports why and what follows, unless another container has started already.
    pub(super) fn unlinked(&mut self) -> Option<End> {
        self.commands.line.close();
        if !self.slot.is_taken()
            && let Some(link) = self.api.execs.open(&self.id)
        {
            self.commands.open(link, &mut self.writer);
            return None;
        }
        if self.status_machine.stage == Stage::Attaching {
            let restoring = self.status_machine.restoring();
            self.writer.say_all(&restoring);
        }
        self.patience.get_or_insert(self.api.clock.now() + self.api.settings.handoff_wait);
        None
    }

    /// Ends the session because its deadline has passed.
    pub(super) fn give_up(&mut self) -> End {
        let (status, message) = match self.status_machine.stage {
            Stage::Creating => (Status::CreationError, "The sandbox did not start in time."),
            Stage::Attaching => (Status::RestoreError, "The sandbox was not released or restored in time."),
            Stage::Open => (Status::Error, "The sandbox has ended."),
        };
        if self.status_machine.stage == Stage::Attaching {
            let restoring = self.status_machine.restoring();
            self.writer.say_all(&restoring);
        }
        self.writer.say_all(&Event::refusal(status, message));
        End::Close(Close::Fatal)
    }
}
