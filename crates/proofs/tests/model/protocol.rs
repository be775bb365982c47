//! Every step that an instance, its guard, the store or an operator can take, and when. What an instance does next
//! is decided by the real `desired` and `plan`, how it stands by the real rules.

use baton::{
    reconciler::{
        desired::{Drain, Inputs, desired},
        plan::{Action, AttachState, Desired, LockState, Observed, Saved, plan},
        precedence::{AttachedClient, verdict},
    },
    runtime::Container,
    storage::lease::lease_rules::LeaseState,
};
use baton_protocol::{lock::Claim, metadata::DesiredState};
use stateright::{Model, Property};

use crate::{
    judge,
    lock_model::{self, LockView, Ticks, Write},
    model_mistakes::ModelMistake,
    model_state::{ActionStage, FrozenPart, Instance, ModelBounds, ModelState, Want, seen},
};

#[derive(Clone, Debug)]
pub struct Protocol {
    pub bounds: ModelBounds,
    pub mistake: Option<ModelMistake>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteFate {
    Answered,
    /// It arrives later, or never.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    Tick,
    /// Reads the lock.
    Look(usize),
    /// Goes on with what it does, or begins what the plan says.
    Step(usize, WriteFate),
    Renew(usize, WriteFate),
    /// Shows that it still waits.
    Beat(usize, WriteFate),
    /// Tells whoever asks that a client here is alive.
    Decline(usize, WriteFate),
    /// Begins a checkpoint after which it runs on.
    Save(usize),
    /// A checkpoint breaks off before its commit was sent; it goes on at once, or the next pass sees to it.
    Abort(usize, bool),
    /// The guard stops the container.
    Fence(usize),
    /// The container ends by itself.
    Ends(usize),
    Change(usize, Want),
    /// A write arrives whose answer was lost.
    Arrive(usize),
    Kill(usize),
    Restart(usize, bool),
    Stop(usize, FrozenPart),
    Move(usize),
    StrayEnds(usize),
    LockGone,
}

impl Protocol {
    pub(super) fn makes(&self, mistake: ModelMistake) -> bool {
        self.mistake == Some(mistake)
    }

    pub(super) fn ticks(&self) -> Ticks {
        self.mistake.map_or(self.bounds.ticks, |mistake| mistake.ticks(self.bounds.ticks))
    }

    fn lease_state(&self, instance: &Instance) -> Option<(LeaseState, Option<Claim>)> {
        let view = LockView {
            lock: instance.known?,
            me: instance.name,
            predecessor: instance.predecessor,
            held: instance.held(),
            lease_for: instance.lease_for,
            waiter_for: instance.waiter_for,
            ticks: self.ticks(),
        };
        Some(lock_model::lease_state(self.mistake.map_or(view, |mistake| mistake.view(view))))
    }

    pub(super) fn standing(&self, instance: &Instance) -> LockState {
        let stand = self.lease_state(instance).map(|(stand, _)| stand);
        match stand {
            _ if instance.is_missing => {
                if self.makes(ModelMistake::MissingIsFree) {
                    LockState::Free
                } else {
                    LockState::Missing
                }
            }
            Some(LeaseState::Ours) => LockState::Ours,
            Some(LeaseState::Late) => LockState::Late,
            _ if instance.unsettled => LockState::Unknown,
            None => LockState::Unknown,
            Some(LeaseState::Free) => LockState::Free,
            Some(LeaseState::Theirs | LeaseState::Purged) => LockState::Theirs,
        }
    }

