//! `GET /sandboxes/{id}/ports`: what listens inside.

use std::sync::Arc;

use axum::{
    Json,
    extract::{ConnectInfo, Path, State},
    http::{HeaderMap, Uri},
    response::{IntoResponse, Response},
};
use baton_protocol::id::SandboxId;
use serde_json::{Value, json};

use super::{
    arrival,
    port_access::ShownToken,
    port_headers,
    port_refusal::PortRefusal,
    port_route::{PortTarget, split_authority},
};
use crate::{
    api::{
        Api, Tracked,
        lingering_close::Peer,
        public_message,
        rate_limit::{self, Key},
    },
    network::PortError,
};

/// Lists the ports for the bearer of the token, the tenant, or the operator. `ports` is null if they are not known here.
pub async fn list(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(sandbox_id): Path<String>,
    uri: Uri,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, Response> {
    rate_limit::check_origin(&headers, &api.settings.origins).map_err(IntoResponse::into_response)?;
    api.settings.hosts.check(&headers).map_err(IntoResponse::into_response)?;
    let id = SandboxId::parse(&sandbox_id).ok();
    let known = match rate_limit::list_key(&headers, &api.settings) {
        Key::Right(tenant) => {
            let found = match &id {
                Some(id) => api.records.find(id).await,
                None => Ok(None),
            };
            match found {
                Ok(Some(found)) if tenant.is_none() || found.spec.tenant == tenant => Ok(found.spec.sandbox_id),
                Ok(_) => Err(PortRefusal::NotFound),
                Err(error) => Err(PortRefusal::Unavailable(public_message(&error))),
            }
        }
        Key::Wrong | Key::NotNeeded => {
            let shown = match ShownToken::of(&headers, &uri) {
                // A cookie is for the pages of one port.
                ShownToken::Cookies(_) => ShownToken::Absent,
                shown @ (ShownToken::Absent | ShownToken::Explicit(_) | ShownToken::Query(_)) => shown,
            };
            let caller = api.caller(&headers, peer);
            let found = api.find_for_port(id.as_ref(), &shown, caller, &connection).await;
            found.map(|found| found.spec.sandbox_id.clone())
        }
    };
    let id = known.map_err(IntoResponse::into_response)?;
    Ok(Json(view(&api, &id, &headers).await).into_response())
}

async fn view(api: &Api, id: &SandboxId, headers: &HeaderMap) -> Value {
    let outer = port_headers::outer_host(headers).unwrap_or_default();
    let suffix = split_authority(&outer).1.map_or(String::new(), |port| format!(":{port}"));
    let proto = if port_headers::is_https(headers, api.settings.proxies) { "https" } else { "http" };
    let entry = |port: u16| {
        let path = PortTarget { id: id.clone(), port }.prefix() + "/";
        let host = api.settings.domain.as_ref().map(|domain| domain.host(id, port));
        let url = host.map(|host| format!("{proto}://{host}{suffix}/"));
        json!({"port": port, "path": path, "url": url})
    };
    match arrival::network_view(api, id).await {
        Ok(view) => {
            let ports: Vec<_> = view.listening.into_iter().map(entry).collect();
            json!({"sandbox_id": id, "ports": ports, "egress_denied": view.denied})
        }
        Err(error) => {
            let message = match error {
                PortError::NotRunning => "The sandbox does not run on this instance.".to_owned(),
                PortError::Refused | PortError::Busy | PortError::Unsupported | PortError::TimedOut => {
                    format!("The ports cannot be listed: {error}.")
                }
            };
            json!({"sandbox_id": id, "ports": null, "message": message})
        }
    }
}
