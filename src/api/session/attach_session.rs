//! Attaching to a sandbox that exists: its token, its slot, and the request that it runs here.

use std::{sync::Arc, time::Duration};

use baton_protocol::{
    event::{Event, Status, Update},
    id::SandboxId,
    metadata::{self, DesiredState, Metadata, Phase, Spec},
    request::Refusal,
};
use tracing::Instrument;

use super::{
    Session, Upgrade,
    incoming::IncomingRequests,
    log_span,
    pending::{AdmissionRejection, AdmittedSession, PendingSession, reject},
};
use crate::{
    api::{
        Api, Tracked,
        caller::Caller,
        client_connection::{ClientConnection, EventSink},
        close_code::{Close, SessionEnd},
        dialect::Dialect,
        event_writer::EventWriter,
        intent, public_message,
        status_machine::{OpenStage, StatusMachine},
        token,
        upgrade::WebSocket,
    },
    storage::records,
};

/// Delay before a refusal to which some clients respond by reconnecting at once.
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(500);
const DENIED: &str = "The sandbox token is missing or wrong.";

/// How an attach that gets no session ends, after what was sent to the client.
type Refused = SessionEnd;

const FATAL: Refused = SessionEnd::Close(Close::Fatal);
const UNAVAILABLE: Refused = SessionEnd::Close(Close::Unavailable);

pub async fn attach(api: Arc<Api>, socket: WebSocket, upgrade: Upgrade, id: Option<SandboxId>, token: Option<String>) {
    let (caller, connection) = (upgrade.caller, upgrade.connection.clone());
    let span = id.as_ref().map(|id| log_span(id, &upgrade.request));
    let mut writer = api.open_writer(socket, upgrade);
    let Some((id, span)) = id.zip(span) else {
        let end = refuse_unknown(&api, &mut writer, caller);
        return writer.close(end).await;
    };
    let attached = async {
        let found = match find(&api, &mut writer, &id, token, caller, &connection).await {
            Ok(found) => found,
            Err(end) => return writer.close(end).await,
        };
        if let Some(session) = attach_session(api, writer, id, found).await {
            session.run().await;
        }
    };
    attached.instrument(span).await;
}

/// The record of the sandbox, if the client may attach to it. Until the token is checked nothing is written, and no
/// other session is disturbed.
async fn find(
    api: &Api,
    writer: &mut EventWriter,
    id: &SandboxId,
    token: Option<String>,
    caller: Caller,
    connection: &Tracked,
) -> Result<Metadata, Refused> {
    if api.is_draining() {
        api.clock.sleep(RETRY_DELAY).await;
        return Err(SessionEnd::Close(Close::Restart));
    }
    let found = match api.records.find(id).await {
        Ok(Some(found)) => found,
        Ok(None) => return Err(refuse_unknown(api, writer, caller)),
        Err(error) => {
            writer.send(&Event::status(Status::Restoring));
            writer.refuse(&Refusal::of(Status::RestoreError, public_message(&error)));
            return Err(FATAL);
        }
    };
    writer.set_dialect(writer.dialect().of_attach(&found.spec));
    let is_excused = token.is_none() && api.settings.is_token_optional;
    if !is_excused && !token::matches(token.as_deref(), &found.spec.token_sha256) {
        api.charge(caller);
        writer.refuse(&Refusal::of(Status::PermissionDenialError, DENIED));
        return Err(FATAL);
    }
    api.known_tokens.remember(id, &found.spec.token_sha256);
    if !connection.prove() {
        writer.refuse(&Refusal::of(Status::RestoreError, AdmissionRejection::Full.message()));
        return Err(FATAL);
    }
    Ok(found)
}

/// Waits for admission and requests that the sandbox runs here. Otherwise the client is told why, and there is no
/// session.
async fn attach_session(api: Arc<Api>, writer: EventWriter, id: SandboxId, found: Metadata) -> Option<Session> {
    let mut status_machine = StatusMachine::new(OpenStage::Attaching, writer.dialect());
    let mut admitted = admit(&api, writer, &found.spec, &mut status_machine).await?;
    let spec = match request_here(&api, &id, admitted.client()).await {
        Ok(Some(spec)) => spec,
        Ok(None) => {
            let mut client = admitted.release();
            if sends_restoring(&api, &*client) {
                client.send_all(&status_machine.restoring());
            }
            let end = refuse_not_found(&mut *client);
            client.end(end).await;
            return None;
        }
        Err(error) => {
            let mut client = admitted.release();
            client.send_all(&status_machine.restoring());
            client.refuse(&Refusal::of(Status::RestoreError, public_message(&error)));
            client.end(FATAL).await;
            return None;
        }
    };
    let is_stale = runs_elsewhere(&api, &id, &found.status).await;
    status_machine.apply_spec(&spec, admitted.client().dialect());
    let mut session = admitted.into_session(api, spec, None, status_machine);
    // If the sandbox runs here already, its agent answers, unless it is about to leave; then the bus reports that.
    match session.api.execs.open(&id).filter(|_| !is_stale) {
        Some(link) => session.execs.open(link, &mut *session.client),
        None => session.send_restoring(),
    }
    session.api.bus.placed(&id);
    Some(session)
}

