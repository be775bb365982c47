//! `baton serve`: connects the modules, runs them, and drains.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use baton_protocol::id::InstanceId;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{admin, descriptors, runtime_paths::Pieces, termination::Termination};
use crate::{
    api::{self, Api, hosts::Hosts, listener},
    bus::{Bus, LifecycleEvent},
    clock::{SharedClock, SystemClock},
    config::{
        Config, LeaseTimes,
        variables::{API_KEYS, LIMITS, LISTEN},
    },
    fair_watch::FairWatch,
    ipc::IpcHello,
    metrics::Metrics,
    network::{Denials, DeniedConnection, DeniedConnections, NameResolver, NetworkContext},
    reconciler::{self, AllowedRuntimes, BaseUpload, Housekeeping, ReconcilerContext, desired::Drain},
    runtime::{
        Containers, Lifecycle, RuntimeSettings, STAGING, Shares, WarmSettings, archive::ArchiveLimits, predecessor,
        sign,
    },
    storage::{
        lease::lease_rules::Identity,
        memory::Memory,
        records::{Durable, Records},
        signature::Seals,
        store::Store,
        stores::Stores,
    },
    traces::{Target, Traces},
};

/// How long the release of sandboxes that missed the drain timeout may take.
const LAST_CALL: Duration = Duration::from_secs(1);

pub async fn serve(config: Config) -> Result<()> {
    descriptors::raise();
    let clock: SharedClock = Arc::new(SystemClock);
    let listener = listen(&config).await?;
    let metrics = Metrics::default();
    let half = ReconcilerHalf::open(&config, &clock, &metrics).await?;
    let side = AdminServer::open(&config, metrics).await?;
    let (leaving, leaving_seen) = watch::channel(false);
    let api = Api::new(
        api_settings(&config, &half.hello(), leaving_seen, half.tools.traces.clone()),
        clock.clone(),
        half.tools.records.clone(),
        half.tools.bus.clone(),
        half.containers.clone(),
        half.containers.clone(),
    );
    let termination = Termination::listen()?;
    say_hello(&config, half.instance(), &listener)?;

    let stop_api = CancellationToken::new();
    let front = api::serve(listener, api, stop_api.clone().cancelled_owned());
    let back = half.run(&config, &leaving, &termination);
    let halves = async {
        tokio::select! {
            () = front => Ok(()),
            () = async {
                back.await;
                stop_api.cancel();
                std::future::pending::<()>().await
            } => Ok(()),
        }
    };
    let outcome = tokio::select! {
        outcome = halves => outcome,
        () = side.serve(half.tools.bus.clone()) => Ok(()),
        () = termination.second() => {
            tracing::warn!("received a second signal; exiting at once");
            Ok(())
        }
    };
    half.containers.close().await;
    half.tools.traces.close().await;
    outcome
}

/// The half of an instance that runs sandboxes: its reconciler.
pub(super) struct ReconcilerHalf {
    denied: tokio::sync::Mutex<DeniedConnections>,
    pub containers: Arc<Containers>,
    pub tools: Arc<ReconcilerContext>,
    /// Holds the records that end with this instance.
    pub memory: Arc<dyn Store>,
}

impl ReconcilerHalf {
    pub async fn open(config: &Config, clock: &SharedClock, metrics: &Metrics) -> Result<Self> {
        let pieces = Pieces::find(config)?;
        let (network, denied) = network(config, clock, metrics);
        let settings = settings(config, &pieces, network, metrics)?;
        let containers = Arc::new(Containers::open(settings, clock.clone()).await?);
        say_what_is_held(config, &containers);
        let who = Identity { me: clock.instance_id(), predecessor: predecessor(&config.state_dir) };
        sign(&config.state_dir, &who.me)
            .with_context(|| format!("the state directory {} is not writable", config.state_dir.display()))?;
        let times = config.lease;
        let traces = traces(config, &who.me, clock);
        let stores = Stores::open(&config.storage, clock).counted(metrics);
        let stores = stores.sealed_by(Seals::new(config.hmac_keys.clone()));
        let (checkpoints, snapshots) = (stores.of_checkpoints(), stores.of_snapshots());
        let memory: Arc<dyn Store> = Arc::new(Memory::new(clock.clone()));
        let tools = Arc::new(ReconcilerContext {
            who,
            clock: clock.clone(),
            records: records(stores, memory.clone(), clock, times).measured_by(metrics.clone()),
            bus: Bus::new(clock.clone()),
            lifecycle: containers.clone(),
            checkpoints,
            snapshots,
            quotas: config.quotas.clone(),
            egress: config.egress.default.clone(),
            archive_size: config.archive_size,
            base_upload: BaseUpload::new(config.store_runtime),
            runtimes: AllowedRuntimes::new(config.runtimes.clone()),
            staging: config.state_dir.join(STAGING),
            times,
            drain: Arc::new(FairWatch::new(Drain::No)),
            housekeeping: Housekeeping {
                sweep: config.sweep,
                retention: config.retention,
                keep_checkpoints: config.keep_checkpoints as usize,
                checkpoint_every: config.checkpoint_every,
                room: config.max_sandboxes,
            },
            metrics: metrics.clone(),
            traces,
        });
        Ok(Self { denied: denied.into(), containers, tools, memory })
    }

