//! [I5] After a holder's death a waiting instance holds the lease within 33 s, unless something else happens to it.

use std::time::Duration;

use baton::{clock::Moment, storage::layout};
use baton_protocol::lock::Lock;

use super::{Oracle, StatusHistory};
use crate::words::short;

const TAKEOVER_BOUND: Duration = Duration::from_secs(33);

/// A holder has died, and somebody waits.
#[derive(Debug)]
pub struct Vacancy {
    waiter: String,
    at: usize,
    /// On the waiter's own clock.
    since: Moment,
}

impl Oracle {
    /// Something happens to an instance: what it does in good time is not promised any more.
    pub fn disturbed(&self, at: usize) {
        for history in self.told.lock().unwrap().histories.values_mut() {
            history.vacancy.take_if(|vacancy| vacancy.at == at);
        }
    }
}

impl StatusHistory {
    /// An instance has died.
    pub(super) fn vacate(&mut self, name: &str) {
        let Self { histories, places, .. } = self;
        for history in histories.values_mut() {
            history.vacancy.take_if(|vacancy| vacancy.waiter == name);
            // What nobody can read nobody takes, and without metadata there is nothing to start.
            let is_clear = !history.garbled && history.unnamed_since.is_none();
            let Some(lock) = history.lock.as_ref().filter(|_| is_clear) else { continue };
            let is_owner = lock.lease.as_ref().is_some_and(|lease| lease.owner.as_str() == name);
            let waiter = lock.waiter.as_ref().filter(|waiter| is_owner && !waiter.declined);
            let Some(waiter) = waiter.map(|waiter| waiter.instance.as_str()) else { continue };
            let place = places.iter().find(|(_, place)| place.name == waiter && place.machine.moves());
            history.vacancy =
                place.map(|(at, place)| Vacancy { waiter: waiter.to_owned(), at: *at, since: place.machine.now() });
        }
    }

    /// Somebody has written an object by which the waiter may have lost its reason to wait.
    pub(super) fn touched(&mut self, key: &str) {
        if let Some(history) = layout::sandbox_of(key).and_then(|id| self.histories.get_mut(&id)) {
            history.vacancy = None;
        }
    }

    /// The lock was written: taken by whoever waited, or changed otherwise.
    pub(super) fn succeeded(&mut self, old: &Lock, new: &Lock) {
        let Some(history) = self.histories.get_mut(&new.sandbox_id) else { return };
        let waiter = |lock: &Lock| lock.waiter.as_ref().map(|waiter| waiter.instance.clone());
        if old.lease == new.lease && waiter(old) == waiter(new) {
            return;
        }
        let Some(vacancy) = history.vacancy.take() else { return };
        if new.lease.as_ref().is_some_and(|lease| lease.owner.as_str() == vacancy.waiter) {
            self.successions += 1;
        }
    }

    pub(super) fn overdue(&mut self, now: Duration, name: &str) {
        let Self { histories, places, .. } = self;
        let late = histories.iter_mut().find_map(|(id, history)| {
            let vacancy = history.vacancy.take_if(|vacancy| {
                vacancy.waiter == name
                    && places.get(&vacancy.at).is_some_and(|place| place.machine.now() - vacancy.since > TAKEOVER_BOUND)
            });
            vacancy.map(|_| short(id))
        });
        if let Some(id) = late {
            let waiter = self.name(name);
            self.wrong(now, &format!("I5: {waiter} waits for {id}, whose holder died {TAKEOVER_BOUND:?} ago"));
        }
    }
}
