//! Cut connections: what the client asks for when it comes back, and what its caller sees of it.

use std::time::Duration;

use baton_client::{Chunk, Connection, Error, Exec, Offsets, Options, Running, Sandbox, StdStream};
use baton_protocol::{
    event::{Event, Status, Update},
    frame::Stream,
    id::{CheckpointId, ExecId, Nonce},
    request::Request,
};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::{
    client_wire::create,
    script::{Heard, ScriptedPeer, Server, sandbox_id, soon, view},
};

/// What the server lets run ahead of the acknowledgements.
pub const WINDOW: u64 = 1 << 20;

pub async fn start(sandbox: &Sandbox, peer: &mut ScriptedPeer, exec: Exec) -> (Running, ExecId) {
    let (running, id) = tokio::join!(sandbox.exec(exec), async {
        let id = peer.exec().await;
        peer.started(&id, 1).await;
        id
    });
    (running.unwrap(), id)
}

pub async fn offsets(peer: &mut ScriptedPeer, id: &ExecId) -> Offsets {
    match peer.request_but_ack().await {
        Request::Reconnect { offsets, .. } => offsets[id],
        other => panic!("{other:?} instead of a reconnect"),
    }
}

async fn next(running: &mut Running) -> Vec<u8> {
    match soon(running.next()).await {
        Some((StdStream::Stdout, Chunk::Data(bytes))) => bytes.to_vec(),
        other => panic!("{other:?} instead of stdout"),
    }
}

/// Byte `offset` of a long output.
fn byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

pub fn bytes(from: u64, to: u64) -> Vec<u8> {
    (from..to).map(byte).collect()
}

#[tokio::test]
async fn a_cut_command_goes_on_where_it_was() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["tick"])).await;
    peer.output(Stream::Stdout, 1, 0, b"one").await;
    peer.output(Stream::Stderr, 1, 0, b"e").await;
    assert_eq!(next(&mut running).await, b"one");
    assert_eq!(soon(running.next()).await, Some((StdStream::Stderr, Chunk::Data(Bytes::from_static(b"e")))));
    peer.cut();
    let mut peer = server.attach(vec![view(&id, 8, 0)]).await;
    assert_eq!(offsets(&mut peer, &id).await, Offsets { stdout: 3, stderr: 1 });
    peer.started(&id, 8).await;
    peer.output(Stream::Stdout, 8, 2, b"e two").await;
    peer.done(&id, 0).await;
    assert_eq!(next(&mut running).await, b" two");
    assert_eq!(soon(running.next()).await, None);
    assert!(soon(running.wait()).await.unwrap().is_success());
}

#[tokio::test]
async fn a_command_is_asked_for_again_only_if_the_sandbox_does_not_know_it() {
    for is_known in [false, true] {
        let server = Server::start().await;
        let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
        let (running, ()) = tokio::join!(sandbox.exec(Exec::argv(["once"])), async {
            let id = peer.exec().await;
            peer.cut();
            let known = if is_known { vec![view(&id, 1, 0)] } else { Vec::new() };
            let mut peer = server.attach(known).await;
            if is_known {
                assert_eq!(offsets(&mut peer, &id).await, Offsets::default());
            } else {
                assert_eq!(peer.exec().await, id);
            }
            peer.started(&id, 1).await;
            peer.done(&id, 3).await;
            assert!(matches!(peer.request().await, Request::Ack { .. }));
        });
        assert_eq!(soon(running.unwrap().wait()).await.unwrap().exit_code, Some(3));
    }
}

#[tokio::test]
async fn a_command_the_sandbox_has_forgotten_ends_with_the_reason() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, _) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.cut();
    let _peer = server.attach(Vec::new()).await;
    let outcome = soon(running.wait()).await.unwrap();
    assert!(outcome.error.is_some() && outcome.exit_code.is_none());
}

