//! Where a sandbox executes.

use baton::runtime::Container;
use baton_protocol::id::SandboxId;

use super::{Oracle, letter};
use crate::{sim_faults::MACHINES, words::short};

impl Oracle {
    /// [I3] A container has changed somewhere.
    pub fn look(&self, id: &SandboxId) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        let states: Vec<(usize, Container, bool)> = told
            .places
            .iter()
            .filter_map(|(at, place)| {
                let seen = place.seen.get(id)?.borrow().container;
                let counts = !place.machine.is_still() && !place.machine.is_excused();
                Some((*at, seen, counts))
            })
            .collect();
        for (at, container, _) in &states {
            let name = told.places[at].name.clone();
            let history = told.histories.get_mut(id).expect("it is expected");
            // What another still has, frozen, counts for nothing.
            let owner = history.lock.as_ref().and_then(|lock| Some(lock.lease.as_ref()?.owner.as_str() == name));
            if *container == Container::Running && owner == Some(true) {
                (history.ran_on, history.ever_ran) = (true, true);
            }
            let before = history.shown.insert(*at, *container).unwrap_or(Container::Absent);
            // What its holder starts again after this starts from the head.
            if owner == Some(true) && matches!(container, Container::Stopped | Container::Absent) {
                history.behind |= history.ran_on && !history.chain.is_empty();
                history.gone_back |= history.ran_on;
            }
            if before != *container {
                told.note(now, &format!("{} {} is {container:?}", letter(*at), short(id)));
            }
            // What outlives its server by mistake is found by what it does to others.
            if *at < MACHINES
                && let Some(complaint) = told.judge_fleeting(id, &name, *container)
            {
                told.wrong(now, &complaint);
            }
        }
        let running: Vec<_> = states.iter().filter(|(_, c, counts)| *c == Container::Running && *counts).collect();
        if running.len() > 1 {
            let at: Vec<_> = running.iter().map(|(at, ..)| letter(*at)).collect();
            told.wrong(now, &format!("I3: {} executes on {}", short(id), at.join(" and ")));
        }
    }
}
