//! What the server counts and measures, in the format of Prometheus. Modules receive a [`Metrics`]
//! and record what happened; only the page reads it.
//!
//! Every label is the [name](Named) of an enum's variant, so that no id, token or path can
//! ever become one. On the path of a command's bytes a measurement is a single addition.

use std::{fmt, fmt::Write, sync::Arc, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};
use strum::IntoStaticStr;

/// An enum whose variants have names that may be labels: it derives [`IntoStaticStr`]. A text has no name.
pub trait Named {
    fn name(&self) -> &'static str;
}

impl<T> Named for T
where
    for<'a> &'a T: Into<&'static str>,
{
    fn name(&self) -> &'static str {
        self.into()
    }
}

/// The name of a variant; created only through [`Named`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Word(&'static str);

impl Word {
    fn of(named: &impl Named) -> Self {
        Self(named.name())
    }
}

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        encoder.write_str(self.0)
    }
}

/// The outcome of a reconciler's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ActionOutcome {
    Done,
    Again,
    Failed,
    Refused,
}

/// An operation on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum StoreVerb {
    Poll,
    Put,
    Delete,
    List,
    Upload,
    Download,
}

/// The result of an operation on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum StoreAnswer {
    Good,
    Unchanged,
    Conflict,
    NotFound,
    RateLimited,
    Unavailable,
    Denied,
    Damaged,
    Other,
    Dropped,
}

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Direction {
    In,
    Out,
}

/// The streams of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ExecPipe {
    Stdin,
    Stdout,
    Stderr,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ExecEnd {
    Zero,
    #[strum(serialize = "nonzero")]
    NonZero,
    Signal,
    TimedOut,
    NotStarted,
}

/// How a connection of a sandbox to the outside ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionEnd {
    /// By its program or its peer.
    Closed,
    /// The policy does not allow it, or the name.
    Denied,
    /// It could not be established.
    Failed,
    /// A limit of the sandbox ended it.
    Limited,
    Broken,
}