/// Sends `total` bytes as a real server would: never more than a window past what was confirmed.
/// Stops after `cut_after` bytes, and says how far it was confirmed.
async fn stream(peer: &mut ScriptedPeer, from: u64, total: u64, cut_after: u64) {
    let (mut sent, mut confirmed) = (from, from);
    while sent < total && sent - from < cut_after {
        if sent < confirmed + WINDOW {
            let end = total.min(sent + 40_000).min(confirmed + WINDOW);
            // A little is repeated, as after a restore.
            let begin = sent.saturating_sub(7);
            peer.output(Stream::Stdout, 1, begin, &bytes(begin, end)).await;
            sent = end;
        } else {
            let Request::Ack { offsets, .. } = peer.request().await else { panic!("no acknowledgement") };
            assert!(offsets.stdout <= sent, "it confirmed what was never sent");
            confirmed = offsets.stdout;
        }
    }
}

#[tokio::test]
async fn twenty_cuts_lose_and_double_nothing() {
    const TOTAL: u64 = 24 << 20;
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = start(&sandbox, &mut peer, Exec::argv(["flood"])).await;
    let (collected, ()) = tokio::join!(running.collect(), async {
        let mut from = 0;
        for cut in 1..=20 {
            stream(&mut peer, from, TOTAL, 900_000 + cut * 31_337).await;
            peer.cut();
            peer = server.attach(vec![view(&id, 1, 0)]).await;
            from = offsets(&mut peer, &id).await.stdout;
            peer.started(&id, 1).await;
        }
        stream(&mut peer, from, TOTAL, TOTAL).await;
        peer.done(&id, 0).await;
        while let Heard::Request(Request::Ack { offsets, .. }) = peer.heard().await {
            if offsets.stdout == TOTAL {
                break;
            }
        }
    });
    let collected = collected.unwrap();
    assert!(collected.stdout == bytes(0, TOTAL), "{} of {TOTAL} bytes, or others", collected.stdout.len());
}

#[tokio::test]
async fn nothing_is_confirmed_that_was_not_read() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["yes"])).await;
    let mut stdout = running.take_stdout().unwrap();
    peer.output(Stream::Stdout, 1, 0, &bytes(0, 600_000)).await;
    peer.output(Stream::Stdout, 1, 600_000, &bytes(600_000, WINDOW)).await;
    // An answered request shows that everything before it was received.
    let (refused, ()) = tokio::join!(sandbox.fork(1), async {
        assert!(peer.request().await == Request::Fork { count: 1 });
        peer.refuse(Status::Error, "no").await;
    });
    assert!(refused.is_err());
    assert!(matches!(soon(stdout.next()).await, Some(Chunk::Data(bytes)) if bytes.len() == 600_000));
    let Request::Ack { exec_id, offsets } = peer.request().await else { panic!() };
    assert_eq!((exec_id, offsets.stdout), (id, 600_000));
}

#[tokio::test]
async fn a_stream_that_was_dropped_does_not_hold_the_command_back() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["yes"])).await;
    drop(running.take_stderr());
    peer.output(Stream::Stderr, 1, 0, &bytes(0, 300_000)).await;
    let Request::Ack { exec_id, offsets } = peer.request().await else { panic!() };
    assert_eq!((exec_id, offsets), (id, Offsets { stdout: 0, stderr: 300_000 }));
}

#[tokio::test]
async fn a_server_that_ignores_the_window_is_not_read_without_bound() {
    const TOTAL: u64 = 64 << 20;
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = start(&sandbox, &mut peer, Exec::argv(["yes"])).await;
    let mut flood = JoinSet::new();
    let (progress, mut seen) = tokio::sync::watch::channel(0);
    flood.spawn(async move {
        for offset in (0..TOTAL).step_by(1 << 18) {
            peer.output_slowly(Stream::Stdout, 1, offset, &bytes(offset, offset + (1 << 18))).await;
            progress.send_replace(offset);
        }
        peer.done(&id, 0).await;
        peer
    });
    // It stands still once what lies between is full.
    while matches!(tokio::time::timeout(Duration::from_secs(2), seen.changed()).await, Ok(Ok(()))) {}
    let sent = *seen.borrow();
    assert!(sent < TOTAL / 2, "{sent} bytes were taken in although nobody reads");
    let collected = tokio::time::timeout(Duration::from_secs(60), running.collect()).await.unwrap().unwrap();
    assert!(collected.stdout == bytes(0, TOTAL));
}