    pub fn instance(&self) -> &InstanceId {
        &self.tools.who.me
    }

    /// What the API must know about this backend.
    pub fn hello(&self) -> IpcHello {
        let runsc = self.containers.facts().runsc_version;
        IpcHello::new(self.instance().clone(), runsc, self.containers.cgroups(), self.tools.times)
    }

    /// Runs until a signal, and then until every sandbox is released or the drain timeout is over.
    /// `leaving` is set at the signal.
    pub async fn run(&self, config: &Config, leaving: &watch::Sender<bool>, termination: &Termination) {
        let stop = CancellationToken::new();
        let clock = &self.tools.clock;
        let end = async {
            termination.first().await;
            tracing::info!(within = ?config.drain, "draining; a second signal exits at once");
            leaving.send_replace(true);
            self.containers.drain();
            self.tools.drain.post(Drain::Draining);
            clock.sleep(config.drain).await;
            tracing::warn!("the drain time is up; the remaining sandboxes are left with their last checkpoint");
            self.tools.drain.post(Drain::Over);
            clock.sleep(LAST_CALL).await;
        };
        tokio::select! {
            () = reconciler::run(self.tools.clone(), stop.clone()) => {}
            () = self.announce_denials() => {}
            () = end => stop.cancel(),
        }
    }

    /// Tells sessions which connections were refused. Never returns.
    async fn announce_denials(&self) {
        let mut denied = self.denied.lock().await;
        loop {
            let DeniedConnection { sandbox, host, port, why } = denied.next().await;
            self.tools.bus.post(&sandbox, LifecycleEvent::EgressDenied { host, port, why: why.to_owned() });
        }
    }
}

/// The admin listener and its metrics.
pub(super) struct AdminServer {
    admin: Option<admin::Admin>,
    metrics: Metrics,
}

impl AdminServer {
    /// Opened last, so that an error that prevents the start is reported alone.
    pub async fn open(config: &Config, metrics: Metrics) -> Result<Self> {
        Ok(Self { admin: admin::Admin::open(config).await?, metrics })
    }

    /// Serves forever.
    pub async fn serve(self, bus: Arc<Bus>) {
        self.serve_latest(watch::Sender::new(bus).subscribe()).await;
    }

    /// Serves forever, with a bus that may be replaced.
    pub async fn serve_latest(self, bus: watch::Receiver<Arc<Bus>>) {
        if let Some(admin) = self.admin {
            admin.serve(self.metrics, bus).await;
        }
        std::future::pending().await
    }
}

pub(super) async fn listen(config: &Config) -> Result<TcpListener> {
    TcpListener::bind(config.listen)
        .await
        .map_err(|error| anyhow!("cannot listen on {} ({error}): choose another address with {LISTEN}", config.listen))
}

/// `memory` holds the records that end with this instance.
pub(super) fn records(stores: Stores, memory: Arc<dyn Store>, clock: &SharedClock, times: LeaseTimes) -> Records {
    let durable = match (&stores.lock, &stores.metadata, &stores.checkpoints) {
        (Some(lock), Some(metadata), Some(_)) => Some(Durable {
            locks: lock.store.clone(),
            metadata: metadata.store.clone(),
            lock_bucket: lock.bucket.clone(),
        }),
        _ => None,
    };
    let can_snapshot = stores.snapshots.is_some();
    let (forks_from, seals) = (stores.of_checkpoints(), stores.seals().clone());
    let records = Records::new(clock.clone(), memory, durable, can_snapshot, times).checked_by(stores);
    let records = records.sealed_by(seals);
    match forks_from {
        Some(checkpoints) => records.forking_from(checkpoints),
        None => records,
    }
}

/// What the connections of all sandboxes share, and where refused ones are announced.
fn network(config: &Config, clock: &SharedClock, metrics: &Metrics) -> (Arc<NetworkContext>, DeniedConnections) {
    let (denials, denied) = Denials::new(clock.clone());
    let context = NetworkContext {
        clock: clock.clone(),
        metrics: metrics.clone(),
        settings: config.egress.clone(),
        resolver: NameResolver::of_machine(),
        denials,
    };
    (Arc::new(context), denied)
}