/// Admits a client with a valid token.
async fn admit(
    api: &Api,
    mut writer: EventWriter,
    spec: &Spec,
    status_machine: &mut StatusMachine,
) -> Option<AdmittedSession> {
    let id = &spec.sandbox_id;
    // The session counts against the tenant of the sandbox, whatever key it came with.
    let counted = match api.count(id, spec.tenant.as_ref()).await {
        Ok(counted) => counted,
        Err(message) => {
            writer.send(&Event::status(Status::Restoring));
            reject(Box::new(writer), Status::RestoreError, &AdmissionRejection::Quota(message)).await;
            return None;
        }
    };
    let Some(slot) = api.registry.admit(id, &api.clock).await else {
        api.clock.sleep(RETRY_DELAY).await;
        send_in_use(&mut writer);
        writer.close(UNAVAILABLE).await;
        return None;
    };
    let mut pending = PendingSession::new(Box::new(writer), IncomingRequests::default(), slot);
    let admitted = match api.bus.admit(id, api.settings.max_sandboxes) {
        Some(guard) => Ok(guard),
        None => {
            pending.client.send_all(&status_machine.restoring());
            pending.wait_for_room(api, id).await
        }
    };
    drop(counted);
    let rejection = match admitted {
        Ok(guard) => return Some(pending.admitted(api, id, guard)),
        Err(AdmissionRejection::Draining) => AdmissionRejection::Ended(SessionEnd::Close(Close::Restart)),
        Err(rejection) => rejection,
    };
    reject(pending.release_slot(), Status::RestoreError, &rejection).await;
    None
}

/// Requests in the spec that the sandbox runs here; `None` if it was deleted.
async fn request_here(
    api: &Api,
    id: &SandboxId,
    client: &mut dyn ClientConnection,
) -> Result<Option<Spec>, records::Error> {
    let instance = &api.settings.instance;
    let (is_v1, is_held) = (client.is_v1(), api.bus.is_held(id));
    let attach = |spec: &mut Spec| intent::attach(spec, instance, is_v1, is_held);
    let spec = api.records.edit_for_request(id, client.traceparent(), &attach).await?;
    Ok(spec.filter(|spec| spec.desired_state != DesiredState::Deleted))
}

pub(super) fn send_in_use(client: &mut dyn EventSink) {
    let message = Some("Another client is attached to the sandbox.".to_owned());
    client.send(&Event::StatusUpdate(Update { message, ..Update::new(Status::InUse) }));
}

/// Sets the placement back to the holder after a client that attached here was told that the sandbox is in use. If
/// the write fails nothing moves either: a claim of this instance is not an order.
pub async fn give_back(api: &Api, id: &SandboxId) {
    let here = &api.settings.instance;
    let given = async {
        let lock = api.records.lock_of(id).await?;
        let Some(holder) = lock.and_then(|lock| lock.lease).map(|lease| lease.owner) else { return Ok(()) };
        api.records.edit(id, &|spec| intent::give_back(spec, here, &holder)).await.map(drop)
    };
    if let Err(error) = given.await {
        let error: records::Error = error;
        tracing::warn!(%error, "the claim on a sandbox in use could not be withdrawn");
    }
}

/// Whether the container here is no longer the sandbox: this machine was suspended, its clock included, and another
/// instance took over without this one knowing yet. Its output would send the client back in time. The status only
/// raises the question, the lock answers it; if the lock cannot be read, the container here counts.
pub async fn runs_elsewhere(api: &Api, id: &SandboxId, status: &metadata::SandboxStatus) -> bool {
    let me = &api.settings.instance;
    if status.phase != Phase::Running || status.instance.as_ref().is_none_or(|instance| instance == me) {
        return false;
    }
    let lock = api.records.lock_of(id).await;
    lock.is_ok_and(|lock| lock.is_some_and(|lock| lock.lease.is_none_or(|lease| lease.owner != *me)))
}

/// The documents send RESTORING for every sandbox not in memory; the predecessor only where it could restore one.
fn sends_restoring(api: &Api, client: &dyn EventSink) -> bool {
    client.dialect() != Dialect::Predecessor || api.records.can_checkpoint()
}

fn refuse_unknown(api: &Api, writer: &mut EventWriter, caller: Caller) -> Refused {
    api.charge(caller);
    if sends_restoring(api, writer) {
        writer.send(&Event::status(Status::Restoring));
    }
    refuse_not_found(writer)
}

fn refuse_not_found(client: &mut dyn EventSink) -> Refused {
    client.send(&Event::status(Status::NotFound));
    UNAVAILABLE
}
