//! What the model remembers: the one register, the writes on their way to it, and each instance.

use std::hash::{Hash, Hasher};

use baton::runtime::Container;

use crate::lock_model::{self, Small, Ticks, Write};

/// How much may happen. Renewals, looks and beats are not bounded.
#[derive(Clone, Debug)]
pub struct ModelBounds {
    pub instances: u8,
    pub ticks: Ticks,
    pub epochs: u8,
    pub checkpoints: u8,
    /// Writes whose answer is lost: they arrive later, or never.
    pub lost: u8,
    pub kills: u8,
    pub restarts: u8,
    /// Of the whole machine, with its clock going on.
    pub freezes: u8,
    /// Of the whole machine and its clock.
    pub suspends: u8,
    /// Of the server, while its guard lives.
    pub hangs: u8,
    /// Containers that end by themselves.
    pub ends: u8,
    /// Changes of mind: to let go, to run, to delete.
    pub wishes: u8,
    pub may_delete: bool,
    /// Checkpoints may break off before their commit.
    pub aborts: bool,
    /// Checkpoints may be asked for while it runs on.
    pub saves: bool,
    /// An operator deletes the lock.
    pub lock_gone: bool,
    /// Who waits asks, and a holder whose client is alive declines.
    pub asks: bool,
}

impl ModelBounds {
    pub const NONE: ModelBounds = ModelBounds {
        instances: 2,
        ticks: Ticks { hold: 2, takeover: 3, waiter: 4 },
        epochs: 3,
        checkpoints: 2,
        lost: 0,
        kills: 0,
        restarts: 0,
        freezes: 0,
        suspends: 0,
        hangs: 0,
        ends: 0,
        wishes: 0,
        may_delete: false,
        aborts: false,
        saves: false,
        lock_gone: false,
        asks: false,
    };
}

/// What is left of each bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Left {
    pub lost: u8,
    pub kills: u8,
    pub restarts: u8,
    pub freezes: u8,
    pub suspends: u8,
    pub hangs: u8,
    pub ends: u8,
    pub wishes: u8,
    pub lock_gone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrozenPart {
    No,
    Process,
    Machine,
    Clock,
}

/// Where an action of several steps stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActionStage {
    Planning,
    /// This checkpoint is stored; its commit is next, and frees the lease or does not.
    Stored {
        checkpoint: u8,
        frees: bool,
    },
    /// Rule 11: A release was sent, with this checkpoint or none.
    Freeing {
        checkpoint: u8,
    },
    /// Rule 13: The purge is marked.
    Marked,
    Erased,
}

/// What somebody wants of one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    Run,
    HandOff,
    Delete,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    pub name: u8,
    pub predecessor: u8,
    pub is_up: bool,
    pub still: FrozenPart,
    /// Ticks for which a container of a process that died may still execute.
    pub stray: u8,
    pub want: Want,
    pub refused: bool,
    /// The lock as last read or written.
    pub known: Option<Small>,
    /// It was read or written, and was not there.
    pub is_missing: bool,
    /// Nobody has written since.
    pub is_fresh: bool,
    pub unsettled: bool,
    pub lease_for: u8,
    pub waiter_for: u8,
    pub since_look: u8,
    pub held: u8,
    pub released: bool,
    /// Until the deadline, for the lease and for the guard.
    pub left: u8,
    pub attempts: Vec<(u8, u8)>,
    pub before_ran: bool,
    pub before_behind: bool,
    pub ran: bool,
    pub container: Container,
    pub stage: ActionStage,
    /// It was frozen with its clock: what it runs is excused until its next look.
    pub excused: bool,
    /// Rule 2: The answer to a commit was lost, and no write of ours was seen applied since.
    pub in_doubt: bool,
    /// The head as first seen; only a mistake looks at it.
    pub old_head: u8,
}

impl Instance {
    pub fn new(name: u8, predecessor: u8) -> Self {
        Self {
            name,
            predecessor,
            is_up: true,
            still: FrozenPart::No,
            stray: 0,
            want: Want::Run,
            refused: false,
            known: None,
            is_missing: false,
            is_fresh: false,
            unsettled: false,
            lease_for: 0,
            waiter_for: 0,
            since_look: 0,
            held: 0,
            released: false,
            left: 0,
            attempts: Vec::new(),
            before_ran: false,
            before_behind: false,
            ran: false,
            container: Container::Absent,
            stage: ActionStage::Planning,
            excused: false,
            in_doubt: false,
            old_head: 0,
        }
    }

    pub fn held(&self) -> Option<(u8, u8, bool)> {
        (self.held > 0).then_some((self.held, self.left, self.released))
    }

    pub fn executes(&self) -> bool {
        self.container == Container::Running && !matches!(self.still, FrozenPart::Machine | FrozenPart::Clock)
    }
}

/// A write whose answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Late {
    pub write: Write,
    pub lock: Small,
    pub who: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelState {
    /// `None`: an operator deleted it.
    pub lock: Option<Small>,
    pub late: Vec<Late>,
    pub instances: Vec<Instance>,
    /// Parent and epoch of every checkpoint; the first is none.
    pub checkpoints: Vec<(u8, u8)>,
    /// How many were begun.
    pub drawn: u8,
    /// The last one a client was told of.
    pub told: u8,
    /// Ticks since the waiter's entry changed.
    pub waiter_age: u8,
    pub names: u8,
    /// It was started once; and it went on after what is committed.
    pub ever_ran: bool,
    pub ran_on: bool,
    pub wanted_deleted: bool,
    pub marked: bool,
    pub left: Left,
    pub wrong: u16,
    /// By the last step.
    pub seen: u16,
}

