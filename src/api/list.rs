//! `GET /sandboxes`: what there is, for who has the admin key.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use baton_protocol::{id::SandboxId, metadata::Metadata};
use futures::{StreamExt, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Api, limits, sentence};

const PAGE: usize = 100;
const AT_ONCE: usize = 16;
const WITHIN: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
pub struct ListQuery {
    label: Option<String>,
    after: Option<String>,
}

pub async fn list(
    State(api): State<Arc<Api>>,
    Query(query): Query<ListQuery>,
    headers: HeaderMap,
) -> Result<Response, StatusCode> {
    check(&api, &headers)?;
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
    let (mut ids, mut more) = match api.records.list(after.as_ref()).await {
        Ok(listed) => listed,
        Err(error) => return Ok(unavailable(&sentence(&error))),
    };
    if ids.len() > PAGE {
        ids.truncate(PAGE);
        more = true;
    }
    let next = more.then(|| ids.last().cloned()).flatten();
    let records = &api.records;
    let found = stream::iter(ids)
        .map(|id| async move { (records.find(&id).await, id) })
        .buffered(AT_ONCE)
        .filter_map(|(found, id)| {
            let view = match found {
                Ok(Some(found)) => is_labelled(&found, label.as_ref()).then(|| view_of(&api, &found)),
                // It went between the listing and the look.
                Ok(None) => None,
                Err(error) => label.is_none().then(|| json!({"sandbox_id": id, "error": sentence(&error)})),
            };
            std::future::ready(view)
        })
        .collect::<Vec<_>>();
    match api.clock.timeout(WITHIN, found).await {
        Ok(sandboxes) => Ok(Json(json!({"sandboxes": sandboxes, "next": next})).into_response()),
        Err(_) => Ok(unavailable("Storage does not answer at the moment: try again.")),
    }
}

pub async fn view(
    State(api): State<Arc<Api>>,
    Path(sandbox_id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, StatusCode> {
    check(&api, &headers)?;
    let id = SandboxId::parse(&sandbox_id).map_err(|_| StatusCode::NOT_FOUND)?;
    match api.records.find(&id).await {
        Ok(Some(found)) => Ok(Json(view_of(&api, &found)).into_response()),
        Ok(None) => Err(StatusCode::NOT_FOUND),
        Err(error) => Ok(unavailable(&sentence(&error))),
    }
}

fn check(api: &Api, headers: &HeaderMap) -> Result<(), StatusCode> {
    limits::check_origin(headers, &api.settings.origins)?;
    limits::check_admin(headers, &api.settings)
}

fn unavailable(text: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"message": text}))).into_response()
}

fn is_labelled(found: &Metadata, label: Option<&(String, String)>) -> bool {
    label.is_none_or(|(name, value)| found.spec.labels.get(name) == Some(value))
}

fn view_of(api: &Api, found: &Metadata) -> Value {
    let (spec, status) = (&found.spec, &found.status);
    let created = humantime::parse_rfc3339_weak(&spec.created_timestamp).ok();
    let age = created.and_then(|created| api.clock.wall().duration_since(created).ok());
    json!({
        "sandbox_id": spec.sandbox_id,
        "phase": status.phase,
        "reason": status.reason,
        "instance": status.instance,
        "desired_state": spec.desired_state,
        "labels": spec.labels,
        "created": spec.created_timestamp,
        "age_seconds": age.map(|age| age.as_secs()),
        "enable_checkpoint": spec.enable_sandbox_checkpoint,
        "enable_sandbox_handoff": spec.enable_sandbox_handoff,
        "latest_checkpoint": found.latest_sandbox_checkpoint.as_ref().map(|latest| &latest.path),
    })
}
