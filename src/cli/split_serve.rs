//! `baton api` and `baton reconciler`: the two halves of `baton serve` as two processes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use axum::{Json, Router, http::StatusCode, response::IntoResponse};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    descriptors,
    serve::{AdminServer, ReconcilerHalf, api_settings, connections, listen, records, say_hello, traces},
    termination::Termination,
};
use crate::{
    api::{self, Api, listener},
    bus::Bus,
    clock::{SharedClock, SystemClock},
    config::{Config, LeaseTimes},
    ipc::{self, IpcClient, IpcServer},
    metrics::Metrics,
    storage::{signature::Seals, stores::Stores},
};

/// The interval between attempts to reach the reconciler.
const RETRY: Duration = Duration::from_millis(200);
/// After a signal: how long to wait for the reconciler to report that it received one too.
const BOTH: Duration = Duration::from_millis(500);
/// Lets the last events of an instance reach its clients before their sessions end.
const LAST_EVENTS: Duration = Duration::from_millis(200);

/// Runs the sandboxes of an instance until SIGTERM, for an API on the same machine.
pub async fn reconciler(config: Config) -> Result<()> {
    descriptors::raise();
    let clock: SharedClock = Arc::new(SystemClock);
    let metrics = Metrics::default();
    let half = ReconcilerHalf::open(&config, &clock, &metrics).await?;
    let side = AdminServer::open(&config, metrics).await?;
    let api_user = config.api_user.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let socket = ipc::listen(&config.socket_dir, api_user)?;
    let (leaving, leaving_seen) = watch::channel(false);
    let back = IpcServer {
        hello: half.hello(),
        clock,
        bus: half.tools.bus.clone(),
        execs: half.containers.clone(),
        lifecycle: half.containers.clone(),
        memory: half.memory.clone(),
        ports: half.containers.clone(),
        leaving: leaving_seen,
        api_user,
    };
    let termination = Termination::listen()?;
    tracing::info!(instance = %half.instance(), sockets = %config.socket_dir.display(), "reconciling");
    let stop = CancellationToken::new();
    let work = async {
        let answer = back.serve(socket, stop.clone());
        let run = async {
            half.run(&config, &leaving, &termination).await;
            stop.cancel();
        };
        tokio::join!(answer, run);
    };
    tokio::select! {
        () = work => {}
        () = side.serve(half.tools.bus.clone()) => {}
        () = termination.second() => tracing::warn!("received a second signal; exiting at once"),
    }
    half.containers.close().await;
    half.tools.traces.close().await;
    Ok(())
}

/// Serves clients until SIGTERM, as the user that starts it. While there is no reconciler, clients are told so.
pub async fn api(config: Config) -> Result<()> {
    descriptors::raise();
    let clock: SharedClock = Arc::new(SystemClock);
    let listener = listen(&config).await?.into_std().context("the listener cannot be shared")?;
    let another = || {
        let listener = listener.try_clone().and_then(TcpListener::from_std);
        listener.context("the listener cannot be shared")
    };
    let termination = Termination::listen()?;
    let metrics = Metrics::default();
    let side = AdminServer::open(&config, metrics.clone()).await?;
    // Shared by all rounds: a page requested between two of them shows no sessions.
    let (shown, bus) = watch::channel(Bus::new(clock.clone()));
    let tasks = TaskTracker::new();
    let (leaving, leaving_seen) = watch::channel(false);
    let rounds = async {
        let mut is_new = true;
        loop {
            let waiting = CancellationToken::new();
            let found = tokio::select! {
                front = find(&config, &clock, &tasks) => front,
                () = wait_page(another()?, &config, &clock, waiting.clone()) => return Ok(()),
                () = termination.first() => return Ok(()),
            };
            waiting.cancel();
            shown.send_replace(found.bus.clone());
            if std::mem::take(&mut is_new) {
                tracing::info!(user = rustix::process::geteuid().as_raw(), "connected to the reconciler");
            }
            let round = Round {
                config: &config,
                clock: &clock,
                metrics: &metrics,
                leaving: &leaving,
                termination: &termination,
            };
            if round.serve(another()?, found, leaving_seen.clone()).await? {
                return Ok(());
            }
            tracing::warn!("lost the reconciler; waiting for another");
        }
    };
    tokio::select! {
        ended = rounds => ended,
        () = side.serve_latest(bus) => Ok(()),
        () = termination.second() => {
            tracing::warn!("received a second signal; exiting at once");
            Ok(())
        }
    }
}