    /// What the plan says to do next.
    pub(super) fn planned(&self, instance: &Instance, owed_checkpoint: bool) -> (Desired, Action) {
        let standing = self.standing(instance);
        let lock = instance.known.unwrap_or_default();
        let held = matches!(standing, LockState::Ours | LockState::Late);
        let ran = if held { instance.ran || instance.before_ran } else { lock.ran };
        let saved = match (lock.head, ran) {
            (1.., _) => Saved::Checkpoint,
            (0, true) => Saved::Lost,
            (0, false) => Saved::Nothing,
        };
        let spec = match instance.want {
            Want::Run => DesiredState::Running,
            Want::HandOff => DesiredState::HandedOff,
            Want::Delete => DesiredState::Deleted,
        };
        let asked = instance.want == Want::Run;
        let registered = lock.waiter == instance.name;
        let is_declined = registered && lock.declined;
        let refused = instance.refused || is_declined;
        // Whether its client is alive is nobody's to foresee: if it is, the waiter is declined at some step.
        let waiter = self.lease_state(instance).and_then(|(_, waiter)| waiter);
        let wish = Inputs {
            spec,
            purging: lock.purging && !self.makes(ModelMistake::PurgeIsOpen),
            held,
            verdict: verdict(waiter, AttachedClient::Absent),
            movable: true,
            persistent: true,
            drain: Drain::No,
            yields: false,
            idle: false,
            checkpoint_when_idle: false,
            placed_here: asked,
            asked_here: asked,
            saved,
            refused,
        };
        let observed = Observed {
            lock: standing,
            container: instance.container,
            saved,
            checkpointable: true,
            may_wait: lock.owner > 0,
            checkpoint_requested: owed_checkpoint,
            snapshot_requested: false,
            rootfs_missing: false,
            registered,
            waiting: registered && !is_declined,
            declines: false,
            refused,
            // Renewals and beats are steps of their own here, which may come at any time.
            attachment: AttachState::None,
            due: None,
            deferred: None,
        };
        let (desired, _) = desired(&wish);
        (desired, plan(desired, &observed))
    }

    fn may_checkpoint(&self, state: &ModelState, instance: &Instance) -> bool {
        let sure = !instance.in_doubt || self.makes(ModelMistake::BeginsInDoubt);
        sure && state.drawn < self.bounds.checkpoints
    }

    pub(super) fn op(&self, state: &ModelState, at: usize) -> u8 {
        if self.makes(ModelMistake::OneNonce) { state.instances[at].name } else { state.fresh_op() }
    }

    /// Whether a step changes anything, and whether it sends a write.
    fn step_sends(&self, state: &ModelState, instance: &Instance) -> Option<bool> {
        match instance.stage {
            ActionStage::Stored { .. } | ActionStage::Freeing { .. } | ActionStage::Erased => {
                (!instance.unsettled).then_some(true)
            }
            ActionStage::Marked => Some(false),
            ActionStage::Planning => match self.planned(instance, false).1 {
                Action::Rest | Action::Finish | Action::Extract | Action::Snapshot | Action::Save => None,
                Action::Probe
                | Action::Expire
                | Action::RecreateMetadata
                | Action::ReportInvalid
                | Action::SetEgress
                | Action::ForgetAnswers
                | Action::CollectGarbage => None,
                Action::Acquire if instance.known.is_some_and(|lock| lock.epoch >= self.bounds.epochs) => None,
                Action::Wait | Action::Withdraw | Action::Acquire | Action::Renew | Action::Resume => {
                    (!instance.unsettled).then_some(true)
                }
                Action::Decline => None,
                Action::Release | Action::Purge => (!instance.unsettled).then_some(true),
                Action::Checkpoint if instance.in_doubt => None,
                Action::Checkpoint => self.may_checkpoint(state, instance).then_some(false),
                Action::Create | Action::Restore | Action::Refuse(_) | Action::Fence | Action::Remove => Some(false),
            },
        }
    }

    fn tick(&self, state: &mut ModelState) {
        let hold = self.ticks().hold;
        for instance in &mut state.instances {
            if (2..u8::MAX).contains(&instance.stray) {
                instance.stray -= 1;
            }
            if !instance.is_up || instance.still == FrozenPart::Clock {
                continue;
            }
            instance.since_look += 1;
            instance.left = instance.left.saturating_sub(1);
            for (_, age) in &mut instance.attempts {
                *age = (*age + 1).min(hold);
            }
        }
        state.waiter_age = (state.waiter_age + 1).min(self.bounds.ticks.waiter);
    }

    fn fences(&self, instance: &Instance) -> bool {
        let guard_moves = match instance.still {
            FrozenPart::No => true,
            FrozenPart::Process => !self.makes(ModelMistake::GuardHangsToo),
            FrozenPart::Machine | FrozenPart::Clock => false,
        };
        matches!(instance.container, Container::Running | Container::Paused)
            && instance.left == 0
            && guard_moves
            && !self.makes(ModelMistake::NoFence)
    }

