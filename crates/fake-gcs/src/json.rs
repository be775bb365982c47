//! The JSON API: objects read and written over HTTP/1.1.

use std::collections::HashMap;

use axum::{
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, HeaderName, HeaderValue, Response, header},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use http_body_util::BodyExt;
use memchr::memmem;
use serde_json::{Value, json};

use crate::{
    Plan, Shared, drop_connection,
    fault::Op,
    objects::{About, Condition, Object, Refusal},
    resumable,
};

pub type Reply = Response<Body>;
pub type Parameters = HashMap<String, String>;

/// A whole object in one request, or the start of a resumable upload.
pub async fn upload(
    State(state): State<Shared>,
    Path(bucket): Path<String>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
    body: Body,
) -> Reply {
    let name = parameters.get("name").cloned().unwrap_or_default();
    let condition = condition(&parameters);
    let kind = parameters.get("uploadType").map_or("", String::as_str);
    let op = if kind == "resumable" { Op::Start } else { Op::Write };
    let plan = match state.receive(op, &name).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    let Ok(body) = collect(body, plan.cut).await else { return refuse(&Refusal::Invalid("The body is cut.")) };
    let reply = match kind {
        "resumable" => resumable::start(&state, bucket, name, &body, condition),
        "multipart" => match parts(&headers, &body) {
            Some((about, data)) => {
                let stored = state.objects().put(&bucket, &name, data, &about, condition);
                stored.map_or_else(
                    |refusal| refuse(&refusal),
                    |object| json_reply(200, &describe(&bucket, &name, &object)),
                )
            }
            None => refuse(&Refusal::Invalid("Malformed multipart body.")),
        },
        _ => refuse(&Refusal::Unimplemented),
    };
    if plan.lose_reply {
        drop_connection();
    }
    reply
}

/// The whole body; the connection breaks once `cut` bytes are there.
async fn collect(mut body: Body, cut: Option<usize>) -> Result<Bytes, axum::Error> {
    let Some(cut) = cut else { return Ok(body.collect().await?.to_bytes()) };
    let mut count = 0;
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            count += data.len();
            whole.extend_from_slice(&data);
        }
        if count >= cut {
            drop_connection();
        }
    }
    Ok(whole.into())
}

/// The first part describes, the second is the content, later ones add to the description.
fn parts(headers: &HeaderMap, body: &Bytes) -> Option<(About, Bytes)> {
    let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let delimiter = format!("--{}", kind.split_once("boundary=")?.1.trim_matches('"'));
    let borders: Vec<usize> = memmem::find_iter(body, delimiter.as_bytes()).collect();
    let mut parts = borders.windows(2).filter_map(|pair| {
        let part = body.slice(pair[0] + delimiter.len()..pair[1]);
        let head = memmem::find(&part, b"\r\n\r\n")? + 4;
        Some(part.slice(head..part.len().checked_sub(2)?))
    });
    let mut description: Value = serde_json::from_slice(&parts.next()?).ok()?;
    let data = parts.next()?;
    for part in parts {
        if let Ok(Value::Object(more)) = serde_json::from_slice(&part) {
            description.as_object_mut()?.extend(more);
        }
    }
    Some((about(&description), data))
}

pub fn about(description: &Value) -> About {
    let crc = description["crc32c"].as_str().and_then(|text| BASE64_STANDARD.decode(text).ok());
    let metadata = description["metadata"].as_object();
    About {
        content_type: description["contentType"].as_str().map(str::to_owned),
        metadata: metadata
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
            .collect(),
        crc32c: crc.and_then(|bytes| Some(u32::from_be_bytes(bytes.try_into().ok()?))),
    }
}

