//! The admin listener: `/metrics`, for whoever may reach it. It is on loopback unless an
//! operator says otherwise, and shows figures alone, never an id.

use std::sync::Arc;

use anyhow::{Context, Result};
use axum::{Router, http::header, routing::get};
use tokio::{net::TcpListener, sync::watch};

use crate::{config::Config, metrics::Metrics, storage::board::Board};

/// As Prometheus wants to be answered.
const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Binds the listener. Another server on this machine may have the default place already; one
/// that an operator chose must be free.
pub async fn listen(config: &Config) -> Result<Option<TcpListener>> {
    let Some(address) = config.admin_listen else { return Ok(None) };
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if config.is_default("BATON_ADMIN_LISTEN") => {
            tracing::info!(%address, %error, "no metrics are served: choose another place with BATON_ADMIN_LISTEN");
            Ok(None)
        }
        Err(error) => {
            Err(error).with_context(|| format!("cannot listen on {address}: choose another with BATON_ADMIN_LISTEN"))
        }
    }
}

/// Serves as long as it can; without a listener that is not at all.
pub async fn serve(listener: Option<TcpListener>, metrics: Metrics, board: watch::Receiver<Arc<Board>>) {
    let Some(listener) = listener else { return };
    if let Ok(address) = listener.local_addr() {
        tracing::info!(%address, "metrics are served");
    }
    let page = move || async move {
        let counts = board.borrow().counts();
        ([(header::CONTENT_TYPE, KIND)], metrics.page(counts.sessions, counts.nudges))
    };
    let app = Router::new().route("/metrics", get(page)).route("/healthz", get(|| async { "ok\n" }));
    if let Err(error) = axum::serve(listener, app).await {
        tracing::warn!(%error, "the admin listener failed");
    }
}