    fn acts_of(&self, state: &ModelState, at: usize, acts: &mut Vec<Act>) {
        let (instance, left) = (&state.instances[at], &state.left);
        if instance.stray == 1 {
            acts.push(Act::StrayEnds(at));
        }
        if !instance.is_up {
            if left.restarts > 0 {
                acts.extend([Act::Restart(at, true), Act::Restart(at, false)]);
            }
            return;
        }
        if self.fences(instance) {
            acts.push(Act::Fence(at));
        }
        if instance.still != FrozenPart::No {
            acts.push(Act::Move(at));
            return;
        }
        if left.kills > 0 {
            acts.push(Act::Kill(at));
        }
        for (allowed, still) in
            [(left.freezes, FrozenPart::Machine), (left.suspends, FrozenPart::Clock), (left.hangs, FrozenPart::Process)]
        {
            if allowed > 0 {
                acts.push(Act::Stop(at, still));
            }
        }
        if left.ends > 0 && instance.container == Container::Running {
            acts.push(Act::Ends(at));
        }
        self.changes_of(state, at, acts);
        if !instance.is_fresh || instance.unsettled || instance.since_look > 0 {
            acts.push(Act::Look(at));
        }
        let writes = |act: fn(usize, WriteFate) -> Act, acts: &mut Vec<Act>| {
            acts.push(act(at, WriteFate::Answered));
            if left.lost > 0 && instance.is_fresh {
                acts.push(act(at, WriteFate::Lost));
            }
        };
        match self.step_sends(state, instance) {
            Some(true) => writes(Act::Step, acts),
            Some(false) => acts.push(Act::Step(at, WriteFate::Answered)),
            None => {}
        }
        let standing = self.standing(instance);
        if standing == LockState::Ours
            && !instance.released
            && !instance.unsettled
            && (instance.left < self.ticks().hold || instance.in_doubt)
        {
            writes(Act::Renew, acts);
        }
        let is_asked = instance.known.is_some_and(|lock| lock.asks && !lock.declined && lock.waiter != instance.name);
        let in_use = standing == LockState::Ours && instance.container == Container::Running && !instance.released;
        if is_asked
            && in_use
            && !instance.unsettled
            && instance.stage == ActionStage::Planning
            && instance.want == Want::Run
        {
            writes(Act::Decline, acts);
        }
        let waits = instance.known.is_some_and(|lock| lock.waiter == instance.name && !lock.declined);
        if waits && !instance.unsettled && state.waiter_age > 0 && instance.stage == ActionStage::Planning {
            writes(Act::Beat, acts);
        }
        if self.bounds.saves
            && instance.stage == ActionStage::Planning
            && self.may_checkpoint(state, instance)
            && self.planned(instance, true).1 == Action::Save
        {
            acts.push(Act::Save(at));
        }
        if let ActionStage::Stored { frees, .. } = instance.stage
            && self.bounds.aborts
        {
            acts.push(Act::Abort(at, false));
            if frees && instance.container == Container::Paused && instance.left > 0 {
                acts.push(Act::Abort(at, true));
            }
        }
    }

    fn changes_of(&self, state: &ModelState, at: usize, acts: &mut Vec<Act>) {
        let want = state.instances[at].want;
        if state.wanted_deleted && want != Want::Delete {
            acts.push(Act::Change(at, Want::Delete));
        }
        if state.left.wishes == 0 || want == Want::Delete {
            return;
        }
        acts.push(Act::Change(at, if want == Want::Run { Want::HandOff } else { Want::Run }));
        if self.bounds.may_delete && !state.wanted_deleted {
            acts.push(Act::Change(at, Want::Delete));
        }
    }
}

impl Model for Protocol {
    type State = ModelState;
    type Action = Act;

    fn init_states(&self) -> Vec<ModelState> {
        vec![ModelState::new(&self.bounds, false), ModelState::new(&self.bounds, true)]
    }

    fn actions(&self, state: &ModelState, acts: &mut Vec<Act>) {
        if state.wrong != 0 {
            return;
        }
        for at in 0..state.instances.len() {
            self.acts_of(state, at, acts);
        }
        acts.extend((0..state.late.len()).map(Act::Arrive));
        if state.left.lock_gone && state.lock.is_some_and(|lock| lock.epoch > 0) {
            acts.push(Act::LockGone);
        }
        // What is due happens before time goes on.
        if !acts.iter().any(|act| matches!(act, Act::Fence(_) | Act::StrayEnds(_))) {
            acts.push(Act::Tick);
        }
    }

