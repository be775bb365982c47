//! Serves HTTP/1.1 and WebSockets on a listener, with limits on connections in total and per address, and on the time a
//! request may take to arrive. HTTP/2 is not supported: nothing here needs it, and it would need limits of its own.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    extract::ConnectInfo,
    http::{Request, Response},
    serve::Listener,
};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    connections::{Caps, ConnectionSlot, Connections, Standing, Underway},
    lingering_close::{LingeringConnection, Peer},
};
use crate::clock::SharedClock;

/// Timeout of the first request: a new connection has no reason to wait.
const FIRST_WITHIN: Duration = Duration::from_secs(30);
/// Limit on the request line and all headers, and so on the memory of a connection whose request is not known yet.
const MAX_HEAD: usize = 16 << 10;

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub struct ListenerLimits {
    /// How many may be open at once. To accept another one, the one that has been idle longest is closed.
    pub connections: usize,
    /// How many of one address may be open without having shown a key or a token; `None` means no limit.
    pub per_peer: Option<usize>,
    /// How long a connection may wait for its next request.
    pub keep_alive: Duration,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self { connections: 4_096, per_peer: None, keep_alive: Duration::from_secs(20) }
    }
}

/// Serves until `stop`, and then until the requests in progress are answered. `tasks` reads the bytes that clients
/// send after the end of their connection.
pub async fn serve(
    mut listener: TcpListener,
    app: Router,
    bounds: ListenerLimits,
    clock: SharedClock,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let connections = Connections::new(Caps { total: bounds.connections, per_peer: bounds.per_peer });
    let open = TaskTracker::new();
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = Listener::accept(&mut listener) => accepted,
        };
        let Some(place) = connections.admit(peer.ip()) else { continue };
        // One event is one small write, which must not wait for the next.
        let _ = stream.set_nodelay(true);
        let server = Server { app: app.clone(), keep_alive: bounds.keep_alive, clock: clock.clone() };
        open.spawn(server.serve(stream, Peer(peer), place, tasks.clone(), stop.clone()));
    }
    drop(listener);
    open.close();
    open.wait().await;
}

/// Serves one connection.
struct Server {
    app: Router,
    keep_alive: Duration,
    clock: SharedClock,
}

impl Server {
    /// Serves until the connection is closed or becomes a session.
    async fn serve(
        self,
        stream: TcpStream,
        peer: Peer,
        place: ConnectionSlot,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let (handle, closed, standing) = (place.handle(), place.closed.clone(), place.standing.clone());
        let connection = LingeringConnection::new(stream, place, self.clock.clone(), tasks);
        let app = Arc::new(TowerToHyperService::new(self.app));
        let service = service_fn(move |mut request: Request<Incoming>| {
            let underway = handle.begin();
            request.extensions_mut().insert(ConnectInfo(peer));
            request.extensions_mut().insert(handle.clone());
            let answer = app.call(request);
            async move {
                let response = answer.await?;
                Ok::<Response<Answer>, Infallible>(response.map(|body| Answer { body, _underway: underway }))
            }
        });
        let mut http = http1::Builder::new();
        http.max_buf_size(MAX_HEAD);
        let mut served = std::pin::pin!(http.serve_connection(TokioIo::new(connection), service).with_upgrades());
        let mut overdue = std::pin::pin!(overdue(&self.clock, standing, self.keep_alive));
        let mut is_stopping = false;
        loop {
            tokio::select! {
                biased;
                // Errors of a connection concern its client only.
                _ = served.as_mut() => return,
                () = closed.cancelled() => return,
                () = overdue.as_mut() => return,
                () = stop.cancelled(), if !is_stopping => {
                    is_stopping = true;
                    served.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

/// Resolves when a connection has waited too long for a complete request.
async fn overdue(clock: &SharedClock, mut standing: watch::Receiver<Standing>, keep_alive: Duration) {
    let mut within = keep_alive.min(FIRST_WITHIN);
    loop {
        // Any change means that a request has arrived, even one before the first poll.
        if standing.has_changed().unwrap_or(false) {
            within = keep_alive;
        }
        let now = *standing.borrow_and_update();
        let changed = async {
            if standing.changed().await.is_err() {
                // The connection has ended, or another one has taken its slot.
                std::future::pending::<()>().await;
            }
        };
        match now {
            Standing::Idle => tokio::select! {
                biased;
                () = changed => {}
                () = clock.sleep(within) => return,
            },
            Standing::Unproven | Standing::Proven => changed.await,
        }
        within = keep_alive;
    }
}

/// The body of an answer; once it is written, the connection waits for the next request.
struct Answer {
    body: Body,
    _underway: Underway,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
