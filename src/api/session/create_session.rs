//! Creating a sandbox, for a WebSocket on `/create` or for one command of `POST /execute`.

use std::sync::Arc;

use baton_protocol::{
    event::{Event, Status, Token},
    id::{SandboxId, Tenant},
    metadata::Spec,
    request::{ExecRequest, Refusal, Request, SandboxConfig},
};
use tracing::Instrument;

use super::{
    Session, Upgrade, first_request,
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
        response_writer::ResponseWriter,
        status_machine::{OpenStage, StatusMachine},
        token,
        upgrade::WebSocket,
    },
    storage::records,
};

const TOO_MANY_FAILURES: &str = "Too many wrong tokens from this address: try again later.";

/// A sandbox that is not written yet.
struct NewSandbox {
    spec: Spec,
    /// The token for its client; `None` if no client will attach to it.
    token: Option<Token>,
}

/// Creates a sandbox of this tenant. With `config` the query holds all of it, and no first message is awaited.
pub async fn create(
    api: Arc<Api>,
    socket: WebSocket,
    upgrade: Upgrade,
    tenant: Option<Tenant>,
    config: Option<Result<SandboxConfig, Refusal>>,
) {
    let id = api.clock.sandbox_id();
    let span = log_span(&id, &upgrade.request);
    let (caller, connection) = (upgrade.caller, upgrade.connection.clone());
    let created = async {
        let mut writer = api.open_writer(socket, upgrade);
        writer.send(&Event::status(Status::Creating));
        let mut requests = IncomingRequests::default();
        let config = match first_request::read_config(&api, &mut writer, &mut requests, config).await {
            Ok(config) => config,
            Err(end) => return writer.close(end).await,
        };
        writer.apply_config(&config);
        let new = match new_sandbox(&api, &mut writer, &id, tenant, &config, caller).await {
            Ok(new) => new,
            Err(refusal) => {
                writer.refuse(&refusal);
                return writer.close(SessionEnd::Close(Close::Fatal)).await;
            }
        };
        if let Some(session) = create_session(&api, Box::new(writer), requests, new, &connection).await {
            session.run().await;
        }
    };
    created.instrument(span).await;
}

/// Creates a sandbox, runs one command in it and deletes the sandbox in any case. The writer responds to the caller.
pub async fn execute(
    api: Arc<Api>,
    mut writer: ResponseWriter,
    id: SandboxId,
    tenant: Option<Tenant>,
    exec: ExecRequest,
    connection: Tracked,
) {
    // The token is never given out.
    let token = token::fresh(&*api.clock);
    let mut spec = match api.new_spec(&id, &token, tenant, &SandboxConfig::default(), writer.dialect()) {
        Ok(spec) => spec,
        Err(refusal) => {
            writer.refuse(&refusal);
            return Box::new(writer).end(SessionEnd::Close(Close::Fatal)).await;
        }
    };
    spec.traceparent = writer.traceparent();
    let mut requests = IncomingRequests::default();
    requests.push(Ok(Request::Exec(Box::new(exec))), 0);
    let new = NewSandbox { spec, token: None };
    if let Some(session) = create_session(&api, Box::new(writer), requests, new, &connection).await {
        session.run().await;
    }
}

impl Api {
    /// The spec of a new sandbox on this instance.
    fn new_spec(
        &self,
        id: &SandboxId,
        token: &Token,
        tenant: Option<Tenant>,
        config: &SandboxConfig,
        dialect: Dialect,
    ) -> Result<Spec, Refusal> {
        let (hash, instance) = (token::sha256(&token.0), self.settings.instance.clone());
        let defaults = self.defaults(tenant.as_ref());
        let bare = Spec::new(id.clone(), hash, self.clock.timestamp(), instance);
        intent::create(Spec { tenant, ..bare }, config, dialect, self.abilities(), defaults)
    }

    /// Writes a new sandbox, leased to this instance from its first write on. The reconciler learns of the lease before
    /// it is written, and continues from it when woken.
    async fn write_new(&self, spec: &Spec) -> records::Result<()> {
        if let Some(checkpoint_id) = &spec.from_checkpoint {
            return self.records.fork(checkpoint_id, spec).await;
        }
        let (id, instance) = (&spec.sandbox_id, &self.settings.instance);
        let lease = self.bus.lease(id);
        let created = self.records.create(spec, instance, &lease).await;
        if created.is_err() {
            self.bus.unlease(id);
        }
        created
    }
}

async fn new_sandbox(
    api: &Api,
    writer: &mut EventWriter,
    id: &SandboxId,
    tenant: Option<Tenant>,
    config: &SandboxConfig,
    caller: Caller,
) -> Result<NewSandbox, Refusal> {
    let token = token::fresh(&*api.clock);
    let mut spec = api.new_spec(id, &token, tenant, config, writer.dialect())?;
    spec.traceparent = writer.traceparent();
    inherit(api, config, &mut spec, caller).await?;
    Ok(NewSandbox { spec, token: Some(token) })
}

