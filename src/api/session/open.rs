//! Opening a session: the first message of a create, the token of an attach, and admission.

use std::{sync::Arc, time::Duration};

use baton_protocol::{
    agent,
    event::{Event, PROTOCOL, Status, Update},
    id::{SandboxId, Tenant},
    metadata::{self, DesiredState, Phase, Spec},
    request::{Config, Refusal, Request},
};
use futures::stream::FuturesUnordered;
use tracing::{Instrument, field};

use super::{
    Session, SpecEdits, Turns, Waiting,
    pending::{PendingSession, Rejection},
};
use crate::{
    api::{
        Api, Tracked,
        caller::Caller,
        close_code::Close,
        dialect::Dialect,
        event_writer::EventWriter,
        execs::ExecTable,
        intent::{self, NO_ROOM, SHUTTING_DOWN},
        public_message,
        status_machine::{Stage, StatusMachine},
        token,
        upgrade::WebSocket,
        websocket::{MAX_FRAME, Socket, SocketEvent},
    },
    clock::Moment,
    storage::records,
    traces,
};

/// How long a new client may take to send its config, if it answers no pings.
const FIRST_WITHIN: Duration = Duration::from_secs(3);
/// How long after its first pong, which shows that the client is connected and has sent nothing before it.
const FIRST_AFTER_PONG: Duration = Duration::from_millis(150);
/// Delay before a refusal to which some clients respond by reconnecting at once.
pub(super) const LATE: Duration = Duration::from_millis(500);
const DENIED: &str = "The sandbox token is missing or wrong.";
const FIRST_TOO_LONG: &str =
    "The first message is longer than 256 KiB: a command with more code goes after the config.";
const TOO_MANY_FAILURES: &str = "Too many wrong tokens came from this address: try again in a while.";

/// The first message of a create.
enum First {
    /// No message came in time.
    Silence,
    /// A message, and the length of its text.
    Message(Result<Request, Refusal>, usize),
    TooLong,
    End(super::End),
}

/// What the upgrade request says about the session.
pub struct Upgrade {
    pub dialect: Dialect,
    /// Whether a plain client asked for every field and event.
    pub details: bool,
    pub request: traces::Span,
    pub caller: Caller,
    pub connection: Tracked,
}

/// Where a session comes from, apart from its socket.
struct Comer {
    request: traces::Span,
    caller: Caller,
    connection: Tracked,
}

/// Creates a sandbox of this tenant. With `config` the query holds all of it, and no first message is awaited.
pub async fn create(
    api: Arc<Api>,
    socket: WebSocket,
    upgrade: Upgrade,
    tenant: Option<Tenant>,
    config: Option<Result<Config, Refusal>>,
) {
    let id = api.clock.sandbox_id();
    let span = log_span(&id, &upgrade.request);
    create_session(api, socket, upgrade, tenant, config, id).instrument(span).await;
}

/// The fields of every log line of a session.
fn log_span(id: &SandboxId, request: &traces::Span) -> tracing::Span {
    let span = tracing::info_span!("session", sandbox = %id, trace = field::Empty);
    if let Some(context) = request.traceparent() {
        span.record("trace", context.trace_id());
    }
    span
}