/// Retries until there is a reconciler.
async fn find(config: &Config, clock: &SharedClock, tasks: &TaskTracker) -> IpcClient {
    let mut told = String::new();
    loop {
        match ipc::connect(&config.socket_dir, clock, tasks).await {
            Ok(front) => return front,
            Err(error) => {
                // Log each reason once.
                let reason = error.to_string();
                if reason != told {
                    tracing::warn!(%error, "the reconciler cannot be reached yet");
                    told = reason;
                }
            }
        }
        clock.sleep(RETRY).await;
    }
}

/// The response to clients while there is no reconciler.
async fn wait_page(listener: TcpListener, config: &Config, clock: &SharedClock, stop: CancellationToken) {
    let answer = || async {
        let body = json!({"status": "starting", "message": "The reconciler half of the server does not respond yet."});
        (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
    };
    let app = Router::new().fallback(answer);
    listener::serve(listener, app, connections(config), clock.clone(), TaskTracker::new(), stop).await;
}

/// The API with one reconciler, from connecting to disconnecting.
struct Round<'a> {
    config: &'a Config,
    clock: &'a SharedClock,
    metrics: &'a Metrics,
    leaving: &'a watch::Sender<bool>,
    termination: &'a Termination,
}

impl Round<'_> {
    /// Returns whether this was the last round, after which this process ends.
    async fn serve(&self, listener: TcpListener, front: IpcClient, leaving: watch::Receiver<bool>) -> Result<bool> {
        let IpcClient { hello, bus, execs, memory, ports, mut draining, gone, hold: _hold } = front;
        let stores = Stores::open(&self.config.storage, self.clock).counted(self.metrics);
        let stores = stores.sealed_by(Seals::new(self.config.hmac_keys.clone()));
        let times = LeaseTimes { hold: hello.hold, takeover: hello.takeover, ..self.config.lease };
        let records = records(stores, memory, self.clock, times).measured_by(self.metrics.clone());
        // The instance id is the reconciler's: another reconciler is another source of traces.
        let traces = traces(self.config, &hello.instance, self.clock);
        let settings = api_settings(self.config, &hello, leaving, traces.clone());
        let api = Api::new(settings, self.clock.clone(), records, bus, execs, ports);
        say_hello(self.config, &hello.instance, &listener)?;
        let stop = CancellationToken::new();
        let front = api::serve(listener, api, stop.clone().cancelled_owned());
        let is_last = AtomicBool::new(false);
        let drains = draining.clone();
        let end = async {
            tokio::select! {
                () = gone.cancelled() => {}
                _ = draining.wait_for(|draining| *draining) => self.see_it_out(&gone).await,
                // The reconciler stays: clients reconnect to it through the next API process.
                () = self.told_alone(&is_last, drains) => {}
            }
            stop.cancel();
            std::future::pending::<()>().await;
        };
        let signal = async {
            self.termination.first().await;
            is_last.store(true, Ordering::Relaxed);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = front => {}
            () = end => {}
            () = signal => {}
        }
        traces.close().await;
        let is_last = is_last.into_inner();
        if !is_last {
            self.leaving.send_replace(false);
        }
        Ok(is_last)
    }

    /// Resolves when this process got a signal and the reconciler did not.
    async fn told_alone(&self, is_last: &AtomicBool, mut draining: watch::Receiver<bool>) {
        self.termination.first().await;
        is_last.store(true, Ordering::Relaxed);
        self.leaving.send_replace(true);
        if self.clock.timeout(BOTH, draining.wait_for(|draining| *draining)).await.is_ok() {
            std::future::pending::<()>().await;
        }
    }

    /// The reconciler releases its sandboxes: keep serving until their clients know.
    async fn see_it_out(&self, gone: &CancellationToken) {
        self.leaving.send_replace(true);
        let _ = self.clock.timeout(self.config.drain + 2 * BOTH + Duration::from_secs(1), gone.cancelled()).await;
        self.clock.sleep(LAST_EVENTS).await;
    }
}
