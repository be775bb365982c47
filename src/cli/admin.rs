//! The admin listener: `/metrics`, for everyone who can reach it. It listens on loopback unless an
//! operator configures otherwise, and shows only metrics, never an id.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use axum::{
    Router,
    http::{HeaderMap, StatusCode, header},
    routing::get,
};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    api::{
        hosts::Hosts,
        listener::{self, ListenerLimits},
    },
    bus::Bus,
    clock::SystemClock,
    config::{Config, variables::ADMIN_LISTEN},
    metrics::Metrics,
};

/// The content type that Prometheus expects.
const OPENMETRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// One or two collectors connect every few seconds and may keep their connections open for longer.
const CONNECTION_BOUNDS: ListenerLimits =
    ListenerLimits { connections: 64, per_peer: None, keep_alive: Duration::from_secs(120) };

#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
    hosts: Hosts,
}

impl Admin {
    /// Binds the listener. Another server on this machine may already use the default address; an address
    /// that an operator chose must be free.
    pub async fn open(config: &Config) -> Result<Option<Self>> {
        let Some(address) = config.admin_listen else { return Ok(None) };
        let hosts = Hosts::new(address, false, &config.hosts);
        match TcpListener::bind(address).await {
            Ok(listener) => Ok(Some(Self { address: listener.local_addr().unwrap_or(address), listener, hosts })),
            Err(error) if config.is_default(ADMIN_LISTEN) => {
                tracing::info!(%address, %error, variable = %ADMIN_LISTEN, "no metrics are served: the address is in use");
                Ok(None)
            }
            Err(error) => {
                Err(error).with_context(|| format!("cannot listen on {address}: choose another with {ADMIN_LISTEN}"))
            }
        }
    }

    /// Serves forever.
    pub async fn serve(self, metrics: Metrics, bus: watch::Receiver<Arc<Bus>>) {
        let Self { listener, address, hosts } = self;
        tracing::info!(%address, "serving metrics");
        let page = move |headers: HeaderMap| async move {
            hosts.check(&headers)?;
            let counts = bus.borrow().counts();
            let page = metrics.page(counts.sessions, counts.wakeups);
            Ok::<_, StatusCode>(([(header::CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE)], page))
        };
        let app = Router::new().route("/metrics", get(page)).route("/healthz", get(|| async { "ok\n" }));
        let stop = CancellationToken::new();
        listener::serve(listener, app, CONNECTION_BOUNDS, Arc::new(SystemClock), TaskTracker::new(), stop).await;
    }
}
