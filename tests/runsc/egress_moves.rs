//! A sandbox with open connections moves: the old ones are reset at once, new ones work at once, and nothing waits.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use crate::{
    fixture::clock,
    network_fixture::{NetworkedMachine, PUBLIC, comes_true},
    outer_servers::SOURCE,
    sandbox_programs::{Attempt, Programs},
    websocket_client::Key,
};

const LINKS: usize = 16;
/// How a connection ends that is reset, whatever the program does at that time.
const RESET: &[&str] = &["ECONNRESET", "EPIPE"];

/// Keeps connections of every kind busy. What happens to each is a line of a file.
fn keeper() -> String {
    format!(
        "
out = open('/tmp/happened', 'a', buffering=1)
def speak(number):
    generation = 0
    while True:
        count = 0
        try:
            link = connect('keeper.example.org', 7)
            while True:
                link.sendall(b'%08d' % count)
                got = link.recv(8, socket.MSG_WAITALL)
                if got != b'%08d' % count: raise EOFError
                count += 1
                if count == 1: print(json.dumps(dict(who=number, generation=generation, how='works')), file=out)
                time.sleep(0.01)
        except (OSError, EOFError) as error:
            how = 'EOF' if isinstance(error, EOFError) else how_it_failed(error)
            # One that never carried a byte may be in any state: nothing could be taken for more than it is.
            if count == 0:
                time.sleep(0.01)
                continue
            print(json.dumps(dict(who=number, generation=generation, how=how)), file=out)
        generation += 1
def drink(number):
    while True:
        try:
            link = connect('{PUBLIC}', {SOURCE}); link.sendall(b'100000000000\\n')
            while link.recv(1 << 16): pass
        except OSError: pass
        time.sleep(0.01)
def wait(number):
    heard = None
    while True:
        how = None
        try:
            link = connect('{PUBLIC}', 7); link.sendall(b'x'); heard = link.recv(1)
            link.settimeout(None)
            if heard: how = 'EOF' if not link.recv(1) else 'answered'
        except OSError as error:
            how = how_it_failed(error) if heard else None
        if how: print(json.dumps(dict(who=number, generation=0, how=how)), file=out)
        heard = None
        time.sleep(0.01)
for number in range({LINKS}): threading.Thread(target=speak, args=(number,), daemon=True).start()
threading.Thread(target=drink, args=(100,), daemon=True).start()
threading.Thread(target=wait, args=(200,), daemon=True).start()
time.sleep(100000)"
    )
}

#[derive(Debug, Deserialize)]
struct Happened {
    who: usize,
    generation: usize,
    how: String,
}

async fn happened(sandbox: &mut Programs) -> Vec<Happened> {
    let text = sandbox.python("print(open('/tmp/happened').read())").await;
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Waits until every connection of this generation works; everything before it ended in one of these ways.
async fn all_work(sandbox: &mut Programs, generation: usize, ends: &[&str]) {
    let began = clock().now();
    loop {
        let all = happened(sandbox).await;
        let working = all.iter().filter(|one| one.generation == generation && one.how == "works").count();
        let resets = |who: usize| all.iter().filter(|one| one.who == who && one.how != "works").count();
        // One that only waits hears of it too.
        if working == LINKS && resets(200) == generation {
            for one in all.iter().filter(|one| one.how != "works") {
                assert!(ends.contains(&one.how.as_str()), "{one:?} of {all:?}");
            }
            assert!((0..LINKS).all(|who| resets(who) == generation), "{all:?}");
            return;
        }
        assert!(clock().now() - began < Duration::from_secs(20), "it hangs: {all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_reset_by_a_move_and_new_ones_work_at_once() {
    let machine = NetworkedMachine::new().await;
    machine.names.add("keeper.example.org", &[PUBLIC]);
    machine.names.add("late.example.org", &[PUBLIC]);
    let settings = [("BATON_EGRESS", "any")];
    let (one, two) = tokio::join!(machine.server("a", &settings), machine.server("b", &settings));
    let mut sandbox = Programs::start_as(&one, crate::live_handoff::movable()).await;
    sandbox.spawn_python(&keeper()).await;
    sandbox.python("while not os.path.exists('/tmp/happened'): time.sleep(0.05)").await;
    all_work(&mut sandbox, 0, &[]).await;

    for (generation, server) in [(1, &two), (2, &one)] {
        let before = machine.outer.open();
        let began = clock().now();
        sandbox.move_to(server).await;
        let took = clock().now() - began;
        let fresh = sandbox.attempts("attempt('late.example.org')\nattempt('93.184.216.34')").await;
        fresh.iter().for_each(Attempt::assert_reached);
        assert!(fresh.iter().all(|fresh| fresh.seconds < 1.0), "{fresh:?}");
        all_work(&mut sandbox, generation, RESET).await;
        println!("move {generation} with {before} open connections took {took:?}");
        comes_true("the old ones are closed outside", || machine.outer.open() <= LINKS + 3).await;
    }

    // A checkpoint that goes on is not held up, and breaks nothing.
    let began = clock().now();
    sandbox.socket.send(json!({"action": "checkpoint", "live": true, "keep_running": true})).await;
    sandbox.socket.status("CHECKPOINTED").await;
    println!("a checkpoint with open connections took {:?}", clock().now() - began);
    assert!(happened(&mut sandbox).await.iter().all(|one| one.generation < 3), "no connection was reset by it");

    // Copies have none of the connections, and make their own.
    sandbox.socket.send(json!({"action": "fork", "count": 1})).await;
    let forked = sandbox.socket.until("copies", |event| event["event"] == "forked" || event["event"] == "error").await;
    let copy = &forked["sandboxes"].as_array().expect("copies")[0];
    let text = |field: &str| copy[field].as_str().unwrap().to_owned();
    let key = Key { id: text("sandbox_id"), token: text("sandbox_token") };
    let mut copy = Programs::attach(&two, &key).await;
    // Its image was taken while they were open: there the kernel ends them, and cannot reset them.
    all_work(&mut copy, 3, &[RESET, &["EOF"]].concat()).await;
    assert!(happened(&mut sandbox).await.iter().all(|one| one.generation < 3), "its own were left alone");
    copy.kill().await;

    // From the store, and by another server.
    sandbox.socket.send(json!({"action": "checkpoint", "live": true})).await;
    assert_eq!(sandbox.socket.end().await, Some(1000));
    comes_true("everything is closed outside", || machine.outer.open() == 0).await;
    let mut restored = Programs::attach(&two, &sandbox.key).await;
    all_work(&mut restored, 3, RESET).await;
    restored.attempt("late.example.org", 7).await.assert_reached();
    restored.kill().await;
    one.stop().await;
    two.stop().await;
}
