//! Two real servers, and two clients that want the same sandbox; and an operator who says where it is to be.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    commandline::Person,
    fixture::clock,
    live_handoff::{movable, tick, ticking},
    servers::{Machine, Server},
    websocket_client::{Dialect, Heard, Key, Mind, Socket},
};

/// Two servers whose sweeps come often.
async fn servers(machine: &Machine) -> (Server, Server) {
    let sweeps = [("BATON_SWEEP", "1s")];
    tokio::join!(machine.server_with("a", &sweeps), machine.server_with("b", &sweeps))
}

async fn instance(server: &Server) -> String {
    let (_, status) = server.get("/status").await;
    serde_json::from_str::<Value>(&status).unwrap()["instance"].as_str().unwrap().to_owned()
}

/// What an operator's command prints; it must work.
async fn operator(machine: &Machine, arguments: &[&str]) -> String {
    let mut command = Person::at(machine, String::new()).types(arguments);
    command.env_remove("BATON_URL").envs(machine.place());
    let output = clock().timeout(Duration::from_secs(90), command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A sandbox as the documents have it, with a plain client and a command that counts.
async fn of_the_documents(machine: &Machine, server: &Server) -> (Socket, Key) {
    let (mut socket, key) = Socket::create(server, Dialect::Plain, movable()).await;
    operator(machine, &["edit", &key.id, "--set", "plain=documents", "--no-wait"]).await;
    let code = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done";
    socket.send(json!({"language": "bash", "code": code})).await;
    socket.status("EXECUTION_RUNNING").await;
    (socket, key)
}

/// Everything a newcomer hears until it has the sandbox or is sent away, without what is said of locks.
async fn statuses(mut newcomer: Socket) -> (Vec<String>, Option<Option<u16>>, Socket) {
    let end = loop {
        match newcomer.next().await {
            Heard::End(code) => break Some(code),
            Heard::Event(event) if event["status"] == "SANDBOX_RUNNING" => break None,
            Heard::Event(_) | Heard::Bytes(_) => {}
        }
    };
    let heard = newcomer.statuses.iter().filter(|status| !status.starts_with("LOCK_")).cloned().collect();
    (heard, end, newcomer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_alive_keeps_its_sandbox_and_a_plain_newcomer_elsewhere_is_told() {
    let machine = Machine::with_a_bucket().await;
    let (one, two) = servers(&machine).await;
    let (mut first, key) = of_the_documents(&machine, &one).await;
    let before = first.statuses.clone();
    let newcomer = Socket::attach(&two, Dialect::Plain, &key).await;
    let told = statuses(newcomer);
    tokio::pin!(told);
    let (heard, end, _) = loop {
        tokio::select! {
            told = &mut told => break told,
            // It reads, and so it answers pings.
            heard = first.next() => assert!(matches!(heard, Heard::Event(_)), "{heard:?}"),
        }
    };
    assert_eq!((heard, end), (vec!["RESTORING".to_owned(), "IN_USE".to_owned()], Some(Some(1011))));
    // The command of the first goes on, and nothing was said to it.
    for _ in 0..20 {
        first.until("its output goes on", |event| event["event"] == "stdout").await;
    }
    assert_eq!(first.statuses, before);
    assert_eq!(machine.lock(&key.id)["epoch"], json!(1));
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    assert_eq!(metadata["placement"], json!(instance(&one).await), "what the newcomer asked for is taken back");
    first.send(json!({"action": "kill_process"})).await;
    first.status("EXECUTION_DONE").await;
    first.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_whose_connection_is_stalled_loses_its_sandbox_to_a_plain_newcomer() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = servers(&machine).await;
    let (stalled, key) = of_the_documents(&machine, &one).await;
    // Nobody reads from it, and it is not closed: pings are never answered.
    let began = clock().now();
    let (heard, end, mut newcomer) = statuses(Socket::attach(&two, Dialect::Plain, &key).await).await;
    assert!(clock().now() - began >= Duration::from_secs(1), "the first had its second");
    assert_eq!((heard, end), (vec!["RESTORING".to_owned(), "RUNNING".to_owned()], None));
    assert_eq!(machine.lock(&key.id)["epoch"], json!(2));
    newcomer.send(json!({"action": "reconnect"})).await;
    newcomer.status("EXECUTION_RUNNING").await;
    newcomer.until("the command goes on", |event| event["event"] == "stdout").await;
    newcomer.send(json!({"action": "kill_process"})).await;
    newcomer.status("EXECUTION_DONE").await;
    drop(stalled);
    newcomer.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newcomer_of_v1_gets_the_sandbox_at_once_and_the_loser_hears_who_has_it() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = servers(&machine).await;
    let mut mind = Mind::default();
    let (mut first, key) = Socket::create(&one, Dialect::V1, movable()).await;
    operator(&machine, &["edit", &key.id, "--set", "plain=documents", "--no-wait"]).await;
    tick(&mut mind, &mut first).await;
    let mut next = Socket::attach(&two, Dialect::V1, &key).await;
    let requested = first.status("LOCK_RELEASE_REQUESTED").await;
    let message = requested["message"].as_str().expect("it is told why");
    assert!(message.contains(&instance(&two).await), "{message}");
    next.status("RUNNING").await;
    drop(first);
    next.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_hands_a_sandbox_off_to_an_instance_and_its_client_follows() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = servers(&machine).await;
    let (mut socket, key, mut mind) = ticking(&one).await;
    let to = instance(&two).await;
    let ordered = async {
        let line = operator(&machine, &["handoff", &key.id, "--to", &to, "--force"]).await;
        assert!(line.trim_end().ends_with(&format!("runs on {to}")), "{line}");
    };
    let left = async {
        loop {
            if let Some(code) = mind.step(&mut socket).await {
                return code;
            }
        }
    };
    let ((), code) = tokio::join!(ordered, left);
    assert_eq!((code, socket.statuses.last().map(String::as_str)), (Some(1012), Some("CHECKPOINTED")));
    assert!(!socket.statuses.iter().any(|status| status == "DELETED"), "{:?}", socket.statuses);
    let lock = machine.lock(&key.id);
    assert_eq!((&lock["epoch"], &lock["lease"]["owner"]), (&json!(2), &json!(to)));
    let mut socket = mind.come_back(&two, &key).await;
    let lines = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
    assert_eq!(machine.lock(&key.id)["epoch"], json!(2), "it was there already");
    socket.kill().await;
    one.stop().await;
    two.stop().await;
}
