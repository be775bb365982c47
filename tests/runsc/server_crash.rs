//! `kill -9` of the server that runs a sandbox: nothing of it runs on, another one takes over
//! and restores the last checkpoint, and whoever comes back is told what it lost.

use serde_json::{Value, json};

use crate::{
    fixture::clock,
    live_handoff::{movable, ticking},
    servers::Machine,
    websocket_client::{Dialect, Heard, Key, Socket},
};

/// A fifth of every time of the lease: a takeover comes after six seconds.
pub const SCALED: [(&str, &str); 1] = [("BATON_TIME_SCALE", "0.2")];

/// Everything a counting command ever wrote, as one client has it.
#[derive(Default)]
struct Tape {
    bytes: Vec<u8>,
    exec: u32,
}

const COUNTER: &str = "i=0; while :; do echo count $i; i=$((i+1)); sleep 0.01; done";

impl Tape {
    async fn start(socket: &mut Socket, id: &str) -> Self {
        socket.send(json!({"action": "exec", "exec_id": id, "argv": ["bash", "-c", COUNTER]})).await;
        let running = socket.status("EXECUTION_RUNNING").await;
        Self { bytes: vec![], exec: u32::try_from(running["exec"].as_u64().unwrap()).unwrap() }
    }

    /// Reads at least so many bytes more; events go to `told`.
    async fn read(&mut self, socket: &mut Socket, more: usize, mut told: impl FnMut(&mut Vec<u8>, &Value)) {
        let mut left = more;
        while left > 0 {
            match socket.next().await {
                Heard::Bytes(bytes) => {
                    let chunk = baton_protocol::binary::BinaryChunk::decode(&bytes).unwrap();
                    if chunk.exec == self.exec {
                        assert_eq!(chunk.offset, self.bytes.len() as u64, "no byte is lost or doubled");
                        self.bytes.extend_from_slice(chunk.payload);
                        left = left.saturating_sub(chunk.payload.len());
                    }
                }
                Heard::Event(event) => told(&mut self.bytes, &event),
                Heard::End(code) => panic!("closed with {code:?}; heard {:?}", socket.statuses),
            }
        }
    }

    fn offsets(&self) -> Value {
        json!({"stdout": self.bytes.len(), "stderr": 0})
    }

    /// Every line is there once, in order.
    fn check(&self) {
        let text = String::from_utf8(self.bytes.clone()).unwrap();
        for (number, line) in text[..text.rfind('\n').unwrap()].lines().enumerate() {
            assert_eq!(line, format!("count {number}"));
        }
    }
}

/// Comes back after a crash; the roll-back is told before RUNNING, and what it means for commands after it.
async fn come_back(machine: &Machine, socket: &mut Socket, key: &Key, tape: &mut Tape) {
    let rolled_back = socket.until("rolled_back", |event| event["event"] == "rolled_back").await;
    assert_eq!(rolled_back["checkpoint_id"], machine.lock(&key.id)["head"]["checkpoint_id"]);
    assert!(rolled_back["age_ms"].as_u64().unwrap() > 0);
    socket.status("RUNNING").await;
    let had = tape.bytes.len();
    let offsets = json!({"known": tape.offsets(), "later": {"stdout": 3, "stderr": 0}});
    socket.send(json!({"action": "reconnect", "offsets": offsets})).await;
    let (mut rewound, mut unknown) = (false, false);
    tape.read(socket, 200, |bytes, event| {
        if event["event"] == "output_rewound" && event["stream"] == "stdout" {
            assert_eq!(event["exec_id"], "known");
            let to = usize::try_from(event["to"].as_u64().unwrap()).unwrap();
            assert!(to < had, "it goes back behind what was read");
            bytes.truncate(to);
            rewound = true;
        }
        unknown |= event["status"] == "SANDBOX_EXECUTION_ERROR" && event["exec_id"] == "later";
    })
    .await;
    assert!(rewound, "the client is told from where the command goes on");
    assert!(unknown, "a command that the checkpoint does not know has ended");
    tape.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn after_kill_9_another_server_takes_over_and_goes_on_from_the_last_checkpoint() {
    let machine = Machine::with_a_directory().await;
    let (one, mut two) = tokio::join!(machine.server_with("a", &SCALED), machine.server_with("b", &SCALED));
    let (mut socket, key) = Socket::create(&one, Dialect::V1, movable()).await;
    let mut tape = Tape::start(&mut socket, "known").await;
    tape.read(&mut socket, 100, |_, _| {}).await;
    // The move leaves a checkpoint behind, with the command in it.
    drop(socket);
    let mut socket = Socket::attach(&two, Dialect::V1, &key).await;
    socket.status("RUNNING").await;
    socket.send(json!({"action": "reconnect", "offsets": {"known": tape.offsets()}})).await;
    tape.read(&mut socket, 100, |_, _| {}).await;
    Tape::start(&mut socket, "later").await;
    tape.read(&mut socket, 100, |_, _| {}).await;

    two.die().await;
    assert_eq!(socket.end().await, None, "nobody was left to say goodbye");
    let began = clock().now();
    let mut socket = Socket::attach(&one, Dialect::V1, &key).await;
    come_back(&machine, &mut socket, &key, &mut tape).await;
    println!("kill -9 to goes on: {:?}", clock().now() - began);
    assert_eq!(socket.statuses[..3], ["RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED"]);
    assert_eq!(machine.lock(&key.id)["epoch"], json!(3));
    socket.kill().await;
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_on_its_state_directory_takes_its_sandboxes_without_waiting() {
    let machine = Machine::with_a_directory().await;
    let (one, mut two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, key) = Socket::create(&one, Dialect::V1, movable()).await;
    let mut tape = Tape::start(&mut socket, "known").await;
    tape.read(&mut socket, 100, |_, _| {}).await;
    drop(socket);
    let mut socket = Socket::attach(&two, Dialect::V1, &key).await;
    socket.status("RUNNING").await;
    socket.send(json!({"action": "reconnect", "offsets": {"known": tape.offsets()}})).await;
    tape.read(&mut socket, 100, |_, _| {}).await;
    two.die().await;
    let takeover = std::time::Duration::from_millis(machine.lock(&key.id)["lease"]["takeover_ms"].as_u64().unwrap());

    let began = clock().now();
    let heir = machine.server("b").await;
    let mut socket = Socket::attach(&heir, Dialect::V1, &key).await;
    come_back(&machine, &mut socket, &key, &mut tape).await;
    let took = clock().now() - began;
    assert!(took < takeover, "it took {took:?}, as if the dead had to be watched");
    socket.kill().await;
    heir.stop().await;
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_without_a_checkpoint_is_lost_with_its_server_and_that_is_said() {
    let machine = Machine::with_a_directory().await;
    let (mut one, two) = tokio::join!(machine.server_with("a", &SCALED), machine.server_with("b", &SCALED));
    let (_socket, key, _) = ticking(&one).await;
    one.die().await;
    for _ in 0..2 {
        let mut socket = Socket::attach(&two, Dialect::Plain, &key).await;
        let refusal = socket.status("RESTORE_ERROR").await;
        assert!(refusal["message"].as_str().unwrap().contains("lost"), "{refusal}");
        assert_eq!(socket.end().await, Some(4000));
        assert_eq!(socket.statuses, ["RESTORING", "RESTORE_ERROR", "E"]);
    }
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    assert_eq!((&metadata["status"]["phase"], &metadata["status"]["reason"]), (&json!("failed"), &json!("Lost")));
    two.stop().await;
}
