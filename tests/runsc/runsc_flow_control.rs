//! Much output, many commands, tiny and huge writes: all of it through a real server.

use std::time::Duration;

use baton_protocol::binary::BinaryChunk;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    fixture::clock,
    servers::{Machine, Server},
    websocket_client::{Dialect, Heard, Mind, Socket},
};

fn resident_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a process has memory");
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_client_that_never_reads_costs_the_server_less_than_eight_mebibytes() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
    // A first command, so that what every session needs is there already.
    socket.run("bash", "head -c 3000000 /dev/zero | tr '\\0' x").await;
    let before = resident_kib(&server);
    socket.send(json!({"language": "bash", "code": "yes"})).await;
    socket.status("EXECUTION_RUNNING").await;
    // Nobody reads from here on: whatever the server took by now, and takes later, is what it costs.
    let mut most = 0;
    for _ in 0..40 {
        clock().sleep(Duration::from_millis(100)).await;
        most = most.max(resident_kib(&server));
    }
    assert!(most < before + 8 * 1024, "{before} KiB grew to {most} KiB");
    drop(socket);
    server.stop().await;
}

/// Every ping is answered by the WebSocket library itself, past our own queue.
#[tokio::test]
async fn a_client_that_pings_and_never_reads_costs_the_server_less_than_eight_mebibytes() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (socket, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
    let before = resident_kib(&server);
    let mut stream = TcpStream::connect(&server.address).await.unwrap();
    let upgrade = format!(
        "GET /create HTTP/1.1\r\nhost: {}\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
         sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        server.address
    );
    stream.write_all(upgrade.as_bytes()).await.unwrap();
    assert!(stream.read(&mut [0; 64]).await.unwrap() > 0);
    // The longest ping, masked with zeros.
    let mut ping = vec![0x89, 0x80 | 125, 0, 0, 0, 0];
    ping.resize(ping.len() + 125, b'x');
    let pings = ping.repeat(8_192);
    let mut most = 0;
    for _ in 0..128 {
        // A server that ends the connection, or stops listening to it, is safe too.
        let wrote = clock().timeout(Duration::from_secs(2), stream.write_all(&pings)).await;
        most = most.max(resident_kib(&server));
        if !matches!(wrote, Ok(Ok(()))) {
            break;
        }
    }
    assert!(most < before + 8 * 1024, "{before} KiB grew to {most} KiB");
    drop((socket, stream));
    server.stop().await;
}

#[tokio::test]
async fn who_comes_back_after_the_grace_time_is_told_what_is_gone() {
    const LINES: u64 = 4_000_000;
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("BATON_DETACH_GRACE", "50ms")]).await;
    let (mut socket, key) = Socket::create(&server, Dialect::V1, json!({})).await;
    socket.send(json!({"action": "exec", "exec_id": "s", "argv": ["seq", "-f", "%09.0f", LINES.to_string()]})).await;
    // Every line has ten bytes, so that each offset says what must stand there.
    let (mut at, mut lost) = (0, 0);
    loop {
        match socket.next().await {
            Heard::Bytes(bytes) => {
                let chunk = BinaryChunk::decode(&bytes).unwrap();
                assert_eq!(chunk.offset, at, "what does not come is said");
                let wanted = |at: u64| format!("{:09}\n", at / 10 + 1).as_bytes()[(at % 10) as usize];
                assert!(chunk.payload.iter().zip(at..).all(|(byte, at)| *byte == wanted(at)), "at {at}");
                at += chunk.payload.len() as u64;
            }
            Heard::Event(event) if event["event"] == "output_gap" => {
                assert_eq!(event["from"], json!(at), "{event}");
                lost += event["to"].as_u64().unwrap() - at;
                at = event["to"].as_u64().unwrap();
            }
            Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_DONE" => break,
            Heard::Event(_) => continue,
            Heard::End(code) => panic!("closed with {code:?}"),
        }
        if lost == 0 {
            // Gone without a word, until nobody is waited for any longer.
            drop(socket);
            clock().sleep(Duration::from_millis(100)).await;
            socket = Socket::attach(&server, Dialect::V1, &key).await;
            socket.status("RUNNING").await;
            socket.send(json!({"action": "reconnect", "offsets": {"s": {"stdout": at, "stderr": 0}}})).await;
        } else {
            socket.send(json!({"action": "ack", "exec_id": "s", "stdout": at, "stderr": 0})).await;
        }
    }
    assert_eq!(at, LINES * 10);
    assert!(lost > 0, "the command did not wait");
    socket.kill().await;
    server.stop().await;
}

