//! The front end: WebSockets and a few plain endpoints.
//!
//! The API writes the spec into the records, wakes the reconciler through the bus and follows its events; the bytes of
//! commands travel as frames to and from the agent. The API never starts or stops a container.

mod agent_link;
mod caller;
mod client_connection;
pub mod close_code;
mod connections;
mod delivered;
pub mod dialect;
mod event_writer;
mod exec_input;
mod exec_spec;
mod exec_table;
mod execute;
mod execute_result;
mod frame_scanner;
pub mod hosts;
mod inbound;
pub mod intent;
mod known_tokens;
mod lingering_close;
pub mod listener;
mod pings;
mod ports;
pub mod rate_limit;
mod response_writer;
mod sandbox_list;
mod session;
mod session_registry;
pub mod status_machine;
pub mod stream_cursor;
mod tenants;
pub mod token;
mod upgrade;
mod websocket;

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{ConnectInfo, FromRequestParts, Path, Query, State},
    http::{HeaderMap, StatusCode, request::Parts},
    middleware,
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use baton_protocol::{
    id::{InstanceId, SandboxId, Tenant},
    limits::{Bounds, Limits},
    metadata::PlainWords,
    request::SandboxConfig,
    sandbox_network::Egress,
};
use serde::Deserialize;
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    caller::Caller,
    connections::Handle,
    dialect::Dialect,
    inbound::Budget,
    intent::{Abilities, Defaults},
    known_tokens::KnownTokens,
    ports::{PortLimits, PortUses, RecentRecords},
    rate_limit::{EdgeRefusal, Key, Limiter},
    session_registry::SessionRegistry,
    tenants::Occupancy,
    upgrade::{WebSocket, WebSocketUpgrade},
};
pub use self::{
    lingering_close::Peer,
    ports::{PortDomain, port_number},
};
use crate::{
    bus::Bus,
    clock::SharedClock,
    config::{ApiKey, Quotas},
    network::PortLinks,
    runtime::{AgentLinks, Shares},
    storage::{records, records::Records},
    traces::{Asked, Traces},
};

/// Settings that the API gets once, at startup.
#[derive(Debug)]
pub struct ApiSettings {
    pub instance: InstanceId,
    pub version: &'static str,
    pub runsc_version: String,
    /// Idle timeout in seconds of sandboxes that set none; `None` means never.
    pub idle_timeout: Option<u64>,
    pub max_sandboxes: usize,
    /// Resource limits of a sandbox.
    pub limits: Bounds,
    /// The cgroup shares that enforce the limits, or why they cannot be enforced.
    pub cgroups: Result<Shares, String>,
    pub connections: listener::ListenerLimits,
    /// Memory for messages that clients are still sending, shared by all clients, in bytes.
    pub inbound_memory: u64,
    /// The most that a client may allow its sandbox to reach.
    pub egress_max: Egress,
    /// The words for plain clients whose sandbox does not set others.
    pub plain: PlainWords,
    /// Knowing the id is enough to attach; a wrong token is still refused.
    pub is_token_optional: bool,
    /// If empty, `/create` and `/execute` need no key.
    pub api_keys: Vec<ApiKey>,
    pub quotas: Quotas,
    pub admin_key: Option<String>,
    /// Origins of web pages that may connect; `*` allows all.
    pub origins: Vec<String>,
    pub rate_limit: Option<rate_limit::FailureRate>,
    /// How many trusted proxies are in front; each appends to `X-Forwarded-For` the address it saw.
    pub proxies: usize,
    /// The `Host` names that are answered without a key.
    pub hosts: hosts::Hosts,
    /// Where every port of a sandbox has a host name.
    pub domain: Option<PortDomain>,
    /// Becomes true when the instance starts to drain.
    pub drain: watch::Receiver<bool>,
    pub handoff_wait: Duration,
    pub traces: Traces,
}

