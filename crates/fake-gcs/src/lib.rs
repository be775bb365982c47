//! A Cloud Storage server in this process: tests run against it, and two servers on one machine can be tried with it.
//!
//! It speaks both transports of the official clients on one port: the JSON API over HTTP/1.1 (`buckets`, `listing`,
//! `read`, `upload`, `resumable`, `change`; what they share is `json`) and gRPC over HTTP/2 (`grpc`, `proto`).
//! Objects lie in memory (`objects`). What can go wrong goes wrong on demand (`fault`).

#![expect(clippy::disallowed_methods, reason = "a server in its own right: its time is not an instance's")]

mod buckets;
mod change;
mod grpc;
mod injected_fault;
mod json;
mod listing;
mod objects;
mod proto;
mod read;
mod responses;
mod resumable;
mod resumable_upload;

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    routing::{get, post},
    serve::ListenerExt,
};
use tokio::{net::TcpListener, task::JoinSet};

pub use injected_fault::{FaultCount, FaultKind, InjectedFault, MalformedFault, Op, parse_fault};
use objects::{ObjectRefusal, Objects};

/// How the server behaves from the start.
#[derive(Clone, Debug, Default)]
pub struct FakeGcsOptions {
    /// Added to every request.
    pub latency: Duration,
    /// How soon the same object may be written again; sooner is answered with 429.
    pub write_interval: Option<Duration>,
    pub faults: Vec<InjectedFault>,
    /// The buckets there are. Empty: every bucket anybody names.
    pub buckets: Vec<String>,
}

/// A running server; it ends with this value.
#[derive(Debug)]
pub struct FakeGcs {
    shared: SharedServer,
    server: JoinSet<()>,
}

pub(crate) type SharedServer = Arc<ServerState>;

#[derive(Debug)]
pub(crate) struct ServerState {
    url: String,
    objects: Mutex<Objects>,
    faults: Mutex<Vec<InjectedFault>>,
    latency: Mutex<Duration>,
    requests: AtomicU64,
    /// Names sent in listings.
    listed: AtomicU64,
    /// Bytes of content sent, by object.
    sent: Mutex<HashMap<String, u64>>,
}

impl FakeGcs {
    /// Listens on `addr` (port 0 is any free one) and serves at once.
    pub async fn start(addr: SocketAddr, options: FakeGcsOptions) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let shared = Arc::new(ServerState {
            url: format!("http://{}", listener.local_addr()?),
            objects: Mutex::new(Objects::new(options.buckets, options.write_interval)),
            faults: Mutex::new(options.faults),
            latency: Mutex::new(options.latency),
            requests: AtomicU64::new(0),
            listed: AtomicU64::new(0),
            sent: Mutex::default(),
        });
        let routes = routes(shared.clone());
        // Without it small gRPC answers wait 40 ms for a delayed acknowledgement.
        let listener = listener.tap_io(|socket| drop(socket.set_nodelay(true)));
        let mut server = JoinSet::new();
        server.spawn(async move { drop(axum::serve(listener, routes).await) });
        Ok(Self { shared, server })
    }

    /// The endpoint for both clients.
    pub fn url(&self) -> &str {
        &self.shared.url
    }

    pub fn add_fault(&self, fault: InjectedFault) {
        lock(&self.shared.faults).push(fault);
    }

    /// Faults that have not happened yet, or not as often as they should.
    pub fn faults_left(&self) -> Vec<InjectedFault> {
        lock(&self.shared.faults).clone()
    }

    pub fn clear_faults(&self) {
        lock(&self.shared.faults).clear();
    }

    pub fn set_latency(&self, latency: Duration) {
        *lock(&self.shared.latency) = latency;
    }

    pub fn set_write_interval(&self, interval: Option<Duration>) {
        lock(&self.shared.objects).set_write_interval(interval);
    }

    /// Requests received so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Names sent in listings so far.
    pub fn listed(&self) -> u64 {
        self.shared.listed.load(Ordering::SeqCst)
    }

    /// How many bytes of an object's content were sent to whoever read it, in however many requests.
    pub fn sent(&self, bucket: &str, name: &str) -> u64 {
        lock(&self.shared.sent).get(&format!("{bucket}/{name}")).copied().unwrap_or(0)
    }

    /// What an object holds, past all faults.
    pub fn content(&self, bucket: &str, name: &str) -> Option<bytes::Bytes> {
        lock(&self.shared.objects).get(bucket, name).ok().map(|object| object.data.clone())
    }

    /// The names of all objects of a bucket.
    pub fn names(&self, bucket: &str) -> Vec<String> {
        let objects = lock(&self.shared.objects);
        objects.objects.keys().filter(|(home, _)| home == bucket).map(|(_, name)| name.clone()).collect()
    }

    /// Puts an object there, past all faults and conditions.
    pub fn put(&self, bucket: &str, name: &str, data: impl Into<bytes::Bytes>) {
        lock(&self.shared.objects).force(bucket, name, data.into());
    }

    /// Serves until the task is gone, which is for ever.
    pub async fn run(mut self) {
        self.server.join_next().await;
    }
}

