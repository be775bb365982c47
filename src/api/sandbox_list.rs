//! `GET /sandboxes`: lists all sandboxes, for holders of the admin key.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{ConnectInfo, Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use baton_protocol::{id::SandboxId, metadata::Metadata, reason::Reason};
use futures::{StreamExt, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Api, Peer, Tracked, public_message, rate_limit};
use crate::storage::unresponsive::{self, LastWrite, Unresponsive};

const PAGE: usize = 100;
const AT_ONCE: usize = 16;
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
pub struct ListQuery {
    label: Option<String>,
    after: Option<String>,
}

pub async fn list(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(query): Query<ListQuery>,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, StatusCode> {
    check(&api, &headers, peer, &connection)?;
    let bad = |text: &str| Ok((StatusCode::BAD_REQUEST, Json(json!({"message": text}))).into_response());
    let after = match query.after.as_deref().map(SandboxId::parse) {
        None => None,
        Some(Ok(id)) => Some(id),
        Some(Err(_)) => return bad("`after` is not a sandbox id."),
    };
    let label = match query.label.as_deref().map(|label| label.split_once('=')) {
        None => None,
        Some(Some((name, value))) => Some((name.to_owned(), value.to_owned())),
        Some(None) => return bad("`label` must be `name=value`."),
    };
    let (listed, more) = match api.records.page(after.as_ref(), PAGE).await {
        Ok(listed) => listed,
        Err(error) => return Ok(unavailable(&public_message(&error))),
    };
    let next = more.then(|| listed.last().map(|(id, _)| id.clone())).flatten();
    let (api, label) = (&*api, label.as_ref());
    let found = stream::iter(listed)
        .map(|(id, lock)| async move {
            match api.records.find(&id).await {
                Ok(Some(found)) if is_labelled(&found, label) => Some(view_of(api, &found, lock).await),
                // The sandbox was erased after the listing, or does not have the label.
                Ok(_) => None,
                Err(error) => label.is_none().then(|| json!({"sandbox_id": id, "error": public_message(&error)})),
            }
        })
        .buffered(AT_ONCE)
        .filter_map(std::future::ready)
        .collect::<Vec<_>>();
    match api.clock.timeout(LIST_TIMEOUT, found).await {
        Ok(sandboxes) => Ok(Json(json!({"sandboxes": sandboxes, "next": next})).into_response()),
        Err(_) => Ok(unavailable("Storage does not answer at the moment: try again.")),
    }
}

pub async fn view(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(sandbox_id): Path<String>,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, StatusCode> {
    check(&api, &headers, peer, &connection)?;
    let id = SandboxId::parse(&sandbox_id).map_err(|_| StatusCode::NOT_FOUND)?;
    match api.records.find(&id).await {
        Ok(Some(found)) => Ok(Json(view_of(&api, &found, None).await).into_response()),
        Ok(None) => Err(StatusCode::NOT_FOUND),
        Err(error) => Ok(unavailable(&public_message(&error))),
    }
}

fn check(api: &Api, headers: &HeaderMap, peer: Peer, connection: &Tracked) -> Result<(), StatusCode> {
    rate_limit::check_origin(headers, &api.settings.origins)?;
    api.settings.hosts.check(headers)?;
    let admin = api.settings.admin_key.as_deref().ok_or(StatusCode::FORBIDDEN)?;
    api.admit(rate_limit::admin_key(headers, admin), api.caller(headers, peer), connection).map(drop)
}

fn unavailable(text: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"message": text}))).into_response()
}

fn is_labelled(found: &Metadata, label: Option<&(String, String)>) -> bool {
    label.is_none_or(|(name, value)| found.spec.labels.get(name) == Some(value))
}

/// `lock` is the last write of the lock, if it is known.
async fn view_of(api: &Api, found: &Metadata, lock: Option<LastWrite>) -> Value {
    let (spec, status) = (&found.spec, &found.status);
    let silent = api.records.unresponsive(found, lock).await;
    let created = humantime::parse_rfc3339_weak(&spec.created_timestamp).ok();
    let age = created.and_then(|created| api.clock.wall().duration_since(created).ok());
    json!({
        "sandbox_id": spec.sandbox_id,
        "tenant": spec.tenant,
        "phase": silent.as_ref().map_or_else(|| json!(status.phase), |_| json!(unresponsive::PHASE)),
        "reason": silent.as_ref().map_or(status.reason.as_str(), |_| Reason::Unresponsive.name()),
        "message": silent.as_ref().map_or_else(|| status.message.clone(), Unresponsive::story),
        "unresponsive": silent.as_ref().map(Unresponsive::json),
        "instance": status.instance,
        "desired_state": spec.desired_state,
        "labels": spec.labels,
        "created": spec.created_timestamp,
        "age_seconds": age.map(|age| age.as_secs()),
        "enable_checkpoint": spec.enable_sandbox_checkpoint,
        "enable_sandbox_handoff": spec.enable_sandbox_handoff,
        "latest_checkpoint": found.latest_sandbox_checkpoint.as_ref().map(|latest| &latest.path),
        "last_checkpointed": found.last_checkpointed,
    })
}
