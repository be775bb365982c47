//! Simulated time: it stands still while anybody has something to do, and then moves to the next moment that somebody
//! waits for. Tokio can do that too, but its timers are made for many threads and cost a tenth of a seed.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    future::{Future, poll_fn},
    ops::{Add, Sub},
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

/// A moment of this run, in nanoseconds since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(pub u64);

impl Instant {
    pub fn now() -> Self {
        TIME.with_borrow(|time| time.now)
    }

    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    /// Zero if `earlier` is in truth later.
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

pub fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Default)]
struct Time {
    now: Instant,
    /// In the order in which they are woken: of one moment, who began to wait first.
    waiting: BTreeMap<(Instant, u64), Waker>,
    count: u64,
    /// Nobody has anything to do, and nobody waits for a moment.
    is_over: bool,
    /// Sees every moment.
    watcher: Option<Waker>,
}

impl Time {
    fn due(&mut self) -> Option<Waker> {
        let first = self.waiting.first_entry().filter(|first| first.key().0 <= self.now)?;
        Some(first.remove())
    }
}

thread_local! {
    static TIME: RefCell<Time> = RefCell::default();
}

/// A run begins. Numbers go on: what is left of the last run must not end waits of this one.
pub fn begin() {
    let left = TIME.with_borrow_mut(|time| {
        let count = time.count;
        std::mem::replace(time, Time { count, ..Time::default() })
    });
    // Only now: what hangs on a waker may wait too.
    drop(left);
}

/// Nobody has anything to do.
pub fn move_on() {
    let watcher = TIME.with_borrow_mut(|time| {
        match time.waiting.first_key_value() {
            Some(((next, _), _)) => time.now = *next,
            None => time.is_over = true,
        }
        time.watcher.take()
    });
    // Who is woken may have ended meanwhile: then time must move once more, and not wait for another thread.
    if let Some(watcher) = watcher {
        watcher.wake();
    }
    while let Some(waker) = TIME.with_borrow_mut(Time::due) {
        waker.wake();
    }
}

/// Ends when nothing can happen any more. It must be waited for all the time, by what the runtime blocks on.
pub async fn is_over() {
    poll_fn(|context| {
        let watcher = Some(context.waker().clone());
        let (is_over, before) =
            TIME.with_borrow_mut(|time| (time.is_over, std::mem::replace(&mut time.watcher, watcher)));
        drop(before);
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await
}

const MILLISECOND: u64 = 1_000_000;

/// Moments are whole milliseconds, so that things happen at the same time.
fn whole(moment: Instant) -> Instant {
    Instant(moment.0.div_ceil(MILLISECOND).saturating_mul(MILLISECOND))
}

pub fn sleep(span: Duration) -> Sleep {
    sleep_until(Instant::now() + span)
}

pub fn sleep_until(moment: Instant) -> Sleep {
    Sleep { until: whole(moment), number: None }
}

/// What the work came to, unless it takes longer.
pub async fn timeout<T>(span: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = sleep(span) => None,
    }
}

#[derive(Debug)]
pub struct Sleep {
    until: Instant,
    /// Under which somebody waits for it.
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.until {
            return Poll::Ready(());
        }
        let before = TIME.with_borrow_mut(|time| {
            let number = *self.number.get_or_insert_with(|| {
                time.count += 1;
                time.count
            });
            match time.waiting.get(&(self.until, number)) {
                Some(waker) if waker.will_wake(context.waker()) => None,
                Some(_) | None => time.waiting.insert((self.until, number), context.waker().clone()),
            }
        });
        // As in `begin`: not while the time is borrowed.
        drop(before);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let waker = TIME.with_borrow_mut(|time| time.waiting.remove(&(self.until, number)));
        drop(waker);
    }
}
