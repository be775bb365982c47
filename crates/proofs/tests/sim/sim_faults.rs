//! What goes wrong, and when: each seed draws some kinds of fault, and spells of each.

use std::{sync::Mutex, time::Duration};

use crate::{
    kinds::{ScenarioKind, Tally},
    machine_clock::FreezeScope,
    rng::Rng,
    time::Instant,
};

pub const MACHINES: usize = 3;
/// The last fault ends here; what is wanted must be so two minutes later.
pub const FAULTS_END: Duration = Duration::from_secs(480);

/// Something that happens at one moment.
#[derive(Clone, Copy, Debug)]
pub enum SimEvent {
    Kill(usize),
    /// Who holds something, or that machine.
    KillHolder(usize),
    /// It dies after so many steps.
    Doom(usize, u64),
    Start {
        machine: usize,
        same_directory: bool,
    },
    Drain(usize),
    DrainOver(usize),
    Freeze(usize, FreezeScope, Duration),
    Thaw(usize),
    /// The oracle looks at everything again.
    Look,
    ContainerEnds(usize),
    GuardDies(usize),
    StaleOverwrite,
    Garbage,
    LockGarbage,
    /// Somebody puts back what garbage was written over.
    LockMended,
    MetadataGone,
    LockGone,
    Flip,
    Deletion,
    Order,
    Muffle,
    Fork,
    /// So many clients come at once, from all sides.
    Storm(u64),
}

#[derive(Debug)]
struct Spell {
    from: Duration,
    to: Duration,
    machine: Option<usize>,
    percent: u64,
}

#[derive(Debug)]
pub struct FaultSchedule {
    pub kinds: Vec<ScenarioKind>,
    pub events: Vec<(Duration, SimEvent)>,
    /// Of each kind: every call asks for several.
    spells: Mutex<Vec<Vec<Spell>>>,
    start: Instant,
    pub tally: Tally,
}

impl FaultSchedule {
    /// `more`: kinds that are not drawn here, with the generator for what happens then.
    pub fn new(rng: &Rng, start: Instant, is_crowded: bool, (more, own): (&[ScenarioKind], &Rng)) -> Self {
        let density = rng.below(45);
        let drawn = ScenarioKind::ALL.iter().copied().filter(|kind| kind.is_drawn());
        let mut kinds: Vec<ScenarioKind> = drawn.filter(|_| rng.falls(density)).collect();
        // Both end what a seed is about, so they are rare.
        kinds.retain(|kind| {
            !matches!(kind, ScenarioKind::LockGone | ScenarioKind::MetadataGone | ScenarioKind::Deletion)
                || rng.falls(40)
        });
        // Who hears nothing is in danger where its clock is slow and the other's is fast.
        if kinds.contains(&ScenarioKind::Muffled) && !kinds.contains(&ScenarioKind::Rates) {
            kinds.push(ScenarioKind::Rates);
        }
        if is_crowded {
            // What is not stored, or comes on top, makes no room.
            kinds.retain(|kind| !matches!(kind, ScenarioKind::Ephemeral | ScenarioKind::Fork));
            kinds.push(ScenarioKind::Crowded);
        }
        let spells = ScenarioKind::ALL.iter().map(|_| Vec::new()).collect();
        let (spells, tally) = (Mutex::new(spells), Tally::default());
        let mut faults = Self { kinds: kinds.clone(), events: Vec::new(), spells, start, tally };
        for kind in kinds {
            faults.draw(kind, rng);
        }
        faults.kinds.extend(more);
        for kind in more {
            faults.draw(*kind, own);
        }
        faults
    }

