//! Objects as they are read: their attributes, and their content by whichever way a client asks for it.

use axum::{
    body::Body,
    extract::{Path, Query, State},
    http::{HeaderMap, HeaderName, HeaderValue, header},
};
use base64::{Engine, prelude::BASE64_STANDARD};

use crate::{
    Plan, SharedServer, drop_connection,
    injected_fault::Op,
    json::{Parameters, Reply, condition, describe, etag, generation, json_reply, refuse, reply},
    objects::{Condition, FakeObject, ObjectRefusal},
    responses::{broken_off, flipped},
};

type Named = Path<(String, String)>;

/// `GET /storage/v1/b/BUCKET/o/OBJECT`: the resource, or with `alt=media` the content.
pub async fn get(
    state: State<SharedServer>,
    place: Named,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Reply {
    if parameters.get("alt").is_some_and(|alt| alt == "media") {
        return content(state, place, &parameters, condition(&parameters), &headers).await;
    }
    let (State(state), Path((bucket, name))) = (state, place);
    let plan = match state.receive(Op::Get, &name).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    if plan.lose_reply {
        drop_connection();
    }
    match find(&state, &bucket, &name, &parameters, condition(&parameters)) {
        Ok(object) => json_reply(200, &describe(&state.url, &bucket, &name, &object, object.md5())),
        Err(refusal) => refuse(&refusal),
    }
}

/// `GET /download/storage/v1/b/BUCKET/o/OBJECT`: where a `mediaLink` leads.
pub async fn download(
    state: State<SharedServer>,
    place: Named,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Reply {
    content(state, place, &parameters, condition(&parameters), &headers).await
}

/// `GET /BUCKET/OBJECT`, of the XML API: gcsfuse reads this way. Its conditions are headers.
pub async fn xml(
    state: State<SharedServer>,
    place: Named,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Reply {
    let number = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()?.parse().ok());
    let condition = Condition {
        is: number("x-goog-if-generation-match"),
        metageneration_is: number("x-goog-if-metageneration-match"),
        ..Condition::default()
    };
    content(state, place, &parameters, condition, &headers).await
}

fn find(
    state: &SharedServer,
    bucket: &str,
    name: &str,
    parameters: &Parameters,
    condition: Condition,
) -> Result<FakeObject, ObjectRefusal> {
    let objects = state.objects();
    let object = objects.get(bucket, name)?;
    condition.check(Some(object))?;
    objects.get_generation(bucket, name, generation(parameters)).cloned()
}

async fn content(
    State(state): State<SharedServer>,
    Path((bucket, name)): Named,
    parameters: &Parameters,
    condition: Condition,
    headers: &HeaderMap,
) -> Reply {
    let plan = match state.receive(Op::Read, &name).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    if plan.lose_reply {
        drop_connection();
    }
    match find(&state, &bucket, &name, parameters, condition) {
        Ok(object) => {
            let (answer, bytes) = bytes_of(&object, headers, &plan);
            state.sends(&bucket, &name, bytes);
            answer
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// And how many bytes it has.
fn bytes_of(object: &FakeObject, headers: &HeaderMap, plan: &Plan) -> (Reply, usize) {
    let size = object.data.len();
    let asked = headers.get(header::RANGE).and_then(|value| value.to_str().ok()).and_then(|text| range(text, size));
    let (from, to) = asked.unwrap_or((0, size));
    if asked.is_some() && from >= to {
        return (reply(416, Body::empty()), 0);
    }
    let mut data = object.data.slice(from..to);
    if plan.flip {
        data = flipped(&data);
    }
    let body = match plan.cut {
        Some(cut) if cut < data.len() => broken_off(data.slice(..cut)),
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
    describe_in_headers(object, set);
    (answer, to - from)
}

fn describe_in_headers(object: &FakeObject, mut set: impl FnMut(&str, &str)) {
    let attributes = &object.attributes;
    set("content-type", attributes.content_type.as_deref().unwrap_or("application/octet-stream"));
    for (name, value) in [
        ("content-disposition", &attributes.content_disposition),
        ("content-language", &attributes.content_language),
        ("content-encoding", &attributes.content_encoding),
        ("cache-control", &attributes.cache_control),
    ] {
        if let Some(value) = value {
            set(name, value);
        }
    }
    set("etag", &etag(object));
    set("last-modified", &http_date(object.updated));
    set("x-goog-generation", &object.generation.to_string());
    set("x-goog-metageneration", &object.metageneration.to_string());
    set("x-goog-stored-content-length", &object.data.len().to_string());
    set("x-goog-stored-content-encoding", attributes.content_encoding.as_deref().unwrap_or("identity"));
    set("x-goog-storage-class", "STANDARD");
    let mut hash = format!("crc32c={}", BASE64_STANDARD.encode(object.crc32c.to_be_bytes()));
    if let Some(md5) = object.cheap_md5() {
        hash += &format!(",md5={}", BASE64_STANDARD.encode(md5));
    }
    set("x-goog-hash", &hash);
    for (key, value) in &attributes.metadata {
        set(&format!("x-goog-meta-{key}"), value);
    }
}

/// `Wed, 18 Nov 2026 00:25:25 GMT`
fn http_date(time: std::time::SystemTime) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let days = time.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs() / 86_400;
    let text = humantime::format_rfc3339_seconds(time).to_string();
    let month: usize = text.get(5..7).and_then(|month| month.parse().ok()).unwrap_or(1);
    let (day, month) = (DAYS[usize::try_from(days % 7).unwrap_or(0)], MONTHS[(month - 1).min(11)]);
    format!("{day}, {} {month} {} {} GMT", &text[8..10], &text[..4], &text[11..19])
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_date_is_written_as_http_wants_it() {
        assert_eq!(http_date(UNIX_EPOCH), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(UNIX_EPOCH + Duration::from_secs(784_111_777)), "Sun, 06 Nov 1994 08:49:37 GMT");
    }

    #[test]
    fn a_range_is_what_the_header_says() {
        assert_eq!(range("bytes=2-4", 10), Some((2, 5)));
        assert_eq!(range("bytes=2-", 10), Some((2, 10)));
        assert_eq!(range("bytes=-3", 10), Some((7, 10)));
        assert_eq!(range("bytes=8-99", 10), Some((8, 10)));
        assert_eq!(range("lines=1-2", 10), None);
    }
}