/// Gives a copy of another sandbox the snapshot, the limits and, unless the client chose another, the network of its source. The client needs the token of the source,
/// whatever key it came with.
async fn inherit(api: &Api, config: &SandboxConfig, spec: &mut Spec, caller: Caller) -> Result<(), Refusal> {
    let Some(checkpoint_id) = &config.from_checkpoint else { return Ok(()) };
    let (id, given) = (checkpoint_id.sandbox(), config.source_token.as_ref().map(|token| token.0.as_str()));
    if api.is_limited(caller) && !api.known_tokens.has(&id, given, false) {
        return Err(Refusal::of(Status::PermissionDenialError, TOO_MANY_FAILURES));
    }
    let found = api.records.find(&id).await;
    let found = found.map_err(|failure| Refusal::of(Status::CreationError, public_message(&failure)))?;
    let Some(source) = found else {
        api.charge(caller);
        return Err(Refusal::of(Status::CreationError, "The sandbox of that checkpoint does not exist."));
    };
    if !token::matches(given, &source.spec.token_sha256) {
        api.charge(caller);
        return Err(Refusal::of(Status::PermissionDenialError, "`source_token` is missing or wrong."));
    }
    // If keys are not required, the copy belongs to the tenant of its source.
    spec.tenant = spec.tenant.take().or(source.spec.tenant);
    spec.filesystem_snapshot_name = source.spec.filesystem_snapshot_name;
    spec.limits = source.spec.limits;
    if spec.network.is_empty() {
        spec.network = source.spec.network;
    }
    Ok(())
}

/// Waits for admission and writes the sandbox. Otherwise the client is told why, and there is no session.
async fn create_session(
    api: &Arc<Api>,
    client: Box<dyn ClientConnection>,
    requests: IncomingRequests,
    new: NewSandbox,
    connection: &Tracked,
) -> Option<Session> {
    let NewSandbox { spec, token } = new;
    let created = async {
        let mut admitted = admit(api, client, requests, &spec, connection).await?;
        if let Err(error) = api.write_new(&spec).await {
            tracing::warn!(%error, "a new sandbox could not be written");
            return Err((admitted.release(), AdmissionRejection::Failed(public_message(&error))));
        }
        if token.is_some() {
            api.known_tokens.remember(&spec.sandbox_id, &spec.token_sha256);
        }
        tracing::info!("sandbox requested");
        api.bus.placed(&spec.sandbox_id);
        let dialect = admitted.client().dialect();
        let mut status_machine = StatusMachine::new(OpenStage::Creating, dialect);
        status_machine.apply_spec(&spec, dialect);
        let mut session = admitted.into_session(api.clone(), spec, token, status_machine);
        // A sandbox from a snapshot exists only once the snapshot is found. Clients of the predecessor always expect
        // the id just before RUNNING.
        if dialect != Dialect::Predecessor && session.sandbox.spec.filesystem_snapshot_name.is_none() {
            session.send_id();
        }
        Ok(session)
    };
    match created.await {
        Ok(session) => Some(session),
        Err((client, rejection)) => {
            reject(client, Status::CreationError, &rejection).await;
            None
        }
    }
}

type Rejected = (Box<dyn ClientConnection>, AdmissionRejection);

async fn admit(
    api: &Api,
    client: Box<dyn ClientConnection>,
    requests: IncomingRequests,
    spec: &Spec,
    connection: &Tracked,
) -> Result<AdmittedSession, Rejected> {
    let id = &spec.sandbox_id;
    if api.is_draining() {
        return Err((client, AdmissionRejection::Draining));
    }
    let counted = match api.count(id, spec.tenant.as_ref()).await {
        Ok(counted) => counted,
        Err(message) => return Err((client, AdmissionRejection::Quota(message))),
    };
    // No other session can know the id yet, so the slot is free.
    let Some(slot) = api.registry.admit(id, &api.clock).await else {
        return Err((client, AdmissionRejection::Failed("The sandbox could not be created.".to_owned())));
    };
    let mut pending = PendingSession::new(client, requests, slot);
    let admitted = match api.bus.admit(id, api.settings.max_sandboxes) {
        Some(guard) => Ok(guard),
        None => pending.wait_for_room(api, id).await,
    };
    // An admitted sandbox is on the bus, and a rejected client may try again at once.
    drop(counted);
    match admitted {
        Ok(guard) if connection.prove() => Ok(pending.admitted(api, id, guard)),
        Ok(_) => Err((pending.release_slot(), AdmissionRejection::Full)),
        Err(rejection) => Err((pending.release_slot(), rejection)),
    }
}
