//! What the answers of the JSON API have in common: resources, conditions, refusals.

use std::collections::HashMap;

use axum::{
    body::Body,
    http::{HeaderValue, Response, header},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use crate::objects::{Attributes, Condition, DeclaredAttributes, FakeObject, ObjectRefusal};

pub type Reply = Response<Body>;
pub type Parameters = HashMap<String, String>;

/// What a name keeps as it is inside a URL.
const IN_NAMES: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// An object's resource. The MD5 is the caller's choice: it may take a while.
pub fn describe(url: &str, bucket: &str, name: &str, object: &FakeObject, md5: Option<[u8; 16]>) -> Value {
    let time = |time| humantime::format_rfc3339_millis(time).to_string();
    let place = format!("storage/v1/b/{bucket}/o/{}", utf8_percent_encode(name, IN_NAMES));
    let generation = object.generation.to_string();
    let mut resource = json!({
        "kind": "storage#object", "id": format!("{bucket}/{name}/{generation}"), "name": name, "bucket": bucket,
        "selfLink": format!("{url}/{place}"),
        "mediaLink": format!("{url}/download/{place}?generation={generation}&alt=media"),
        "metageneration": object.metageneration.to_string(), "size": object.data.len().to_string(),
        "crc32c": BASE64_STANDARD.encode(object.crc32c.to_be_bytes()), "etag": etag(object),
        "storageClass": "STANDARD", "timeCreated": time(object.created), "updated": time(object.updated),
        "timeStorageClassUpdated": time(object.created), "timeFinalized": time(object.created), "generation": generation,
    });
    if let Value::Object(attributes) = show_attributes(&object.attributes)
        && let Some(fields) = resource.as_object_mut()
    {
        fields.extend(attributes);
    }
    if let Some(md5) = md5 {
        resource["md5Hash"] = json!(BASE64_STANDARD.encode(md5));
    }
    if let Some(components) = object.components {
        resource["componentCount"] = json!(components);
    }
    resource
}

/// Another one for every change of content or attributes.
pub fn etag(object: &FakeObject) -> String {
    BASE64_STANDARD.encode(format!("{}/{}", object.generation, object.metageneration))
}

fn show_attributes(attributes: &Attributes) -> Value {
    let mut shown = serde_json::Map::new();
    for (name, value) in named(attributes) {
        shown.extend(value.clone().map(|value| (name.to_owned(), json!(value))));
    }
    if !attributes.metadata.is_empty() {
        shown.insert("metadata".to_owned(), json!(attributes.metadata));
    }
    Value::Object(shown)
}

fn named(attributes: &Attributes) -> [(&'static str, &Option<String>); 5] {
    [
        ("contentType", &attributes.content_type),
        ("contentEncoding", &attributes.content_encoding),
        ("contentDisposition", &attributes.content_disposition),
        ("contentLanguage", &attributes.content_language),
        ("cacheControl", &attributes.cache_control),
    ]
}

/// Merges a patch: a field that is `null` goes, one that is not there stays.
pub fn merge(attributes: &mut Attributes, patch: &Value) {
    let fields = [
        ("contentType", &mut attributes.content_type),
        ("contentEncoding", &mut attributes.content_encoding),
        ("contentDisposition", &mut attributes.content_disposition),
        ("contentLanguage", &mut attributes.content_language),
        ("cacheControl", &mut attributes.cache_control),
    ];
    for (name, field) in fields {
        if let Some(value) = patch.get(name) {
            *field = value.as_str().map(str::to_owned);
        }
    }
    match patch.get("metadata") {
        Some(Value::Object(changes)) => {
            for (key, value) in changes {
                match value.as_str() {
                    Some(value) => drop(attributes.metadata.insert(key.clone(), value.to_owned())),
                    None => drop(attributes.metadata.remove(key)),
                }
            }
        }
        Some(_) => attributes.metadata.clear(),
        None => {}
    }
}

/// What a resource that comes with an upload says.
pub fn about(resource: &Value) -> DeclaredAttributes {
    let bytes = |name: &str| resource[name].as_str().and_then(|text| BASE64_STANDARD.decode(text).ok());
    let mut attributes = Attributes::default();
    merge(&mut attributes, resource);
    DeclaredAttributes {
        attributes,
        crc32c: bytes("crc32c").and_then(|bytes| Some(u32::from_be_bytes(bytes.try_into().ok()?))),
        md5: bytes("md5Hash").and_then(|bytes| bytes.try_into().ok()),
    }
}

pub fn condition(parameters: &Parameters) -> Condition {
    conditions(parameters, "if")
}

/// Conditions whose names begin with `prefix`: those of a copy's source have one of their own.
pub fn conditions(parameters: &Parameters, prefix: &str) -> Condition {
    let number = |name: &str| parameters.get(&format!("{prefix}{name}")).and_then(|text| text.parse().ok());
    Condition {
        is: number("GenerationMatch"),
        is_not: number("GenerationNotMatch"),
        metageneration_is: number("MetagenerationMatch"),
        metageneration_is_not: number("MetagenerationNotMatch"),
    }
}

/// The generation that a request names. 0 is whichever is live: gcsfuse says so.
pub fn generation(parameters: &Parameters) -> Option<i64> {
    parameters.get("generation").and_then(|text| text.parse().ok()).filter(|generation| *generation != 0)
}

pub fn refuse(refusal: &ObjectRefusal) -> Reply {
    let (code, reason, message) = match refusal {
        ObjectRefusal::NotModified => return reply(304, Body::empty()),
        ObjectRefusal::NoBucket => (404, "notFound", "The specified bucket does not exist.".to_owned()),
        ObjectRefusal::NoObject(place) => (404, "notFound", format!("No such object: {place}")),
        ObjectRefusal::Conflict(why) => (409, "conflict", (*why).to_owned()),
        ObjectRefusal::Precondition => {
            (412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.".to_owned())
        }
        ObjectRefusal::Invalid(why) => (400, "invalid", (*why).to_owned()),
        ObjectRefusal::TooMany => {
            (429, "rateLimitExceeded", "The object exceeded the rate limit for object mutation operations.".to_owned())
        }
        ObjectRefusal::Unavailable => (503, "backendError", "Try again.".to_owned()),
        ObjectRefusal::Unimplemented => (501, "notImplemented", "Not implemented.".to_owned()),
        ObjectRefusal::Status(code) => (*code, "fault", "A fault was asked for.".to_owned()),
    };
    let errors = json!([{"message": message, "domain": "global", "reason": reason}]);
    json_reply(code, &json!({"error": {"code": code, "message": message, "errors": errors}}))
}

pub fn json_reply(status: u16, value: &Value) -> Reply {
    let mut answer = reply(status, Body::from(value.to_string()));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=UTF-8"));
    answer
}

pub fn reply(status: u16, body: Body) -> Reply {
    let mut answer = Response::new(body);
    *answer.status_mut() = status.try_into().unwrap_or(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_changes_what_it_names_and_removes_what_it_names_null() {
        let mut attributes = Attributes {
            content_type: Some("text/plain".to_owned()),
            cache_control: Some("no-cache".to_owned()),
            metadata: [("a", "1"), ("b", "2")].map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..Attributes::default()
        };
        merge(&mut attributes, &json!({"cacheControl": null, "metadata": {"a": null, "c": "3"}}));
        let left = [("b", "2"), ("c", "3")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert_eq!(
            attributes,
            Attributes { content_type: Some("text/plain".to_owned()), metadata: left, ..Attributes::default() }
        );
        merge(&mut attributes, &json!({"metadata": null}));
        assert!(attributes.metadata.is_empty());
    }
}