#[tokio::test]
async fn two_hundred_commands_run_at_once_in_one_sandbox() {
    const MANY: usize = 200;
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = Socket::create(&server, Dialect::V1, json!({})).await;
    for number in 0..MANY {
        let argv = ["bash", "-c", "read line; exit $line"];
        socket.send(json!({"action": "exec", "exec_id": format!("n-{number}"), "argv": argv, "stdin": true})).await;
    }
    for _ in 0..MANY {
        socket.status("EXECUTION_RUNNING").await;
    }
    // All of them run: none has had its line yet.
    assert!(!socket.statuses.iter().any(|status| status == "EXECUTION_DONE"));
    for number in 0..MANY {
        let line = format!("{}\n", number % 100);
        socket.send(json!({"event": "stdin", "exec_id": format!("n-{number}"), "data": line})).await;
    }
    for _ in 0..MANY {
        let done = socket.status("EXECUTION_DONE").await;
        let number: u64 = done["exec_id"].as_str().unwrap().trim_start_matches("n-").parse().unwrap();
        assert_eq!(done["exit_code"], json!(number % 100), "{done}");
    }
    socket.kill().await;
    server.stop().await;
}

#[tokio::test]
async fn many_loud_commands_and_a_client_that_pauses_lose_and_double_nothing() {
    const LOUD: usize = 16;
    const LINES: u64 = 200_000;
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = Socket::create(&server, Dialect::V1, json!({})).await;
    let mut mind = Mind::default();
    for number in 0..LOUD {
        let argv = ["seq", "0", &(LINES - 1).to_string()].map(str::to_owned);
        mind.exec(&mut socket, &format!("loud-{number}"), json!({"argv": argv}), |line| format!("{line}\n"), None)
            .await;
    }
    // All together they may send more than the server holds for a client that does not read.
    clock().sleep(Duration::from_secs(1)).await;
    let (mut taken, mut acked) = (0, 0);
    while !mind.commands.values().all(|one| one.done.is_some()) {
        assert_eq!(mind.step(&mut socket).await, None, "heard {:?}", socket.statuses);
        taken = mind.commands.values().map(|one| one.stdout.at).sum::<u64>().max(taken);
        if taken >= acked + (256 << 10) {
            acked = taken;
            mind.ack(&mut socket).await;
        }
    }
    for (id, one) in &mind.commands {
        assert_eq!((one.stdout.lines(), &one.done.as_ref().unwrap()["exit_code"]), (LINES, &json!(0)), "{id}");
    }
    socket.kill().await;
    server.stop().await;
}

#[tokio::test]
async fn single_bytes_and_whole_mebibytes_arrive_as_they_were_written() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
    let (ones, _) = socket.run("python", "import os\nfor i in range(3000): os.write(1, b'%d' % (i % 10))").await;
    assert_eq!(ones, "0123456789".repeat(300));
    let code = "import os\nfor i in range(6):\n  left = b'%07d\\n' % i * 131072\n  while left: left = left[os.write(1, left):]";
    let (blocks, _) = socket.run("python", code).await;
    let wanted: String = (0..6).map(|i| format!("{i:07}\n").repeat(131_072)).collect();
    assert!(blocks == wanted, "{} bytes instead of {}", blocks.len(), wanted.len());

    // One print is one event, however it is flushed: what comes within two milliseconds is joined, and on a
    // busy machine now and then it does not.
    let mut tries = 0;
    loop {
        let events = one_print(&mut socket).await;
        assert_eq!(events.concat(), "one - line - 2\n");
        if events.len() == 1 {
            break;
        }
        tries += 1;
        assert!(tries < 20, "it never came as one");
    }
    socket.kill().await;
    server.stop().await;
}

async fn one_print(socket: &mut Socket) -> Vec<String> {
    socket.send(json!({"language": "python", "code": "print('one', 'line', 2, sep=' - ')"})).await;
    let mut events = vec![];
    loop {
        match socket.next().await {
            Heard::Event(event) if event["event"] == "stdout" => {
                events.push(event["data"].as_str().unwrap().to_owned())
            }
            Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_DONE" => return events,
            Heard::Event(_) | Heard::Bytes(_) => {}
            Heard::End(code) => panic!("closed with {code:?}"),
        }
    }
}
