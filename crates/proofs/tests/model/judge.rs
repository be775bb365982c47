//! What must hold: of every write as the store takes it, and of every state.

use stateright::Property;

use crate::{
    lock_model::{Small, Write},
    model_state::{Instance, ModelBounds, ModelState, seen, wrong},
    protocol::Protocol,
};

impl Protocol {
    /// The store takes a write, and everything about it is judged.
    pub(super) fn apply(&self, state: &mut ModelState, next: Small, write: Write, who: u8) {
        let Some(old) = state.lock else {
            state.wrong |= wrong::MADE_UP;
            state.lock = Some(next);
            return;
        };
        if old.purged || (old.purging && !next.purging && !next.purged) {
            state.wrong |= wrong::PURGE;
        }
        let takes = matches!(write, Write::Acquire { .. });
        if next.epoch != old.epoch + u8::from(takes) {
            state.wrong |= wrong::EPOCH;
        }
        if takes {
            let waits = old.waiter > 0 && old.waiter != who && !old.declined;
            if waits && state.waiter_age < self.bounds.ticks.waiter {
                state.wrong |= wrong::PRIORITY;
            }
            state.seen |= match (old.owner, old.waiter == who) {
                (0, true) => seen::HANDOFF,
                (0, false) => 0,
                _ if old.purging => seen::PURGE_TAKEN,
                _ => seen::TAKEOVER,
            };
            let heir =
                state.instances.iter().any(|it| it.name == who && it.predecessor > 0 && it.predecessor == old.owner);
            state.seen |= if heir { seen::INHERITED } else { 0 };
        } else if !matches!(write, Write::Wait { .. } | Write::Withdraw { .. }) && old.owner != who {
            state.wrong |= wrong::LATE_COMMIT;
        }
        if matches!(write, Write::Decline { .. }) {
            // The holder answers an entry and changes nothing else of it.
            let same = Small { op: old.op, declined: old.declined, ..next } == old;
            state.wrong |= if same && old.asks { 0 } else { wrong::NOT_ITS_OWN };
            state.seen |= seen::DECLINED;
        }
        if matches!(write, Write::Wait { .. } | Write::Withdraw { .. }) {
            let entry =
                Small { waiter: old.waiter, waiter_op: old.waiter_op, asks: old.asks, declined: old.declined, ..next };
            let same = entry == old;
            state.wrong |= if same { 0 } else { wrong::NOT_ITS_OWN };
            let overwrites = matches!(write, Write::Wait { .. }) && old.waiter > 0 && old.waiter != who;
            state.seen |= if overwrites { seen::OVERWRITTEN } else { 0 };
            state.seen |= if matches!(write, Write::Withdraw { .. }) { seen::WITHDRAWN } else { 0 };
        }
        if next.head != old.head && !next.purged {
            let (parent, epoch) = state.checkpoints[usize::from(next.head)];
            if parent != old.head || next.prev_head != old.head {
                state.wrong |= wrong::CHAIN;
            }
            if epoch != old.epoch || old.owner != who {
                state.wrong |= wrong::LATE_COMMIT;
            }
            if matches!(write, Write::Release { .. }) {
                state.ran_on = false;
            }
        }
        if next.purging && !old.purging {
            state.marked = true;
            state.wrong |= if state.wanted_deleted { 0 } else { wrong::PURGE };
        }
        if next.purged {
            state.seen |= seen::PURGED;
        }
        if (next.waiter, next.waiter_op) != (old.waiter, old.waiter_op) {
            state.waiter_age = 0;
        }
        state.lock = Some(next);
        for instance in &mut state.instances {
            instance.is_fresh = false;
        }
        state.late.clear();
    }
}

pub fn properties(bounds: &ModelBounds) -> Vec<Property<Protocol>> {
    fn executing(state: &ModelState) -> usize {
        let here = |instance: &&Instance| (instance.executes() && !instance.excused) || instance.stray > 1;
        state.instances.iter().filter(here).count()
    }
    macro_rules! never {
        ($name:literal, $bit:expr) => {
            Property::always($name, |_: &Protocol, state: &ModelState| state.wrong & $bit == 0)
        };
    }
    macro_rules! possible {
        ($name:literal, $bit:expr) => {
            Property::sometimes($name, |_: &Protocol, state: &ModelState| state.seen & $bit != 0)
        };
    }
    let mut all = vec![
        Property::always("I3: one container executes", |_: &Protocol, state: &ModelState| executing(state) <= 1),
        Property::always("I1: what was told stays stored", |_: &Protocol, state: &ModelState| {
            state.lock.is_none_or(|lock| lock.purged || state.descends(lock.head, state.told))
        }),
        never!("I1: commits form one chain", wrong::CHAIN),
        never!("I1: only what is committed is told", wrong::LOST_CHECKPOINT),
        never!("I1: a restore starts from the head", wrong::OLD_HEAD),
        never!("I2: only the holder of the epoch commits", wrong::LATE_COMMIT),
        never!("I4: a fresh waiter comes first", wrong::PRIORITY),
        never!("[2] nobody writes what is another's", wrong::NOT_ITS_OWN),
        never!("[4] nothing starts without the lease", wrong::AFTER_RELEASE),
        never!("[9] epochs go up by one", wrong::EPOCH),
        never!("[13] a purge is marked first and is the end", wrong::PURGE),
        never!("[14] no lock is made up", wrong::MADE_UP),
        never!("what has run does not start over", wrong::STARTED_OVER),
        never!("going back in time is told", wrong::LOST_WORK),
        possible!("a handoff", seen::HANDOFF),
        possible!("a takeover", seen::TAKEOVER),
        possible!("a fenced container goes on", seen::UNFENCED),
        possible!("a told checkpoint is restored by a later holder", seen::RESTORED),
    ];
    let mut also = |when: bool, property: Property<Protocol>| {
        if when {
            all.push(property);
        }
    };
    also(bounds.aborts, possible!("a broken off handoff goes on", seen::ABORT));
    also(bounds.saves, possible!("a checkpoint of what runs on", seen::SAVED));
    also(bounds.restarts > 0, possible!("a predecessor's lease is inherited", seen::INHERITED));
    also(bounds.wishes > 0 || bounds.asks, possible!("a waiter withdraws", seen::WITHDRAWN));
    also(bounds.asks, possible!("a waiter is declined", seen::DECLINED));
    also(bounds.instances > 2, possible!("a waiter is overwritten", seen::OVERWRITTEN));
    also(bounds.may_delete, possible!("a purge ends", seen::PURGED));
    also(bounds.may_delete && bounds.kills > 0, possible!("a purge is taken over", seen::PURGE_TAKEN));
    also(bounds.lost > 0, possible!("an acquisition is found to have succeeded", seen::FOUND_LATER));
    all
}
