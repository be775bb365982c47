//! What happens to a world, when, and what follows from it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton::reconciler::desired::Drain;
use baton_protocol::id::SandboxId;

use super::World;
use crate::{
    kinds::ScenarioKind,
    machine_clock::{FreezeScope, TICK},
    sim_client,
    sim_faults::{FAULTS_END, MACHINES, SimEvent},
    sim_fork,
    sim_mistakes::SimMistake,
    time::sleep_until,
};

impl World {
    pub(super) async fn let_it_happen(self: &Arc<Self>) {
        let mut queue: BTreeMap<(Duration, usize), SimEvent> = BTreeMap::new();
        for (number, (at, event)) in self.shared.faults.events.iter().enumerate() {
            queue.insert((*at, number), *event);
        }
        while let Some(((at, number), event)) = queue.pop_first() {
            if at >= FAULTS_END {
                break;
            }
            sleep_until(self.start + at).await;
            for (after, next) in self.happen(event) {
                queue.insert((at + after, queue.len() + number + 1000), next);
            }
            if self.shared.oracle.is_wrong() {
                break;
            }
        }
        sleep_until(self.start + FAULTS_END).await;
    }

    /// Lets one thing happen; what follows from it, and how much later.
    fn happen(self: &Arc<Self>, event: SimEvent) -> Vec<(Duration, SimEvent)> {
        match event {
            SimEvent::KillHolder(at) => {
                let holder = self.shared.oracle.holder(self.pick()).filter(|_| self.rng.falls(50));
                self.happen(SimEvent::Kill(holder.unwrap_or(at)))
            }
            SimEvent::Kill(at) => {
                if !self.end(at) {
                    return Vec::new();
                }
                self.count(ScenarioKind::Kill);
                let same_directory = self.rng.falls(50);
                let after = if self.rng.falls(50) { self.rng.millis(50, 2_000) } else { self.rng.seconds(1, 40) };
                vec![(after, SimEvent::Start { machine: at, same_directory })]
            }
            SimEvent::Doom(at, steps) => {
                let id = self.pick();
                let holder = self.shared.oracle.holder(id);
                let at = holder.filter(|_| self.rng.falls(70)).unwrap_or(at);
                // What outlives its server by mistake does not die with it either.
                let survives = self.shared.mistake == Some(SimMistake::ContainersSurvive);
                let Some(process) = self.process(at).filter(|_| !survives) else { return Vec::new() };
                self.note(format!("{at} is doomed"));
                process.life.doom(steps);
                // Somebody wants what it has, so that it dies while it hands over.
                let other = (at + 1 + self.rng.below(2) as usize) % MACHINES;
                let stay = self.rng.seconds(45, 75);
                self.send_visitor(id, other, Duration::ZERO, stay);
                vec![(self.rng.seconds(1, 30), SimEvent::Kill(at))]
            }
            SimEvent::Start { machine, same_directory } => {
                if self.process(machine).is_none() {
                    self.count(if same_directory { ScenarioKind::RestartSame } else { ScenarioKind::RestartNew });
                    self.begin(machine, same_directory);
                }
                Vec::new()
            }
            SimEvent::Drain(at) => {
                let Some(process) = self.process(at) else { return Vec::new() };
                self.note(format!("{at} drains"));
                self.count(ScenarioKind::Drain);
                self.shared.oracle.disturbed(at);
                self.shared.oracle.drains(at);
                process.drain(Drain::Draining);
                let grace = Duration::from_secs(8);
                vec![(grace, SimEvent::DrainOver(at)), (grace + Duration::from_secs(2), SimEvent::Kill(at))]
            }
            SimEvent::DrainOver(at) => {
                if let Some(process) = self.process(at).filter(|process| process.tools.drain.read() != Drain::No) {
                    process.drain(Drain::Over);
                }
                Vec::new()
            }
            SimEvent::Freeze(at, still, span) => {
                self.note(format!("{at} stands still: {still:?} for {span:?}"));
                self.count(match still {
                    FreezeScope::Process => ScenarioKind::Hang,
                    FreezeScope::Machine => ScenarioKind::Freeze,
                    FreezeScope::Clock => ScenarioKind::Suspend,
                });
                self.shared.oracle.disturbed(at);
                self.shared.oracle.shaken(at);
                self.shared.machines[at].freeze(still);
                vec![(span, SimEvent::Thaw(at))]
            }
            SimEvent::Thaw(at) => {
                self.thaw(at);
                vec![(TICK + Duration::from_millis(2), SimEvent::Look)]
            }
            SimEvent::Look => {
                for id in self.shared.all() {
                    self.shared.oracle.look(id);
                }
                Vec::new()
            }
            SimEvent::ContainerEnds(at) => {
                let ids: Vec<_> = self.shared.all().cloned().collect();
                let id = self.rng.pick(&ids);
                if let Some(process) = self.process(at).filter(|process| process.runtime.has(id)) {
                    self.note(format!("a container of {at} ends by itself"));
                    self.count(ScenarioKind::ContainerEnds);
                    self.shared.oracle.may_end(id);
                    process.runtime.end(id);
                }
                Vec::new()
            }
            SimEvent::GuardDies(at) => {
                // Without its guard and hanging, a machine keeps no promise.
                if let Some(process) = self.process(at).filter(|_| self.shared.machines[at].moves()) {
                    self.note(format!("the guard of {at} dies"));
                    self.count(ScenarioKind::GuardDies);
                    self.shared.oracle.disturbed(at);
                    self.shared.oracle.shaken(at);
                    tokio::spawn(async move { process.runtime.lose_guard().await });
                }
                Vec::new()
            }
            SimEvent::Muffle => {
                let id = self.pick();
                if let Some(at) = self.shared.oracle.holder(id) {
                    self.note(format!("{at} hears nothing"));
                    self.count(ScenarioKind::Muffled);
                    let (deaf, mute) = (self.rng.millis(7_000, 14_000), self.rng.seconds(25, 40));
                    self.shared.faults.muffle(at, deaf, mute);
                    // Whose clock is fast has waited soonest.
                    let rivals = [(at + 1) % MACHINES, (at + 2) % MACHINES];
                    let rate = |at: &usize| self.shared.machines[*at].rate;
                    let other = rivals.into_iter().max_by_key(rate).unwrap_or(at);
                    let (wait, stay) = (self.rng.millis(0, 6_000), self.rng.seconds(35, 60));
                    self.send_visitor(id, other, wait, stay);
                }
                vec![(self.rng.seconds(50, 120), SimEvent::Muffle)]
            }
            SimEvent::Fork => {
                if let Some(id) = self.shared.copies.first() {
                    let copying = sim_fork::live(self.clone(), self.pick().clone(), id.clone(), self.rng.fork());
                    self.crowd.lock().unwrap().spawn(copying);
                }
                Vec::new()
            }
            SimEvent::Storm(count) => {
                let id = self.pick();
                self.count(ScenarioKind::Storm);
                for _ in 0..count {
                    let at = self.rng.below(MACHINES as u64) as usize;
                    let (wait, stay) = (self.rng.millis(0, 3_000), self.rng.millis(10, 15_000));
                    self.send_visitor(id, at, wait, stay);
                }
                Vec::new()
            }
            SimEvent::LockGarbage
            | SimEvent::LockMended
            | SimEvent::StaleOverwrite
            | SimEvent::Garbage
            | SimEvent::MetadataGone
            | SimEvent::LockGone
            | SimEvent::Flip
            | SimEvent::Order
            | SimEvent::Deletion => self.operate(event),
        }
    }

    fn send_visitor(self: &Arc<Self>, id: &SandboxId, at: usize, wait: Duration, stay: Duration) {
        self.crowd.lock().unwrap().spawn(sim_client::attach_briefly(self.clone(), id.clone(), at, wait, stay));
    }
}