pub async fn read(
    State(state): State<Shared>,
    Path((bucket, name)): Path<(String, String)>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Reply {
    let plan = match state.receive(Op::Read, &name).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    if plan.lose_reply {
        drop_connection();
    }
    let found = state.objects().get(&bucket, &name).cloned();
    let object = found.and_then(|object| {
        let wanted = parameters.get("generation").is_none_or(|wanted| *wanted == object.generation.to_string());
        condition(&parameters).check(Some(&object))?;
        if wanted { Ok(object) } else { Err(Refusal::NoObject(format!("{bucket}/{name}"))) }
    });
    match object {
        Err(refusal) => refuse(&refusal),
        Ok(object) if parameters.get("alt").is_some_and(|alt| alt == "media") => {
            let (answer, bytes) = content(&object, &headers, &plan);
            state.sends(&bucket, &name, bytes);
            answer
        }
        Ok(object) => json_reply(200, &describe(&bucket, &name, &object)),
    }
}

/// And how many bytes it has.
fn content(object: &Object, headers: &HeaderMap, plan: &Plan) -> (Reply, usize) {
    let size = object.data.len();
    let asked = headers.get(header::RANGE).and_then(|value| value.to_str().ok()).and_then(|text| range(text, size));
    let (from, to) = asked.unwrap_or((0, size));
    if asked.is_some() && from >= to {
        return (reply(416, Body::empty()), 0);
    }
    let mut data = object.data.slice(from..to);
    if plan.flip && !data.is_empty() {
        let mut wrong = data.to_vec();
        wrong[0] ^= 1;
        data = wrong.into();
    }
    let body = match plan.cut {
        Some(cut) if cut < data.len() => {
            let broken = Err(std::io::Error::other("the connection breaks here"));
            Body::from_stream(futures::stream::iter([Ok(data.slice(..cut)), broken]))
        }
        Some(_) | None => Body::from(data),
    };
    let mut answer = reply(if asked.is_some() { 206 } else { 200 }, body);
    let mut set = |name: &str, value: &str| {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            answer.headers_mut().insert(name, value);
        }
    };
    if asked.is_some() {
        set("content-range", &format!("bytes {from}-{}/{size}", to - 1));
    }
    set("content-length", &(to - from).to_string());
    set("content-type", &object.content_type);
    set("etag", &format!("\"{}\"", object.generation));
    set("x-goog-generation", &object.generation.to_string());
    set("x-goog-metageneration", "1");
    set("x-goog-stored-content-length", &size.to_string());
    set("x-goog-stored-content-encoding", "identity");
    set("x-goog-storage-class", "STANDARD");
    set("x-goog-hash", &format!("crc32c={}", BASE64_STANDARD.encode(object.crc32c.to_be_bytes())));
    for (key, value) in &object.metadata {
        set(&format!("x-goog-meta-{key}"), value);
    }
    (answer, to - from)
}

/// `bytes=A-B`, `bytes=A-` or `bytes=-N`, as the bytes from one place up to another.
fn range(text: &str, size: usize) -> Option<(usize, usize)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        return Some((size.saturating_sub(last.parse().ok()?), size));
    }
    let end = if last.is_empty() { size } else { last.parse::<usize>().ok()?.saturating_add(1).min(size) };
    Some((first.parse().ok()?, end))
}

fn condition(parameters: &Parameters) -> Condition {
    let number = |name: &str| parameters.get(name).and_then(|text| text.parse().ok());
    Condition { is: number("ifGenerationMatch"), is_not: number("ifGenerationNotMatch") }
}

pub fn describe(bucket: &str, name: &str, object: &Object) -> Value {
    let updated = humantime::format_rfc3339_millis(object.updated).to_string();
    json!({
        "kind": "storage#object", "name": name, "bucket": bucket,
        "generation": object.generation.to_string(), "metageneration": "1",
        "size": object.data.len().to_string(), "contentType": object.content_type,
        "crc32c": BASE64_STANDARD.encode(object.crc32c.to_be_bytes()), "etag": object.generation.to_string(),
        "storageClass": "STANDARD", "timeCreated": updated, "updated": updated, "metadata": object.metadata,
    })
}

pub fn refuse(refusal: &Refusal) -> Reply {
    let (code, message) = match refusal {
        Refusal::NotModified => return reply(304, Body::empty()),
        Refusal::NoBucket => (404, "The specified bucket does not exist.".to_owned()),
        Refusal::NoObject(place) => (404, format!("No such object: {place}")),
        Refusal::Precondition => (412, "At least one of the pre-conditions you specified did not hold.".to_owned()),
        Refusal::Invalid(why) => (400, (*why).to_owned()),
        Refusal::TooMany => (429, "The object exceeded the rate limit for object mutation operations.".to_owned()),
        Refusal::Unavailable => (503, "Try again.".to_owned()),
        Refusal::Unimplemented => (501, "Not implemented.".to_owned()),
        Refusal::Status(code) => (*code, "A fault was asked for.".to_owned()),
    };
    json_reply(code, &json!({"error": {"code": code, "message": message, "errors": [{"message": message}]}}))
}

pub fn json_reply(status: u16, value: &Value) -> Reply {
    let mut answer = reply(status, Body::from(value.to_string()));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

pub fn reply(status: u16, body: Body) -> Reply {
    let mut answer = Response::new(body);
    *answer.status_mut() = status.try_into().unwrap_or(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    answer
}