    fn next_state(&self, last: &ModelState, act: Act) -> Option<ModelState> {
        let mut next = last.clone();
        let state = &mut next;
        state.seen = 0;
        match act {
            Act::Tick => self.tick(state),
            Act::Look(at) => self.look(state, at),
            Act::Step(at, fate) => self.step(state, at, fate),
            Act::Renew(at, fate) => {
                let op = self.op(state, at);
                self.send(state, at, Write::Renew { op }, fate);
            }
            Act::Beat(at, fate) => {
                let (me, op, asks) = (state.instances[at].name, state.fresh_waiter_op(), self.bounds.asks);
                self.send(state, at, Write::Wait { me, op, asks }, fate);
            }
            Act::Decline(at, fate) => {
                let op = self.op(state, at);
                self.send(state, at, Write::Decline { op }, fate);
            }
            Act::Save(at) => self.begin_checkpoint(state, at, false),
            Act::Abort(at, goes_on) => {
                state.instances[at].stage = ActionStage::Planning;
                if goes_on {
                    state.seen |= seen::ABORT;
                    self.execute(state, at);
                }
            }
            Act::Fence(at) => {
                (state.instances[at].container, state.instances[at].excused) = (Container::Fenced, false);
            }
            Act::Ends(at) => {
                state.left.ends -= 1;
                state.instances[at].container = Container::Stopped;
            }
            Act::Change(at, want) => {
                if !state.wanted_deleted || want != Want::Delete {
                    state.left.wishes -= 1;
                }
                state.wanted_deleted |= want == Want::Delete;
                (state.instances[at].want, state.instances[at].refused) = (want, false);
            }
            Act::Arrive(at) => {
                let late = state.late.remove(at);
                self.apply(state, late.lock, late.write, late.who);
            }
            Act::Kill(at) => {
                state.left.kills -= 1;
                let dead = &state.instances[at];
                let stray = match dead.executes() {
                    true if self.makes(ModelMistake::ContainersSurvive) => u8::MAX,
                    true => dead.left + 1,
                    false => 0,
                };
                state.instances[at] = Instance { is_up: false, stray, ..Instance::new(dead.name, dead.predecessor) };
            }
            Act::Restart(at, same_directory) => {
                state.left.restarts -= 1;
                state.names += 1;
                let dead = &state.instances[at];
                let wiped = same_directory && !self.makes(ModelMistake::RestartBeforeWipe);
                let (stray, predecessor) =
                    (if wiped { 0 } else { dead.stray }, if same_directory { dead.name } else { 0 });
                state.instances[at] = Instance { stray, ..Instance::new(state.names, predecessor) };
            }
            Act::Stop(at, still) => {
                match still {
                    FrozenPart::Machine => state.left.freezes -= 1,
                    FrozenPart::Clock => state.left.suspends -= 1,
                    FrozenPart::Process => state.left.hangs -= 1,
                    FrozenPart::No => {}
                }
                state.instances[at].still = still;
            }
            Act::Move(at) => {
                let instance = &mut state.instances[at];
                let frozen = instance.still;
                instance.still = FrozenPart::No;
                // [I3'] Until the guard's next tick, or until its next write if its clock stood too.
                instance.excused = frozen == FrozenPart::Clock
                    || (frozen == FrozenPart::Machine && instance.executes() && instance.left == 0);
            }
            Act::StrayEnds(at) => state.instances[at].stray = 0,
            Act::LockGone => {
                state.left.lock_gone = false;
                state.lock = None;
                state.late.clear();
                for instance in &mut state.instances {
                    instance.is_fresh = false;
                }
            }
        }
        // With one nonce for all the nonce is the name.
        if !self.makes(ModelMistake::OneNonce) {
            state.line_up();
        }
        state.settle(self.ticks());
        // What changes nothing is no step.
        let seen = std::mem::replace(&mut next.seen, last.seen);
        let changes = next != *last;
        next.seen = seen;
        changes.then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        judge::properties(&self.bounds)
    }
}