#[derive(Debug)]
pub struct Api {
    settings: ApiSettings,
    clock: SharedClock,
    records: Records,
    bus: Arc<Bus>,
    execs: Arc<dyn AgentLinks>,
    ports: Arc<dyn PortLinks>,
    port_limits: PortLimits,
    port_uses: PortUses,
    recent_records: RecentRecords,
    registry: Arc<SessionRegistry>,
    occupancy: Arc<Occupancy>,
    inbound: Budget,
    limiter: Limiter,
    known_tokens: KnownTokens,
    marks: delivered::MarkCache,
    /// Every session, and the work that outlives it.
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl Api {
    pub fn new(
        settings: ApiSettings,
        clock: SharedClock,
        records: Records,
        bus: Arc<Bus>,
        execs: Arc<dyn AgentLinks>,
        ports: Arc<dyn PortLinks>,
    ) -> Arc<Self> {
        Arc::new(Self {
            inbound: Budget::new(settings.inbound_memory),
            settings,
            clock,
            records,
            occupancy: Occupancy::new(bus.clone()),
            bus,
            execs,
            ports,
            port_limits: PortLimits::default(),
            port_uses: PortUses::default(),
            recent_records: RecentRecords::default(),
            registry: Arc::default(),
            limiter: Limiter::default(),
            known_tokens: KnownTokens::default(),
            marks: delivered::MarkCache::default(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        })
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
        Defaults {
            idle: self.settings.idle_timeout,
            limits: &self.settings.limits,
            quota,
            egress_max: &self.settings.egress_max,
        }
    }

    fn is_draining(&self) -> bool {
        *self.settings.drain.borrow()
    }

    fn caller(&self, headers: &HeaderMap, peer: Peer) -> Caller {
        Caller::find(headers, peer.0.ip(), self.settings.proxies)
    }

    /// Whether `caller` failed so often that only requests with a valid key or a known token pass.
    fn is_limited(&self, caller: Caller) -> bool {
        self.settings.rate_limit.is_some_and(|rate| self.limiter.is_limited(rate, caller, self.clock.now()))
    }

    /// Counts a wrong key or token, or a request for something that does not exist, against `caller`.
    fn charge(&self, caller: Caller) {
        if let Some(rate) = self.settings.rate_limit {
            self.limiter.charge(rate, caller, self.clock.now());
        }
    }

    fn is_known(&self, id: &SandboxId, token: Option<&str>) -> bool {
        self.known_tokens.has(id, token, self.settings.is_token_optional)
    }

    /// A request with a valid key always passes, as the tenant of the key. One with a wrong key is counted and refused.
    fn admit(&self, key: Key, caller: Caller, connection: &Tracked) -> Result<Option<Tenant>, StatusCode> {
        match key {
            Key::NotNeeded => Ok(None),
            Key::Right(tenant) if connection.prove() => Ok(tenant),
            Key::Right(_) => Err(StatusCode::SERVICE_UNAVAILABLE),
            Key::Wrong if self.is_limited(caller) => Err(StatusCode::TOO_MANY_REQUESTS),
            Key::Wrong => {
                self.charge(caller);
                Err(StatusCode::UNAUTHORIZED)
            }
        }
    }
}

/// The connection that carries a request, if [`listener`] accepted it.
#[derive(Clone, Debug)]
pub struct Tracked(Option<Handle>);

impl Tracked {
    /// See [`Handle::prove`].
    fn prove(&self) -> bool {
        self.0.as_ref().is_none_or(Handle::prove)
    }

    fn upgraded(&self) {
        if let Some(handle) = &self.0 {
            handle.upgraded();
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Tracked {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get().cloned()))
    }
}

pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/", get(|| async { Json(json!({"message": "Server is running"})) }))
        .route("/status", get(status))
        .route("/create", any(create))
        .route("/attach/{sandbox_id}", any(attach))
        .route("/execute", post(execute::execute))
        .route("/sandboxes", get(sandbox_list::list))
        .route("/sandboxes/{sandbox_id}", get(sandbox_list::view).delete(sandbox_list::delete))
        .merge(ports::router())
        .layer(middleware::from_fn_with_state(api.clone(), ports::by_host))
        .with_state(api)
}

/// Serves until `shutdown`; then ends the remaining sessions, which takes a few seconds at most.
pub async fn serve(listener: TcpListener, api: Arc<Api>, shutdown: impl Future<Output = ()> + Send + 'static) {
    let (closing, clock, tasks) = (api.closing.clone(), api.clock.clone(), api.tasks.clone());
    let bounds = api.settings.connections;
    let server = listener::serve(listener, router(api.clone()), bounds, clock.clone(), tasks, closing.clone());
    let late = async {
        shutdown.await;
        closing.cancel();
        clock.sleep(Duration::from_secs(5)).await;
    };
    tokio::select! {
        () = server => {}
        // A client that keeps its connection open must not keep the server running.
        () = late => {}
    }
    api.tasks.close();
    let _ = clock.timeout(Duration::from_secs(5), api.tasks.wait()).await;
}

async fn status(State(api): State<Arc<Api>>, headers: HeaderMap) -> Result<Response, StatusCode> {
    api.settings.hosts.check(&headers)?;
    let draining = api.is_draining();
    let can = api.abilities();
    let bounds = &api.settings.limits;
    // The limits a sandbox actually gets, not the configured ones.
    let default = Limits { cpus: bounds.default.cpus.filter(|_| can.cpus), ..bounds.default.clone() };
    let body = json!({
        "status": if draining { "draining" } else { "ok" },
        "instance": api.settings.instance,
        "version": api.settings.version,
        "sandboxes": api.bus.held_count(),
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
    Ok((if draining { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }, Json(body)).into_response())
}

async fn create(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(parameters): Query<Vec<(String, String)>>,
    connection: Tracked,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, EdgeRefusal> {
    rate_limit::check_origin(&headers, &api.settings.origins)?;
    let caller = api.caller(&headers, peer);
    let tenant = api.admit(rate_limit::api_key(&headers, &api.settings), caller, &connection)?;
    let request = api.settings.traces.asked(Asked::Create, rate_limit::traceparent(&headers));
    let (details, config) = match SandboxConfig::from_query(&parameters) {
        Ok((config, is_given)) => (config.details, is_given.then_some(Ok(config))),
        Err(refusal) => (false, Some(Err(refusal))),
    };
    Ok(accept(&api.clone(), upgrade, &connection.clone(), move |socket, dialect| {
        let upgrade = session::Upgrade { dialect, details, request, caller, connection };
        session::create(api, socket, upgrade, tenant, config)
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
    connection: Tracked,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, EdgeRefusal> {
    rate_limit::check_origin(&headers, &api.settings.origins)?;
    let caller = api.caller(&headers, peer);
    let token = query
        .sandbox_token
        .or_else(|| rate_limit::header_text(&headers, "x-sandbox-token"))
        .or_else(|| rate_limit::offered(&headers, "baton.token."));
    // A malformed id was never issued, so nothing is looked up for it.
    let id = SandboxId::parse(&sandbox_id).ok();
    if api.is_limited(caller) && !id.as_ref().is_some_and(|id| api.is_known(id, token.as_deref())) {
        return Err(StatusCode::TOO_MANY_REQUESTS.into());
    }
    let request = api.settings.traces.asked(Asked::Attach, rate_limit::traceparent(&headers));
    let details = query.details.is_some_and(|details| details == "1" || details == "true");
    Ok(accept(&api.clone(), upgrade, &connection.clone(), move |socket, dialect| {
        session::attach(api, socket, session::Upgrade { dialect, details, request, caller, connection }, id, token)
    }))
}

/// Upgrades at once; the subprotocol decides the dialect.
fn accept<F>(
    api: &Arc<Api>,
    upgrade: WebSocketUpgrade,
    connection: &Tracked,
    session: impl FnOnce(WebSocket, Dialect) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    connection.upgraded();
    let dialect = Dialect::of_server(upgrade.is_v1(), api.settings.plain);
    let (response, socket) = upgrade.accept(api.inbound.clone(), api.clock.clone());
    // Tracked, so that shutdown waits for the session to end.
    api.tasks.spawn(async move {
        if let Some(socket) = socket.await {
            session(socket, dialect).await;
        }
    });
    response
}

/// Describes a records error to a client, without paths or object names.
fn public_message(error: &records::Error) -> String {
    use crate::storage::store;
    match error {
        records::Error::InvalidSpec(_) => "InvalidSpec: the metadata of the sandbox cannot be read.".to_owned(),
        records::Error::OtherStore(_) => {
            "OtherStore: this server is configured for another bucket than that of the sandbox.".to_owned()
        }
        records::Error::TokenMissing => {
            "TokenMissing: the sandbox has no token yet; an operator must give it one with `baton repair`.".to_owned()
        }
        records::Error::NotConfigured(text) => text.clone(),
        records::Error::NoCheckpoint => "The checkpoint is not one of the last two of its sandbox.".to_owned(),
        records::Error::Store(error) => match error {
            store::Error::Denied { .. } => "Storage refuses access: an operator must fix that.".to_owned(),
            store::Error::Conflict(_) | store::Error::RateLimited(_) | store::Error::Unavailable { .. } => {
                "Storage does not answer at the moment: try again.".to_owned()
            }
            store::Error::NotFound(_)
            | store::Error::Damaged { .. }
            | store::Error::Newer { .. }
            | store::Error::Unsigned(_)
            | store::Error::Other { .. } => "Storage failed.".to_owned(),
        },
    }
}