fn routes(shared: SharedServer) -> Router {
    let uploads = || post(resumable_upload::post).put(resumable::put).delete(resumable::cancel);
    let object = get(read::get).patch(change::patch).put(change::update).delete(change::delete).post(change::post);
    Router::new()
        .route("/storage/v1/b", get(buckets::list).post(buckets::create))
        .route("/storage/v1/b/{bucket}", get(buckets::get).delete(buckets::delete))
        .route("/storage/v1/b/{bucket}/storageLayout", get(buckets::layout))
        .route("/storage/v1/b/{bucket}/o", get(listing::list))
        .route("/storage/v1/b/{bucket}/o/{*object}", object)
        .route("/download/storage/v1/b/{bucket}/o/{*object}", get(read::download))
        .route("/upload/storage/v1/b/{bucket}/o", uploads())
        // What the command line of Google's puts before it.
        .route("/resumable/upload/storage/v1/b/{bucket}/o", uploads())
        .route("/google.storage.v2.Storage/{method}", post(grpc::serve))
        .route("/{bucket}/{*object}", get(read::xml))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .with_state(shared)
}

/// What a handler has to do beside its work.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The reply is lost after the work was done.
    lose_reply: bool,
    /// The connection breaks after so many bytes.
    cut: Option<usize>,
    /// So many bytes of an upload are kept, then 503.
    keep: Option<usize>,
    /// The answer breaks off after so many bytes.
    clip: Option<usize>,
    /// A bit of the body is wrong.
    flip: bool,
}

impl ServerState {
    /// Counts a request, lets it wait, and applies the fault that is due, if any.
    pub(crate) async fn receive(&self, op: Op, object: &str) -> Result<Plan, ObjectRefusal> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let latency = *lock(&self.latency);
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let due = injected_fault::next_fault(&mut lock(&self.faults), op, object);
        let mut plan = Plan::default();
        match due {
            None => {}
            Some(FaultKind::Lost) => plan.lose_reply = true,
            Some(FaultKind::Drop) => drop_connection(),
            Some(FaultKind::Hang) => std::future::pending().await,
            Some(FaultKind::Delay(span)) => tokio::time::sleep(span).await,
            Some(FaultKind::Status(code)) => return Err(ObjectRefusal::Status(code)),
            Some(FaultKind::Cut(bytes)) => plan.cut = Some(bytes),
            Some(FaultKind::Keep(bytes)) => plan.keep = Some(bytes),
            Some(FaultKind::Clip(bytes)) => plan.clip = Some(bytes),
            Some(FaultKind::Flip) => plan.flip = true,
        }
        Ok(plan)
    }

    pub(crate) fn sends(&self, bucket: &str, name: &str, bytes: usize) {
        *lock(&self.sent).entry(format!("{bucket}/{name}")).or_default() += bytes as u64;
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }
}

/// Ends the connection's task, and with it the connection, without an answer and without a panic message.
pub(crate) fn drop_connection() -> ! {
    std::panic::resume_unwind(Box::new("the connection is dropped"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
