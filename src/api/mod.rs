//! The front end: WebSockets and a few plain endpoints.
//!
//! The API writes what is wanted into the records, nudges the board and follows it; bytes
//! of commands go to and from the agent by frames. It never makes or ends a container.

pub mod close;
mod command;
mod commands;
pub mod dialect;
mod execute;
mod input;
pub mod intent;
pub mod limits;
mod linger;
mod link;
mod list;
mod marks;
pub mod output;
mod registry;
mod session;
mod speaker;
pub mod tell;
mod tenants;
pub mod token;
mod wire;

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{ConnectInfo, Path, Query, State, WebSocketUpgrade, ws::WebSocket},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use baton_protocol::{
    id::{InstanceId, SandboxId, Tenant},
    limits::{Bounds, Limits},
    metadata::{PlainWords, Spec},
    request::Config,
};
use serde::Deserialize;
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::linger::Peer;
use self::{
    dialect::Dialect,
    intent::{Abilities, Defaults},
    limits::Limiter,
    registry::Registry,
    tenants::Occupancy,
};
use crate::{
    clock::SharedClock,
    config::{ApiKey, Quotas},
    runtime::{Execs, Shares},
    storage::{board::Board, records, records::Records},
    traces::{Asked, Traces},
};

/// What the API is told once, at start.
#[derive(Debug)]
pub struct Settings {
    pub instance: InstanceId,
    pub version: &'static str,
    pub runsc_version: String,
    /// Seconds, for sandboxes that do not say; `None` is never.
    pub idle_timeout: Option<u64>,
    pub max_sandboxes: usize,
    /// What a sandbox may have.
    pub limits: Bounds,
    /// What holds it to its share of the machine, or why nothing does.
    pub cgroups: Result<Shares, String>,
    /// So many at once; more wait until one has ended.
    pub connections: usize,
    /// The words of plain clients that do not say otherwise.
    pub plain: PlainWords,
    /// Whoever knows the id may attach without a token; a wrong one is still refused.
    pub is_token_optional: bool,
    /// Empty: everybody may create.
    pub api_keys: Vec<ApiKey>,
    pub quotas: Quotas,
    pub admin_key: Option<String>,
    /// Pages that may connect; `*` is all.
    pub origins: Vec<String>,
    pub rate_limit: Option<limits::Rate>,
    /// Requests come through a proxy that says in `X-Forwarded-For` whom it saw.
    pub is_proxied: bool,
    /// True from the moment the instance is on its way out.
    pub drain: watch::Receiver<bool>,
    pub handoff_wait: Duration,
    pub traces: Traces,
}

#[derive(Debug)]
pub struct Api {
    settings: Settings,
    clock: SharedClock,
    records: Records,
    board: Arc<Board>,
    execs: Arc<dyn Execs>,
    registry: Arc<Registry>,
    occupancy: Arc<Occupancy>,
    limiter: Limiter,
    marks: marks::Shelf,
    /// Every session and everything it leaves to do.
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl Api {
    pub fn new(
        settings: Settings,
        clock: SharedClock,
        records: Records,
        board: Arc<Board>,
        execs: Arc<dyn Execs>,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            clock,
            records,
            occupancy: Occupancy::new(board.clone()),
            board,
            execs,
            registry: Arc::default(),
            limiter: Limiter::default(),
            marks: marks::Shelf::default(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        })
    }

    /// Writes a new sandbox, held by this instance from its first write on. The reconciler knows of that write before
    /// it is sent, and goes on from it when it is nudged.
    async fn create(&self, spec: &Spec) -> records::Result<()> {
        let (id, me) = (&spec.sandbox_id, &self.settings.instance);
        let lease = self.board.lease(id);
        let created = self.records.create(spec, me, &lease).await;
        if created.is_err() {
            self.board.unlease(id);
        }
        created
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            checkpoint: self.records.can_checkpoint(),
            snapshot: self.records.can_snapshot(),
            cpus: self.settings.cgroups.as_ref().is_ok_and(|shares| shares.cpus),
        }
    }

    fn defaults(&self, tenant: Option<&Tenant>) -> Defaults<'_> {
        let quota = self.settings.quotas.of(tenant);
        Defaults { idle: self.settings.idle_timeout, limits: &self.settings.limits, quota }
    }

    fn is_draining(&self) -> bool {
        *self.settings.drain.borrow()
    }

    /// Origin and rate, before anything else.
    fn admit(&self, headers: &HeaderMap, peer: Peer, id: Option<&str>) -> Result<(), StatusCode> {
        limits::check_origin(headers, &self.settings.origins)?;
        let Some(rate) = self.settings.rate_limit else { return Ok(()) };
        let now = self.clock.now();
        let caller = limits::caller(headers, &peer.0.ip().to_string(), self.settings.is_proxied);
        let admitted = self.limiter.admit(rate, &caller, now)
            && id.is_none_or(|id| self.limiter.admit(rate, &id.chars().take(64).collect::<String>(), now));
        if admitted { Ok(()) } else { Err(StatusCode::TOO_MANY_REQUESTS) }
    }
}

pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/", get(|| async { Json(json!({"message": "Server is running"})) }))
        .route("/status", get(status))
        .route("/create", any(create))
        .route("/attach/{sandbox_id}", any(attach))
        .route("/execute", post(execute::execute))
        .route("/sandboxes", get(list::list))
        .route("/sandboxes/{sandbox_id}", get(list::view))
        .with_state(api)
}

