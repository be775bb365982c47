//! What a client may make the server hold in memory before its sandbox has a place, and while a message is not whole.

use std::time::Duration;

use baton::api::ApiSettings;
use futures::SinkExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::frame::{
        Frame,
        coding::{Data, OpCode},
    },
};

use crate::{
    real::{
        servers::{Machine, Server},
        websocket_client::{Dialect, Socket},
    },
    scripted::{
        test_server::{Plan, World, until},
        wire_client::Client,
    },
};

const MIB: usize = 1 << 20;
/// The least that may be configured.
const BUDGET: usize = 16 * MIB;
/// What the server may need beside: sockets, tasks, and what its allocator keeps.
const BESIDE: usize = 16 * MIB;

/// The most memory that a server has had since its peak was last forgotten.
struct Peak {
    pid: i32,
    before: usize,
}

impl Peak {
    fn of(server: &Server) -> Self {
        let pid = server.pid().as_raw();
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
        Self { pid, before: status(pid, "VmRSS:") }
    }

    fn growth(&self) -> usize {
        status(self.pid, "VmHWM:").saturating_sub(self.before)
    }
}

fn status(pid: i32, name: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// Sends `length` bytes of a longer body, until the server answers or has them; the connection stays.
async fn unfinished_body(address: String, length: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let declared = length + 1;
    let head = format!("POST /execute?language=bash HTTP/1.1\r\nhost: localhost\r\ncontent-length: {declared}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reader, mut writer) = stream.split();
    let (body, mut answer) = (vec![b'x'; length], [0; 256]);
    tokio::select! {
        _ = writer.write_all(&body) => {}
        _ = reader.read(&mut answer) => {}
    }
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_never_end_share_one_budget() {
    const CLIENTS: usize = 24;
    const SENT: usize = 4 * MIB;
    let machine = Machine::with_a_directory().await;
    for (budget, is_bounded) in [("16MiB", true), ("1GiB", false)] {
        let server = machine.server_with(budget, &[("BATON_INBOUND_MEMORY", budget)]).await;
        let peak = Peak::of(&server);
        let attacks = (0..CLIENTS).map(|_| tokio::spawn(unfinished_body(server.address.clone(), SENT)));
        let held = futures::future::join_all(attacks).await;
        if is_bounded {
            assert!(peak.growth() < BUDGET + BESIDE, "the server grew by {}", peak.growth());
            assert_eq!(server.get("/status").await.0, 200);
        } else {
            until(async || peak.growth() > CLIENTS * SENT / 2).await;
        }
        drop(held);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_are_never_whole_share_one_budget() {
    const CLIENTS: usize = 5;
    let machine = Machine::with_a_directory().await;
    for (budget, is_bounded) in [("16MiB", true), ("1GiB", false)] {
        let server = machine.server_with(budget, &[("BATON_INBOUND_MEMORY", budget)]).await;
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(Socket::create(&server, Dialect::Plain, serde_json::json!({})).await.0);
        }
        let (mut honest, _) = Socket::create(&server, Dialect::Plain, serde_json::json!({})).await;
        let peak = Peak::of(&server);
        // Fifteen of sixteen mebibytes each. Who is not read any further cannot write any further.
        let attacks = clients.into_iter().map(|client| {
            tokio::spawn(async move {
                let mut stream = client.stream;
                let sent =
                    tokio::time::timeout(Duration::from_secs(2), unfinished_message(&mut stream, 15 * MIB)).await;
                (stream, sent.is_ok())
            })
        });
        if is_bounded {
            let held = futures::future::join_all(attacks).await;
            let whole = held.iter().filter(|one| one.as_ref().unwrap().1).count();
            assert!(whole < CLIENTS, "there is memory for one of them");
            assert!(peak.growth() < BUDGET + BESIDE, "the server grew by {}", peak.growth());
            // A short message needs none of what they hold.
            honest.send(serde_json::json!({"language": "bash", "code": "echo fine"})).await;
            honest.status("EXECUTION_DONE").await;
        } else {
            let held = futures::future::join_all(attacks).await;
            until(async || peak.growth() > CLIENTS * 10 * MIB).await;
            drop(held);
        }
    }
}

async fn unfinished_message<S>(socket: &mut S, length: usize)
where
    S: futures::Sink<Message> + Unpin,
    S::Error: std::fmt::Debug,
{
    let mut code = OpCode::Data(Data::Text);
    for _ in 0..length / MIB {
        let _ = socket.send(Message::Frame(Frame::message(vec![b'x'; MIB], code, false))).await;
        code = OpCode::Data(Data::Continue);
    }
}

fn plan(change: fn(&mut ApiSettings)) -> Plan {
    Plan { has_storage: false, can_snapshot: false, change }
}

/// A message of this length that says nothing the server knows.
fn long(length: usize) -> String {
    format!("{{\"x\":\"{}\",\"action\":\"dance\"}}", "x".repeat(length))
}

#[tokio::test]
async fn before_the_sandbox_has_a_place_a_message_is_short() {
    let world = World::new().await;
    let labels: Vec<_> = (0..700_000).map(|number| format!("\"label-{number}\":\"\"")).collect();
    for first in [format!("{{\"labels\":{{{}}}}}", labels.join(",")), long(300 << 10), long(15 * MIB)] {
        let mut client = Client::create(&world).await;
        client.hears("CREATING").await;
        let (mut sink, stream) = futures::StreamExt::split(client.socket);
        // It cannot all be taken; what happens to the sender is no matter.
        let sending = tokio::spawn(async move {
            let _ = sink.send(Message::text(first)).await;
            sink
        });
        let closed = words(stream).await;
        assert!(closed.contains("longer than 256 KiB") && closed.ends_with("1009"), "{closed}");
        sending.abort();
    }
    assert_eq!(world.count(), 0);
    // The same message, once there is a place.
    let mut client = Client::running(&world, "{}").await;
    client.says(&long(15 * MIB)).await;
    client.hears("ERROR E").await;
}

/// Every text that comes, and the close code.
async fn words(mut stream: futures::stream::SplitStream<crate::scripted::wire_client::Socket>) -> String {
    use futures::StreamExt;
    let mut heard = String::new();
    loop {
        match tokio::time::timeout(Duration::from_secs(20), stream.next()).await.expect("the server is silent") {
            Some(Ok(Message::Text(text))) => heard += &text,
            Some(Ok(Message::Close(Some(frame)))) => return heard + &u16::from(frame.code).to_string(),
            Some(Ok(_)) => {}
            None | Some(Err(_)) => return heard,
        }
    }
}

#[tokio::test]
async fn a_long_message_waits_for_a_place_and_is_then_read() {
    let change = |settings: &mut ApiSettings| settings.max_sandboxes = 1;
    let world = World::with(Plan { has_storage: true, can_snapshot: false, change }).await;
    world.set(|script| script.checkpoint_waits = true);
    let mut first = Client::running(&world, r#"{"enable_checkpoint":true}"#).await;
    first.socket.close(None).await.unwrap();
    until(async || world.bus.counts().sessions == 0).await;
    let mut second = Client::create(&world).await;
    second.says("{}").await;
    second.hears("CREATING").await;
    let exec = serde_json::json!({"language": "bash", "code": "out \"late\"", "x": "x".repeat(8 * MIB)}).to_string();
    let (mut sink, stream) = futures::StreamExt::split(second.socket);
    let sending = tokio::spawn(async move {
        sink.send(Message::text(exec)).await.unwrap();
        sink
    });
    until(async || world.bus.is_wanted(first.id())).await;
    world.set(|script| script.checkpoint_waits = false);
    second.socket = sending.await.unwrap().reunite(stream).unwrap();
    second.hears("sandbox_id RUNNING EXECUTION_RUNNING out:late EXECUTION_DONE").await;
}

#[tokio::test]
async fn while_others_hold_all_memory_short_messages_are_answered_and_long_ones_wait() {
    let world = World::with(plan(|settings| settings.inbound_memory = 16 << 20)).await;
    let mut hoarder = Client::running(&world, "{}").await;
    let honest = Client::running(&world, "{}").await;
    unfinished_message(&mut hoarder.socket, 15 * MIB).await;
    let (mut sink, mut stream) = futures::StreamExt::split(honest.socket);
    let mut sending = tokio::spawn(async move {
        sink.send(Message::text(long(8 * MIB))).await.unwrap();
        sink
    });
    let mut another = Client::running(&world, "{}").await;
    for _ in 0..20 {
        another.exec("out \"x\"").await;
        another.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    }
    assert!(!sending.is_finished(), "there is no memory for it");
    // The client is there all the time: that it is not read is the server's doing.
    for _ in 0..8 {
        world.clock.skip(Duration::from_secs(5));
        another.exec("out \"x\"").await;
        another.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    }
    drop(hoarder);
    let sink = (&mut sending).await.unwrap();
    let mut heard = String::new();
    while !heard.contains("SANDBOX_ERROR") {
        use futures::StreamExt;
        if let Message::Text(text) = stream.next().await.unwrap().unwrap() {
            heard += &text;
        }
    }
    drop(sink);
}

#[tokio::test]
async fn labels_and_variables_are_bounded_and_the_refusal_names_them() {
    let world = World::new().await;
    let many = |count: usize| -> serde_json::Value {
        (0..count).map(|number| (format!("n{number}"), serde_json::json!(""))).collect::<serde_json::Map<_, _>>().into()
    };
    for (field, most) in [("labels", 64), ("env", 512)] {
        let mut client = Client::create(&world).await;
        client.hears("CREATING").await;
        client.says(&serde_json::json!({field: many(most + 1)}).to_string()).await;
        client.hears("CREATION_ERROR E close:4000").await;
        assert!(client.message().contains(&format!("`{field}`")), "{}", client.message());
        Client::running(&world, &serde_json::json!({field: many(most)}).to_string()).await;
    }
}
