//! Counts the bytes of connections, and holds them to their sandbox's limits.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    clock::{Moment, SharedClock},
    config::EgressLimits,
    metrics::{ConnectionEnd, Direction, Metrics},
};

/// How far ahead of its rate a sandbox may get: the bytes of this much time.
const BURST: Duration = Duration::from_millis(200);

/// What all connections of one container have moved together.
#[derive(Debug)]
pub struct SandboxTraffic {
    clock: SharedClock,
    metrics: Metrics,
    limits: EgressLimits,
    moved: AtomicU64,
    /// When everything that was moved is paid for at the limited rate.
    paid_at: Mutex<Moment>,
    denied: AtomicU64,
}

impl SandboxTraffic {
    pub fn new(clock: SharedClock, metrics: Metrics, limits: EgressLimits) -> Arc<Self> {
        let paid_at = Mutex::new(clock.now());
        Arc::new(Self { clock, metrics, limits, moved: AtomicU64::new(0), paid_at, denied: AtomicU64::new(0) })
    }

    pub fn clock(&self) -> &SharedClock {
        &self.clock
    }

    pub fn limits(&self) -> &EgressLimits {
        &self.limits
    }

    pub fn is_used_up(&self) -> bool {
        self.limits.total.is_some_and(|total| self.moved.load(Ordering::Relaxed) >= total)
    }

    /// Counts an open connection until the returned value is dropped.
    pub fn open(&self) -> OpenConnection {
        self.metrics.connection_opened();
        OpenConnection(self.metrics.clone())
    }

    pub fn count_denial(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
        self.metrics.connection_ended(ConnectionEnd::Denied);
    }

    /// How many connections and names were refused.
    pub fn denied(&self) -> u64 {
        self.denied.load(Ordering::Relaxed)
    }

    pub fn count_end(&self, end: ConnectionEnd) {
        self.metrics.connection_ended(end);
    }

    /// Counts bytes that were moved. Waits if the sandbox is ahead of its rate; fails if it has no bytes left.
    async fn pass(&self, count: usize) -> io::Result<()> {
        self.moved.fetch_add(count as u64, Ordering::Relaxed);
        if self.is_used_up() {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let Some(rate) = self.limits.rate else { return Ok(()) };
        let paid_at = {
            let mut paid_at = self.paid_at.lock();
            let cost = Duration::from_secs_f64(count as f64 / rate as f64);
            *paid_at = (*paid_at).max(self.clock.now()) + cost;
            *paid_at
        };
        if paid_at > self.clock.now() + BURST {
            self.clock.sleep(paid_at - self.clock.now() - BURST).await;
        }
        Ok(())
    }
}

/// An open connection as counted in the metrics.
#[derive(Debug)]
pub struct OpenConnection(Metrics);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connection_closed();
    }
}

/// What one connection has moved. Clones share it.
#[derive(Clone, Debug)]
pub struct Traffic(Arc<ConnectionTraffic>);

#[derive(Debug)]
struct ConnectionTraffic {
    clock: SharedClock,
    /// `None`: its bytes are not limited.
    sandbox: Option<Arc<SandboxTraffic>>,
    /// To the program, and from it.
    moved: [AtomicU64; 2],
    began: Moment,
    active_at: Mutex<Moment>,
}

impl Traffic {
    pub fn new(clock: &SharedClock, sandbox: Option<Arc<SandboxTraffic>>) -> Self {
        let began = clock.now();
        let moved = [AtomicU64::new(0), AtomicU64::new(0)];
        Self(Arc::new(ConnectionTraffic { clock: clock.clone(), sandbox, moved, began, active_at: Mutex::new(began) }))
    }

    /// Counts bytes that were moved, as [`SandboxTraffic::pass`].
    pub async fn pass(&self, direction: Direction, count: usize) -> io::Result<()> {
        let inner = &*self.0;
        inner.moved[direction as usize].fetch_add(count as u64, Ordering::Relaxed);
        *inner.active_at.lock() = inner.clock.now();
        let Some(sandbox) = &inner.sandbox else { return Ok(()) };
        sandbox.metrics.connection_moved(direction, count);
        sandbox.pass(count).await
    }

    pub fn moved(&self, direction: Direction) -> u64 {
        self.0.moved[direction as usize].load(Ordering::Relaxed)
    }

    pub fn age(&self) -> Duration {
        self.0.clock.now() - self.0.began
    }

    /// Returns once the connection was silent, or open, for too long.
    pub async fn overdue(&self, idle: Option<Duration>, lifetime: Option<Duration>) {
        let inner = &*self.0;
        loop {
            let idle_at = idle.map(|idle| *inner.active_at.lock() + idle);
            let ends_at = lifetime.map(|lifetime| inner.began + lifetime);
            let Some(at) = idle_at.into_iter().chain(ends_at).min() else { return std::future::pending().await };
            if at <= inner.clock.now() {
                return;
            }
            inner.clock.sleep_until(at).await;
        }
    }
}
