//! `POST /execute`: one command in a fresh sandbox, its output as the answer's body.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, HttpBody},
    extract::{ConnectInfo, Query, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use baton_protocol::{
    agent,
    event::Output,
    frame::{Frame, Kind, Stream},
    id::{ExecId, SandboxId, Tenant},
    metadata::Spec,
    printable::printable,
    request::{Config, Exec, Language},
};
use bytes::Bytes;
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument;

use super::{
    Api, Tracked,
    dialect::Dialect,
    exec_spec,
    inbound::Reservation,
    input::Input,
    intent::{self, NO_ROOM, SHUTTING_DOWN},
    limits,
    lingering_close::Peer,
    output::{Delivery, WINDOW},
    public_message, token,
    websocket::MAX_MESSAGE,
};
use crate::{
    bus::{AttachGuard, LifecycleEvent, Subscription},
    metrics::Outcome,
    runtime::Link,
    traces::{self, Asked},
};

/// How long the code may take to arrive.
const BODY_WITHIN: Duration = Duration::from_secs(30);
/// How long to wait for memory that the messages of other clients take up.
const MEMORY_WITHIN: Duration = Duration::from_secs(3);
const SETTLE: Duration = Duration::from_millis(20);

#[derive(Deserialize)]
pub struct ExecuteQuery {
    language: Option<String>,
}

type Refused = (StatusCode, String);

pub async fn execute(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(query): Query<ExecuteQuery>,
    connection: Tracked,
    request: Request,
) -> Result<Response, Response> {
    let headers = request.headers();
    let plain = |status: StatusCode| status.into_response();
    limits::check_origin(headers, &api.settings.origins).map_err(plain)?;
    let key = limits::api_key(headers, &api.settings);
    let tenant = api.admit(key, api.caller(headers, peer), &connection).map_err(plain)?;
    let refuse = |status: StatusCode, text: &str| (status, text.to_owned()).into_response();
    let asked = query.language.unwrap_or_default();
    let Some(language) = Language::parse(&asked) else {
        return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, &Language::unsupported(&asked)));
    };
    let mut span = api.settings.traces.asked(Asked::Execute, limits::traceparent(headers));
    let read = api.clock.timeout(BODY_WITHIN, read(&api, request.into_body())).await;
    let (code, memory) = match read {
        Ok(read) => read.map_err(|(status, text)| refuse(status, text))?,
        Err(_) => return Err(refuse(StatusCode::REQUEST_TIMEOUT, "The code did not arrive in time.")),
    };
    let code = String::from_utf8(code).ok().filter(|code| !code.contains('\0'));
    let Some(code) = code else {
        return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, "The code must be UTF-8 without NUL."));
    };
    let mut exec = Exec::plain(language, code);
    exec.stdin = false;
    let (started, start) = oneshot::channel();
    let (output, chunks) = mpsc::channel::<Bytes>(4);
    let id = api.clock.sandbox_id();
    let line = tracing::info_span!("execute", sandbox = %id);
    let tasks = api.tasks.clone();
    // A separate task: the sandbox is deleted even if the caller disconnects midway.
    tasks.spawn(
        async move {
            let mut started = Some(started);
            let pending = PendingExecute { tenant, connection, memory };
            match run(&api, &id, &exec, &mut started, output, &span, pending).await {
                Ok(()) => span.end(Outcome::Done),
                Err(refused) => {
                    if let Some(started) = started {
                        let _ = started.send(Err(refused));
                    }
                }
            }
        }
        .instrument(line),
    );
    match start.await {
        Ok(Ok(())) => {
            let chunks = futures::stream::unfold(chunks, |mut chunks| async move {
                chunks.recv().await.map(|chunk| (Ok::<_, std::io::Error>(chunk), chunks))
            });
            let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
            Ok((kind, Body::from_stream(chunks)).into_response())
        }
        Ok(Err(refused)) => Err(refused.into_response()),
        Err(_) => Err(plain(StatusCode::INTERNAL_SERVER_ERROR)),
    }
}

/// Reads the code, and reserves memory for it from the budget of all clients.
async fn read(api: &Api, body: Body) -> Result<(Vec<u8>, Reservation), (StatusCode, &'static str)> {
    let too_long = || (StatusCode::PAYLOAD_TOO_LARGE, "The code is longer than 16 MiB.");
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if declared > MAX_MESSAGE {
        return Err(too_long());
    }
    // Untouched pages cost nothing, whereas a growing vector exists twice for a moment.
    let mut code = Vec::with_capacity(declared);
    let (mut chunks, mut memory) = (body.into_data_stream(), api.inbound.reservation());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| (StatusCode::BAD_REQUEST, "The code did not arrive."))?;
        let length = code.len() + chunk.len();
        if length > MAX_MESSAGE {
            return Err(too_long());
        }
        let resized = api.clock.timeout(MEMORY_WITHIN, memory.resize(length as u64)).await;
        resized.map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, "The server takes no more input now: try again."))?;
        code.extend_from_slice(&chunk);
    }
    Ok((code, memory))
}

