//! An agent that was taken over: it may harm its own sandbox, and nothing else.

use std::time::Duration;

use baton::runtime::{AgentLinks, Container, Lifecycle, OUTPUT_FRAMES, RuntimeSettings};
use baton_protocol::{
    agent::AgentExec,
    frame::{Frame, FrameKind, Stream},
};

use crate::{
    fixture::{Place, clock, sandbox, start},
    impostor::place_with,
    plain_session::{Client, command},
};

#[tokio::test(flavor = "multi_thread")]
async fn one_that_talks_nonsense_never_becomes_an_agent() {
    for nonsense in [
        "say(b'hello' * 100); time.sleep(600)",
        "say(frame(64, b'not json')); time.sleep(600)",
        "say(frame(64, length=0xffffffff)); time.sleep(600)",
        "say(frame(1)); time.sleep(600)",
        "os._exit(3)",
    ] {
        let (place, _agent) = place_with(nonsense).await;
        let id = sandbox();
        let error = place.containers.create(&id, &start()).await.unwrap_err().to_string();
        assert!(error.starts_with("create failed: the agent"), "{nonsense}: {error}");
        assert_eq!(place.containers.watch(&id).borrow().container, Container::Absent);
        place.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_breaks_a_frame_later_ends_its_container() {
    let (place, _agent) = place_with("greet(); hear(); say(b'x' * 64); time.sleep(600)").await;
    let id = sandbox();
    place.containers.create(&id, &start()).await.unwrap();
    let mut seen = place.containers.watch(&id);
    let link = place.containers.open(&id).unwrap();
    seen.wait_for(|seen| seen.container == Container::Stopped).await.unwrap();
    clock().timeout(Duration::from_secs(20), link.to_agent.closed()).await.expect("its link closes");
    assert!(place.containers.open(&id).is_none());
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_claims_many_commands_is_counted_to_the_limit() {
    let flood = "greet(); say(b''.join(frame(65, exec=n) for n in range(1, 1501)));
while True:
    kind, sequence, _ = hear()
    if kind == 16: say(frame(70, sequence=sequence))";
    let (place, _agent) = place_with(flood).await;
    let id = sandbox();
    place.containers.create(&id, &start()).await.unwrap();
    let mut seen = place.containers.watch(&id);
    seen.wait_for(|seen| seen.running_execs == 1024).await.unwrap();
    // It still answers, and can be removed while it does not listen.
    let link = place.containers.open(&id).unwrap();
    link.to_agent.send(Frame::new(FrameKind::Ping).sequence(3)).await.unwrap();
    assert_eq!(seen.borrow().running_execs, 1024);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_nobody_reads_holds_the_agent_back_and_nothing_else() {
    let place = Place::new().await;
    let (id, other) = (sandbox(), sandbox());
    place.containers.create(&id, &start()).await.unwrap();
    let mut link = place.containers.open(&id).unwrap();
    let exec = |number: u32, argv: &[&str]| {
        let asked = serde_json::to_vec(&AgentExec { stdin: true, ..command(argv) }).unwrap();
        Frame::new(FrameKind::Exec).exec(number).sequence(number.into()).payload(asked)
    };
    let stdout = |kind, number| Frame::new(kind).exec(number).stream(Stream::Stdout);
    // Many small writes of several commands: more frames than a link holds.
    for number in 1..=10 {
        link.to_agent.send(exec(number, &["seq", "1000000000"])).await.unwrap();
        link.to_agent.send(stdout(FrameKind::Credit, number).offset(u64::MAX)).await.unwrap();
    }
    let behind = link.behind.clone();
    clock().timeout(Duration::from_secs(20), behind.noted()).await.expect("the link is full");
    assert!(link.from_agent.len() >= OUTPUT_FRAMES);
    // Neither its own life hangs on it, nor another sandbox, nor what the runtime hears of its commands.
    let mut seen = place.containers.watch(&id);
    link.to_agent.send(exec(11, &["cat"])).await.unwrap();
    let limit = Duration::from_secs(20);
    clock().timeout(limit, seen.wait_for(|seen| seen.running_execs == 11)).await.expect("its start is heard").unwrap();
    link.to_agent.send(Frame::new(FrameKind::StdinEof).exec(11)).await.unwrap();
    clock().timeout(limit, seen.wait_for(|seen| seen.running_execs == 10)).await.expect("its end is heard").unwrap();
    place.containers.pause(&id).await.unwrap();
    place.containers.resume(&id).await.unwrap();
    place.containers.create(&other, &start()).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &other);
    let free = client.exec(command(&["echo", "free"]), None).await;
    assert_eq!(client.done(free).await.stdout.bytes, b"free\n");

    // What was left out comes when it is asked for, from the byte on that was missing.
    let mut at = std::collections::BTreeMap::<u32, u64>::new();
    while let Ok(frame) = link.from_agent.try_recv() {
        if frame.kind == FrameKind::Data {
            assert_eq!(frame.offset, at.get(&frame.exec).copied().unwrap_or(0), "up to there nothing is missing");
            at.insert(frame.exec, frame.offset + frame.payload.len() as u64);
        }
    }
    let (late, _) = *link.behind.drain().first().expect("one is behind");
    let from = at.get(&late).copied().unwrap_or(0);
    link.to_agent.send(stdout(FrameKind::Replay, late).offset(from).sequence(77)).await.unwrap();
    let clock = clock();
    let next = clock.timeout(limit, async {
        loop {
            let frame = link.from_agent.recv().await.expect("it is open");
            if frame.kind == FrameKind::Data && frame.exec == late {
                return (frame.offset, frame.sequence);
            }
        }
    });
    assert_eq!(next.await.expect("it comes"), (from, 77));
    place.containers.remove(&id).await.unwrap();
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_grace_nobody_is_waited_for() {
    let grace = Duration::from_millis(300);
    let place = Place::with(|settings| RuntimeSettings { detach_grace: grace, ..settings }).await;
    let id = sandbox();
    place.containers.create(&id, &start()).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &id);
    // More than a ring holds while somebody is there to read it.
    let exec = client.exec(command(&["head", "-c", "6000000", "/dev/zero"]), None).await;
    client.until("it runs", |client| client.execs[&exec].started).await;
    drop(client);
    let mut seen = place.containers.watch(&id);
    seen.wait_for(|seen| seen.running_execs == 0).await.unwrap();
    place.close().await;
}