/// Serves until `shutdown`; then ends the sessions that are left, which takes a few seconds at most.
pub async fn serve(
    listener: TcpListener,
    api: Arc<Api>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let app = router(api.clone()).into_make_service_with_connect_info::<Peer>();
    let listener = linger::Lingering::new(listener, api.settings.connections, api.clock.clone(), api.tasks.clone());
    let (closing, clock) = (api.closing.clone(), api.clock.clone());
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        shutdown.await;
        closing.cancel();
    });
    let late = async {
        api.closing.cancelled().await;
        clock.sleep(Duration::from_secs(5)).await;
    };
    let served = tokio::select! {
        served = server => served,
        // A client that keeps its connection open does not keep the server.
        () = late => Ok(()),
    };
    api.tasks.close();
    let _ = clock.timeout(Duration::from_secs(5), api.tasks.wait()).await;
    served
}

async fn status(State(api): State<Arc<Api>>) -> Response {
    let draining = api.is_draining();
    let can = api.abilities();
    let bounds = &api.settings.limits;
    // What a sandbox gets, not what was wished for.
    let default = Limits { cpus: bounds.default.cpus.filter(|_| can.cpus), ..bounds.default.clone() };
    let body = json!({
        "status": if draining { "draining" } else { "ok" },
        "instance": api.settings.instance,
        "version": api.settings.version,
        "sandboxes": api.board.held(),
        "capabilities": {
            "checkpoint": can.checkpoint,
            "handoff": can.checkpoint,
            "snapshot": can.snapshot,
            "runsc": api.settings.runsc_version,
            "cpus": can.cpus,
        },
        "limits": {
            "default": default,
            "ceiling": bounds.ceiling,
            "cgroup": api.settings.cgroups.as_ref().map_or("none", |shares| &shares.version),
        },
    });
    (if draining { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }, Json(body)).into_response()
}

async fn create(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(parameters): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, StatusCode> {
    api.admit(&headers, peer, None)?;
    let tenant = limits::check_key(&headers, &api.settings)?;
    let request = api.settings.traces.asked(Asked::Create, limits::traceparent(&headers));
    let (details, config) = match Config::from_query(&parameters) {
        Ok((config, is_given)) => (config.details, is_given.then_some(Ok(config))),
        Err(refusal) => (false, Some(Err(refusal))),
    };
    Ok(accept(&api.clone(), upgrade, move |socket, dialect| {
        session::create(api, socket, session::Upgrade { dialect, details, request }, tenant, config)
    }))
}

#[derive(Deserialize)]
struct AttachQuery {
    sandbox_token: Option<String>,
    details: Option<String>,
}

async fn attach(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(sandbox_id): Path<String>,
    Query(query): Query<AttachQuery>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, StatusCode> {
    api.admit(&headers, peer, Some(&sandbox_id))?;
    let token = query
        .sandbox_token
        .or_else(|| limits::header_text(&headers, "x-sandbox-token"))
        .or_else(|| limits::offered(&headers, "baton.token."));
    // What is no id was never given out: nothing is looked up for it.
    let id = SandboxId::parse(&sandbox_id).ok();
    let request = api.settings.traces.asked(Asked::Attach, limits::traceparent(&headers));
    let details = query.details.is_some_and(|details| details == "1" || details == "true");
    Ok(accept(&api.clone(), upgrade, move |socket, dialect| {
        session::attach(api, socket, session::Upgrade { dialect, details, request }, id, token)
    }))
}

/// Upgrades at once; the dialect is the subprotocol. Offers that carry a token or key are never echoed.
fn accept<F>(
    api: &Arc<Api>,
    upgrade: WebSocketUpgrade,
    session: impl FnOnce(WebSocket, Dialect) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let upgrade = upgrade
        .max_message_size(wire::MAX_MESSAGE)
        .max_frame_size(wire::MAX_MESSAGE)
        .read_buffer_size(wire::READ_AT_ONCE)
        .max_write_buffer_size(wire::MAX_UNWRITTEN)
        .protocols(["baton.v1", "baton.plain"]);
    let is_v1 = upgrade.selected_protocol().is_some_and(|name| name == "baton.v1");
    let dialect = Dialect::of_server(is_v1, api.settings.plain);
    let tasks = api.tasks.clone();
    // Tracked, so that the end of the server waits for the end of the session.
    upgrade.on_upgrade(move |socket| tasks.track_future(session(socket, dialect)))
}

/// What went wrong with the records, as a client may hear it: no path, no object's name.
fn sentence(error: &records::Error) -> String {
    use crate::storage::store;
    match error {
        records::Error::InvalidSpec(_) => "InvalidSpec: the metadata of the sandbox cannot be read.".to_owned(),
        records::Error::OtherStore(_) => {
            "OtherStore: this server is configured for another bucket than that of the sandbox.".to_owned()
        }
        records::Error::TokenMissing => {
            "TokenMissing: the sandbox has no token yet; an operator has to give it one with `baton repair`.".to_owned()
        }
        records::Error::NotConfigured(text) => text.clone(),
        records::Error::NoCheckpoint => "The checkpoint is not one of the last two of its sandbox.".to_owned(),
        records::Error::Store(error) => match error {
            store::Error::Denied { .. } => "Storage refuses access: an operator has to act.".to_owned(),
            store::Error::Conflict(_) | store::Error::RateLimited(_) | store::Error::Unavailable { .. } => {
                "Storage does not answer at the moment: try again.".to_owned()
            }
            store::Error::NotFound(_)
            | store::Error::Damaged { .. }
            | store::Error::Unsigned(_)
            | store::Error::Other { .. } => "Storage failed.".to_owned(),
        },
    }
}
