//! `/sandboxes`: lists, shows and deletes sandboxes. The operator's key covers all of them, a tenant's key its own.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{ConnectInfo, Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use baton_protocol::{
    id::{SandboxId, Tenant},
    metadata::Metadata,
    reason::Reason,
};
use futures::{StreamExt, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Api, Peer, Tracked, public_message,
    rate_limit::{self, EdgeRefusal, Key},
    token,
};
use crate::storage::{
    records,
    unresponsive::{self, LastWrite, Unresponsive},
};

const PAGE: usize = 100;
const AT_ONCE: usize = 16;
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest wait of a request for the end of a deletion.
const MAX_DELETE_WAIT: Duration = Duration::from_secs(60);
const DELETE_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Deserialize)]
pub struct ListQuery {
    label: Option<String>,
    after: Option<String>,
}

#[derive(Deserialize)]
pub struct DeleteQuery {
    /// How many seconds to wait until the sandbox is gone; by default not at all.
    wait: Option<u64>,
}

pub async fn list(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(query): Query<ListQuery>,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, EdgeRefusal> {
    let scope = check(&api, &headers, peer, &connection)?;
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
    let filter = ListFilter { scope, label };
    match api.clock.timeout(LIST_TIMEOUT, filter.page(&api, after)).await {
        Ok(Ok((sandboxes, next))) => Ok(Json(json!({"sandboxes": sandboxes, "next": next})).into_response()),
        Ok(Err(error)) => Ok(unavailable(&public_message(&error))),
        Err(_) => Ok(unavailable("Storage does not answer at the moment: try again.")),
    }
}

/// Whose sandboxes a request may see: those of one tenant, or with `None` all.
#[derive(Clone, Debug)]
struct ListScope(Option<Tenant>);

impl ListScope {
    fn covers(&self, found: &Metadata) -> bool {
        self.0.is_none() || found.spec.tenant == self.0
    }
}

struct ListFilter {
    scope: ListScope,
    label: Option<(String, String)>,
}

impl ListFilter {
    /// One page, and the id after which the next one starts. A tenant never learns an id that is not its own, so its
    /// page is filled from as many pages of the store as it takes.
    async fn page(&self, api: &Api, after: Option<SandboxId>) -> records::Result<(Vec<Value>, Option<SandboxId>)> {
        let (mut sandboxes, mut after) = (Vec::new(), after);
        loop {
            let (listed, has_more) = api.records.page(after.as_ref(), PAGE).await?;
            let last = listed.last().map(|(id, _)| id.clone());
            let found = stream::iter(listed).map(|(id, lock)| self.view(api, id, lock)).buffered(AT_ONCE);
            let found: Vec<_> = found.filter_map(std::future::ready).collect().await;
            if self.scope.0.is_none() {
                return Ok((found.into_iter().map(|(_, view)| view).collect(), last.filter(|_| has_more)));
            }
            for (id, view) in found {
                sandboxes.push(view);
                if sandboxes.len() == PAGE {
                    return Ok((sandboxes, Some(id)));
                }
            }
            if !has_more || last.is_none() {
                return Ok((sandboxes, None));
            }
            after = last;
        }
    }

    /// `None` if the sandbox is not covered, or was erased after the listing.
    async fn view(&self, api: &Api, id: SandboxId, lock: Option<LastWrite>) -> Option<(SandboxId, Value)> {
        match api.records.find(&id).await {
            Ok(Some(found)) if self.scope.covers(&found) && self.is_labelled(&found) => {
                Some((id, view_of(api, &found, lock).await))
            }
            Ok(_) => None,
            // Whose it is cannot be read either.
            Err(error) => {
                let is_shown = self.label.is_none() && self.scope.0.is_none();
                is_shown.then(|| (id.clone(), json!({"sandbox_id": id, "error": public_message(&error)})))
            }
        }
    }

    fn is_labelled(&self, found: &Metadata) -> bool {
        self.label.as_ref().is_none_or(|(name, value)| found.spec.labels.get(name) == Some(value))
    }
}

pub async fn view(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(sandbox_id): Path<String>,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, EdgeRefusal> {
    let scope = check(&api, &headers, peer, &connection)?;
    let id = SandboxId::parse(&sandbox_id).map_err(|_| StatusCode::NOT_FOUND)?;
    match api.records.find(&id).await {
        Ok(Some(found)) if scope.covers(&found) => Ok(Json(view_of(&api, &found, None).await).into_response()),
        Ok(_) => Err(StatusCode::NOT_FOUND.into()),
        Err(error) => Ok(unavailable(&public_message(&error))),
    }
}

/// Deletes a sandbox, wherever it is: for the bearer of its token, its tenant, or the operator. 204 once it is gone,
/// 202 if that takes longer than the request waits.
pub async fn delete(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path(sandbox_id): Path<String>,
    Query(query): Query<DeleteQuery>,
    connection: Tracked,
    headers: HeaderMap,
) -> Result<Response, EdgeRefusal> {
    rate_limit::check_origin(&headers, &api.settings.origins)?;
    api.settings.hosts.check(&headers)?;
    let caller = api.caller(&headers, peer);
    let token = rate_limit::header_text(&headers, "x-sandbox-token");
    let id = SandboxId::parse(&sandbox_id).ok();
    let scope = match rate_limit::list_key(&headers, &api.settings) {
        Key::Right(tenant) => Some(ListScope(tenant)),
        Key::Wrong | Key::NotNeeded => None,
    };
    let is_known = id.as_ref().is_some_and(|id| api.known_tokens.has(id, token.as_deref(), false));
    if scope.is_none() && api.is_limited(caller) && !is_known {
        return Err(StatusCode::TOO_MANY_REQUESTS.into());
    }
    if scope.is_none() && token.is_none() {
        api.charge(caller);
        return Err(StatusCode::UNAUTHORIZED.into());
    }
    let unknown = || {
        api.charge(caller);
        Err(StatusCode::NOT_FOUND.into())
    };
    let Some(id) = id else { return unknown() };
    let found = match api.records.find(&id).await {
        Ok(Some(found)) => found,
        Ok(None) => return unknown(),
        Err(error) => return Ok(unavailable(&public_message(&error))),
    };
    let is_bearer = token::matches(token.as_deref(), &found.spec.token_sha256);
    if !is_bearer && !scope.as_ref().is_some_and(|scope| scope.covers(&found)) {
        // To a tenant the sandbox of another one does not exist.
        if scope.is_some() && token.is_none() {
            return unknown();
        }
        api.charge(caller);
        return Err(StatusCode::FORBIDDEN.into());
    }
    if !connection.prove() {
        return Err(StatusCode::SERVICE_UNAVAILABLE.into());
    }
    match api.delete(&id, rate_limit::traceparent(&headers)).await {
        Ok(()) if is_gone_within(&api, &id, query.wait.map_or(Duration::ZERO, Duration::from_secs)).await => {
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        Ok(()) => {
            Ok((StatusCode::ACCEPTED, Json(json!({"sandbox_id": id, "desired_state": "deleted"}))).into_response())
        }
        Err(error) => Ok(unavailable(&public_message(&error))),
    }
}

/// Waits until the reconciler has erased a sandbox. A drain ends the wait: whoever holds the sandbox then deletes it.
async fn is_gone_within(api: &Api, id: &SandboxId, wait: Duration) -> bool {
    let gone = async {
        while !matches!(api.records.find(id).await, Ok(None)) {
            if api.is_draining() {
                return false;
            }
            api.clock.sleep(DELETE_POLL_INTERVAL).await;
        }
        true
    };
    !wait.is_zero() && api.clock.timeout(wait.min(MAX_DELETE_WAIT), gone).await.unwrap_or(false)
}

fn check(api: &Api, headers: &HeaderMap, peer: Peer, connection: &Tracked) -> Result<ListScope, EdgeRefusal> {
    rate_limit::check_origin(headers, &api.settings.origins)?;
    api.settings.hosts.check(headers)?;
    match rate_limit::list_key(headers, &api.settings) {
        Key::NotNeeded => Err(StatusCode::FORBIDDEN.into()),
        key @ (Key::Right(_) | Key::Wrong) => Ok(ListScope(api.admit(key, api.caller(headers, peer), connection)?)),
    }
}

fn unavailable(text: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"message": text}))).into_response()
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
        "message": silent.as_ref().map_or_else(|| status.message.clone(), Unresponsive::summary),
        "unresponsive": silent.as_ref().map(Unresponsive::json),
        "instance": status.instance,
        "desired_state": spec.desired_state,
        "labels": spec.labels,
        "created": spec.created_timestamp,
        "age_seconds": age.map(|age| age.as_secs()),
        "persistent": spec.enable_sandbox_checkpoint,
        "enable_checkpoint": spec.enable_sandbox_checkpoint,
        "enable_sandbox_handoff": spec.enable_sandbox_handoff,
        "latest_checkpoint": found.latest_sandbox_checkpoint.as_ref().map(|latest| &latest.path),
        "last_checkpointed": found.last_checkpointed,
    })
}
