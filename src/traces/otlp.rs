//! Exports spans by OTLP, as protobuf over HTTP. The SDK batches them and sends from its own thread;
//! the connection belongs to the server's runtime.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use axum::http;
use baton_protocol::id::InstanceId;
use bytes::Bytes;
use opentelemetry::{
    Context, KeyValue,
    trace::{
        Link, Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
        TraceState, Tracer, TracerProvider,
    },
};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider, Span},
};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::{Cause, Target, Traceparent};
use crate::metrics::{ActionOutcome, Named};

/// The timeout of one batch.
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Exporter {
    pub fn open(target: &Target<'_>, instance: &InstanceId) -> Result<Self, String> {
        let runtime = Handle::try_current().map_err(|error| error.to_string())?;
        let client =
            reqwest::Client::builder().timeout(BATCH_TIMEOUT).redirect(reqwest::redirect::Policy::none()).build();
        let client = client.map_err(|error| error.to_string())?;
        let sender = Sender { client, runtime, tasks: TaskTracker::new(), is_in_trouble: AtomicBool::new(false) };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(sender)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", target.endpoint.trim_end_matches('/')))
            .build()
            .map_err(|error| error.to_string())?;
        let resource = Resource::builder()
            .with_service_name(target.service.to_owned())
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("service.instance.id", instance.to_string()));
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
        Ok(Self { tracer: provider.tracer("baton"), provider })
    }

    pub fn start(&self, name: &'static str, cause: Cause, is_request: bool, at: SystemTime) -> Started {
        let kind = if is_request { SpanKind::Server } else { SpanKind::Internal };
        let mut builder = SpanBuilder::from_name(name).with_kind(kind).with_start_time(at);
        let parent = match cause {
            Cause::Request(parent) => Context::new().with_remote_span_context(context(parent)),
            Cause::After(before) => {
                builder = builder.with_links(vec![Link::with_context(context(before))]);
                Context::new()
            }
            Cause::Unrequested => Context::new(),
        };
        Started(self.tracer.build_with_context(builder, &parent))
    }

    /// Returns when everything is sent or at the timeout. Must not run on the runtime, which does the sending.
    pub fn close(&self, within: Duration) {
        if let Err(error) = self.provider.shutdown_with_timeout(within) {
            tracing::debug!(%error, "the last traces could not be exported");
        }
    }
}

#[derive(Debug)]
pub struct Started(Span);

impl Started {
    pub fn traceparent(&self) -> Option<Traceparent> {
        let context = self.0.span_context();
        context.is_valid().then(|| Traceparent {
            trace: context.trace_id().to_bytes(),
            span: context.span_id().to_bytes(),
            sampled: context.is_sampled(),
        })
    }

    pub fn end(mut self, outcome: ActionOutcome, at: SystemTime) {
        self.0.set_attribute(KeyValue::new("outcome", outcome.name()));
        if outcome == ActionOutcome::Failed {
            self.0.set_status(Status::error(""));
        }
        self.0.end_with_timestamp(at);
    }
}

fn context(parent: Traceparent) -> SpanContext {
    let flags = if parent.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace, span) = (TraceId::from_bytes(parent.trace), SpanId::from_bytes(parent.span));
    SpanContext::new(trace, span, flags, true, TraceState::default())
}

/// The HTTP client that the SDK sends through.
#[derive(Debug)]
struct Sender {
    client: reqwest::Client,
    runtime: Handle,
    tasks: TaskTracker,
    /// Logs the first failure only, not every batch.
    is_in_trouble: AtomicBool,
}

#[async_trait::async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let (client, (parts, body)) = (self.client.clone(), request.into_parts());
        let call = async move {
            let request = client.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body);
            let answer = request.send().await?;
            let mut response = http::Response::builder().status(answer.status());
            if let Some(headers) = response.headers_mut() {
                headers.clone_from(answer.headers());
            }
            Ok::<_, HttpError>(response.body(answer.bytes().await?)?)
        };
        let answer = self.tasks.spawn_on(call, &self.runtime).await.map_err(HttpError::from).and_then(|answer| answer);
        let trouble = match &answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(answer.status().to_string()),
            Err(error) => Some(error.to_string()),
        };
        let was_in_trouble = self.is_in_trouble.swap(trouble.is_some(), Ordering::Relaxed);
        if let Some(error) = trouble.filter(|_| !was_in_trouble) {
            tracing::warn!(error, "traces could not be exported");
        }
        answer
    }
}
