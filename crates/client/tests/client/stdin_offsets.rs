//! Input over cut connections: each byte reaches the command once, also when another client wrote meanwhile.

use std::time::Duration;

use baton_client::{Exec, Offsets, Sandbox};
use baton_protocol::{
    event::{Event, ExecView, Status},
    id::ExecId,
    request::Request,
};
use bytes::Bytes;

use crate::{
    client_wire::create,
    resume::{WINDOW, bytes, offsets, start},
    script::{Server, sandbox_id, soon, view},
};

#[tokio::test]
async fn stdin_that_was_not_taken_is_sent_again() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = start(&sandbox, &mut peer, Exec::argv(["cat"]).stdin()).await;
    running.write_stdin("abc").await.unwrap();
    running.write_stdin("def").await.unwrap();
    assert_eq!(peer.stdin().await, (0, Bytes::from_static(b"abc")));
    peer.cut();
    let mut peer = server.attach(vec![view(&id, 1, 2)]).await;
    offsets(&mut peer, &id).await;
    assert_eq!(peer.stdin().await, (2, Bytes::from_static(b"c")));
    assert_eq!(peer.stdin().await, (3, Bytes::from_static(b"def")));
    running.close_stdin();
    let Request::Stdin(end) = peer.request().await else { panic!() };
    assert_eq!((end.eof, end.offset, end.exec_id), (true, Some(6), Some(id.clone())));
    peer.cut();
    // The end is said again: nothing confirms it.
    let mut peer = server.attach(vec![view(&id, 1, 6)]).await;
    offsets(&mut peer, &id).await;
    let Request::Stdin(end) = peer.request().await else { panic!() };
    assert_eq!((end.eof, end.offset), (true, Some(6)));
    assert!(running.write_stdin("x").await.is_err());
}

#[tokio::test]
async fn a_writer_waits_while_a_mebibyte_is_on_its_way() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = start(&sandbox, &mut peer, Exec::argv(["cat"]).stdin()).await;
    let input = bytes(0, 3 * WINDOW);
    let mut taken = Vec::new();
    let (written, ()) = tokio::join!(running.write_stdin(input.clone()), async {
        while taken.len() < input.len() {
            // All of the window, and not a byte more, without an acknowledgement.
            let until = taken.len() + WINDOW as usize;
            while taken.len() < until {
                let (offset, bytes) = peer.stdin().await;
                assert_eq!(offset, taken.len() as u64);
                taken.extend_from_slice(&bytes);
            }
            assert_eq!(taken.len(), until);
            let early = tokio::time::timeout(Duration::from_millis(100), peer.stdin()).await;
            assert!(early.is_err(), "more than the window");
            peer.say(&Event::StdinAck { exec_id: id.clone(), offset: taken.len() as u64 }).await;
        }
    });
    written.unwrap();
    assert!(taken == input);
}

#[tokio::test]
async fn input_to_a_followed_command_begins_where_the_input_of_others_ended() {
    let server = Server::start().await;
    let url = server.url();
    let id = ExecId::parse("cat").unwrap();
    let attaching = Sandbox::attach(&url, sandbox_id(), crate::script::token());
    let (sandbox, mut peer) = tokio::join!(attaching, server.attach(vec![view(&id, 5, 3)]));
    let sandbox = sandbox.unwrap();
    let running = soon(sandbox.follow(&id, Offsets::default())).await.unwrap();
    soon(running.write_stdin("a longer line\n")).await.unwrap();
    assert_eq!(offsets(&mut peer, &id).await, Offsets::default());
    assert_eq!(peer.stdin().await, (3, Bytes::from_static(b"a longer line\n")));
    peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 5 }).await;
    peer.status(Status::Running).await;
    peer.cut();
    // The command has taken more than was acknowledged: only the rest is sent again.
    let mut peer = server.attach(vec![view(&id, 6, 9)]).await;
    assert_eq!(offsets(&mut peer, &id).await, Offsets::default());
    assert_eq!(peer.stdin().await, (9, Bytes::from_static(b"er line\n")));
    running.close_stdin();
    let Request::Stdin(end) = peer.request().await else { panic!() };
    assert_eq!((end.eof, end.offset), (true, Some(17)));
}

#[tokio::test]
async fn input_comes_after_what_another_client_wrote_during_a_drop() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = start(&sandbox, &mut peer, Exec::argv(["cat"]).stdin()).await;
    soon(running.write_stdin("ab")).await.unwrap();
    assert_eq!(peer.stdin().await, (0, Bytes::from_static(b"ab")));
    peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 2 }).await;
    // The acknowledgement was received before this.
    peer.status(Status::Running).await;
    peer.cut();
    while sandbox.is_connected() {
        tokio::task::yield_now().await;
    }
    // Written while there is no connection: it was never sent, so the seven bytes are another client's.
    soon(running.write_stdin("later")).await.unwrap();
    let mut peer = server.attach(vec![view(&id, 1, 7)]).await;
    offsets(&mut peer, &id).await;
    assert_eq!(peer.stdin().await, (7, Bytes::from_static(b"later")));
    soon(running.write_stdin("last")).await.unwrap();
    assert_eq!(peer.stdin().await, (12, Bytes::from_static(b"last")));
    running.close_stdin();
    let Request::Stdin(end) = peer.request().await else { panic!() };
    assert_eq!((end.eof, end.offset), (true, Some(16)));
}

#[tokio::test]
async fn a_command_is_lost_rather_than_its_input() {
    // Of eight bytes sent, five were acknowledged; then the sandbox has accepted fewer, more than were sent, or others.
    let crc32 = Some(crc32fast::hash(b"12345XY"));
    for (accepted, stdin_crc32, rolled_back, said) in [
        (4, None, true, "rolled back to before"),
        (9, None, false, "another client wrote"),
        (7, crc32, false, "another client wrote"),
    ] {
        let server = Server::start().await;
        let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
        let (mut running, id) = start(&sandbox, &mut peer, Exec::argv(["cat"]).stdin()).await;
        soon(running.write_stdin("12345678")).await.unwrap();
        peer.stdin().await;
        peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 5 }).await;
        peer.status(Status::Running).await;
        peer.cut();
        let _peer = server.attach(vec![ExecView { stdin_crc32, ..view(&id, 1, accepted) }]).await;
        let outcome = soon(running.wait()).await.unwrap();
        assert!(outcome.error.as_deref().unwrap_or_default().contains(said), "{outcome:?}");
        assert_eq!(outcome.rolled_back, rolled_back);
        assert!(running.write_stdin("x").await.is_err());
        // The sandbox knows the command: its output can still be followed.
        assert!(sandbox.execs().iter().any(|view| view.exec_id == id));
    }
}