#[tokio::test]
async fn what_is_lost_or_repeated_is_said_in_its_place() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.output(Stream::Stdout, 1, 0, b"abcd").await;
    assert_eq!(next(&mut running).await, b"abcd");
    peer.cut();
    let mut peer = server.accept().await;
    peer.hello().await;
    let checkpoint_id = CheckpointId::new(&sandbox_id(), 1, 1, &Nonce::from_bits([1; 16]));
    peer.say(&Event::RolledBack { checkpoint_id, age_ms: 5 }).await;
    peer.update(Update { execs: Some(vec![view(&id, 1, 0)]), ..Update::new(Status::Running) }).await;
    offsets(&mut peer, &id).await;
    let stream = StdStream::Stdout;
    peer.say(&Event::OutputRewound { exec_id: id.clone(), stream, to: 2 }).await;
    peer.output(Stream::Stdout, 1, 2, b"CD").await;
    peer.say(&Event::OutputGap { exec_id: id.clone(), stream, from: 4, to: 10 }).await;
    peer.output(Stream::Stdout, 1, 10, b"k").await;
    peer.done(&id, 0).await;
    let mut heard = Vec::new();
    while let Some((_, chunk)) = soon(running.next()).await {
        heard.push(chunk);
    }
    let data = |text: &'static str| Chunk::Data(Bytes::from_static(text.as_bytes()));
    assert_eq!(heard, [Chunk::Rewound { to: 2 }, data("CD"), Chunk::Gap { from: 4, to: 10 }, data("k")]);
}

#[tokio::test]
async fn missing_bytes_nobody_spoke_of_are_an_error() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, _) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.output(Stream::Stdout, 1, 5, b"late").await;
    assert!(matches!(soon(running.wait()).await, Err(Error::Protocol(_))));
}

#[tokio::test]
async fn a_sandbox_in_use_is_tried_again_and_one_that_is_gone_is_not() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.cut();
    let mut peer = server.accept().await;
    peer.status(Status::InUse).await;
    peer.close(1011).await;
    // Not even a WebSocket.
    drop(server.tcp().await);
    let mut peer = server.attach(vec![view(&id, 1, 0)]).await;
    offsets(&mut peer, &id).await;
    peer.close(1011).await;
    let mut peer = server.accept().await;
    peer.status(Status::Restoring).await;
    peer.status(Status::NotFound).await;
    peer.close(1011).await;
    assert_eq!(soon(running.wait()).await.unwrap_err(), Error::NotFound);
    assert_eq!(soon(sandbox.exec(Exec::argv(["x"]))).await.unwrap_err(), Error::NotFound);
}

#[tokio::test]
async fn a_deleted_sandbox_is_not_followed() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (mut running, _) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.status(Status::Deleting).await;
    peer.status(Status::Deleted).await;
    peer.close(1000).await;
    assert_eq!(soon(running.wait()).await.unwrap_err(), Error::Ended("the sandbox was deleted".into()));
}

#[tokio::test]
async fn a_server_that_falls_silent_is_left() {
    let server = Server::start().await;
    let connection = Connection { silence: Duration::from_millis(300), ..Connection::default() };
    let options = Options { connection, ..Options::default() };
    let url = server.url();
    let (sandbox, peer) = tokio::join!(Sandbox::create(&url, options), server.create());
    let _again = server.attach(Vec::new()).await;
    drop((sandbox.unwrap(), peer));
}

