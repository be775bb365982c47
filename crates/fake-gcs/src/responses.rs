//! How much of an answer arrives: all of it, nothing, or its beginning.

use axum::{
    body::{Body, Bytes},
    http::{Response, header},
};
use futures::StreamExt;
use http_body_util::BodyExt;

use crate::{Plan, drop_connection, json::Reply};

/// The answer to work that is done, as far as it arrives.
pub async fn send(reply: Reply, plan: &Plan) -> Reply {
    if plan.lose_reply {
        drop_connection();
    }
    let Some(clip) = plan.clip else { return reply };
    let (mut head, body) = reply.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    head.headers.insert(header::CONTENT_LENGTH, body.len().into());
    Response::from_parts(head, broken_off(body.slice(..clip.min(body.len()))))
}

/// These bytes, and then the connection breaks.
pub fn broken_off(data: Bytes) -> Body {
    let broken = async {
        // The bytes are sent before it breaks: the server flushes what it has while it waits for more.
        tokio::task::yield_now().await;
        Err(std::io::Error::other("the connection breaks here"))
    };
    Body::from_stream(futures::stream::iter([Ok(data)]).chain(futures::stream::once(broken)))
}

/// One bit is wrong.
pub fn flipped(data: &Bytes) -> Bytes {
    let mut wrong = data.to_vec();
    if let Some(first) = wrong.first_mut() {
        *first ^= 1;
    }
    wrong.into()
}
