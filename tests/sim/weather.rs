//! What goes wrong, and when: each seed draws some kinds of fault, and spells of each.

use std::time::Duration;

use tokio::time::Instant;

use crate::{clock::Still, dice::Dice};

pub const MACHINES: usize = 3;
/// The last fault ends here; what is wanted must be so two minutes later.
pub const FAULTS_END: Duration = Duration::from_secs(480);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Rates,
    Slow,
    Busy,
    Down,
    ReplyLost,
    ReplyTwisted,
    Late,
    Cut,
    Paced,
    ActionFails,
    ActionHangs,
    ActionSlow,
    NoSpace,
    ActionLies,
    ContainerEnds,
    GuardDies,
    Kill,
    Drain,
    Hang,
    Freeze,
    Suspend,
    StaleOverwrite,
    Garbage,
    LockGarbage,
    MetadataGone,
    LockGone,
    Flips,
    Deletion,
    Idle,
}

pub const KINDS: [Kind; 29] = [
    Kind::Rates,
    Kind::Slow,
    Kind::Busy,
    Kind::Down,
    Kind::ReplyLost,
    Kind::ReplyTwisted,
    Kind::Late,
    Kind::Cut,
    Kind::Paced,
    Kind::ActionFails,
    Kind::ActionHangs,
    Kind::ActionSlow,
    Kind::NoSpace,
    Kind::ActionLies,
    Kind::ContainerEnds,
    Kind::GuardDies,
    Kind::Kill,
    Kind::Drain,
    Kind::Hang,
    Kind::Freeze,
    Kind::Suspend,
    Kind::StaleOverwrite,
    Kind::Garbage,
    Kind::LockGarbage,
    Kind::MetadataGone,
    Kind::LockGone,
    Kind::Flips,
    Kind::Deletion,
    Kind::Idle,
];

/// Something that happens at one moment.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Kill(usize),
    Start {
        machine: usize,
        same_directory: bool,
    },
    Drain(usize),
    DrainOver(usize),
    Freeze(usize, Still, Duration),
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
}

#[derive(Debug)]
struct Spell {
    kind: Kind,
    from: Duration,
    to: Duration,
    machine: Option<usize>,
    percent: u64,
}

#[derive(Debug)]
pub struct Weather {
    pub kinds: Vec<Kind>,
    pub events: Vec<(Duration, Event)>,
    spells: Vec<Spell>,
    start: Instant,
}

impl Weather {
    pub fn new(dice: &Dice, start: Instant) -> Self {
        let density = dice.below(45);
        let mut kinds: Vec<Kind> = KINDS.into_iter().filter(|_| dice.falls(density)).collect();
        // Both end what a seed is about, so they are rare.
        kinds.retain(|kind| !matches!(kind, Kind::LockGone | Kind::MetadataGone | Kind::Deletion) || dice.falls(40));
        let mut weather = Self { kinds: kinds.clone(), events: Vec::new(), spells: Vec::new(), start };
        for kind in kinds {
            weather.draw(kind, dice);
        }
        weather
    }

    fn draw(&mut self, kind: Kind, dice: &Dice) {
        let end = FAULTS_END.as_secs();
        let times = dice.below(4) + 1;
        for _ in 0..times {
            let from = dice.seconds(5, end - 1);
            let machine = dice.below(MACHINES as u64) as usize;
            let still = |still| Event::Freeze(machine, still, dice.seconds(1, 90));
            let event = match kind {
                Kind::Rates | Kind::Idle => return,
                Kind::Slow
                | Kind::Busy
                | Kind::Down
                | Kind::ReplyLost
                | Kind::ReplyTwisted
                | Kind::Late
                | Kind::Cut
                | Kind::Paced
                | Kind::ActionFails
                | Kind::ActionHangs
                | Kind::ActionSlow
                | Kind::ActionLies
                | Kind::NoSpace => {
                    let to = (from + dice.seconds(2, 120)).min(FAULTS_END);
                    let machine = dice.falls(60).then_some(machine);
                    let percent = *dice.pick(&[10, 30, 60, 100]);
                    self.spells.push(Spell { kind, from, to, machine, percent });
                    continue;
                }
                Kind::ContainerEnds => Event::ContainerEnds(machine),
                Kind::GuardDies => Event::GuardDies(machine),
                Kind::Kill => Event::Kill(machine),
                Kind::Drain => Event::Drain(machine),
                Kind::Hang => still(Still::Process),
                Kind::Freeze => still(Still::Machine),
                Kind::Suspend => still(Still::Clock),
                Kind::StaleOverwrite => Event::StaleOverwrite,
                Kind::Garbage => Event::Garbage,
                Kind::LockGarbage => Event::LockGarbage,
                Kind::MetadataGone => Event::MetadataGone,
                Kind::LockGone => Event::LockGone,
                Kind::Deletion => Event::Deletion,
                Kind::Flips => {
                    let count = dice.below(20) + 1;
                    let flips = (0..count).map(|n| (from + Duration::from_secs(n), Event::Flip));
                    self.events.extend(flips.filter(|(at, _)| *at < FAULTS_END));
                    continue;
                }
            };
            self.events.push((from, event));
        }
    }

    pub fn has(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether a fault of this kind strikes a call on this machine now.
    pub fn strikes(&self, kind: Kind, machine: usize, dice: &Dice) -> bool {
        if !self.has(kind) {
            return false;
        }
        let now = self.start.elapsed();
        let spell = self.spells.iter().find(|spell| {
            spell.kind == kind && spell.from <= now && now < spell.to && spell.machine.is_none_or(|at| at == machine)
        });
        spell.is_some_and(|spell| dice.falls(spell.percent))
    }

    /// `span`, but never beyond the end of the faults by more than a moment.
    pub fn at_most(&self, span: Duration) -> Duration {
        span.min(FAULTS_END.saturating_sub(self.start.elapsed()).max(Duration::from_millis(50)))
    }
}
