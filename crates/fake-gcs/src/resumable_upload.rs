//! Whole objects in one request, and where a resumable upload begins.

use axum::{
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, header},
};
use http_body_util::BodyExt;
use memchr::memmem;
use serde_json::Value;

use crate::{
    Plan, SharedServer, drop_connection,
    injected_fault::Op,
    json::{Parameters, Reply, about, condition, describe, json_reply, refuse},
    objects::{Attributes, DeclaredAttributes, FakeObject, ObjectRefusal},
    responses::{flipped, send},
    resumable,
};

/// `POST /upload/storage/v1/b/BUCKET/o`. The name is a parameter, or stands in the resource that comes along. With
/// an `upload_id` it is a piece of an upload that was begun: Go's client posts these.
pub async fn post(
    State(state): State<SharedServer>,
    Path(bucket): Path<String>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
    body: Body,
) -> Reply {
    if parameters.contains_key("upload_id") {
        return resumable::put(State(state), Query(parameters), headers, body).await;
    }
    let kind = parameters.get("uploadType").map_or("", String::as_str);
    let (plan, name, body) = match receive(&state, kind, &parameters, &headers, body).await {
        Ok(received) => received,
        Err(refusal) => return refuse(&refusal),
    };
    let reply = match kind {
        "resumable" => resumable::start(&state, bucket, name, &body, condition(&parameters)),
        "multipart" => match parts(&headers, &body) {
            Some((resource, data)) => {
                let data = if plan.flip { flipped(&data) } else { data };
                store(&state, &bucket, &name, data, &about(&resource), &parameters)
            }
            None => refuse(&ObjectRefusal::Invalid("Malformed multipart body.")),
        },
        "media" => {
            let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
            let attributes = Attributes { content_type: content_type.map(str::to_owned), ..Attributes::default() };
            let about = DeclaredAttributes { attributes, ..DeclaredAttributes::default() };
            store(&state, &bucket, &name, body, &about, &parameters)
        }
        _ => refuse(&ObjectRefusal::Unimplemented),
    };
    send(reply, &plan).await
}

/// The whole body, and the name of the object, with the fault that is due for it.
async fn receive(
    state: &SharedServer,
    kind: &str,
    parameters: &Parameters,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Plan, String, Bytes), ObjectRefusal> {
    let op = if kind == "resumable" { Op::Start } else { Op::Write };
    let cut_off = |_| ObjectRefusal::Invalid("The body is cut.");
    if let Some(name) = parameters.get("name").filter(|name| !name.is_empty()) {
        let plan = state.receive(op, name).await?;
        let body = collect(body, plan.cut).await.map_err(cut_off)?;
        return Ok((plan, name.clone(), body));
    }
    // Which object it is, and with that which fault, only the body says.
    let body = collect(body, None).await.map_err(cut_off)?;
    let resource = match kind {
        "multipart" => parts(headers, &body).map(|(resource, _)| resource),
        _ => serde_json::from_slice(&body).ok(),
    };
    let name = resource.as_ref().and_then(|resource| resource["name"].as_str()).unwrap_or_default().to_owned();
    let plan = state.receive(op, &name).await?;
    if plan.cut.is_some_and(|cut| body.len() >= cut) {
        drop_connection();
    }
    Ok((plan, name, body))
}

fn store(
    state: &SharedServer,
    bucket: &str,
    name: &str,
    data: Bytes,
    about: &DeclaredAttributes,
    parameters: &Parameters,
) -> Reply {
    let stored = state.objects().put(bucket, name, data, about, condition(parameters));
    match stored {
        Ok(object) => json_reply(200, &stored_as(&state.url, bucket, name, &object, about)),
        Err(refusal) => refuse(&refusal),
    }
}

/// The resource of what was just stored. A writer that gave a CRC32C does not wait for an MD5.
pub fn stored_as(url: &str, bucket: &str, name: &str, object: &FakeObject, about: &DeclaredAttributes) -> Value {
    let md5 = if about.crc32c.is_some() { object.cheap_md5() } else { object.md5() };
    describe(url, bucket, name, object, md5)
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
fn parts(headers: &HeaderMap, body: &Bytes) -> Option<(Value, Bytes)> {
    let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let delimiter = format!("--{}", kind.split_once("boundary=")?.1.trim_matches(['"', '\'']));
    let borders: Vec<usize> = memmem::find_iter(body, delimiter.as_bytes()).collect();
    let mut parts = borders.windows(2).filter_map(|pair| {
        let part = body.slice(pair[0] + delimiter.len()..pair[1]);
        let head = memmem::find(&part, b"\r\n\r\n")? + 4;
        let kind = part.slice(..head);
        Some((kind, part.slice(head..part.len().checked_sub(2)?)))
    });
    let mut resource: Value = serde_json::from_slice(&parts.next()?.1).ok()?;
    let (head, data) = parts.next()?;
    for (_, part) in parts {
        if let Ok(Value::Object(more)) = serde_json::from_slice(&part) {
            resource.as_object_mut()?.extend(more);
        }
    }
    if resource["contentType"].is_null()
        && let Some(kind) = content_type(&head)
    {
        resource.as_object_mut()?.insert("contentType".to_owned(), Value::String(kind));
    }
    Some((resource, data))
}

/// What the header of a part says its content is.
fn content_type(head: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(name, _)| name.eq_ignore_ascii_case("content-type")).map(|(_, value)| value.trim().to_owned())
}