async fn create_session(
    api: Arc<Api>,
    socket: WebSocket,
    upgrade: Upgrade,
    tenant: Option<Tenant>,
    config: Option<Result<Config, Refusal>>,
    id: SandboxId,
) {
    let (mut writer, Comer { request, caller, connection }) = greet(&api, socket, upgrade);
    writer.send(&Event::status(Status::Creating));
    let mut malformed = 0;
    let first = match config {
        Some(config) => First::Message(config.map(|config| Request::Config(Box::new(config))), 0),
        None => first(&api, &mut writer, &mut malformed).await,
    };
    let mut waiting = Waiting::default();
    let config = match first {
        First::Silence => Config::default(),
        First::Message(Ok(Request::Config(config)), _) => *config,
        First::Message(Err(refusal), _) if refusal.status == Status::CreationError => {
            return refuse(writer, &refusal, Close::Fatal).await;
        }
        First::Message(other, bytes) => {
            waiting.push(other, bytes);
            Config::default()
        }
        First::TooLong => {
            return refuse(writer, &Refusal::of(Status::CreationError, FIRST_TOO_LONG), Close::TooBig).await;
        }
        First::End(super::End::Close(close)) => return writer.socket.close(close).await,
        First::End(super::End::Gone) => return writer.socket.leave().await,
    };
    writer.details |= config.details;
    writer.dialect = writer.dialect.of_create(&config);
    let dialect = writer.dialect;
    let token = token::fresh(&*api.clock);
    let bare = Spec::new(id.clone(), token::sha256(&token.0), api.clock.timestamp(), api.settings.instance.clone());
    let defaults = api.defaults(tenant.as_ref());
    let mut spec = match intent::create(Spec { tenant, ..bare }, &config, dialect, api.abilities(), defaults) {
        Ok(spec) => spec,
        Err(refusal) => return refuse(writer, &refusal, Close::Fatal).await,
    };
    spec.traceparent = request.traceparent();
    if let Err(refusal) = inherit(&api, &config, &mut spec, caller).await {
        return refuse(writer, &refusal, Close::Fatal).await;
    }
    let error = |message: &str| Refusal::of(Status::CreationError, message);
    if api.is_draining() {
        return refuse(writer, &error(SHUTTING_DOWN), Close::Fatal).await;
    }
    let counted = match api.count(&id, spec.tenant.as_ref()).await {
        Ok(counted) => counted,
        Err(sentence) => return refuse(writer, &error(&sentence), Close::Fatal).await,
    };
    // No other session can know the id yet, so the slot is free.
    let Some(slot) = api.registry.admit(&id, &api.clock).await else {
        return refuse(writer, &error("The sandbox could not be created."), Close::Fatal).await;
    };
    let mut pending = PendingSession { waiting, malformed, ..PendingSession::new(writer, slot) };
    let admitted = match api.bus.admit(&id, api.settings.max_sandboxes) {
        Some(presence) => Ok(presence),
        None => pending.wait_for_room(&api, &id).await,
    };
    // An admitted sandbox is on the bus, and a rejected client may try again at once.
    drop(counted);
    let presence = match admitted {
        Ok(presence) => presence,
        Err(Rejection::End(end)) => return pending.leave(end).await,
        Err(Rejection::Full) => return refuse(pending.give_up_seat(), &error(NO_ROOM), Close::Fatal).await,
        Err(Rejection::Draining) => return refuse(pending.give_up_seat(), &error(SHUTTING_DOWN), Close::Fatal).await,
    };
    if !connection.prove() {
        return refuse(pending.give_up_seat(), &error(NO_ROOM), Close::Fatal).await;
    }
    let PendingSession { writer, slot, waiting, liveness_probes, malformed } = pending;
    writer.socket.allow_long_messages();
    let subscription = api.bus.follow(&id);
    let written = match &spec.from_checkpoint {
        None => api.create(&spec).await,
        Some(checkpoint_id) => api.records.fork(checkpoint_id, &spec).await,
    };
    if let Err(failure) = written {
        tracing::warn!(error = %failure, "a sandbox could not be written");
        return refuse(writer, &error(&public_message(&failure)), Close::Fatal).await;
    }
    api.known_tokens.remember(&id, &spec.token_sha256);
    tracing::info!("a sandbox is wanted");
    api.bus.wake(&id);
    let mut status_machine = StatusMachine::new(Stage::Creating, dialect);
    status_machine.learn(&spec, dialect);
    let mut session = Session {
        commands: ExecTable::new(api.clock.clone()),
        patience: Some(start_deadline(&api)),
        marks: api.marks.take(&id),
        token: Some(token),
        waiting,
        request,
        api,
        id,
        spec,
        writer,
        status_machine,
        boot: None,
        slot,
        presence,
        subscription,
        liveness_probes,
        probes: vec![],
        is_declined: false,
        malformed,
        work: FuturesUnordered::new(),
        spec_edits: SpecEdits::default(),
        takes_turns: Turns::default(),
    };
    // A sandbox from a snapshot exists only once the snapshot is found. Clients of the predecessor always expect the id
    // just before RUNNING.
    if dialect != Dialect::Predecessor && session.spec.filesystem_snapshot_name.is_none() {
        session.tell_id();
    }
    session.run().await;
}

/// A copy of another sandbox needs the token of its source, whatever key comes with it; it gets the same snapshot and
/// the same limits.
async fn inherit(api: &Api, config: &Config, spec: &mut Spec, caller: Caller) -> Result<(), Refusal> {
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
    Ok(())
}

pub async fn attach(api: Arc<Api>, socket: WebSocket, upgrade: Upgrade, id: Option<SandboxId>, token: Option<String>) {
    let (writer, comer) = greet(&api, socket, upgrade);
    let Some(id) = id else { return unknown(&api, writer, comer.caller).await };
    let span = log_span(&id, &comer.request);
    attach_session(api, writer, id, token, comer).instrument(span).await;
}