impl Hash for ModelState {
    /// What the last step showed is looked at once, and makes no other state.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let Self { lock, late, instances, checkpoints, drawn, told, waiter_age, names, .. } = self;
        let Self { ever_ran, ran_on, wanted_deleted, marked, left, wrong, .. } = self;
        (lock, late, instances, checkpoints, drawn, told, waiter_age, names).hash(hasher);
        (ever_ran, ran_on, wanted_deleted, marked, left, wrong).hash(hasher);
    }
}

/// What must never be.
pub mod wrong {
    pub const CHAIN: u16 = 1;
    pub const LATE_COMMIT: u16 = 2;
    pub const LOST_CHECKPOINT: u16 = 4;
    pub const OLD_HEAD: u16 = 8;
    pub const PRIORITY: u16 = 16;
    pub const EPOCH: u16 = 32;
    pub const PURGE: u16 = 64;
    pub const AFTER_RELEASE: u16 = 128;
    pub const NOT_ITS_OWN: u16 = 256;
    pub const MADE_UP: u16 = 512;
    pub const STARTED_OVER: u16 = 1024;
    pub const LOST_WORK: u16 = 2048;
}

/// What must be possible.
pub mod seen {
    pub const HANDOFF: u16 = 1;
    pub const TAKEOVER: u16 = 2;
    pub const ABORT: u16 = 4;
    pub const UNFENCED: u16 = 8;
    pub const INHERITED: u16 = 16;
    pub const WITHDRAWN: u16 = 32;
    pub const OVERWRITTEN: u16 = 64;
    pub const PURGED: u16 = 128;
    pub const PURGE_TAKEN: u16 = 256;
    pub const RESTORED: u16 = 512;
    pub const SAVED: u16 = 1024;
    pub const FOUND_LATER: u16 = 2048;
    pub const DECLINED: u16 = 4096;
}

impl ModelState {
    /// As create writes it, held by the first instance, whose reconciler has only been told of that write; or, once it
    /// was stored, as its last holder left it.
    pub fn new(bounds: &ModelBounds, is_stored: bool) -> Self {
        let left = Left {
            lost: bounds.lost,
            kills: bounds.kills,
            restarts: bounds.restarts,
            freezes: bounds.freezes,
            suspends: bounds.suspends,
            hangs: bounds.hangs,
            ends: bounds.ends,
            wishes: bounds.wishes,
            lock_gone: bounds.lock_gone,
        };
        let mut instances: Vec<_> = (1..=bounds.instances).map(|name| Instance::new(name, 0)).collect();
        let lock = if is_stored {
            Small { head: 1, ran: true, ..Small::default() }
        } else {
            instances[0].attempts.push((1, 0));
            lock_model::written(Small::default(), Write::Acquire { me: 1, op: 1, runs: true })
        };
        Self {
            lock: Some(lock),
            late: Vec::new(),
            instances,
            checkpoints: if is_stored { vec![(0, 0); 2] } else { vec![(0, 0)] },
            drawn: 0,
            told: is_stored.into(),
            waiter_age: 0,
            names: bounds.instances,
            ever_ran: is_stored,
            ran_on: false,
            wanted_deleted: false,
            marked: false,
            left,
            wrong: 0,
            seen: 0,
        }
    }

    pub fn descends(&self, mut checkpoint: u8, ancestor: u8) -> bool {
        while checkpoint != ancestor && checkpoint > 0 {
            checkpoint = self.checkpoints[usize::from(checkpoint)].0;
        }
        checkpoint == ancestor
    }

    /// A client hears that this checkpoint is stored.
    pub fn tell(&mut self, checkpoint: u8) {
        if checkpoint == 0 || self.descends(self.told, checkpoint) {
            return;
        }
        let stored = self.lock.is_none_or(|lock| lock.purged || self.descends(lock.head, checkpoint));
        if !stored || !self.descends(checkpoint, self.told) {
            self.wrong |= wrong::LOST_CHECKPOINT;
        }
        self.told = checkpoint;
    }

    /// A nonce that nothing in the world carries.
    pub fn fresh_op(&self) -> u8 {
        1 + self.ops().max().unwrap_or(0)
    }

    pub fn fresh_waiter_op(&self) -> u8 {
        1 + self.locks().map(|lock| lock.waiter_op).max().unwrap_or(0)
    }

    pub(super) fn locks(&self) -> impl Iterator<Item = Small> + '_ {
        let known = self.instances.iter().filter_map(|instance| instance.known);
        self.lock.into_iter().chain(known).chain(self.late.iter().map(|late| late.lock))
    }

    fn ops(&self) -> impl Iterator<Item = u8> + '_ {
        let attempts = self.instances.iter().flat_map(|instance| instance.attempts.iter().map(|(op, _)| *op));
        self.locks().map(|lock| lock.op).chain(attempts)
    }
}
