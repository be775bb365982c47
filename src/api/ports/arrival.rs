//! A request waits for its sandbox as an attach does: it is restored, or comes here from another instance.
//!
//! A request asks as a plain client asks, so a live client elsewhere keeps the sandbox. It holds the sandbox against
//! nobody: whoever attaches gets it. Of several requests for a sandbox one writes the spec, the one that has the
//! session slot; the others wait along with it, and a client that attaches takes the slot at once.

use std::sync::Arc;

use baton_protocol::{
    id::SandboxId,
    metadata::{DesiredState, Metadata},
    reason::Reason,
};

use super::{port_activity::PortActivity, port_refusal::PortRefusal, port_route::PortTarget};
use crate::{
    api::{Api, intent, public_message, session, session_registry::SessionSlot},
    bus::{AttachGuard, LeaveReason, LifecycleEvent, Subscription},
    clock::Moment,
    network::{NetworkView, PortError, PortStream},
    traces::Traceparent,
};

/// Connects to a port, and brings its sandbox here first if it is not.
pub async fn connect(
    api: &Arc<Api>,
    target: &PortTarget,
    found: &Metadata,
    traceparent: Option<Traceparent>,
) -> Result<(PortStream, Arc<PortActivity>), PortRefusal> {
    let id = &target.id;
    if api.is_draining() {
        return Err(PortRefusal::Draining);
    }
    let permits = match api.join_use(id, api.port_limits.enter(id).ok_or(PortRefusal::Busy)?) {
        Ok(activity) => match api.ports.connect(id, target.port).await {
            Ok(stream) => return Ok((stream, activity)),
            // It is about to leave: this request waits as if it were the first.
            Err(PortError::NotRunning) => {
                api.recent_records.forget(id);
                drop(activity);
                api.port_limits.enter(id).ok_or(PortRefusal::Busy)?
            }
            Err(error) => return Err(PortRefusal::Port(target.port, error)),
        },
        Err(permits) => permits,
    };
    let guard = admit(api, found).await?;
    let mut arrival = Arrival {
        api,
        target,
        subscription: api.bus.follow(id),
        slot: None,
        has_asked: false,
        deadline: api.start_deadline(),
        traceparent,
    };
    let is_stale = session::runs_elsewhere(api, id, &found.status).await;
    let stream = arrival.wait(!is_stale).await?;
    Ok((stream, api.begin_use(id, guard, permits)))
}

/// The network of the sandbox. Nothing is brought here for that.
pub async fn network_view(api: &Api, id: &SandboxId) -> Result<NetworkView, PortError> {
    if !api.bus.is_held(id) {
        return Err(PortError::NotRunning);
    }
    api.ports.view(id).await
}

/// A slot for the sandbox on this instance, within the quota of its tenant.
async fn admit(api: &Arc<Api>, found: &Metadata) -> Result<AttachGuard, PortRefusal> {
    let id = &found.spec.sandbox_id;
    let _counted = api.count(id, found.spec.tenant.as_ref()).await.map_err(PortRefusal::Quota)?;
    if let Some(guard) = api.bus.admit(id, api.settings.max_sandboxes) {
        return Ok(guard);
    }
    let mut drain = api.settings.drain.clone();
    tokio::select! {
        biased;
        () = api.closing.cancelled() => Err(PortRefusal::Draining),
        true = async { drain.wait_for(|drain| *drain).await.is_ok() } => Err(PortRefusal::Draining),
        admitted = api.bus.make_room(id, api.settings.max_sandboxes) => admitted.ok_or(PortRefusal::Full),
    }
}

struct Arrival<'a> {
    api: &'a Arc<Api>,
    target: &'a PortTarget,
    subscription: Subscription,
    /// The session slot: whoever has it writes the spec.
    slot: Option<SessionSlot>,
    /// Whether the spec says that the sandbox is to run here.
    has_asked: bool,
    deadline: Moment,
    traceparent: Option<Traceparent>,
}