/// What a request holds until its sandbox is admitted.
struct PendingExecute {
    tenant: Option<Tenant>,
    connection: Tracked,
    /// Memory that holds the code.
    memory: Reservation,
}

type Started = Option<oneshot::Sender<Result<(), Refused>>>;

/// Creates the sandbox, runs the command and deletes the sandbox in any case.
async fn run(
    api: &Arc<Api>,
    id: &SandboxId,
    exec: &Exec,
    started: &mut Started,
    output: mpsc::Sender<Bytes>,
    request: &traces::Span,
    pending: PendingExecute,
) -> Result<(), Refused> {
    let unavailable = |text: &str| (StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
    if api.is_draining() {
        return Err(unavailable(SHUTTING_DOWN));
    }
    let counted = api.count(id, pending.tenant.as_ref()).await;
    let counted = counted.map_err(|sentence| (StatusCode::TOO_MANY_REQUESTS, sentence))?;
    let mut drain = api.settings.drain.clone();
    let admitted = tokio::select! {
        biased;
        admitted = api.bus.make_room(id, api.settings.max_sandboxes) => admitted,
        true = async { drain.wait_for(|drain| *drain).await.is_ok() } => return Err(unavailable(SHUTTING_DOWN)),
        // The caller has disconnected.
        () = output.closed() => return Ok(()),
    };
    drop(counted);
    let presence = admitted.filter(|_| pending.connection.prove()).ok_or_else(|| unavailable(NO_ROOM))?;
    let PendingExecute { tenant, memory, .. } = pending;
    // From here on the code no longer counts against the budget.
    drop(memory);
    let subscription = api.bus.follow(id);
    // The token is never given out.
    let hash = token::sha256(&token::fresh(&*api.clock).0);
    let bare = Spec::new(id.clone(), hash, api.clock.timestamp(), api.settings.instance.clone());
    let defaults = api.defaults(tenant.as_ref());
    let spec = intent::create(Spec { tenant, ..bare }, &Config::default(), Dialect::V1, api.abilities(), defaults);
    let mut spec = spec.map_err(|refusal| unavailable(&refusal.message))?;
    spec.traceparent = request.traceparent();
    api.create(&spec).await.map_err(|error| unavailable(&public_message(&error)))?;
    api.bus.wake(id);
    // The caller may send its next request once it has all of the output: by then the sandbox must not count any more.
    let end = output.clone();
    let ran = Running { api, id, presence, subscription }.run(exec, started, output).await;
    api.occupancy.note(id, None);
    drop(end);
    api.delete(id, request.traceparent()).await;
    ran
}

struct Running<'a> {
    api: &'a Arc<Api>,
    id: &'a SandboxId,
    #[expect(dead_code, reason = "held so that the sandbox has somebody")]
    presence: AttachGuard,
    subscription: Subscription,
}

impl Running<'_> {
    async fn run(mut self, exec: &Exec, started: &mut Started, output: mpsc::Sender<Bytes>) -> Result<(), Refused> {
        let gone = (StatusCode::SERVICE_UNAVAILABLE, "The sandbox has ended.".to_owned());
        let wait = self.api.settings.handoff_wait;
        let opened = tokio::select! {
            opened = self.api.clock.timeout(wait, self.open()) => opened,
            () = output.closed() => return Ok(()),
        };
        let link = opened.map_err(|_| (gone.0, "The sandbox did not start in time.".to_owned()))??;
        let api = self.api;
        tokio::select! {
            ended = follow_command(api, link, exec, started, &output) => ended.ok_or(gone)?,
            () = self.left() => Err(gone),
            () = api.closing.cancelled() => Err(gone),
            () = output.closed() => Ok(()),
        }
    }

    async fn open(&mut self) -> Result<Link, Refused> {
        loop {
            match self.subscription.next().await.passing {
                LifecycleEvent::Running { .. } => {
                    if let Some(link) = self.api.execs.open(self.id) {
                        return Ok(link);
                    }
                }
                LifecycleEvent::Failed { message, .. } => return Err((StatusCode::SERVICE_UNAVAILABLE, message)),
                LifecycleEvent::Left { .. } | LifecycleEvent::LeaseLost { .. } => {
                    return Err((StatusCode::SERVICE_UNAVAILABLE, "The sandbox has ended.".to_owned()));
                }
                LifecycleEvent::Acquiring
                | LifecycleEvent::Acquired
                | LifecycleEvent::ReleaseRequested { .. }
                | LifecycleEvent::Probe { .. }
                | LifecycleEvent::Checkpointing { .. }
                | LifecycleEvent::CheckpointFailed { .. }
                | LifecycleEvent::Fenced { .. }
                | LifecycleEvent::Unfenced
                | LifecycleEvent::Answered
                | LifecycleEvent::Progress { .. } => {}
            }
        }
    }

    async fn left(&mut self) {
        while !matches!(
            self.subscription.next().await.passing,
            LifecycleEvent::Left { .. } | LifecycleEvent::LeaseLost { .. }
        ) {}
    }
}

