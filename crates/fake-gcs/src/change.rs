//! Objects as they are changed: other attributes, deleted, composed, copied.

use axum::{
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::Uri,
};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::{
    SharedServer,
    injected_fault::Op,
    json::{Parameters, Reply, about, condition, conditions, describe, json_reply, merge, refuse, reply},
    objects::{Attributes, Condition, DeclaredAttributes, FakeObject, ObjectRefusal},
    responses::send,
};

type Named = Path<(String, String)>;
type Done = Result<Reply, ObjectRefusal>;

/// `PATCH`: what the body names becomes other.
pub async fn patch(
    state: State<SharedServer>,
    place: Named,
    Query(parameters): Query<Parameters>,
    body: Bytes,
) -> Reply {
    change(state, place, &parameters, &body, |_| {}).await
}

/// `PUT`: what the body does not name goes.
pub async fn update(
    state: State<SharedServer>,
    place: Named,
    Query(parameters): Query<Parameters>,
    body: Bytes,
) -> Reply {
    change(state, place, &parameters, &body, |attributes| *attributes = Attributes::default()).await
}

async fn change(
    State(state): State<SharedServer>,
    Path((bucket, name)): Named,
    parameters: &Parameters,
    body: &Bytes,
    first: impl FnOnce(&mut Attributes),
) -> Reply {
    let work = || {
        let patch = if body.is_empty() { Ok(Value::Null) } else { serde_json::from_slice(body) };
        let patch = patch.map_err(|_| ObjectRefusal::Invalid("Parse Error"))?;
        let changed = state.objects().patch(&bucket, &name, condition(parameters), |attributes| {
            first(attributes);
            merge(attributes, &patch);
        });
        Ok(shown(&state, &bucket, &name, &changed?))
    };
    perform(&state, Op::Write, &name, work).await
}

pub async fn delete(
    State(state): State<SharedServer>,
    Path((bucket, name)): Named,
    Query(parameters): Query<Parameters>,
) -> Reply {
    let work = || {
        let mut objects = state.objects();
        objects.get_generation(&bucket, &name, crate::json::generation(&parameters))?;
        objects.delete(&bucket, &name, condition(&parameters))?;
        Ok(reply(204, Body::empty()))
    };
    perform(&state, Op::Delete, &name, work).await
}

/// `POST …/o/OBJECT/compose`, `…/o/OBJECT/copyTo/b/BUCKET/o/OBJECT` and the same with `rewriteTo`.
pub async fn post(
    State(state): State<SharedServer>,
    Path((bucket, _)): Named,
    uri: Uri,
    Query(parameters): Query<Parameters>,
    body: Bytes,
) -> Reply {
    let resource: Value = serde_json::from_slice(&body).unwrap_or_default();
    let Some(verb) = verb(uri.path()) else { return refuse(&ObjectRefusal::Unimplemented) };
    match verb {
        Verb::Compose { target } => {
            let work = || compose(&state, &bucket, &target, &parameters, &resource);
            perform(&state, Op::Compose, &target, work).await
        }
        Verb::Copy { source, bucket: to, target, is_rewrite } => {
            let work = || {
                let object = copy(&state, (&bucket, &source), (&to, &target), &parameters, &resource)?;
                if !is_rewrite {
                    return Ok(shown(&state, &to, &target, &object));
                }
                let size = object.data.len().to_string();
                let resource = describe(&state.url, &to, &target, &object, object.md5());
                Ok(json_reply(
                    200,
                    &json!({
                        "kind": "storage#rewriteResponse", "done": true, "totalBytesRewritten": size,
                        "objectSize": size, "resource": resource,
                    }),
                ))
            };
            perform(&state, Op::Compose, &target, work).await
        }
    }
}

/// One change: counted, with the fault that is due.
async fn perform(state: &SharedServer, op: Op, name: &str, work: impl FnOnce() -> Done) -> Reply {
    let plan = match state.receive(op, name).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    let answer = work().unwrap_or_else(|refusal| refuse(&refusal));
    send(answer, &plan).await
}

fn shown(state: &SharedServer, bucket: &str, name: &str, object: &FakeObject) -> Reply {
    json_reply(200, &describe(&state.url, bucket, name, object, object.md5()))
}

#[derive(Debug, PartialEq, Eq)]
enum Verb {
    Compose { target: String },
    Copy { source: String, bucket: String, target: String, is_rewrite: bool },
}

/// What a path asks for. Names are escaped in it, so that its own slashes are those of the API.
fn verb(path: &str) -> Option<Verb> {
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts.as_slice() {
        ["storage", "v1", "b", _, "o", target, "compose"] => Some(Verb::Compose { target: decoded(target) }),
        ["storage", "v1", "b", _, "o", source, verb @ ("copyTo" | "rewriteTo"), "b", bucket, "o", target] => {
            let is_rewrite = *verb == "rewriteTo";
            Some(Verb::Copy { source: decoded(source), bucket: decoded(bucket), target: decoded(target), is_rewrite })
        }
        _ => None,
    }
}

fn compose(state: &SharedServer, bucket: &str, target: &str, parameters: &Parameters, resource: &Value) -> Done {
    let number = |value: &Value| value.as_i64().or_else(|| value.as_str()?.parse().ok());
    let sources = resource["sourceObjects"].as_array().into_iter().flatten().map(|source| {
        let wanted =
            number(&source["generation"]).or_else(|| number(&source["objectPreconditions"]["ifGenerationMatch"]));
        let name = source["name"].as_str().unwrap_or_default().to_owned();
        (name, Condition { is: wanted, ..Condition::default() })
    });
    let sources: Vec<_> = sources.collect();
    let about = about(&resource["destination"]);
    let composed = state.objects().compose(bucket, target, &sources, &about, condition(parameters))?;
    Ok(shown(state, bucket, target, &composed))
}

fn copy(
    state: &SharedServer,
    (bucket, source): (&str, &str),
    (to, target): (&str, &str),
    parameters: &Parameters,
    resource: &Value,
) -> Result<FakeObject, ObjectRefusal> {
    let wanted = parameters.get("sourceGeneration").and_then(|text| text.parse().ok());
    let mut objects = state.objects();
    let object = objects.get_generation(bucket, source, wanted)?.clone();
    conditions(parameters, "ifSource").check_change(Some(&object))?;
    // A resource in the body takes the place of the attributes, as a whole.
    let mut attributes = object.attributes;
    if resource.as_object().is_some_and(|fields| !fields.is_empty()) {
        attributes = Attributes::default();
        merge(&mut attributes, resource);
    }
    let about = DeclaredAttributes { attributes, crc32c: Some(object.crc32c), md5: None };
    objects.put(to, target, object.data, &about, condition(parameters))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slashes_of_a_name_are_not_those_of_the_path() {
        assert_eq!(
            verb("/storage/v1/b/b/o/a%2Fcompose/compose"),
            Some(Verb::Compose { target: "a/compose".to_owned() })
        );
        assert_eq!(
            verb("/storage/v1/b/b/o/a%2Fb/rewriteTo/b/c/o/d%2Fe"),
            Some(Verb::Copy {
                source: "a/b".to_owned(),
                bucket: "c".to_owned(),
                target: "d/e".to_owned(),
                is_rewrite: true
            })
        );
        assert_eq!(verb("/storage/v1/b/b/o/a"), None);
        assert_eq!(verb("/storage/v1/b/b/o/a%2Fcompose"), None);
    }
}
