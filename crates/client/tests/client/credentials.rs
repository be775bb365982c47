//! What the caller gives for every handshake, and hears of every update.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering},
};

use baton_client::{Auth, Connection, Error, Options, Sandbox};
use baton_protocol::event::{Progress, Status, Update};

use crate::script::{Server, sandbox_id, soon, token};

#[tokio::test]
async fn credentials_are_asked_for_before_each_handshake_and_replace_what_stands_there() {
    let server = Server::start().await;
    let handshakes = Arc::new(AtomicU32::new(0));
    let counted = handshakes.clone();
    let auth = Auth::source(move || {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        async move { Ok(vec![("Authorization".to_owned(), format!("Bearer {number}"))]) }
    });
    assert!(!format!("{auth:?}").contains("Bearer"));
    let headers = vec![("authorization".into(), "none".into()), ("x-front".into(), "door".into())];
    let connection = Connection { auth: Some(auth), headers, ..Connection::default() };
    let url = server.url();
    let options = Options { connection, ..Options::default() };
    let (sandbox, peer) = tokio::join!(soon(Sandbox::create(&url, options)), server.create());
    let sandbox = sandbox.unwrap();
    assert_eq!(peer.headers["authorization"], "Bearer 0");
    assert_eq!(peer.headers["x-front"], "door");
    assert_eq!(peer.headers.get_all("authorization").iter().count(), 1);
    peer.cut();
    let peer = server.attach(vec![]).await;
    assert_eq!(peer.headers["authorization"], "Bearer 1");
    sandbox.close().await;
    assert_eq!(handshakes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn without_credentials_there_is_no_handshake() {
    let server = Server::start().await;
    let auth = Auth::source(|| async { Err(Error::Auth("the safe is locked".into())) });
    let connection = Connection { auth: Some(auth), ..Connection::default() };
    let refused = soon(Sandbox::attach_with(&server.url(), sandbox_id(), token(), connection)).await.unwrap_err();
    assert_eq!(refused, Error::Auth("the safe is locked".into()));
    // And one that never answers is not waited for.
    let never = Auth::source(std::future::pending);
    let connect_within = std::time::Duration::from_millis(50);
    let connection = Connection { auth: Some(never), connect_within, ..Connection::default() };
    let refused = soon(Sandbox::attach_with(&server.url(), sandbox_id(), token(), connection)).await.unwrap_err();
    assert!(matches!(refused, Error::Auth(_)), "{refused:?}");
}

#[tokio::test]
async fn every_update_is_heard_also_how_far_a_restore_is_before_there_is_a_sandbox() {
    let server = Server::start().await;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let kept = heard.clone();
    let on_status = Arc::new(move |update: &Update| kept.lock().unwrap().push((update.status, update.progress)));
    let connection = Connection { on_status: Some(on_status), ..Connection::default() };
    let url = server.url();
    let attaching = soon(Sandbox::attach_with(&url, sandbox_id(), token(), connection));
    let (sandbox, ()) = tokio::join!(attaching, async {
        let mut peer = server.accept().await;
        peer.hello().await;
        peer.status(Status::Restoring).await;
        let progress = Some(Progress { done: 3, total: 8 });
        peer.update(Update { progress, ..Update::new(Status::Restoring) }).await;
        peer.status(Status::Running).await;
    });
    drop(sandbox.unwrap());
    let moved = Some(Progress { done: 3, total: 8 });
    let expected = [(Status::Restoring, None), (Status::Restoring, moved), (Status::Running, None)];
    assert_eq!(*heard.lock().unwrap(), expected);
}