impl Arrival<'_> {
    /// `may_run`: the sandbox may run here already.
    async fn wait(&mut self, may_run: bool) -> Result<PortStream, PortRefusal> {
        let (api, id) = (self.api, &self.target.id);
        let mut drain = api.settings.drain.clone();
        let mut may_run = may_run && api.bus.is_held(id);
        loop {
            if std::mem::take(&mut may_run) {
                match api.ports.connect(id, self.target.port).await {
                    Ok(stream) => return Ok(stream),
                    Err(PortError::NotRunning) => api.recent_records.forget(id),
                    Err(error) => return Err(PortRefusal::Port(self.target.port, error)),
                }
            }
            let freed = api.registry.freed();
            if !self.has_asked {
                self.slot = self.slot.take().or_else(|| api.registry.try_admit(id));
                if self.slot.is_some() {
                    self.ask().await?;
                }
            }
            let probe = async {
                match &mut self.slot {
                    Some(slot) => slot.next_probe().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = api.closing.cancelled() => return Err(PortRefusal::Draining),
                true = async { drain.wait_for(|drain| *drain).await.is_ok() } => return Err(PortRefusal::Draining),
                event = self.subscription.next() => may_run = self.handle(&event.passing).await?,
                // A client attaches: what it asks for counts.
                probe = probe => {
                    self.slot = None;
                    drop(probe);
                }
                // The session that had the slot ended: the sandbox may be about to leave.
                () = freed, if !self.has_asked => may_run = api.bus.is_held(id),
                () = api.clock.sleep_until(self.deadline) => return Err(PortRefusal::Late),
            }
        }
    }

    /// Requests in the spec that the sandbox runs here.
    async fn ask(&mut self) -> Result<(), PortRefusal> {
        let (api, id) = (self.api, &self.target.id);
        let (here, is_held) = (&api.settings.instance, api.bus.is_held(id));
        let edited =
            api.records.edit_for_request(id, self.traceparent, &|spec| intent::visit(spec, here, is_held)).await;
        let spec = edited.map_err(|error| PortRefusal::Unavailable(public_message(&error)))?;
        if spec.is_none_or(|spec| spec.desired_state == DesiredState::Deleted) {
            return Err(PortRefusal::NotFound);
        }
        self.has_asked = true;
        api.bus.placed(id);
        Ok(())
    }

    /// Returns whether the sandbox may run here now.
    async fn handle(&mut self, event: &LifecycleEvent) -> Result<bool, PortRefusal> {
        match event {
            LifecycleEvent::Running { .. } | LifecycleEvent::Unfenced | LifecycleEvent::CheckpointFailed { .. } => {
                Ok(true)
            }
            LifecycleEvent::Failed { reason: Reason::InUse, .. } => {
                if self.slot.is_some() {
                    session::give_back(self.api, &self.target.id).await;
                }
                Err(PortRefusal::InUse)
            }
            LifecycleEvent::Failed { message, .. } => Err(PortRefusal::Unavailable(message.clone())),
            LifecycleEvent::Left { why: LeaveReason::Deleted, .. } => Err(PortRefusal::NotFound),
            LifecycleEvent::Left { why: LeaveReason::Drain, .. } => Err(PortRefusal::Draining),
            // The action in progress has ended; this request comes next.
            LifecycleEvent::Left { .. } | LifecycleEvent::LeaseLost { .. } => {
                self.has_asked = false;
                Ok(false)
            }
            LifecycleEvent::Acquired => {
                // The lease is ours and work is in progress: from here on the reconciler's own time limits apply.
                self.deadline = self.api.start_deadline();
                Ok(false)
            }
            LifecycleEvent::Acquiring
            | LifecycleEvent::EgressDenied { .. }
            | LifecycleEvent::ReleaseRequested { .. }
            | LifecycleEvent::Probe { .. }
            | LifecycleEvent::Checkpointing { .. }
            | LifecycleEvent::Fenced { .. }
            | LifecycleEvent::Answered
            | LifecycleEvent::Progress { .. } => Ok(false),
        }
    }
}
