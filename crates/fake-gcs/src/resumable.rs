//! Resumable uploads: started, continued after a cut, finished once.

use axum::{
    body::Body,
    extract::{Query, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
};
use bytes::Bytes;
use http_body_util::BodyExt;

use crate::{
    Plan, SharedServer, drop_connection,
    injected_fault::Op,
    json::{Parameters, Reply, about, json_reply, refuse, reply},
    objects::{Condition, ObjectRefusal, ResumableUpload},
    responses::send,
    resumable_upload::stored_as,
};

/// The service keeps whole pieces of this size when a connection breaks.
const PIECE: usize = 256 << 10;

pub fn start(state: &SharedServer, bucket: String, name: String, body: &Bytes, condition: Condition) -> Reply {
    let mut objects = state.objects();
    let allowed = objects.check_bucket(&bucket).and_then(|()| condition.check_change(objects.find(&bucket, &name)));
    if let Err(refusal) = allowed {
        return refuse(&refusal);
    }
    let about = about(&serde_json::from_slice(body).unwrap_or_default());
    let upload = ResumableUpload { bucket: bucket.clone(), name, about, condition, data: Vec::new(), done: None };
    let id = objects.begin(upload);
    // The bound address, since the client's Host header has no port.
    let location = format!("{}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={id}", state.url);
    let mut answer = reply(200, Body::empty());
    if let Ok(location) = HeaderValue::from_str(&location) {
        answer.headers_mut().insert(header::LOCATION, location);
    }
    answer
}

/// `bytes A-B/T`, `bytes A-*/*`, or a question: `bytes */T`.
struct Span {
    from: Option<usize>,
    ends_open: bool,
    total: Option<usize>,
}

fn span(headers: &HeaderMap) -> Option<Span> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (bytes, total) = text.split_once('/')?;
    let from = bytes.split_once('-').and_then(|(from, _)| from.parse().ok());
    Some(Span { from, ends_open: bytes.ends_with('*'), total: total.parse().ok() })
}

/// Bytes of an upload, or the question how many there are.
pub async fn put(
    State(state): State<SharedServer>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
    body: Body,
) -> Reply {
    let id = parameters.get("upload_id").cloned().unwrap_or_default();
    let Some(span) = span(&headers) else { return refuse(&ObjectRefusal::Invalid("No content range.")) };
    let name = state.objects().uploads.get(&id).map(|upload| upload.name.clone());
    let Some(name) = name else { return refuse(&ObjectRefusal::NoObject(id)) };
    let mut plan = Plan::default();
    if let Some(from) = span.from {
        plan = match state.receive(Op::Put, &name).await {
            Ok(plan) => plan,
            Err(refusal) => return refuse(&refusal),
        };
        if let Err(refusal) = receive(&state, &id, from, body, &plan).await {
            return refuse(&refusal);
        }
    }
    let mut answer = finish(&state, &id, &span).unwrap_or_else(|refusal| refuse(&refusal));
    if headers.contains_key("x-guploader-no-308") {
        answer = without_308(answer);
    }
    send(answer, &plan).await
}

/// Go's client wants no 308, which proxies take for a redirection: it reads the status from a header.
fn without_308(mut answer: Reply) -> Reply {
    if answer.status() == StatusCode::PERMANENT_REDIRECT {
        *answer.status_mut() = StatusCode::OK;
        answer.headers_mut().insert("x-http-status-code-override", HeaderValue::from_static("308"));
    }
    answer
}

/// Gives an upload up. The service answers so, too.
pub async fn cancel(State(state): State<SharedServer>, Query(parameters): Query<Parameters>) -> Reply {
    let id = parameters.get("upload_id").cloned().unwrap_or_default();
    match state.objects().uploads.remove(&id) {
        Some(_) => reply(499, Body::empty()),
        None => refuse(&ObjectRefusal::NoObject(id)),
    }
}

async fn receive(
    state: &SharedServer,
    id: &str,
    from: usize,
    mut body: Body,
    plan: &Plan,
) -> Result<(), ObjectRefusal> {
    let have = with(state, id, |upload| upload.data.len())?;
    // What is there already is sent again now and then, and ignored.
    let mut again = have.checked_sub(from).ok_or(ObjectRefusal::Unavailable)?;
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            with(state, id, keep_pieces)?;
            return Err(ObjectRefusal::Unavailable);
        };
        let Ok(data) = frame.into_data() else { continue };
        let skip = again.min(data.len());
        again -= skip;
        received += data.len();
        with(state, id, |upload| upload.data.extend_from_slice(&data[skip..]))?;
        if plan.cut.is_some_and(|cut| received >= cut) {
            with(state, id, keep_pieces)?;
            drop_connection();
        }
    }
    if let Some(keep) = plan.keep {
        with(state, id, |upload| {
            upload.data.truncate(from + keep);
            keep_pieces(upload);
        })?;
        return Err(ObjectRefusal::Unavailable);
    }
    Ok(())
}

fn keep_pieces(upload: &mut ResumableUpload) {
    upload.data.truncate(upload.data.len() / PIECE * PIECE);
}

/// The object if all bytes are there, otherwise how many are.
fn finish(state: &SharedServer, id: &str, span: &Span) -> Result<Reply, ObjectRefusal> {
    let mut objects = state.objects();
    let upload = objects.uploads.get_mut(id).ok_or(ObjectRefusal::Unavailable)?;
    if let Some(answer) = &upload.done {
        return Ok(json_reply(200, answer));
    }
    let have = upload.data.len();
    let whole = span.total.map_or(span.from.is_some() && span.ends_open, |total| total == have);
    if !whole {
        let mut answer = reply(308, Body::empty());
        if let Ok(range) = HeaderValue::from_str(&format!("bytes=0-{}", have.saturating_sub(1)))
            && have > 0
        {
            answer.headers_mut().insert(header::RANGE, range);
        }
        return Ok(answer);
    }
    let data = std::mem::take(&mut upload.data).into();
    let (bucket, name) = (upload.bucket.clone(), upload.name.clone());
    let (about, condition) = (upload.about.clone(), upload.condition);
    let stored = objects.put(&bucket, &name, data, &about, condition);
    match stored {
        Ok(object) => {
            let answer = stored_as(&state.url, &bucket, &name, &object, &about);
            let reply = json_reply(200, &answer);
            if let Some(upload) = objects.uploads.get_mut(id) {
                upload.done = Some(answer);
            }
            Ok(reply)
        }
        Err(refusal) => {
            objects.uploads.remove(id);
            Err(refusal)
        }
    }
}

fn with<T>(state: &SharedServer, id: &str, work: impl FnOnce(&mut ResumableUpload) -> T) -> Result<T, ObjectRefusal> {
    state.objects().uploads.get_mut(id).map(work).ok_or(ObjectRefusal::Unavailable)
}