/// `None` means that the link closed first.
async fn follow_command(
    api: &Api,
    mut link: Link,
    exec: &Exec,
    started: &mut Started,
    output: &mpsc::Sender<Bytes>,
) -> Option<Result<(), Refused>> {
    const NUMBER: u32 = 1;
    let exec_id = ExecId::parse("execute").ok()?;
    let start = match exec_spec::start(exec, &exec_id, false) {
        Ok(start) => start,
        Err(refusal) => return Some(Err((StatusCode::UNPROCESSABLE_ENTITY, refusal.message))),
    };
    let to = |kind, stream| Frame::new(kind).exec(NUMBER).stream(stream);
    link.to_agent.send(Frame::new(Kind::Exec).exec(NUMBER).sequence(1).payload(start.payload)).await.ok()?;
    for stream in [Stream::Stdout, Stream::Stderr] {
        link.to_agent.send(to(Kind::Credit, stream).offset(WINDOW)).await.ok()?;
    }
    let mut input = Input::new(false);
    if !start.prelude.is_empty() {
        input.prelude(start.prelude);
    }
    let mut delivery = Delivery::new(NUMBER, exec_id);
    let (mut ask, mut replay) = (false, 0);
    loop {
        while let Some(frame) = input.next_frame(NUMBER) {
            link.to_agent.send(frame).await.ok()?;
        }
        if delivery.take_exit().is_some() {
            return Some(Ok(()));
        }
        for (_, stream) in link.behind.take() {
            // The client reads slowly, and output that did not fit meanwhile was skipped.
            replay += 1;
            let flow = delivery.flow(if stream == Stream::Stderr { Output::Stderr } else { Output::Stdout });
            flow.again(replay);
            let again = to(Kind::Replay, stream).offset(flow.next()).sequence(replay);
            link.to_agent.send(again).await.ok()?;
        }
        let frame = tokio::select! {
            frame = link.from_agent.recv() => frame?,
            () = link.behind.noted() => continue,
            () = api.clock.sleep(SETTLE), if ask => {
                ask = false;
                link.to_agent.send(Frame::new(Kind::List)).await.ok()?;
                continue;
            }
        };
        let stream = match frame.stream {
            Stream::Stderr => Output::Stderr,
            Stream::Stdout | Stream::Stdin | Stream::Exit | Stream::Tree => Output::Stdout,
        };
        if frame.kind == Kind::Started {
            if let Some(started) = started.take() {
                let _ = started.send(Ok(()));
            }
        } else if frame.kind == Kind::Data {
            let flow = delivery.flow(stream);
            let Some(taken) = flow.take(frame.offset, frame.sequence, frame.payload.len()) else { continue };
            output.send(Bytes::from(frame.payload).slice(taken.skip..)).await.ok()?;
            if let Some(confirmed) = flow.confirm(u64::MAX) {
                let credit = flow.credit();
                link.to_agent.send(to(Kind::Ack, frame.stream).offset(confirmed)).await.ok()?;
                link.to_agent.send(to(Kind::Credit, frame.stream).offset(credit)).await.ok()?;
            }
            ask = delivery.has_exited();
        } else if frame.kind == Kind::Eof {
            delivery.flow(stream).end(frame.offset, frame.sequence);
        } else if frame.kind == Kind::StdinAck {
            input.took(frame.offset);
        } else if frame.kind == Kind::Exit {
            let exit: agent::Exit = serde_json::from_slice(&frame.payload).ok()?;
            tracing::info!(code = exit.code, signal = exit.signal, duration_ms = exit.duration_ms, "a command ended");
            if let Some(error) = exit.error {
                // The text of an agent is untrusted.
                return Some(Err((StatusCode::INTERNAL_SERVER_ERROR, printable(&error))));
            }
            delivery.exited(exit);
            ask = true;
        } else if frame.kind == Kind::Execs {
            let state: agent::State = serde_json::from_slice(&frame.payload).ok()?;
            if let Some(told) = state.execs.iter().find(|told| told.exec == NUMBER) {
                ask = delivery.compare(told.stdout.to, told.stderr.to);
            }
        }
    }
}
