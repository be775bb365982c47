//! Buckets: listed, looked at, created, deleted.

use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
};
use serde_json::{Value, json};

use crate::{
    SharedServer,
    injected_fault::Op,
    json::{Reply, json_reply, refuse, reply},
    objects::ObjectRefusal,
};

/// Those somebody created or put an object into.
pub async fn list(State(state): State<SharedServer>) -> Reply {
    if let Err(refusal) = state.receive(Op::List, "").await {
        return refuse(&refusal);
    }
    let items: Vec<_> = state.objects().buckets.iter().map(|bucket| describe(&state.url, bucket)).collect();
    json_reply(200, &json!({"kind": "storage#buckets", "items": items}))
}

pub async fn create(State(state): State<SharedServer>, body: Bytes) -> Reply {
    if let Err(refusal) = state.receive(Op::Write, "").await {
        return refuse(&refusal);
    }
    let resource: Value = serde_json::from_slice(&body).unwrap_or_default();
    let Some(bucket) = resource["name"].as_str().filter(|name| !name.is_empty()) else {
        return refuse(&ObjectRefusal::Invalid("Required parameter: name"));
    };
    match state.objects().create_bucket(bucket) {
        Ok(()) => json_reply(200, &describe(&state.url, bucket)),
        Err(refusal) => refuse(&refusal),
    }
}

pub async fn get(State(state): State<SharedServer>, Path(bucket): Path<String>) -> Reply {
    describe_bucket(&state, &bucket, |url| describe(url, &bucket)).await
}

/// Whether folders are objects of their own, which `gcloud storage` asks first. They are not.
pub async fn layout(State(state): State<SharedServer>, Path(bucket): Path<String>) -> Reply {
    let layout = |_: &str| {
        json!({
            "kind": "storage#storageLayout", "bucket": bucket, "location": "US", "locationType": "multi-region",
            "hierarchicalNamespace": {"enabled": false},
        })
    };
    describe_bucket(&state, &bucket, layout).await
}

async fn describe_bucket(state: &SharedServer, bucket: &str, answer: impl FnOnce(&str) -> Value) -> Reply {
    if let Err(refusal) = state.receive(Op::Get, "").await {
        return refuse(&refusal);
    }
    match state.objects().check_bucket(bucket) {
        Ok(()) => json_reply(200, &answer(&state.url)),
        Err(refusal) => refuse(&refusal),
    }
}

pub async fn delete(State(state): State<SharedServer>, Path(bucket): Path<String>) -> Reply {
    if let Err(refusal) = state.receive(Op::Delete, "").await {
        return refuse(&refusal);
    }
    match state.objects().delete_bucket(&bucket) {
        Ok(()) => reply(204, Body::empty()),
        Err(refusal) => refuse(&refusal),
    }
}

fn describe(url: &str, bucket: &str) -> Value {
    json!({
        "kind": "storage#bucket", "id": bucket, "name": bucket, "selfLink": format!("{url}/storage/v1/b/{bucket}"),
        "location": "US", "locationType": "multi-region", "storageClass": "STANDARD", "metageneration": "1",
        "etag": "CAE=", "projectNumber": "0",
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": true}},
    })
}