/// Why a new sandbox did not use a warm container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Missed {
    Empty,
    Unfit,
    Broken,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Left {
    why: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Acted {
    action: Word,
    outcome: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Called {
    verb: Word,
    answer: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByVerb {
    verb: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Directed {
    direction: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Streamed {
    stream: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    outcome: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Judged {
    verdict: Word,
}

/// Covers a short store call as well as a checkpoint of many gigabytes.
const SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

type Timed<L> = Family<L, Histogram, fn() -> Histogram>;

#[derive(Debug)]
struct Inner {
    registry: Registry,
    sandboxes: Family<Phase, Gauge>,
    left: Family<Left, Counter>,
    warm_ready: Gauge,
    warm_taken: Counter,
    warm_missed: Family<Left, Counter>,
    sessions: Gauge,
    wakeups: Gauge,
    actions: Timed<Acted>,
    renewal_lag: Histogram,
    blackout: Histogram,
    store_calls: Family<Called, Counter>,
    store_seconds: Timed<ByVerb>,
    store_bytes: Family<Directed, Counter>,
    execs_started: Counter,
    execs_ended: Family<Finished, Counter>,
    /// Resolved once, so that a frame costs an addition and no lookup.
    pipes: [Counter; 3],
    connections_ended: Family<Judged, Counter>,
    connections_open: Gauge,
    /// Resolved once, as `pipes`.
    connection_bytes: [Counter; 2],
}

/// The metrics of one process. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("baton");
        registry.register(
            "build",
            "The server that answers",
            Info::new([("version", env!("CARGO_PKG_VERSION"))].to_vec()),
        );
        let sandboxes = Family::default();
        registry.register("sandboxes", "Sandboxes looked after, by the phase of their container", sandboxes.clone());
        let left = Family::default();
        registry.register("sandboxes_left", "Sandboxes that left this instance, by why", left.clone());
        let warm_ready = Gauge::default();
        registry.register("warm_ready", "Warm containers that wait for a sandbox", warm_ready.clone());
        let warm_taken = Counter::default();
        registry.register("warm_taken", "Sandboxes that began in a warm container", warm_taken.clone());
        let warm_missed = Family::default();
        registry.register("warm_missed", "Sandboxes that did not, by why", warm_missed.clone());
        let sessions = Gauge::default();
        registry.register("sessions", "Sessions that are attached or wait", sessions.clone());
        let wakeups = Gauge::default();
        registry.register(
            "nudges_waiting",
            "Sandboxes the reconciler was asked to look at and has not",
            wakeups.clone(),
        );
        let actions = Timed::new_with_constructor(seconds as fn() -> Histogram);
        registry.register_with_unit(
            "action",
            "How long actions of the reconciler took",
            Unit::Seconds,
            actions.clone(),
        );
        let renewal_lag = seconds();
        let help = "How long after it was due a lease was renewed";
        registry.register_with_unit("lease_renewal_lag", help, Unit::Seconds, renewal_lag.clone());
        let blackout = seconds();
        let help = "From the stop on one instance to running on this one";
        registry.register_with_unit("handoff_blackout", help, Unit::Seconds, blackout.clone());
        let store_calls = Family::default();
        registry.register("store_calls", "Calls of the stores", store_calls.clone());
        let store_seconds = Timed::new_with_constructor(seconds as fn() -> Histogram);
        let help = "How long calls of the stores took";
        registry.register_with_unit("store", help, Unit::Seconds, store_seconds.clone());
        let store_bytes = Family::default();
        registry.register_with_unit("store", "Bytes to and from the stores", Unit::Bytes, store_bytes.clone());
        let execs_started = Counter::default();
        registry.register("execs_started", "Commands that were started", execs_started.clone());
        let execs_ended = Family::default();
        registry.register("execs_ended", "Commands that ended", execs_ended.clone());
        let exec_bytes = Family::<Streamed, Counter>::default();
        registry.register_with_unit("exec", "Bytes to and from commands", Unit::Bytes, exec_bytes.clone());
        let pipe = |pipe: ExecPipe| exec_bytes.get_or_create(&Streamed { stream: Word::of(&pipe) }).clone();
        let pipes = [pipe(ExecPipe::Stdin), pipe(ExecPipe::Stdout), pipe(ExecPipe::Stderr)];
        let connections_ended = Family::default();
        let help = "Connections of sandboxes to the outside that ended, and names that were refused";
        registry.register("egress_connections", help, connections_ended.clone());
        let connections_open = Gauge::default();
        registry.register("egress_open", "Open connections of sandboxes to the outside", connections_open.clone());
        let egress_bytes = Family::<Directed, Counter>::default();
        let help = "Bytes of connections of sandboxes to the outside";
        registry.register_with_unit("egress", help, Unit::Bytes, egress_bytes.clone());
        let way = |way: Direction| egress_bytes.get_or_create(&Directed { direction: Word::of(&way) }).clone();
        let connection_bytes = [way(Direction::In), way(Direction::Out)];
        Self(Arc::new(Inner {
            registry,
            sandboxes,
            left,
            warm_ready,
            warm_taken,
            warm_missed,
            sessions,
            wakeups,
            actions,
            renewal_lag,
            blackout,
            store_calls,
            store_seconds,
            store_bytes,
            execs_started,
            execs_ended,
            pipes,
            connections_ended,
            connections_open,
            connection_bytes,
        }))
    }
}

impl Metrics {
    /// Renders the page. Values that are only known at this moment are passed in.
    pub fn page(&self, sessions: usize, wakeups: usize) -> String {
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.0.sessions.set(whole(sessions));
        self.0.wakeups.set(whole(wakeups));
        let mut page = String::new();
        // Writing into a string does not fail.
        let _ = text::encode(&mut page, &self.0.registry);
        page
    }

    /// Counts a sandbox until the returned value is dropped.
    pub fn sandbox(&self) -> Shown {
        Shown { metrics: self.clone(), phase: None }
    }

    pub fn sandbox_left(&self, why: &impl Named) {
        self.0.left.get_or_create(&Left { why: Word::of(why) }).inc();
    }

    pub fn warm_ready(&self, count: usize) {
        self.0.warm_ready.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub fn warm_taken(&self) {
        self.0.warm_taken.inc();
    }

    pub fn warm_missed(&self, why: Missed) {
        self.0.warm_missed.get_or_create(&Left { why: Word::of(&why) }).inc();
    }

    pub fn acted(&self, action: &impl Named, outcome: ActionOutcome, took: Duration) {
        let labels = Acted { action: Word::of(action), outcome: Word::of(&outcome) };
        self.0.actions.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub fn renewed(&self, late: Duration) {
        self.0.renewal_lag.observe(late.as_secs_f64());
    }

    pub fn moved_here(&self, stood_still: Duration) {
        self.0.blackout.observe(stood_still.as_secs_f64());
    }

    pub fn store_called(&self, verb: StoreVerb, answer: StoreAnswer, took: Duration) {
        self.0.store_calls.get_or_create(&Called { verb: Word::of(&verb), answer: Word::of(&answer) }).inc();
        self.0.store_seconds.get_or_create(&ByVerb { verb: Word::of(&verb) }).observe(took.as_secs_f64());
    }

    pub fn store_moved(&self, way: Direction, bytes: u64) {
        self.0.store_bytes.get_or_create(&Directed { direction: Word::of(&way) }).inc_by(bytes);
    }

    pub fn exec_started(&self) {
        self.0.execs_started.inc();
    }

    pub fn exec_ended(&self, how: ExecEnd) {
        self.0.execs_ended.get_or_create(&Finished { outcome: Word::of(&how) }).inc();
    }

    pub fn connection_opened(&self) {
        self.0.connections_open.inc();
    }

    pub fn connection_closed(&self) {
        self.0.connections_open.dec();
    }

    pub fn connection_ended(&self, how: ConnectionEnd) {
        self.0.connections_ended.get_or_create(&Judged { verdict: Word::of(&how) }).inc();
    }

    pub fn connection_moved(&self, way: Direction, bytes: usize) {
        self.0.connection_bytes[way as usize].inc_by(bytes as u64);
    }

    pub fn exec_moved(&self, pipe: ExecPipe, bytes: usize) {
        self.0.pipes[pipe as usize].inc_by(bytes as u64);
    }
}

/// One sandbox as counted in the metrics.
#[derive(Debug)]
pub struct Shown {
    metrics: Metrics,
    phase: Option<Word>,
}

impl Shown {
    pub fn set(&mut self, phase: &impl Named) {
        let phase = Word::of(phase);
        if self.phase != Some(phase) {
            self.clear();
            self.metrics.0.sandboxes.get_or_create(&Phase { phase }).inc();
            self.phase = Some(phase);
        }
    }

    fn clear(&mut self) {
        if let Some(phase) = self.phase.take() {
            self.metrics.0.sandboxes.get_or_create(&Phase { phase }).dec();
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_stands_on_the_page() {
        let metrics = Metrics::default();
        metrics.store_called(StoreVerb::Put, StoreAnswer::Conflict, Duration::from_millis(30));
        metrics.exec_moved(ExecPipe::Stdout, 7);
        metrics.exec_moved(ExecPipe::Stdout, 5);
        metrics.renewed(Duration::from_millis(3));
        let page = metrics.page(2, 1);
        for line in [
            "baton_store_calls_total{verb=\"put\",answer=\"conflict\"} 1",
            "baton_exec_bytes_total{stream=\"stdout\"} 12",
            "baton_lease_renewal_lag_seconds_count 1",
            "baton_sessions 2",
            "baton_nudges_waiting 1",
        ] {
            assert!(page.lines().any(|there| there == line), "no {line} in\n{page}");
        }
    }

    #[test]
    fn a_sandbox_is_counted_in_one_phase_and_no_longer_than_it_is_looked_after() {
        let metrics = Metrics::default();
        let of = |phase: &str| {
            let page = metrics.page(0, 0);
            let begin = format!("baton_sandboxes{{phase=\"{phase}\"}} ");
            page.lines().find_map(|line| line.strip_prefix(&begin)?.parse::<i64>().ok()).unwrap_or(0)
        };
        let mut shown = metrics.sandbox();
        shown.set(&ExecEnd::Zero);
        shown.set(&ExecEnd::Zero);
        assert_eq!((of("zero"), of("signal")), (1, 0));
        shown.set(&ExecEnd::Signal);
        assert_eq!((of("zero"), of("signal")), (0, 1));
        drop(shown);
        assert_eq!((of("zero"), of("signal")), (0, 0));
    }
}