#[tokio::test]
async fn the_affinity_cookie_comes_back_until_the_instance_asks_to_leave() {
    let mut server = Server::start().await;
    server.cookie = Some("GAESA=one; Path=/; HttpOnly");
    let (_sandbox, peer) = tokio::join!(create(&server), server.create());
    assert!(!peer.headers.contains_key("cookie"));
    peer.cut();
    server.cookie = Some("GAESA=two");
    let peer = server.attach(Vec::new()).await;
    assert_eq!(peer.headers["cookie"], "GAESA=one");
    peer.cut();
    let peer = server.attach(Vec::new()).await;
    assert_eq!(peer.headers["cookie"], "GAESA=two");
    peer.close(1012).await;
    assert!(!server.attach(Vec::new()).await.headers.contains_key("cookie"));
}

#[tokio::test]
async fn coming_back_is_given_up_when_its_time_is_over() {
    for reconnect_for in [None, Some(Duration::from_millis(400))] {
        let server = Server::start().await;
        let connection = Connection { reconnect_for, ..Connection::default() };
        let options = Options { connection, ..Options::default() };
        let url = server.url();
        let (sandbox, mut peer) = tokio::join!(Sandbox::create(&url, options), server.create());
        let sandbox = sandbox.unwrap();
        let (mut running, _) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
        drop(server);
        peer.cut();
        let end = soon(running.wait()).await;
        assert!(matches!(end, Err(Error::Connection(_))), "{end:?}");
    }
}

#[tokio::test]
async fn a_command_can_be_followed_by_somebody_who_did_not_start_it() {
    let server = Server::start().await;
    let url = server.url();
    let id = ExecId::parse("build").unwrap();
    let attaching = Sandbox::attach(&url, sandbox_id(), crate::script::token());
    let (sandbox, mut peer) = tokio::join!(attaching, server.attach(vec![view(&id, 5, 0)]));
    let sandbox = sandbox.unwrap();
    assert_eq!(sandbox.execs()[0].exec_id, id);
    let mut running = soon(sandbox.follow(&id, Offsets { stdout: 3, stderr: 0 })).await.unwrap();
    assert_eq!(offsets(&mut peer, &id).await, Offsets { stdout: 3, stderr: 0 });
    peer.started(&id, 5).await;
    peer.output(Stream::Stdout, 5, 3, b"rest").await;
    peer.done(&id, 0).await;
    assert_eq!(next(&mut running).await, b"rest");
    assert!(soon(running.wait()).await.unwrap().is_success());
    assert!(sandbox.follow(&ExecId::parse("other").unwrap(), Offsets::default()).await.is_err());
}

#[tokio::test]
async fn a_roll_back_is_told_to_the_caller_and_marks_what_ran() {
    let server = Server::start().await;
    let told = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let kept = told.clone();
    let on_roll_back = std::sync::Arc::new(move |roll_back: &baton_client::RollBack| {
        kept.lock().unwrap().push(roll_back.clone());
    });
    let connection = Connection { on_roll_back: Some(on_roll_back), ..Connection::default() };
    let url = server.url();
    let creating = Sandbox::create(&url, Options { connection, ..Options::default() });
    let (sandbox, mut peer) = tokio::join!(creating, server.create());
    let sandbox = sandbox.unwrap();
    let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["x"])).await;
    peer.cut();
    let mut peer = server.accept().await;
    peer.hello().await;
    let checkpoint_id = CheckpointId::new(&sandbox_id(), 1, 2, &Nonce::from_bits([3; 16]));
    peer.say(&Event::RolledBack { checkpoint_id: checkpoint_id.clone(), age_ms: 1500 }).await;
    peer.update(Update { execs: Some(vec![view(&id, 1, 0)]), ..Update::new(Status::Running) }).await;
    peer.done(&id, 0).await;
    let outcome = soon(running.wait()).await.unwrap();
    assert_eq!((outcome.rolled_back, outcome.to_string().as_str()), (true, "exit code 0, rolled back"));
    let expected = [baton_client::RollBack { checkpoint_id, age: Duration::from_millis(1500) }];
    assert_eq!(sandbox.roll_backs(), expected);
    assert_eq!(*told.lock().unwrap(), expected);
}