fn settings(
    config: &Config,
    pieces: &Pieces,
    network: Arc<NetworkContext>,
    metrics: &Metrics,
) -> Result<RuntimeSettings> {
    Ok(RuntimeSettings {
        exe: std::env::current_exe().context("the path of this executable is unknown")?,
        runsc: pieces.runsc.clone(),
        state_dir: config.state_dir.clone(),
        rootfs: pieces.rootfs.clone(),
        rootfs_digest: pieces.rootfs_digest.clone(),
        rootfs_cache: config.cache_dir.join("extracted"),
        rootfs_cache_size: config.rootfs_cache,
        runtimes: config.cache_dir.join("runtimes"),
        archive_limits: ArchiveLimits {
            size: config.archive_size,
            entries: config.archive_entries.into(),
            depth: config.archive_depth,
        },
        agent: pieces.agent.clone(),
        detach_grace: config.detach_grace,
        confirm: config.lease.confirm,
        cpu_features: (!config.cpu_features.is_empty()).then(|| config.cpu_features.clone()),
        warm: WarmSettings { count: config.warm, room: config.max_sandboxes, limits: config.limits.default.clone() },
        network,
        metrics: metrics.clone(),
    })
}

pub(super) fn traces(config: &Config, instance: &InstanceId, clock: &SharedClock) -> Traces {
    let endpoint = config.otlp_endpoint.as_deref();
    Traces::open(endpoint.map(|endpoint| Target { endpoint, service: &config.otel_service }).as_ref(), instance, clock)
}

pub(super) fn api_settings(
    config: &Config,
    half: &IpcHello,
    drain: watch::Receiver<bool>,
    traces: Traces,
) -> api::ApiSettings {
    api::ApiSettings {
        instance: half.instance.clone(),
        version: env!("CARGO_PKG_VERSION"),
        runsc_version: half.runsc_version.clone(),
        idle_timeout: config.idle_timeout.map(api::intent::whole_seconds),
        max_sandboxes: config.max_sandboxes,
        limits: config.limits.clone(),
        cgroups: half.cgroups.clone(),
        connections: connections(config),
        inbound_memory: config.connections.inbound_memory,
        egress_max: config.egress.ceiling.clone(),
        api_keys: config.api_keys.clone(),
        quotas: config.quotas.clone(),
        admin_key: config.admin_key.as_ref().map(|key| key.reveal().clone()),
        plain: config.plain,
        is_token_optional: config.is_token_optional,
        origins: config.origins.clone(),
        rate_limit: config.rate_limit.map(|rate| api::rate_limit::FailureRate {
            burst: rate.count,
            per_second: f64::from(rate.count) / rate.per.as_secs_f64(),
        }),
        proxies: config.trusted_proxies,
        domain: config.domain.as_deref().map(api::PortDomain::new),
        hosts: Hosts::new(config.listen, config.trusted_proxies > 0, &config.hosts),
        drain,
        handoff_wait: config.lease.handoff_wait,
        traces,
    }
}

/// The bounds for connections to the API.
pub(super) fn connections(config: &Config) -> listener::ListenerLimits {
    let is_proxied = config.trusted_proxies > 0;
    listener::ListenerLimits {
        connections: descriptors::connections(),
        // All connections come from the proxy.
        per_peer: (!is_proxied).then_some(config.connections.per_peer),
        keep_alive: config.connections.keep_alive,
    }
}

pub(super) fn say_hello(config: &Config, instance: &InstanceId, listener: &TcpListener) -> Result<()> {
    let address = listener.local_addr().context("the listener has no address")?;
    tracing::info!(%address, %instance, version = env!("CARGO_PKG_VERSION"), "serving");
    for warning in config.warnings() {
        tracing::warn!(warning, "configuration warning");
    }
    if config.api_keys.is_empty() && config.listen.ip().is_loopback() {
        tracing::info!(variable = %API_KEYS, "no API key is set: every program on this machine may create sandboxes");
    }
    Ok(())
}

/// Logs once, before the first sandbox, which limits cannot be enforced here.
fn say_what_is_held(config: &Config, containers: &Containers) {
    match containers.cgroups() {
        Ok(shares) if shares.cpus || config.limits.ceiling.cpus.is_none() => {}
        Ok(Shares { version, .. }) => {
            tracing::warn!(
                cgroup = version,
                variable = %LIMITS,
                "cpus have a limit, but no cgroup here controls CPUs: they are not limited"
            );
        }
        Err(why) if config.limits.ceiling.cpus.is_some() => {
            tracing::warn!(why, variable = %LIMITS, "cpus cannot be limited here; all other limits are enforced");
        }
        Err(why) => tracing::info!(why, "cgroups are not available: CPUs cannot be limited"),
    }
}
