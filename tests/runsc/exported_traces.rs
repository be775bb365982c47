//! Traces: one request's way over storage to another instance, as a collector is told of it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, http::StatusCode, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value as Any},
};
use prost::Message;
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    fixture::eventually,
    live_handoff::movable,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

const SECRET: &str = "b7c1e0d2-what-nobody-may-read";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    instance: String,
    name: String,
    trace: String,
    span: String,
    parent: String,
    outcome: String,
    from: u64,
    to: u64,
}

/// The part of a collector that matters: it takes spans.
struct Collector {
    endpoint: String,
    batches: Arc<Mutex<Vec<Bytes>>>,
    server: JoinSet<()>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let batches = Arc::new(Mutex::new(Vec::new()));
        let shelf = batches.clone();
        let take = move |body: Bytes| async move {
            shelf.lock().unwrap().push(body);
            StatusCode::OK
        };
        let mut server = JoinSet::new();
        server.spawn(async move {
            axum::serve(listener, Router::new().route("/v1/traces", post(take))).await.unwrap();
        });
        Self { endpoint, batches, server }
    }

    fn told(&self) -> Vec<Told> {
        let mut all = Vec::new();
        for batch in self.batches.lock().unwrap().iter() {
            for source in ExportTraceServiceRequest::decode(batch.clone()).unwrap().resource_spans {
                let resource = source.resource.unwrap().attributes;
                assert_eq!(text(&resource, "service.name"), "here");
                for span in source.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                    all.push(Told {
                        instance: text(&resource, "service.instance.id"),
                        outcome: text(&span.attributes, "outcome"),
                        name: span.name,
                        trace: baton_protocol::id::hex(&span.trace_id),
                        span: baton_protocol::id::hex(&span.span_id),
                        parent: baton_protocol::id::hex(&span.parent_span_id),
                        from: span.start_time_unix_nano,
                        to: span.end_time_unix_nano,
                    });
                }
            }
        }
        all
    }

    async fn until(&self, name: &str, trace: &str) {
        let what = format!("a span {name} of {trace}");
        eventually(&what, || self.told().iter().any(|told| told.name == name && told.trace == trace)).await;
    }
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.clone()?.value) {
        Some(Any::StringValue(text)) => text,
        other => panic!("{key} is {other:?} in {attributes:?}"),
    }
}

async fn instance(server: &Server) -> String {
    let status: Value = serde_json::from_str(&server.get("/status").await.1).unwrap();
    status["instance"].as_str().unwrap().to_owned()
}

async fn attach(server: &Server, key: &Key, context: &str) -> Socket {
    let path = format!("/attach/{}?sandbox_token={}", key.id, key.token);
    Socket::open_with(server, &path, Dialect::Plain, &[("traceparent", context)]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_leads_from_the_request_over_storage_to_the_restore_elsewhere() {
    let collector = Collector::start().await;
    let machine = Machine::with_a_bucket().await;
    let settings = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.as_str()),
        ("OTEL_SERVICE_NAME", "here"),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
    ];
    let (one, two) = tokio::join!(machine.server_with("a", &settings), machine.server_with("b", &settings));
    let (here, there) = (instance(&one).await, instance(&two).await);

    let (mut old, key) = Socket::create(&one, Dialect::Plain, movable()).await;
    assert_eq!(old.run("bash", &format!("echo {SECRET}")).await.0, format!("{SECRET}\n"));
    let mut new = attach(&two, &key, &format!("00-{TRACE}-{PARENT}-01")).await;
    new.status("RUNNING").await;
    for name in ["attach", "checkpoint", "acquire", "restore"] {
        collector.until(name, TRACE).await;
    }
    let told = collector.told();
    let mine: BTreeMap<_, _> =
        told.iter().filter(|told| told.trace == TRACE).map(|told| (told.name.as_str(), told)).collect();
    let of = |name: &str| mine.get(name).unwrap_or_else(|| panic!("no {name} in {mine:#?}"));
    let relation = |name: &str| (of(name).instance.as_str(), of(name).parent.as_str(), of(name).outcome.as_str());
    let request = of("attach").span.as_str();
    assert_eq!(relation("attach"), (there.as_str(), PARENT, "done"), "the client's own span is its parent");
    assert_eq!(relation("checkpoint"), (here.as_str(), request, "done"), "the old holder acts for it");
    assert_eq!(relation("acquire"), (there.as_str(), request, "done"));
    assert_eq!(relation("restore"), (there.as_str(), request, "done"));
    for (part, whole) in [("pause", "checkpoint"), ("image", "checkpoint"), ("store", "checkpoint")]
        .into_iter()
        .chain([("fetch", "restore"), ("start", "restore")])
    {
        assert_eq!(relation(part).0, of(whole).instance, "{part}");
        assert_eq!(of(part).parent, of(whole).span, "{part}");
        assert!(of(part).from <= of(part).to && of(part).to <= of(whole).to, "{part} of {whole}");
    }
    // One machine, one clock.
    assert!(of("attach").from <= of("checkpoint").from && of("checkpoint").from < of("start").from);
    assert!(of("start").to <= of("attach").to, "the request ends when the sandbox runs");
    let stored = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    assert_eq!(stored["traceparent"], json!(format!("00-{TRACE}-{request}-01")));

    // A trace of its own, begun here.
    let made = told.iter().find(|told| told.name == "create" && told.parent.is_empty()).expect("the first request");
    assert_eq!((made.instance.as_str(), made.outcome.as_str()), (here.as_str(), "done"));
    let done = told.iter().find(|told| told.name == "create" && told.parent == made.span).expect("the container");
    assert_eq!((done.trace.as_str(), done.instance.as_str()), (made.trace.as_str(), here.as_str()));

    // Nobody is hindered by a collector that is gone, and the wish of a session is part of its trace.
    new.kill().await;
    collector.until("purge", TRACE).await;
    let told = collector.told();
    let kill = told.iter().find(|told| told.name == "kill").expect("the wish");
    assert_eq!((kill.trace.as_str(), kill.parent.as_str()), (TRACE, request));
    assert!(told.iter().any(|told| told.name == "purge" && told.parent == kill.span), "{told:#?}");
    let uuid = key.id.trim_start_matches("sandbox-");
    for batch in collector.batches.lock().unwrap().iter() {
        for word in [SECRET, uuid, &key.token] {
            let leaked = batch.windows(word.len()).any(|bytes| bytes == word.as_bytes());
            assert!(!leaked, "{word} left the server: {:?}", String::from_utf8_lossy(batch));
        }
    }
    let Collector { mut server, .. } = collector;
    server.shutdown().await;
    let (mut last, _) = Socket::create(&one, Dialect::Plain, json!({})).await;
    assert_eq!(last.run("bash", "echo well").await.0, "well\n");
    last.kill().await;
    eventually("it says that nobody takes them", || one.log().contains("traces could not be exported")).await;
    let (began, limit) = (crate::fixture::clock().now(), Duration::from_secs(20));
    one.stop().await;
    two.stop().await;
    assert!(crate::fixture::clock().now() - began < limit, "the end does not wait for the collector");
}
