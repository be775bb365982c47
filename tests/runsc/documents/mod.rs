//! The flows of the two protocol documents, message by message, for a client that knows nothing else: it sends what
//! they show, and every message it hears has the fields they show and no others.
//!
//! `checkpoint_and_restore` and `lifecycle_and_handoff` are named after the documents; `predecessor` has the words
//! that a flag of the Python predecessor, or `BATON_PLAIN=predecessor`, brings.

mod checkpoint_and_restore;
mod lifecycle_and_handoff;
mod predecessor;

use serde_json::{Value, json};

use crate::{
    servers::Server,
    websocket_client::{Dialect, Heard, Key, Socket},
};

/// The example of a creation message.
pub fn example() -> Value {
    json!({"idle_timeout": 300, "enable_checkpoint": true})
}

pub fn status(name: &str) -> Value {
    json!({"event": "status_update", "status": format!("SANDBOX_{name}")})
}

pub fn stdout(text: &str) -> Value {
    json!({"event": "stdout", "data": text})
}

pub fn error(text: &str) -> Value {
    json!({"event": "error", "message": text})
}

/// A plain WebSocket, without parameters but those of the path.
pub async fn open(server: &Server, path: &str) -> Socket {
    Socket::open(server, path, Dialect::Plain).await
}

pub async fn attach(server: &Server, key: &Key) -> Socket {
    open(server, &format!("/attach/{}?sandbox_token={}", key.id, key.token)).await
}

pub async fn next(socket: &mut Socket) -> Value {
    match socket.next().await {
        Heard::Event(event) => event,
        other => panic!("{other:?} after {:?}", socket.statuses),
    }
}

/// Exactly these messages come, with exactly these fields.
pub async fn hears(socket: &mut Socket, messages: &[Value]) {
    for message in messages {
        assert_eq!(next(socket).await, *message, "after {:?}", socket.statuses);
    }
}

/// The next thing that comes is the close.
pub async fn closes(socket: &mut Socket, code: u16) {
    match socket.next().await {
        Heard::End(closed) => assert_eq!(closed, Some(code)),
        other => panic!("{other:?} in place of the close {code}"),
    }
}

/// `error` with a text of which only the beginning is promised.
pub async fn explains(socket: &mut Socket, beginning: &str) {
    let event = next(socket).await;
    let text = event["message"].as_str().unwrap_or_else(|| panic!("{event}"));
    assert!(text.starts_with(beginning), "{text}");
    assert_eq!(event, error(text));
}

/// CREATING, the id and RUNNING, as they are shown.
pub async fn is_created(socket: &mut Socket) -> Key {
    hears(socket, &[status("CREATING")]).await;
    let key = hears_id(socket).await;
    hears(socket, &[status("RUNNING")]).await;
    key
}

async fn hears_id(socket: &mut Socket) -> Key {
    let event = next(socket).await;
    let text = |field: &str| event[field].as_str().unwrap_or_else(|| panic!("{event}")).to_owned();
    let key = Key { id: text("sandbox_id"), token: text("sandbox_token") };
    assert_eq!(event, json!({"event": "sandbox_id", "sandbox_id": key.id, "sandbox_token": key.token}));
    key
}

pub async fn create(server: &Server, config: Value) -> (Socket, Key) {
    let mut socket = open(server, "/create").await;
    socket.send(config).await;
    let key = is_created(&mut socket).await;
    (socket, key)
}

/// One command that writes one line, as it is shown.
pub async fn runs(socket: &mut Socket, language: &str, code: &str, output: &str) {
    socket.send(json!({"language": language, "code": code})).await;
    hears(socket, &[status("EXECUTION_RUNNING"), stdout(output), status("EXECUTION_DONE")]).await;
}

/// One command that writes nothing.
pub async fn runs_silently(socket: &mut Socket, code: &str) {
    socket.send(json!({"language": "bash", "code": code})).await;
    hears(socket, &[status("EXECUTION_RUNNING"), status("EXECUTION_DONE")]).await;
}

pub async fn checkpoints(socket: &mut Socket) {
    socket.send(json!({"action": "checkpoint"})).await;
    hears(socket, &[status("CHECKPOINTING"), status("CHECKPOINTED")]).await;
    closes(socket, 1000).await;
}
