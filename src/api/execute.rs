//! `POST /execute`: one command in a new sandbox, its output as the body of the response.
//!
//! The handler reads the code and then waits for a session of its own, whose client is a [`ResponseWriter`].

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, HttpBody},
    extract::{ConnectInfo, Query, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use baton_protocol::request::{ExecRequest, Language};
use futures::StreamExt;
use serde::Deserialize;
use tracing::Instrument;

use super::{
    Api, Tracked,
    execute_result::ResponseForm,
    inbound::Reservation,
    lingering_close::Peer,
    rate_limit,
    response_writer::{PendingResponse, ResponseWriter},
    session,
    websocket::MAX_MESSAGE,
};
use crate::traces::Asked;

/// How long the code may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait for memory that the messages of other clients take up.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Deserialize)]
pub struct ExecuteQuery {
    language: Option<String>,
}

pub async fn execute(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(query): Query<ExecuteQuery>,
    connection: Tracked,
    request: Request,
) -> Result<Response, Response> {
    let headers = request.headers();
    let plain = |status: StatusCode| status.into_response();
    rate_limit::check_origin(headers, &api.settings.origins).map_err(IntoResponse::into_response)?;
    let key = rate_limit::api_key(headers, &api.settings);
    let tenant = api.admit(key, api.caller(headers, peer), &connection).map_err(plain)?;
    let form = ResponseForm::of(headers);
    let refuse = |status: StatusCode, text: &str| form.refusal(status, text);
    let name = query.language.unwrap_or_default();
    let Some(language) = Language::parse(&name) else {
        return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, &Language::unsupported(&name)));
    };
    let request_span = api.settings.traces.asked(Asked::Execute, rate_limit::traceparent(headers));
    let read = api.clock.timeout(BODY_TIMEOUT, read_code(&api, request.into_body())).await;
    let (code, memory) = match read {
        Ok(read) => read.map_err(|(status, text)| refuse(status, text))?,
        Err(_) => return Err(refuse(StatusCode::REQUEST_TIMEOUT, "The code did not arrive in time.")),
    };
    let code = String::from_utf8(code).ok().filter(|code| !code.contains('\0'));
    let Some(code) = code else {
        return Err(refuse(StatusCode::UNPROCESSABLE_ENTITY, "The code must be UTF-8 without NUL."));
    };
    let mut exec = ExecRequest::plain(language, code);
    exec.stdin = false;
    let (writer, PendingResponse { started, body }) = ResponseWriter::new(memory, request_span, form);
    let id = api.clock.sandbox_id();
    let log_span = tracing::info_span!("execute", sandbox = %id);
    let tasks = api.tasks.clone();
    // A separate task: the sandbox is deleted even if the caller disconnects midway.
    tasks.spawn(session::execute(api, writer, id, tenant, exec, connection).instrument(log_span));
    match started.await {
        Ok(Ok(())) => {
            let chunks = futures::stream::unfold(body, |mut body| async move {
                body.recv().await.map(|chunk| (Ok::<_, std::io::Error>(chunk), body))
            });
            let content_type = [(header::CONTENT_TYPE, form.content_type())];
            Ok((content_type, Body::from_stream(chunks)).into_response())
        }
        Ok(Err((status, text))) => Err(form.refusal(status, &text)),
        Err(_) => Err(plain(StatusCode::INTERNAL_SERVER_ERROR)),
    }
}

/// Reads the code, and reserves memory for it from the budget of all clients.
async fn read_code(api: &Api, body: Body) -> Result<(Vec<u8>, Reservation), (StatusCode, &'static str)> {
    let too_long = || (StatusCode::PAYLOAD_TOO_LARGE, "The code is longer than 16 MiB.");
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if declared > MAX_MESSAGE {
        return Err(too_long());
    }
    // Untouched pages cost nothing, whereas a growing vector exists twice for a moment.
    let mut code = Vec::with_capacity(declared);
    let (mut chunks, mut memory) = (body.into_data_stream(), api.inbound.reservation());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| (StatusCode::BAD_REQUEST, "The code did not arrive."))?;
        let length = code.len() + chunk.len();
        if length > MAX_MESSAGE {
            return Err(too_long());
        }
        let resized = api.clock.timeout(MEMORY_TIMEOUT, memory.resize(length as u64)).await;
        resized.map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, "The server accepts no more input now: try again."))?;
        code.extend_from_slice(&chunk);
    }
    Ok((code, memory))
}