async fn attach_session(api: Arc<Api>, mut writer: EventWriter, id: SandboxId, token: Option<String>, comer: Comer) {
    let Comer { request, caller, connection } = comer;
    if api.is_draining() {
        api.clock.sleep(LATE).await;
        return writer.socket.close(Close::Restart).await;
    }
    let error = |message: &str| Refusal::of(Status::RestoreError, message);
    let found = match api.records.find(&id).await {
        Ok(found) => found,
        Err(failure) => {
            writer.send(&Event::status(Status::Restoring));
            return refuse(writer, &error(&public_message(&failure)), Close::Fatal).await;
        }
    };
    let Some(found) = found else { return unknown(&api, writer, caller).await };
    writer.dialect = writer.dialect.of_attach(&found.spec);
    // Until the token is checked nothing is written, and no other session is disturbed.
    let is_excused = token.is_none() && api.settings.is_token_optional;
    if !is_excused && !token::matches(token.as_deref(), &found.spec.token_sha256) {
        api.charge(caller);
        return refuse(writer, &Refusal::of(Status::PermissionDenialError, DENIED), Close::Fatal).await;
    }
    api.known_tokens.remember(&id, &found.spec.token_sha256);
    if !connection.prove() {
        return refuse(writer, &error(NO_ROOM), Close::Fatal).await;
    }
    // The session counts against the tenant of the sandbox, whatever key it came with.
    let counted = match api.count(&id, found.spec.tenant.as_ref()).await {
        Ok(counted) => counted,
        Err(sentence) => {
            writer.send(&Event::status(Status::Restoring));
            return refuse(writer, &error(&sentence), Close::Fatal).await;
        }
    };
    let Some(slot) = api.registry.admit(&id, &api.clock).await else {
        api.clock.sleep(LATE).await;
        say_in_use(&mut writer);
        return writer.socket.close(Close::Unavailable).await;
    };
    let mut status_machine = StatusMachine::new(Stage::Attaching, writer.dialect);
    let mut pending = PendingSession::new(writer, slot);
    let admitted = match api.bus.admit(&id, api.settings.max_sandboxes) {
        Some(presence) => Ok(presence),
        None => {
            pending.writer.say_all(&status_machine.restoring());
            pending.wait_for_room(&api, &id).await
        }
    };
    drop(counted);
    let presence = match admitted {
        Ok(presence) => presence,
        Err(Rejection::End(end)) => return pending.leave(end).await,
        Err(Rejection::Full) => return refuse(pending.give_up_seat(), &error(NO_ROOM), Close::Fatal).await,
        Err(Rejection::Draining) => return pending.leave(super::End::Close(Close::Restart)).await,
    };
    let PendingSession { mut writer, slot, waiting, liveness_probes, malformed } = pending;
    writer.socket.allow_long_messages();
    let subscription = api.bus.follow(&id);
    let here = api.settings.instance.clone();
    let cause = request.traceparent();
    let (is_v1, is_held) = (writer.is_v1(), api.bus.is_held(&id));
    let spec = match api.records.wish(&id, cause, &|spec| intent::attach(spec, &here, is_v1, is_held)).await {
        Ok(Some(spec)) if spec.desired_state != DesiredState::Deleted => spec,
        Ok(_) => {
            if tells_restoring(&api, &writer) {
                writer.say_all(&status_machine.restoring());
            }
            return not_found(writer).await;
        }
        Err(failure) => {
            writer.say_all(&status_machine.restoring());
            return refuse(writer, &error(&public_message(&failure)), Close::Fatal).await;
        }
    };
    let is_old = runs_elsewhere(&api, &id, &found.status).await;
    status_machine.learn(&spec, writer.dialect);
    let mut session = Session {
        commands: ExecTable::new(api.clock.clone()),
        patience: Some(start_deadline(&api)),
        marks: api.marks.take(&id),
        token: None,
        waiting,
        request,
        id,
        spec,
        writer,
        status_machine,
        boot: None,
        slot,
        presence,
        subscription,
        liveness_probes,
        probes: vec![],
        is_declined: false,
        malformed,
        work: FuturesUnordered::new(),
        spec_edits: SpecEdits::default(),
        takes_turns: Turns::default(),
        api,
    };
    // If the sandbox runs here already, its agent answers, unless it is about to leave; then the bus reports that.
    match session.api.execs.open(&session.id).filter(|_| !is_old) {
        Some(link) => session.commands.open(link, &mut session.writer),
        None => {
            let restoring = session.status_machine.restoring();
            session.writer.say_all(&restoring);
        }
    }
    session.api.bus.wake(&session.id);
    session.run().await;
}

pub(super) fn say_in_use(writer: &mut EventWriter) {
    let message = Some("Another client is attached to the sandbox.".to_owned());
    writer.send(&Event::StatusUpdate(Update { message, ..Update::new(Status::InUse) }));
}