    fn draw(&mut self, kind: ScenarioKind, rng: &Rng) {
        let end = FAULTS_END.as_secs();
        let times = rng.below(4) + 1;
        for _ in 0..times {
            let from = rng.seconds(5, end - 1);
            let machine = rng.below(MACHINES as u64) as usize;
            let still = |still| SimEvent::Freeze(machine, still, rng.seconds(1, 90));
            let event = match kind {
                ScenarioKind::Rates
                | ScenarioKind::Idle
                | ScenarioKind::Ephemeral
                | ScenarioKind::Crowded
                | ScenarioKind::Documents => return,
                ScenarioKind::Offset
                | ScenarioKind::RestartSame
                | ScenarioKind::RestartNew
                | ScenarioKind::Vanish
                | ScenarioKind::SlowReader => return,
                ScenarioKind::Slow
                | ScenarioKind::Busy
                | ScenarioKind::Down
                | ScenarioKind::ReplyLost
                | ScenarioKind::ReplyTwisted
                | ScenarioKind::Late
                | ScenarioKind::Cut
                | ScenarioKind::Paced
                | ScenarioKind::ReadOnly
                | ScenarioKind::ActionFails
                | ScenarioKind::ActionHangs
                | ScenarioKind::ActionSlow
                | ScenarioKind::ActionLies
                | ScenarioKind::NoSpace => {
                    let to = (from + rng.seconds(2, 120)).min(FAULTS_END);
                    let machine = rng.falls(60).then_some(machine);
                    let percent = *rng.pick(&[10, 30, 60, 100]);
                    self.spell(kind, Spell { from, to, machine, percent });
                    continue;
                }
                ScenarioKind::ContainerEnds => SimEvent::ContainerEnds(machine),
                ScenarioKind::GuardDies => SimEvent::GuardDies(machine),
                ScenarioKind::Kill => SimEvent::KillHolder(machine),
                ScenarioKind::Doom => SimEvent::Doom(machine, rng.below(60)),
                ScenarioKind::Muffled => SimEvent::Muffle,
                ScenarioKind::Fork => SimEvent::Fork,
                ScenarioKind::Storm => SimEvent::Storm(3 + rng.below(8)),
                ScenarioKind::Drain => SimEvent::Drain(machine),
                ScenarioKind::Hang => still(FreezeScope::Process),
                ScenarioKind::Freeze => still(FreezeScope::Machine),
                ScenarioKind::Suspend => still(FreezeScope::Clock),
                ScenarioKind::StaleOverwrite => SimEvent::StaleOverwrite,
                ScenarioKind::Garbage => SimEvent::Garbage,
                ScenarioKind::LockGarbage => SimEvent::LockGarbage,
                ScenarioKind::MetadataGone => SimEvent::MetadataGone,
                ScenarioKind::LockGone => SimEvent::LockGone,
                ScenarioKind::Deletion => SimEvent::Deletion,
                ScenarioKind::Orders => SimEvent::Order,
                ScenarioKind::Flips => {
                    let count = rng.below(20) + 1;
                    let flips = (0..count).map(|n| (from + Duration::from_secs(n), SimEvent::Flip));
                    self.events.extend(flips.filter(|(at, _)| *at < FAULTS_END));
                    continue;
                }
            };
            self.events.push((from, event));
        }
    }

    fn spell(&self, kind: ScenarioKind, spell: Spell) {
        self.spells.lock().unwrap()[kind as usize].push(spell);
    }

    /// From now on a machine hears no answer for `deaf`, and then for `mute` none to its writes.
    pub fn muffle(&self, machine: usize, deaf: Duration, mute: Duration) {
        let from = self.start.elapsed();
        let spell =
            |from: Duration, to: Duration| Spell { from, to: to.min(FAULTS_END), machine: Some(machine), percent: 100 };
        self.spell(ScenarioKind::ReplyLost, spell(from, from + deaf));
        self.spell(ScenarioKind::ReadOnly, spell(from + deaf, from + deaf + mute));
    }

    pub fn has(&self, kind: ScenarioKind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether a fault of this kind strikes a call on this machine now.
    pub fn strikes(&self, kind: ScenarioKind, machine: usize, rng: &Rng) -> bool {
        let spells = self.spells.lock().unwrap();
        let spells = &spells[kind as usize];
        if spells.is_empty() {
            return false;
        }
        let now = self.start.elapsed();
        let spell = spells.iter().find(|spell| {
            let lasts = spell.from <= now && now < spell.to;
            lasts && spell.machine.is_none_or(|at| at == machine)
        });
        let strikes = spell.is_some_and(|spell| rng.falls(spell.percent));
        if strikes {
            self.tally.count(kind);
        }
        strikes
    }

    /// `span`, but never beyond the end of the faults by more than a moment.
    pub fn at_most(&self, span: Duration) -> Duration {
        span.min(FAULTS_END.saturating_sub(self.start.elapsed()).max(Duration::from_millis(50)))
    }
}
