//! One HTTP request to a server inside, over a connection of its own. Bodies are passed on piece by piece, in both
//! directions at once, and at most as fast as they are read.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{HeaderValue, Response, StatusCode, Version, header, uri::PathAndQuery},
};
use hyper::{
    body::{Frame, SizeHint},
    client::conn::http1,
    upgrade::{self, OnUpgrade},
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    port_activity::PortActivity,
    port_headers::{self, Arrived, upgrade_of},
    port_refusal::PortRefusal,
};
use crate::{
    api::Api,
    network::{PortBytes, PortStream},
};

/// How long a server inside may take to answer after the last byte of the request. A body may take any time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(300);
/// Limit on the head of an answer, and on what is read ahead of a body.
const MAX_HEAD: usize = 64 << 10;
/// How much of an upgraded connection is read at a time.
const PIECE: usize = 16 << 10;
/// Timeout for both sides to leave HTTP after they agreed to.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the server inside for `path` and returns its answer.
pub async fn exchange(
    api: &Arc<Api>,
    (stream, activity): (PortStream, Arc<PortActivity>),
    mut request: Request,
    path: PathAndQuery,
    arrived: &Arrived<'_>,
) -> Result<axum::response::Response, PortRefusal> {
    let port = arrived.target.port;
    let broken = |error: hyper::Error| {
        tracing::debug!(%error, port, "a server inside did not answer");
        PortRefusal::Broken(port)
    };
    let upgrade = upgrade_of(request.headers());
    let client = request.extensions_mut().remove::<OnUpgrade>();
    port_headers::to_inside(request.headers_mut(), arrived);
    if let Some(protocol) = &upgrade {
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, protocol.clone());
    }
    *request.uri_mut() = path.into();
    *request.version_mut() = Version::HTTP_11;
    let request = request.map(|body| PortBody { body, activity: activity.clone() });

    let mut http = http1::Builder::new();
    http.max_buf_size(MAX_HEAD);
    let (mut sender, connection) = http.handshake(TokioIo::new(PortBytes::new(stream))).await.map_err(broken)?;
    let closing = api.closing.clone();
    api.tasks.spawn(async move {
        tokio::select! {
            // What goes wrong shows in the response.
            _ = connection.with_upgrades() => {}
            () = closing.cancelled() => {}
        }
    });
    let answered = activity.busy_with(sender.send_request(request));
    let mut response = tokio::select! {
        answered = answered => answered.map_err(broken)?,
        () = activity.silent_for(HEAD_TIMEOUT) => return Err(PortRefusal::Silent(port)),
    };
    let is_upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let server = is_upgraded.then(|| upgrade::on(&mut response));
    port_headers::to_outside(response.headers_mut(), arrived.target, arrived.route);
    let Some(server) = server else {
        return Ok(response.map(|body| Body::new(PortBody { body: Body::new(body), activity })));
    };
    let (Some(protocol), Some(client)) = (upgrade, client) else { return Err(PortRefusal::Broken(port)) };
    spawn_tunnel(api, client, server, activity);
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
    Ok(Response::from_parts(response.into_parts().0, Body::empty()))
}

/// Joins the two sides of an upgraded connection.
fn spawn_tunnel(api: &Arc<Api>, client: OnUpgrade, server: OnUpgrade, activity: Arc<PortActivity>) {
    let (clock, closing) = (api.clock.clone(), api.closing.clone());
    api.tasks.spawn(async move {
        let both = clock.timeout(UPGRADE_TIMEOUT, async { tokio::try_join!(client, server) }).await;
        let Ok(Ok((client, server))) = both else { return };
        let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
        let (mut from_server, mut to_server) = tokio::io::split(TokioIo::new(server));
        let joined = async {
            tokio::try_join!(
                copy(&mut from_client, &mut to_server, &activity),
                copy(&mut from_server, &mut to_client, &activity),
            )
        };
        tokio::select! {
            // An error on one side ends both.
            _ = joined => {}
            () = closing.cancelled() => {}
        }
    });
}

/// Copies one direction up to its end, which it passes on.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &PortActivity,
) -> std::io::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        activity.beat();
        to.write_all(&buffer[..read]).await?;
        to.flush().await?;
    }
}

/// A body on its way through.
struct PortBody {
    body: Body,
    activity: Arc<PortActivity>,
}

impl HttpBody for PortBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(Ok(_)) = &frame {
            self.activity.beat();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
