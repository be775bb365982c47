//! A machine's time: its own offset and rate, and the ways in which it can stand still.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use baton::clock::{Clock, Moment};
use baton_protocol::id::Nonce;
use tokio::sync::Notify;

use crate::{
    rng::Rng,
    time::{Instant, nanos, sleep},
};

/// What stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FreezeScope {
    /// The server's process alone; its guard goes on.
    Process,
    /// The whole machine, while its clock goes on.
    Machine,
    /// The whole machine and its clock.
    Clock,
}

/// No clock shows less.
const FIRST: Duration = Duration::from_secs(1_000);

/// How long a guard that was frozen may take to act.
pub const TICK: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub struct Machine {
    start: Instant,
    /// What its clock showed then.
    offset: u64,
    /// How many milliseconds of its own a second has.
    pub rate: u64,
    still: Mutex<Option<FreezeScope>>,
    /// Wakes in order, which a watch does not.
    moved: Notify,
    /// For how many nanoseconds the clock has stood still so far, and since when it does.
    stopped: Mutex<(u64, Option<Instant>)>,
    /// Until when a thawed container may run although another has the lease: its clock stood.
    excused_until: Mutex<Instant>,
}

impl Machine {
    pub fn new(start: Instant, offset: Duration, rate: u64) -> Arc<Self> {
        Arc::new(Self {
            start,
            offset: nanos(FIRST + offset),
            rate,
            still: Mutex::new(None),
            moved: Notify::new(),
            stopped: Mutex::default(),
            excused_until: Mutex::new(start),
        })
    }

    /// What stands still already does not begin to move in part.
    pub fn freeze(&self, still: FreezeScope) {
        let mut now = self.still.lock().unwrap();
        *now = Some(now.map_or(still, |now| now.max(still)));
        drop(now);
        if still == FreezeScope::Clock {
            self.stopped.lock().unwrap().1.get_or_insert_with(Instant::now);
        }
    }

    pub fn thaw(&self) {
        let mut stopped = self.stopped.lock().unwrap();
        // [I3'] The guard needs a tick; if its clock stood, the next renewal shows it, which comes before the deadline.
        let mut excused = TICK;
        if let Some(since) = stopped.1.take() {
            stopped.0 += Instant::now().0 - since.0;
            excused = Duration::from_secs(20);
        }
        if self.is_still() {
            *self.excused_until.lock().unwrap() = Instant::now() + excused;
        }
        drop(stopped);
        *self.still.lock().unwrap() = None;
        self.moved.notify_waiters();
    }

    /// Nothing on it moves, containers included.
    pub fn is_still(&self) -> bool {
        matches!(*self.still.lock().unwrap(), Some(FreezeScope::Machine | FreezeScope::Clock))
    }

    /// The server's process goes on.
    pub fn moves(&self) -> bool {
        self.still.lock().unwrap().is_none()
    }

    pub fn is_excused(&self) -> bool {
        Instant::now() < *self.excused_until.lock().unwrap()
    }

    /// Ends when the server's process can go on.
    pub async fn process_moves(&self) {
        self.wait(|still| still.is_none()).await;
    }

    async fn guard_moves(&self) {
        self.wait(|still| !matches!(still, Some(FreezeScope::Machine | FreezeScope::Clock))).await;
    }

    async fn wait(&self, moves: impl Fn(Option<FreezeScope>) -> bool) {
        // Nothing comes between the look and the wait: there is one thread.
        while !moves(*self.still.lock().unwrap()) {
            self.moved.notified().await;
        }
    }

    /// How long `span` of its own time lasts; never a moment too short.
    fn lasts(&self, span: Duration) -> Duration {
        Duration::from_nanos(nanos(span).saturating_mul(1_000).div_ceil(self.rate))
    }

    pub fn now(&self) -> Moment {
        let (stopped, since) = *self.stopped.lock().unwrap();
        let moved = since.unwrap_or_else(Instant::now).0 - self.start.0 - stopped;
        Moment(Duration::from_nanos(self.offset + moved * self.rate / 1_000))
    }
}

/// How far the clock of a server was set back: each time by as long as one of its writes was under way.
#[derive(Debug, Default)]
pub struct SetBack(Mutex<Backwards>);

#[derive(Debug, Default)]
struct Backwards {
    by: Duration,
    sent: BTreeMap<Nonce, Moment>,
    /// It never shows less than it has shown: it stands until then.
    shown: Duration,
}

impl SetBack {
    pub fn by(&self) -> Duration {
        self.0.lock().unwrap().by
    }

    pub fn sent(&self, op: Nonce, now: Moment) {
        self.0.lock().unwrap().sent.insert(op, now);
    }

    /// The first time that a write of ours is seen to be applied.
    pub fn answered(&self, op: &Nonce, now: Moment) {
        let Backwards { by, sent, .. } = &mut *self.0.lock().unwrap();
        if let Some(at) = sent.remove(op) {
            *by += now - at;
        }
    }

    fn show(&self, now: Moment) -> Moment {
        let Backwards { by, shown, .. } = &mut *self.0.lock().unwrap();
        *shown = now.0.saturating_sub(*by).max(*shown);
        Moment(*shown)
    }
}

/// The clock of one process of a machine: of the server, or of its guard with the containers.
#[derive(Debug)]
pub struct ProcessClock {
    pub machine: Arc<Machine>,
    pub is_guard: bool,
    pub rng: Rng,
    /// Nonces that count up instead of being drawn: one of the mistakes.
    pub counter: Option<Mutex<u64>>,
    /// Another one of them.
    pub set_back: Option<Arc<SetBack>>,
}

#[async_trait]
impl Clock for ProcessClock {
    fn now(&self) -> Moment {
        let now = self.machine.now();
        self.set_back.as_ref().map_or(now, |set_back| set_back.show(now))
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000) + self.machine.now().0
    }

    async fn sleep_until(&self, moment: Moment) {
        loop {
            let left = moment - self.now();
            if left.is_zero() {
                return;
            }
            sleep(self.machine.lasts(left)).await;
            if self.is_guard {
                self.machine.guard_moves().await;
            } else {
                self.machine.process_moves().await;
            }
        }
    }

    fn fill(&self, bytes: &mut [u8]) {
        match &self.counter {
            Some(counter) if bytes.len() == 16 => {
                let mut count = counter.lock().unwrap();
                *count = (*count + 1) % 64;
                bytes.fill(0);
                bytes[..8].copy_from_slice(&count.to_le_bytes());
            }
            Some(_) | None => self.rng.fill(bytes),
        }
    }

    fn has_threads(&self) -> bool {
        false
    }
}
