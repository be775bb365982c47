//! Where the time of a request went, on every instance it touched, for OpenTelemetry collectors.
//! Modules receive a [`Traces`] and record what happened, as with metrics.
//!
//! ```text
//!   client ──traceparent──▶ api: attach ──spec──▶ storage ──▶ reconciler there: checkpoint
//!                                                    └──────▶ reconciler here: acquire, restore
//! ```
//!
//! Only names of enums, times, and the trace's own random numbers are exported: no sandbox id,
//! no token, no code, no output. Log lines of a session name its trace.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use baton_protocol::id::InstanceId;
pub use baton_protocol::trace::Traceparent;
use parking_lot::Mutex;
use strum::IntoStaticStr;

use crate::{
    clock::SharedClock,
    metrics::{ActionOutcome, Named},
};

#[cfg(not(feature = "otel"))]
mod nowhere;
#[cfg(feature = "otel")]
mod otlp;

#[cfg(not(feature = "otel"))]
use nowhere::{Exporter, Started};
#[cfg(feature = "otel")]
use otlp::{Exporter, Started};

/// The timeout for sending the remaining spans when the process ends.
const FINAL_EXPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// What a client requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Asked {
    Create,
    Attach,
    Execute,
    Checkpoint,
    Handoff,
    Kill,
    Snapshot,
    Fork,
}

/// A step of an action that takes a noticeable time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Step {
    Pause,
    Image,
    Store,
    Fetch,
    Start,
}

/// Why an action ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// This request caused it.
    Request(Traceparent),
    /// No request caused it; this one came before.
    After(Traceparent),
    /// No request caused it, and none came before.
    Unrequested,
}

/// Where to send traces, as configured by an operator.
#[derive(Clone, Debug)]
pub struct Target<'a> {
    pub endpoint: &'a str,
    pub service: &'a str,
}

/// The traces of one instance. Without a collector all methods do nothing.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<(Exporter, SharedClock)>>);

impl Traces {
    /// Must run inside a runtime, which does the sending. An unreachable collector only loses its traces.
    pub fn open(target: Option<&Target<'_>>, instance: &InstanceId, clock: &SharedClock) -> Self {
        let Some(target) = target else { return Self::default() };
        match Exporter::open(target, instance) {
            Ok(exporter) => {
                tracing::info!(endpoint = target.endpoint, "exporting traces");
                Self(Some(Arc::new((exporter, clock.clone()))))
            }
            Err(why) => {
                tracing::warn!(endpoint = target.endpoint, why, "traces are not exported");
                Self::default()
            }
        }
    }

    /// Starts the span of a request.
    pub fn asked(&self, what: Asked, parent: Option<Traceparent>) -> Span {
        let Some(open) = &self.0 else { return Span { context: None, open: None } };
        let (exporter, clock) = &**open;
        let cause = parent.map_or(Cause::Unrequested, Cause::Request);
        let started = exporter.start(what.name(), cause, true, clock.wall());
        Span { context: started.traceparent(), open: Some((started, clock.clone())) }
    }

    /// Records a finished action.
    pub fn acted(
        &self,
        action: &impl Named,
        cause: Cause,
        outcome: ActionOutcome,
        began: SystemTime,
        parts: Vec<ActionPart>,
    ) {
        let Some(open) = &self.0 else { return };
        let (exporter, clock) = &**open;
        let started = exporter.start(action.name(), cause, false, began);
        if let Some(parent) = started.traceparent() {
            for part in parts {
                let step = exporter.start(part.step.name(), Cause::Request(parent), false, part.from);
                step.end(ActionOutcome::Done, part.to);
            }
        }
        started.end(outcome, clock.wall());
    }

    /// Sends the remaining spans, within a short timeout.
    pub async fn close(&self) {
        if let Some(open) = self.0.clone() {
            let _ = tokio::task::spawn_blocking(move || open.0.close(FINAL_EXPORT_TIMEOUT)).await;
        }
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Traces(sent)" } else { "Traces(nowhere)" })
    }
}

/// The span of a request. Dropping it before its end means that the request was refused or aborted.
pub struct Span {
    context: Option<Traceparent>,
    open: Option<(Started, SharedClock)>,
}

impl Span {
    /// Carried by everything written or requested on its behalf, also after its end.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.context
    }

    /// The first end counts.
    pub fn end(&mut self, outcome: ActionOutcome) {
        if let Some((started, clock)) = self.open.take() {
            started.end(outcome, clock.wall());
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.end(ActionOutcome::Refused);
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.context).finish()
    }
}

/// One part of an action.
#[derive(Clone, Copy, Debug)]
pub struct ActionPart {
    step: Step,
    from: SystemTime,
    to: SystemTime,
}

/// The parts of an action in progress. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Parts(Arc<Mutex<Vec<ActionPart>>>);

impl Parts {
    /// Records a part that has just ended.
    pub fn note(&self, step: Step, clock: &SharedClock, took: Duration) {
        let to = clock.wall();
        let part = ActionPart { step, from: to.checked_sub(took).unwrap_or(to), to };
        self.0.lock().push(part);
    }

    pub fn drain(&self) -> Vec<ActionPart> {
        std::mem::take(&mut self.0.lock())
    }
}
