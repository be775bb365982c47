//! The kinds of fault, and how often each really struck.

use std::sync::Mutex;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ScenarioKind {
            $($(#[$doc])* $name,)*
        }

        impl ScenarioKind {
            pub const ALL: &[ScenarioKind] = &[$(ScenarioKind::$name),*];
        }
    };
}

kinds! {
    // Clocks.
    Offset, Rates,
    // The store.
    Slow, Busy, Down, ReplyLost, ReplyTwisted, Late, Cut, Paced,
    /// Reads are answered, writes are not.
    ReadOnly,
    /// A holder hears no answer for a while, and then may only read; somebody elsewhere wants what it has.
    Muffled,
    // Containers.
    ActionFails, ActionHangs, ActionSlow, NoSpace, ActionLies, ContainerEnds, GuardDies,
    // Processes and machines.
    Kill,
    /// Dead at the next await, or the tenth: between a call and its answer, or before an effect is told.
    Doom,
    RestartSame, RestartNew, Drain, Hang, Freeze, Suspend,
    // Operators.
    StaleOverwrite, Garbage, LockGarbage, MetadataGone, LockGone, Flips, Deletion,
    // Clients, and what they ask for.
    Storm, Vanish, SlowReader, Idle,
    /// Sandboxes of which nothing is stored.
    Ephemeral,
    /// Sandboxes that begin with a checkpoint of another.
    Fork,
    /// Fewer places than sandboxes: one that nobody uses is let go for another.
    Crowded,
    /// A sandbox that is the documents', and plain clients that want it on several instances.
    Documents,
    /// An operator names the instance on which a sandbox is to be.
    Orders,
}

impl ScenarioKind {
    /// Chosen for a seed or not; the others happen in all, or are chosen apart.
    pub fn is_drawn(self) -> bool {
        let in_all =
            matches!(self, Self::Offset | Self::RestartSame | Self::RestartNew | Self::Vanish | Self::SlowReader);
        !in_all && !matches!(self, Self::Crowded | Self::Documents | Self::Orders)
    }
}

/// How often each kind struck.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Vec<u64>>);

impl Tally {
    pub fn count(&self, kind: ScenarioKind) {
        self.add(kind, 1);
    }

    pub fn add(&self, kind: ScenarioKind, times: u64) {
        let mut counts = self.0.lock().unwrap();
        counts.resize(ScenarioKind::ALL.len(), 0);
        counts[kind as usize] += times;
    }

    pub fn merge(&self, other: &Tally) {
        for (kind, times) in other.counts() {
            self.add(kind, times);
        }
    }

    pub fn counts(&self) -> Vec<(ScenarioKind, u64)> {
        let mut counts = self.0.lock().unwrap();
        counts.resize(ScenarioKind::ALL.len(), 0);
        ScenarioKind::ALL.iter().copied().zip(counts.iter().copied()).collect()
    }
}
