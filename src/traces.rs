//! Where the time of a request went, on every instance it touched, as OpenTelemetry collectors
//! read it. Rooms are given a [`Traces`] and tell it what happened, as with metrics.
//!
//! ```text
//!   client ──traceparent──▶ api: attach ──spec──▶ storage ──▶ reconciler there: checkpoint
//!                                                    └──────▶ reconciler here: acquire, restore
//! ```
//!
//! What leaves is names of enums, times, and the trace's own random numbers: no id of a sandbox,
//! no token, no code, no output. Log lines of a session name its trace.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use baton_protocol::id::InstanceId;
pub use baton_protocol::trace::Traceparent;

use crate::{
    clock::SharedClock,
    metrics::{Named, Outcome, words},
};

#[cfg(not(feature = "otel"))]
mod nowhere;
#[cfg(feature = "otel")]
mod otlp;

#[cfg(not(feature = "otel"))]
use nowhere::{Exporter, Started};
#[cfg(feature = "otel")]
use otlp::{Exporter, Started};

/// For what is not sent yet when the process ends.
const LAST: Duration = Duration::from_millis(500);

words! {
    /// What a client asked for.
    Asked {
        Create "create", Attach "attach", Execute "execute", Checkpoint "checkpoint", Handoff "handoff",
        Kill "kill", Snapshot "snapshot", Fork "fork",
    }
}
words! {
    /// A part of an action that takes its time.
    Step { Pause "pause", Image "image", Store "store", Fetch "fetch", Start "start" }
}

/// Why something was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// This request asked for it.
    Request(Traceparent),
    /// Nobody asked for it; this one came before.
    After(Traceparent),
    Nobody,
}

/// Where to send traces, as an operator says it.
#[derive(Clone, Debug)]
pub struct Target<'a> {
    pub endpoint: &'a str,
    pub service: &'a str,
}

/// One instance's traces. Without a collector nothing here does anything.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<(Exporter, SharedClock)>>);

impl Traces {
    /// Inside a runtime, which then does the sending. A collector that cannot be reached only costs its traces.
    pub fn open(target: Option<&Target<'_>>, instance: &InstanceId, clock: &SharedClock) -> Self {
        let Some(target) = target else { return Self::default() };
        match Exporter::open(target, instance) {
            Ok(exporter) => {
                tracing::info!(endpoint = target.endpoint, "traces are sent");
                Self(Some(Arc::new((exporter, clock.clone()))))
            }
            Err(why) => {
                tracing::warn!(endpoint = target.endpoint, why, "no traces are sent");
                Self::default()
            }
        }
    }

    /// A request that begins now.
    pub fn asked(&self, what: Asked, parent: Option<Traceparent>) -> Span {
        let Some(open) = &self.0 else { return Span { context: None, open: None } };
        let (exporter, clock) = &**open;
        let cause = parent.map_or(Cause::Nobody, Cause::Request);
        let started = exporter.start(what.name(), cause, true, clock.wall());
        Span { context: started.traceparent(), open: Some((started, clock.clone())) }
    }

    /// An action that is over.
    pub fn acted(&self, action: &impl Named, cause: Cause, outcome: Outcome, began: SystemTime, parts: Vec<Part>) {
        let Some(open) = &self.0 else { return };
        let (exporter, clock) = &**open;
        let started = exporter.start(action.name(), cause, false, began);
        if let Some(parent) = started.traceparent() {
            for part in parts {
                let step = exporter.start(part.step.name(), Cause::Request(parent), false, part.from);
                step.end(Outcome::Done, part.to);
            }
        }
        started.end(outcome, clock.wall());
    }

    /// Sends what is left, if that is quickly done.
    pub async fn close(&self) {
        if let Some(open) = self.0.clone() {
            let _ = tokio::task::spawn_blocking(move || open.0.close(LAST)).await;
        }
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Traces(sent)" } else { "Traces(nowhere)" })
    }
}

/// A request. One that is dropped before its end was refused or broken off.
pub struct Span {
    context: Option<Traceparent>,
    open: Option<(Started, SharedClock)>,
}

impl Span {
    /// What is written or asked for on its behalf carries this, also after its end.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.context
    }

    /// The first end counts.
    pub fn end(&mut self, outcome: Outcome) {
        if let Some((started, clock)) = self.open.take() {
            started.end(outcome, clock.wall());
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.end(Outcome::Refused);
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.context).finish()
    }
}

/// One part of an action.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    step: Step,
    from: SystemTime,
    to: SystemTime,
}

/// The parts of an action under way. Clones are the same parts.
#[derive(Clone, Debug, Default)]
pub struct Parts(Arc<Mutex<Vec<Part>>>);

impl Parts {
    /// One that has just ended.
    pub fn note(&self, step: Step, clock: &SharedClock, took: Duration) {
        let to = clock.wall();
        let part = Part { step, from: to.checked_sub(took).unwrap_or(to), to };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(part);
    }

    pub fn take(&self) -> Vec<Part> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
