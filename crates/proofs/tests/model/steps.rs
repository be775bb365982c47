//! What an instance does: it looks, sends writes, starts and lets go, as the code does and by the code's own rules.

use baton::{
    reconciler::plan::{Action, Desired, LockState},
    runtime::Container,
    storage::lease::lease_rules::ReleaseOutcome,
};

use crate::{
    lock_model::{self, Small, Write},
    model_mistakes::ModelMistake,
    model_state::{ActionStage, Instance, Late, ModelState, seen, wrong},
    protocol::{Protocol, WriteFate},
};

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    Applied,
    Open,
}

impl Protocol {
    pub(super) fn look(&self, state: &mut ModelState, at: usize) {
        let instance = &mut state.instances[at];
        instance.unsettled = false;
        let Some(lock) = state.lock else {
            (instance.known, instance.is_missing, instance.is_fresh) = (None, true, true);
            return;
        };
        self.learn(instance, lock);
        let before = instance.held;
        self.prove(instance, lock);
        if instance.held != before {
            state.seen |= seen::FOUND_LATER;
        }
        let instance = &mut state.instances[at];
        if self.makes(ModelMistake::LookProves) && lock.owner == instance.name && lock.epoch == instance.held {
            instance.left = self.ticks().hold;
        }
        // What proves lost is remembered no more.
        if instance.stage == ActionStage::Planning && lock.epoch > instance.held && instance.held > 0 {
            (instance.held, instance.released) = (0, false);
        }
    }

    fn learn(&self, instance: &mut Instance, lock: Small) {
        let last = instance.known.map(|known| (known, instance.since_look));
        (instance.lease_for, instance.waiter_for) =
            lock_model::seen(last, lock, (instance.lease_for, instance.waiter_for));
        (instance.known, instance.since_look) = (Some(lock), 0);
        (instance.is_fresh, instance.is_missing) = (true, false);
        if instance.old_head == 0 {
            instance.old_head = if self.makes(ModelMistake::CachedHead) { lock.head } else { 0 };
        }
    }

    fn prove(&self, instance: &mut Instance, lock: Small) {
        let held = instance
            .held()
            .map(|(epoch, left, released)| (epoch, left, released && !self.makes(ModelMistake::RunsAfterRelease)));
        let hold = self.ticks().hold;
        if let Some((epoch, left)) = lock_model::proven(lock, held, &instance.attempts, hold) {
            let left = if self.makes(ModelMistake::DeadlineFromAnswer) { hold } else { left };
            if epoch != instance.held {
                (instance.released, instance.left) = (false, left);
            }
            (instance.held, instance.left) = (epoch, left.max(instance.left));
        }
    }

    /// One conditional write of an instance.
    pub(super) fn send(&self, state: &mut ModelState, at: usize, write: Write, fate: WriteFate) -> WriteOutcome {
        let who = state.instances[at].name;
        let known = state.instances[at].known.unwrap_or_default();
        let mut next = lock_model::written(known, write);
        if let Some(mistake) = self.mistake.filter(|_| matches!(write, Write::Acquire { .. })) {
            next = mistake.written(known, next);
        }
        let instance = &mut state.instances[at];
        if next.op != known.op {
            instance.attempts.push((next.op, 0));
        }
        let holds = instance.is_fresh || self.makes(ModelMistake::NoConditions);
        if fate == WriteFate::Lost {
            state.left.lost -= 1;
            if holds {
                state.late.push(Late { write, lock: next, who });
            }
        } else if holds {
            self.apply(state, next, write, who);
            let instance = &mut state.instances[at];
            self.learn(instance, next);
            self.prove(instance, next);
            (instance.unsettled, instance.excused, instance.in_doubt) = (false, false, false);
            return WriteOutcome::Applied;
        } else if self.makes(ModelMistake::CommitElsewhere)
            && let (Write::Commit { head, .. } | Write::Release { head, .. }, Some(lock)) = (write, &mut state.lock)
        {
            lock.head = head;
        }
        let instance = &mut state.instances[at];
        instance.unsettled = true;
        instance.in_doubt |= matches!(write, Write::Commit { .. });
        WriteOutcome::Open
    }

    /// A container begins to execute.
    pub(super) fn execute(&self, state: &mut ModelState, at: usize) {
        let instance = &state.instances[at];
        let excused = self.bounds.suspends > 0;
        if let Some(lock) = state.lock.filter(|_| !excused) {
            if lock.owner != instance.name || lock.epoch != instance.held {
                state.wrong |= wrong::AFTER_RELEASE;
            }
            if state.marked {
                state.wrong |= wrong::PURGE;
            }
        }
        (state.ever_ran, state.ran_on) = (true, true);
        state.instances[at].container = Container::Running;
        state.instances[at].ran = true;
    }

    fn start(&self, state: &mut ModelState, at: usize, fresh: bool) {
        let instance = &state.instances[at];
        let known = instance.known.unwrap_or_default();
        let head = if self.makes(ModelMistake::CachedHead) { instance.old_head } else { known.head };
        if self.bounds.suspends == 0 {
            let current = state.lock.is_none_or(|lock| lock.head == head);
            if !current || !state.descends(head, state.told) {
                state.wrong |= wrong::OLD_HEAD;
            }
            if fresh && state.ever_ran {
                state.wrong |= wrong::STARTED_OVER;
            }
            // As `restore` tells it.
            let rolled_back = instance.before_behind || (instance.ran && !self.makes(ModelMistake::ForgetsWork));
            if !fresh && state.ran_on && !rolled_back {
                state.wrong |= wrong::LOST_WORK;
            }
        }
        if head > 0 && state.told == head && instance.held > 1 {
            state.seen |= seen::RESTORED;
        }
        self.execute(state, at);
    }

