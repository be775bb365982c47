//! gRPC: get, list, delete and compose over HTTP/2.

use std::sync::atomic::Ordering;

use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
    http::{HeaderMap, HeaderValue},
};
use http_body_util::{BodyExt, Full};
use prost::Message;

use crate::{
    SharedServer, drop_connection,
    injected_fault::Op,
    json::{Reply, reply},
    listing::{LONGEST_PAGE, Query},
    objects::{Attributes, Condition, DeclaredAttributes, FakeObject, ObjectRefusal},
    proto,
};

/// Five bytes before every message: not compressed, and its length.
const PREFIX: usize = 5;

pub async fn serve(State(state): State<SharedServer>, Path(method): Path<String>, body: Body) -> Reply {
    let Ok(body) = body.collect().await else { return refuse(&ObjectRefusal::Unavailable) };
    let mut body = body.to_bytes();
    if body.len() < PREFIX {
        return refuse(&ObjectRefusal::Invalid("No message."));
    }
    match call(&state, &method, body.split_off(PREFIX)).await {
        Ok(answer) => {
            let mut message = vec![0];
            message.extend_from_slice(&u32::try_from(answer.len()).unwrap_or(u32::MAX).to_be_bytes());
            message.extend_from_slice(&answer);
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            let body = Full::new(Bytes::from(message)).with_trailers(async move { Some(Ok(trailers)) });
            framed(reply(200, Body::new(body)))
        }
        Err(refusal) => refuse(&refusal),
    }
}

async fn call(state: &SharedServer, method: &str, message: Bytes) -> Result<Vec<u8>, ObjectRefusal> {
    match method {
        "GetObject" => {
            let asked: proto::GetObject = decode(message)?;
            let lose = state.receive(Op::Get, &asked.object).await?.lose_reply;
            let condition = condition(asked.if_generation_match, asked.if_generation_not_match);
            let bucket = bucket(&asked.bucket);
            let objects = state.objects();
            let object = objects.get(bucket, &asked.object)?;
            condition.check(Some(object))?;
            answer(lose, &describe(bucket, &asked.object, object))
        }
        "DeleteObject" => {
            let asked: proto::DeleteObject = decode(message)?;
            let lose = state.receive(Op::Delete, &asked.object).await?.lose_reply;
            let condition = condition(asked.if_generation_match, asked.if_generation_not_match);
            state.objects().delete(bucket(&asked.bucket), &asked.object, condition)?;
            answer(lose, &proto::Empty {})
        }
        "ListObjects" => {
            let asked: proto::ListObjects = decode(message)?;
            let lose = state.receive(Op::List, &asked.prefix).await?.lose_reply;
            answer(lose, &list(state, &asked)?)
        }
        "ComposeObject" => {
            let asked: proto::ComposeObject = decode(message)?;
            let target = asked.destination.ok_or(ObjectRefusal::Invalid("No destination."))?;
            let lose = state.receive(Op::Compose, &target.name).await?.lose_reply;
            let pinned = |generation| (generation != 0).then_some(generation);
            let sources: Vec<_> =
                asked.sources.into_iter().map(|s| (s.name, condition(pinned(s.generation), None))).collect();
            let content_type = (!target.content_type.is_empty()).then_some(target.content_type);
            let attributes = Attributes { content_type, metadata: target.metadata, ..Attributes::default() };
            let about = DeclaredAttributes { attributes, ..DeclaredAttributes::default() };
            let condition = condition(asked.if_generation_match, None);
            let bucket = bucket(&target.bucket);
            let object = state.objects().compose(bucket, &target.name, &sources, &about, condition)?;
            answer(lose, &describe(bucket, &target.name, &object))
        }
        _ => Err(ObjectRefusal::Unimplemented),
    }
}

fn list(state: &SharedServer, asked: &proto::ListObjects) -> Result<proto::ListObjectsResponse, ObjectRefusal> {
    let bucket = bucket(&asked.parent);
    let objects = state.objects();
    let limit = usize::try_from(asked.page_size).unwrap_or(0);
    let query = Query {
        prefix: &asked.prefix,
        start: &asked.lexicographic_start,
        after: Some(asked.page_token.as_str()).filter(|token| !token.is_empty()),
        limit: if limit == 0 { LONGEST_PAGE } else { limit.min(LONGEST_PAGE) },
        ..Query::default()
    };
    let page = objects.list(bucket, query)?;
    state.listed.fetch_add(page.objects.len() as u64, Ordering::SeqCst);
    Ok(proto::ListObjectsResponse {
        next_page_token: page.next.unwrap_or_default().to_owned(),
        objects: page.objects.into_iter().map(|(name, object)| describe(bucket, name, object)).collect(),
    })
}

fn describe(bucket: &str, name: &str, object: &FakeObject) -> proto::ObjectResource {
    proto::ObjectResource {
        name: name.to_owned(),
        bucket: format!("projects/_/buckets/{bucket}"),
        generation: object.generation,
        metageneration: object.metageneration,
        storage_class: "STANDARD".to_owned(),
        size: i64::try_from(object.data.len()).unwrap_or(i64::MAX),
        content_type: object.attributes.content_type.clone().unwrap_or_default(),
        create_time: Some(timestamp(object.created)),
        checksums: Some(proto::Checksums { crc32c: Some(object.crc32c) }),
        update_time: Some(timestamp(object.updated)),
        metadata: object.attributes.metadata.clone(),
    }
}

fn timestamp(time: std::time::SystemTime) -> proto::Timestamp {
    let since = time.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    proto::Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
    }
}

fn condition(is: Option<i64>, is_not: Option<i64>) -> Condition {
    Condition { is, is_not, ..Condition::default() }
}

fn answer(lose: bool, message: &impl Message) -> Result<Vec<u8>, ObjectRefusal> {
    if lose {
        drop_connection();
    }
    Ok(message.encode_to_vec())
}

fn decode<T: Message + Default>(message: Bytes) -> Result<T, ObjectRefusal> {
    T::decode(message).map_err(|_| ObjectRefusal::Invalid("Malformed message."))
}

/// `projects/_/buckets/NAME` is what the client says.
fn bucket(resource: &str) -> &str {
    resource.rsplit('/').next().unwrap_or(resource)
}

fn refuse(refusal: &ObjectRefusal) -> Reply {
    let (code, message) = match refusal {
        ObjectRefusal::NoBucket => ("5", "The specified bucket does not exist."),
        ObjectRefusal::NoObject(_) => ("5", "No such object."),
        ObjectRefusal::Conflict(why) => ("6", *why),
        ObjectRefusal::Precondition => ("9", "At least one of the pre-conditions you specified did not hold."),
        ObjectRefusal::NotModified => ("10", "Not modified."),
        ObjectRefusal::Invalid(why) => ("3", *why),
        ObjectRefusal::TooMany | ObjectRefusal::Status(429) => ("8", "Rate limit."),
        ObjectRefusal::Unimplemented => ("12", "Not implemented."),
        ObjectRefusal::Status(401) => ("16", "A fault was asked for."),
        ObjectRefusal::Status(403) => ("7", "A fault was asked for."),
        ObjectRefusal::Status(412) => ("9", "A fault was asked for."),
        ObjectRefusal::Unavailable | ObjectRefusal::Status(_) => ("14", "Try again."),
    };
    let mut answer = framed(reply(200, Body::empty()));
    answer.headers_mut().insert("grpc-status", HeaderValue::from_static(code));
    answer.headers_mut().insert("grpc-message", HeaderValue::from_static(message));
    answer
}

fn framed(mut answer: Reply) -> Reply {
    answer.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    answer
}
