//! Limits of what a sandbox may do with its connections, each as its programs feel it.

use crate::{
    network_fixture::{NetworkedMachine, PUBLIC, comes_true},
    outer_servers::SOURCE,
    sandbox_programs::Programs,
    servers::Server,
};

/// An address of the Internet where packets get lost.
const LOST: &str = "93.184.216.99";

async fn limited(machine: &NetworkedMachine, name: &str, limits: &str) -> (Server, Programs) {
    let server = machine.server(name, &[("BATON_EGRESS", "any"), ("BATON_EGRESS_LIMITS", limits)]).await;
    let sandbox = Programs::start_as(&server, crate::live_handoff::movable()).await;
    (server, sandbox)
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_limited_in_number_and_in_time() {
    let machine = NetworkedMachine::new().await;
    let (server, mut sandbox) = limited(&machine, "one", "connections=5,connect=1s,idle=1s,lifetime=4s").await;
    let written = sandbox
        .python(&format!(
            "
links = [connect('{PUBLIC}', 7) for number in range(5)]
time.sleep(0.3)
attempt('{PUBLIC}')
for link in links[1:]: link.close()
time.sleep(0.3)
attempt('{PUBLIC}')
# The silent one is reset.
began = time.monotonic()
try: links[0].recv(1)
except ConnectionResetError: print('silent', time.monotonic() - began < 5)
# One that speaks is not silent, and still ends.
began = time.monotonic()
link = connect('{PUBLIC}', 7)
try:
    while True: link.sendall(b'x'); link.recv(1); time.sleep(0.2)
except (ConnectionResetError, BrokenPipeError): print('old', 3 < time.monotonic() - began < 10)
attempt('{LOST}')"
        ))
        .await;
    let lines: Vec<_> = written.lines().collect();
    assert!(lines[0].contains("ECONNRESET") && lines[1].contains("hello"), "{written}");
    assert_eq!(lines[2..4], ["silent True", "old True"]);
    let lost: crate::sandbox_programs::Attempt = serde_json::from_str(lines[4]).unwrap();
    assert!(lost.how == "ECONNRESET" && (0.5..5.0).contains(&lost.seconds), "{lost:?}");
    comes_true("nothing is open outside", || machine.outer.open() <= 5).await;
    let limited = "baton_egress_connections_total{verdict=\"limited\"}";
    assert_eq!(machine.metric(&server, limited).await, 3, "the sixth, the silent and the old one");
    sandbox.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_and_new_connections_are_limited() {
    let machine = NetworkedMachine::new().await;
    let (server, mut sandbox) = limited(&machine, "opens", "opens=5/s,rate=1MiB").await;
    let written = sandbox
        .python(&format!(
            "
began = time.monotonic()
link = connect('{PUBLIC}', {SOURCE}); link.sendall(b'3000000\\n')
got = 0
while part := link.recv(1 << 16): got += len(part)
print(got, 1.5 < time.monotonic() - began < 10)
time.sleep(1)
for number in range(20): attempt('{PUBLIC}')
time.sleep(1)
attempt('{PUBLIC}')"
        ))
        .await;
    let lines: Vec<_> = written.lines().collect();
    assert_eq!(lines[0], "3000000 True");
    let reset = lines[1..21].iter().filter(|line| line.contains("ECONNRESET")).count();
    assert!((1..=15).contains(&reset), "{written}");
    assert!(lines[21].contains("hello"), "{written}");
    sandbox.kill().await;
    server.stop().await;

    let (server, mut sandbox) = limited(&machine, "total", "total=1MiB").await;
    let written = sandbox
        .python(&format!(
            "
link = connect('{PUBLIC}', {SOURCE}); link.sendall(b'3000000\\n')
got = 0
try:
    while part := link.recv(1 << 16): got += len(part)
except ConnectionResetError: print('reset', 900000 < got < 1200000)
attempt('{PUBLIC}')"
        ))
        .await;
    assert!(written.starts_with("reset True\n") && written.contains("ECONNRESET"), "{written}");
    sandbox.kill().await;
    server.stop().await;
}