    pub(super) fn begin_checkpoint(&self, state: &mut ModelState, at: usize, frees: bool) {
        let instance = &mut state.instances[at];
        // The manifest names the head of the lock as its parent.
        let parent = instance.known.map_or(0, |lock| lock.head);
        let checkpoint = state.checkpoints.len() as u8;
        state.checkpoints.push((parent, instance.held));
        state.drawn += 1;
        instance.stage = ActionStage::Stored { checkpoint, frees };
        instance.container = if frees { Container::Paused } else { Container::Running };
    }

    /// Rule 11: A release or burial, until it is settled.
    fn release(&self, state: &mut ModelState, at: usize, fate: WriteFate) {
        let instance = &mut state.instances[at];
        let checkpoint = match instance.stage {
            ActionStage::Stored { checkpoint, .. } | ActionStage::Freeing { checkpoint } => checkpoint,
            ActionStage::Planning | ActionStage::Marked | ActionStage::Erased => 0,
        };
        let buries = instance.stage == ActionStage::Erased;
        let verdict = match instance.known {
            Some(lock) if instance.held > 0 => lock_model::release_outcome(lock, instance.held, instance.name),
            Some(_) => ReleaseOutcome::Lost,
            // Rule 14: There is nothing to free; what should be committed waits.
            None => {
                if checkpoint == 0 {
                    instance.stage = ActionStage::Planning;
                }
                return;
            }
        };
        let sent = match verdict {
            ReleaseOutcome::NotYet => {
                let behind = instance.ran || instance.before_behind;
                if !buries {
                    instance.stage = ActionStage::Freeing { checkpoint };
                }
                instance.released = true;
                let write = if buries { Write::Bury } else { Write::Release { head: checkpoint, behind } };
                if self.send(state, at, write, fate) == WriteOutcome::Open {
                    if self.makes(ModelMistake::RunsAfterRelease) {
                        state.instances[at].stage = ActionStage::Planning;
                    }
                    return;
                }
                true
            }
            ReleaseOutcome::Done => true,
            ReleaseOutcome::Lost => false,
        };
        let instance = &mut state.instances[at];
        (instance.held, instance.released, instance.ran, instance.stage) = (0, false, false, ActionStage::Planning);
        if sent {
            state.tell(checkpoint);
        }
    }

    pub(super) fn step(&self, state: &mut ModelState, at: usize, fate: WriteFate) {
        let op = self.op(state, at);
        let instance = &mut state.instances[at];
        let me = instance.name;
        match instance.stage {
            ActionStage::Stored { checkpoint, frees: false } => {
                instance.stage = ActionStage::Planning;
                let ours = instance.known.is_some_and(|lock| lock_model::is_ours(lock, instance.held(), me));
                if !ours && !self.makes(ModelMistake::NeverLooks) {
                    return;
                }
                if self.send(state, at, Write::Commit { op, head: checkpoint }, fate) == WriteOutcome::Applied {
                    state.seen |= seen::SAVED;
                    state.tell(checkpoint);
                }
            }
            ActionStage::Stored { .. } | ActionStage::Freeing { .. } | ActionStage::Erased => {
                self.release(state, at, fate)
            }
            ActionStage::Marked => {
                instance.stage = ActionStage::Erased;
                if !state.marked {
                    state.wrong |= wrong::PURGE;
                }
            }
            ActionStage::Planning => {
                let (desired, action) = self.planned(instance, false);
                match action {
                    Action::Acquire => {
                        let lock = instance.known.unwrap_or_default();
                        (instance.before_ran, instance.before_behind) = (lock.ran, lock.behind);
                        self.send(state, at, Write::Acquire { me, op, runs: desired == Desired::Running }, fate);
                    }
                    Action::Wait => {
                        let (op, asks) = (state.fresh_waiter_op(), self.bounds.asks);
                        self.send(state, at, Write::Wait { me, op, asks }, fate);
                    }
                    Action::Withdraw => {
                        self.send(state, at, Write::Withdraw { me }, fate);
                    }
                    Action::Renew => {
                        self.send(state, at, Write::Renew { op }, fate);
                    }
                    Action::Resume => {
                        let fenced = instance.container == Container::Fenced;
                        if self.send(state, at, Write::Renew { op }, fate) == WriteOutcome::Applied {
                            state.seen |= if fenced { seen::UNFENCED } else { seen::ABORT };
                            self.execute(state, at);
                        }
                    }
                    Action::Create => self.start(state, at, true),
                    Action::Restore => self.start(state, at, false),
                    Action::Refuse(_) => instance.refused = true,
                    Action::Fence => instance.container = Container::Fenced,
                    Action::Remove => {
                        let ours = self.standing(instance) == LockState::Ours;
                        let instance = &mut state.instances[at];
                        (instance.container, instance.excused) = (Container::Absent, false);
                        instance.ran &= ours;
                    }
                    Action::Checkpoint => self.begin_checkpoint(state, at, true),
                    Action::Release => self.release(state, at, fate),
                    Action::Purge if self.makes(ModelMistake::ErasesUnmarked) => instance.stage = ActionStage::Marked,
                    Action::Purge => {
                        if self.send(state, at, Write::Purging { op }, fate) == WriteOutcome::Applied {
                            state.instances[at].stage = ActionStage::Marked;
                        }
                    }
                    Action::Rest
                    | Action::Finish
                    | Action::Extract
                    | Action::Snapshot
                    | Action::Save
                    | Action::Decline
                    | Action::Probe
                    | Action::Expire
                    | Action::RecreateMetadata
                    | Action::ReportInvalid
                    | Action::SetEgress
                    | Action::ForgetAnswers
                    | Action::CollectGarbage => {}
                }
            }
        }
    }
}
