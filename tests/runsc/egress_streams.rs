//! Connections of sandboxes as streams: each direction by itself, each connection by itself, every byte as it was.

use std::{cell::Cell, time::Duration};

use sha2::{Digest, Sha256};

use crate::{
    fixture::clock,
    network_fixture::{NetworkedMachine, PUBLIC, comes_true},
    outer_servers::{HALF, SINK, SOURCE, STUCK, bulk},
    sandbox_programs::Programs,
    servers::{Server, is_proof},
};

const OPEN: (&str, &str) = ("BATON_EGRESS", "any");

async fn sandbox(server: &Server) -> Programs {
    Programs::start_as(server, crate::live_handoff::movable()).await
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_direction_ends_by_itself_and_a_stuck_connection_holds_back_nothing() {
    let machine = NetworkedMachine::new().await;
    let server = machine.server("one", &[OPEN]).await;
    let mut sandbox = sandbox(&server).await;
    let written = sandbox
        .python(&format!(
            "
link = connect('{PUBLIC}', {SINK})
link.sendall(b'to the end'); link.shutdown(socket.SHUT_WR)
print(link.recv(64).decode(), link.recv(64))
link = connect('{PUBLIC}', {HALF})
link.settimeout(20)
heard = b''
while part := link.recv(64):
    heard += part
print(heard.decode())
time.sleep(0.1)
link.sendall(b'and still '); time.sleep(0.1); link.sendall(b'I speak'); link.close()"
        ))
        .await;
    assert_eq!(written, format!("{} b''\nall that I say\n", hexadecimal(&Sha256::digest(b"to the end"))));
    comes_true("what is sent after the other end's end arrives", || {
        machine.outer.heard_after_the_end() == ["and still I speak"]
    })
    .await;

    // Nobody reads what these send, and this program reads nothing of those.
    let stuck = sandbox
        .spawn_python(&format!(
            "
links = []
for number in range(8):
    link = connect('{PUBLIC}', {STUCK}); link.setblocking(False)
    try:
        while True: link.send(bytes(65536))
    except BlockingIOError: pass
    links.append(link)
    link = connect('{PUBLIC}', {SOURCE}); link.sendall(b'1000000000\\n'); links.append(link)
open('/tmp/stuck', 'w').close()
time.sleep(600)"
        ))
        .await;
    sandbox.python("while not os.path.exists('/tmp/stuck'): time.sleep(0.05)").await;
    let quick = sandbox.attempt(PUBLIC, 7).await;
    quick.assert_reached();
    assert!(quick.seconds < 1.0, "{quick:?}");
    let (written, ..) = sandbox.run(&["head", "-c", "400000", "/dev/zero"], &[]).await;
    assert_eq!(written.len(), 400_000, "the output of {stuck} and others flows");
    sandbox.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_connections_are_open_at_once() {
    let machine = NetworkedMachine::new().await;
    let server = machine.server("one", &[OPEN, ("BATON_EGRESS_LIMITS", "opens=off")]).await;
    let mut sandbox = sandbox(&server).await;
    let before = machine.outer.accepted().len();
    let id = sandbox
        .spawn_python(&format!(
            "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
links = [connect('{PUBLIC}', 7) for number in range(1000)]
for number, link in enumerate(links): link.sendall(b'%08d' % number)
for number, link in enumerate(links): assert link.recv(8, socket.MSG_WAITALL) == b'%08d' % number
print('all answered', flush=True)
open('/tmp/open', 'w').close()
while os.path.exists('/tmp/open'): time.sleep(0.05)
for number, link in enumerate(links): link.sendall(b'%08d' % number)
for number, link in enumerate(links): assert link.recv(8, socket.MSG_WAITALL) == b'%08d' % number"
        ))
        .await;
    comes_true("all are open", || machine.outer.open() == 1000).await;
    sandbox.python("while not os.path.exists('/tmp/open'): time.sleep(0.05)\nos.unlink('/tmp/open')").await;
    drop(id);
    comes_true("all have ended", || machine.outer.open() == 0).await;
    assert_eq!(machine.outer.accepted().len() - before, 1000);
    sandbox.kill().await;
    server.stop().await;
}

/// The memory of a server now, in bytes.
fn memory(server: &Server) -> u64 {
    let status = server.reconciler_status();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn bulk_goes_both_ways_byte_by_byte_and_memory_does_not_grow_with_it() {
    let size: u64 = if is_proof() { 1 << 30 } else { 128 << 20 };
    let machine = NetworkedMachine::new().await;
    let server = machine.server("one", &[OPEN]).await;
    let mut sandbox = sandbox(&server).await;
    let mut hash = Sha256::new();
    let piece = bulk();
    for _ in 0..size / piece.len() as u64 {
        hash.update(&piece);
    }
    let expected = hexadecimal(&hash.finalize());
    sandbox.attempt(PUBLIC, 7).await.assert_reached();
    let before = memory(&server);
    let program = format!(
        "
import array, hashlib
piece = array.array('I', (number * 2654435761 & 0xffffffff for number in range(1 << 18))).tobytes()
began = time.monotonic()
link = connect('{PUBLIC}', {SINK})
for part in range({size} // len(piece)): link.sendall(piece)
link.shutdown(socket.SHUT_WR)
print(link.recv(64, socket.MSG_WAITALL).decode())
sent = time.monotonic()
link = connect('{PUBLIC}', {SOURCE}); link.sendall(b'{size}\\n')
got = hashlib.sha256()
while part := link.recv(1 << 18): got.update(part)
print(got.hexdigest())
print({size} / (sent - began) / 1e6, {size} / (time.monotonic() - sent) / 1e6)"
    );
    let most = Cell::new(before);
    let watched = async {
        loop {
            clock().sleep(Duration::from_millis(20)).await;
            most.set(most.get().max(memory(&server)));
        }
    };
    let written = tokio::select! {
        written = sandbox.python(&program) => written,
        never = watched => never,
    };
    let lines: Vec<_> = written.lines().collect();
    assert_eq!(lines[..2], [expected.as_str(); 2]);
    let grown = most.get() - before;
    println!("{} MiB each way: MB/s out and in {}; the server grew {} KiB", size >> 20, lines[2], grown >> 10);
    assert!(grown < 16 << 20, "the server grew by {grown} bytes");
    sandbox.kill().await;
    server.stop().await;
}
