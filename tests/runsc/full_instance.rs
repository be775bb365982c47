//! One place on an instance: who left makes room for who comes, and finds everything again.

use std::time::Duration;

use serde_json::json;

use crate::{
    fixture::{clock, processes},
    servers::{Machine, Server},
    websocket_client::{Dialect, Heard, Key, Mind, Socket},
};

const FULL: [(&str, &str); 1] = [("BATON_MAX_SANDBOXES", "1")];
/// A file, and a process that outlives the command that started it.
const BEGIN: &str = "echo kept >/srv/file
(while :; do echo >>/srv/beat; sleep 0.05; done) >/dev/null 2>&1 &
echo $! >/srv/pid";
const LOOK: &str = "cat /srv/file; kill -0 $(cat /srv/pid) && echo alive
beats() { wc -c </srv/beat; }
a=$(beats); for n in $(seq 300); do [ $(beats) -gt $a ] && echo beats && break; sleep 0.05; done";
const LINES: u64 = 10_000;

/// The server has seen that its clients left.
async fn nobody_is_attached(server: &mut Server) {
    for _ in 0..1_000 {
        let page = server.figures().await;
        let sessions = page.lines().filter_map(|line| line.strip_prefix("baton_sessions "));
        if sessions.into_iter().all(|count| count == "0") {
            return;
        }
        clock().sleep(Duration::from_millis(10)).await;
    }
    panic!("somebody is attached for ever");
}

/// A new sandbox on a full instance. The one that has its slot keeps it until its last command has ended, which may be
/// a moment after its client has left; until then a create is refused.
async fn created(server: &Server) -> Socket {
    for _ in 0..500 {
        let mut socket = Socket::open_with(server, "/create?details=1", Dialect::Plain, &[]).await;
        socket.send(json!({})).await;
        loop {
            match socket.next().await {
                Heard::Event(event) if event["status"] == "SANDBOX_RUNNING" => return socket,
                Heard::Event(_) | Heard::Bytes(_) => {}
                Heard::End(_) => break,
            }
        }
        clock().sleep(Duration::from_millis(20)).await;
    }
    panic!("it makes no room");
}

async fn look(server: &Server, key: &Key) -> Socket {
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", LOOK).await.0, "kept\nalive\nbeats\n");
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn who_left_makes_room_for_who_comes_and_finds_everything_again() {
    let machine = Machine::with_a_bucket().await;
    let (mut one, mut two) = tokio::join!(machine.server_with("a", &FULL), machine.server_with("b", &FULL));
    let kept = json!({"enable_checkpoint": true});
    let (mut first, key) = Socket::create(&one, Dialect::V1, kept).await;
    let mut mind = Mind::default();
    mind.exec(&mut first, "begin", json!({"argv": ["bash", "-c", BEGIN]}), |_| String::new(), None).await;
    mind.until(&mut first, "it has begun", |mind| mind.commands["begin"].done.is_some()).await;
    let last = (LINES - 1).to_string();
    mind.exec(&mut first, "count", json!({"argv": ["seq", "0", last]}), |n| format!("{n}\n"), None).await;
    mind.until(&mut first, "the first lines", |mind| mind.commands["count"].stdout.lines() > 10).await;
    drop(first);
    nobody_is_attached(&mut one).await;

    let mut second = created(&one).await;
    assert_eq!(second.statuses, ["CREATING", "RUNNING"]);
    assert_eq!(second.run("bash", "ls /srv").await.0, "", "it is another one");
    assert_eq!(processes(&one.state).len(), 2, "and the only one here");
    let lock = machine.lock(&key.id);
    assert!(lock["lease"].is_null() && lock["head"].is_object(), "{lock}");
    let mut refused = Socket::attach(&one, Dialect::Plain, &key).await;
    assert_eq!(refused.end().await, Some(4000));
    assert_eq!(refused.statuses, ["RESTORING", "RESTORE_ERROR", "E"]);

    // Elsewhere: what it had not read comes from where it stopped.
    let mut again = Socket::attach(&two, Dialect::V1, &key).await;
    again.status("RUNNING").await;
    let offset = mind.commands["count"].stdout.at;
    again.send(json!({"action": "reconnect", "offsets": {"count": {"stdout": offset, "stderr": 0}}})).await;
    let is_whole = |mind: &Mind| {
        let count = &mind.commands["count"];
        count.stdout.lines() == LINES && count.done.is_some()
    };
    mind.until(&mut again, "all of it", is_whole).await;
    drop(again);
    nobody_is_attached(&mut two).await;
    drop(look(&two, &key).await);
    nobody_is_attached(&mut two).await;

    // It makes room there too, and comes back to where it was first, once that is free.
    let third = created(&two).await;
    second.kill().await;
    look(&one, &key).await.kill().await;
    third.kill().await;
    one.stop().await;
    two.stop().await;
}