/// Sets the placement back to the holder after a client that attached here was told that the sandbox is in use. If
/// the write fails nothing moves either: a claim of this instance is not an order.
pub(super) async fn give_back(api: &Api, id: &SandboxId) {
    let here = &api.settings.instance;
    let given = async {
        let lock = api.records.lock_of(id).await?;
        let Some(holder) = lock.and_then(|lock| lock.lease).map(|lease| lease.owner) else { return Ok(()) };
        api.records.edit(id, &|spec| intent::give_back(spec, here, &holder)).await.map(drop)
    };
    if let Err(error) = given.await {
        let error: records::Error = error;
        tracing::warn!(%error, "a request for a sandbox that is in use could not be taken back");
    }
}

/// Whether the container here is no longer the sandbox: this machine was suspended, its clock included, and another
/// instance took over without this one knowing yet. Its output would send the client back in time. The status only
/// raises the question, the lock answers it; if the lock cannot be read, the container here counts.
async fn runs_elsewhere(api: &Api, id: &SandboxId, status: &metadata::Status) -> bool {
    let me = &api.settings.instance;
    if status.phase != Phase::Running || status.instance.as_ref().is_none_or(|instance| instance == me) {
        return false;
    }
    let lock = api.records.lock_of(id).await;
    lock.is_ok_and(|lock| lock.is_some_and(|lock| lock.lease.is_none_or(|lease| lease.owner != *me)))
}

fn greet(api: &Api, socket: WebSocket, upgrade: Upgrade) -> (EventWriter, Comer) {
    let Upgrade { dialect, details, request, caller, connection } = upgrade;
    let socket = Socket::new(socket, api.clock.clone(), !dialect.is_v1());
    let mut writer = EventWriter::new(socket, dialect, details, api.clock.clone());
    if dialect.is_v1() {
        writer.send(&Event::Hello {
            protocol: PROTOCOL,
            max_frame: MAX_FRAME as u64,
            max_execs: agent::MAX_EXECS as u32,
            instance: api.settings.instance.clone(),
        });
    }
    (writer, Comer { request, caller, connection })
}

/// Until when a session waits for its sandbox.
fn start_deadline(api: &Api) -> Moment {
    api.clock.now() + api.settings.handoff_wait
}

async fn refuse(mut writer: EventWriter, refusal: &Refusal, close: Close) {
    writer.refuse(refusal);
    writer.socket.close(close).await;
}

/// The documents send RESTORING for every sandbox not in memory; the predecessor only where it could restore one.
fn tells_restoring(api: &Api, writer: &EventWriter) -> bool {
    writer.dialect != Dialect::Predecessor || api.records.can_checkpoint()
}

async fn unknown(api: &Api, mut writer: EventWriter, caller: Caller) {
    api.charge(caller);
    if tells_restoring(api, &writer) {
        writer.send(&Event::status(Status::Restoring));
    }
    not_found(writer).await;
}

async fn not_found(mut writer: EventWriter) {
    writer.send(&Event::status(Status::NotFound));
    writer.socket.close(Close::Unavailable).await;
}

async fn first(api: &Api, writer: &mut EventWriter, malformed: &mut u32) -> First {
    let mut until = api.clock.now() + FIRST_WITHIN;
    // This ping is not a liveness check: a client that answers no pings has its three seconds.
    writer.socket.ping(vec![], false);
    loop {
        let turn = tokio::select! {
            biased;
            () = api.closing.cancelled() => return First::End(super::End::Close(Close::Restart)),
            turn = writer.socket.turn(true) => turn,
            () = api.clock.sleep_until(until) => return First::Silence,
        };
        let refusal = match turn {
            SocketEvent::Wrote => continue,
            SocketEvent::Pong(_) => {
                // The predecessor waited for a config without a deadline.
                if writer.dialect != Dialect::Predecessor {
                    until = until.min(api.clock.now() + FIRST_AFTER_PONG);
                }
                continue;
            }
            SocketEvent::Text(text) => match Request::parse(&text) {
                Err(refusal) if refusal.malformed => refusal,
                parsed => return First::Message(parsed, text.len()),
            },
            SocketEvent::Binary(_) => Refusal::malformed("The first message must be text."),
            SocketEvent::TooLong => return First::TooLong,
            SocketEvent::Broken(close) => return First::End(super::End::Close(close)),
            SocketEvent::Gone => return First::End(super::End::Gone),
        };
        writer.refuse(&refusal);
        *malformed += 1;
        if *malformed >= super::MOST_MALFORMED {
            return First::End(super::End::Close(Close::BadData));
        }
    }
}
