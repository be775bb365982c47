//! What only the fake can do, and what other tests count on.

use std::{sync::Arc, time::Duration};

use baton::{
    clock::SharedClock,
    runtime::{AgentLinks, Container, Error, Lifecycle, StartSpec},
};
use baton_protocol::{
    agent::{AgentExec, AgentState, RING_ATTACHED, RING_DETACHED},
    frame::{Frame, FrameKind, Stream},
    id::SandboxId,
};
use baton_testkit::{ActionFault, FakeContainers, TestClock};

use crate::{
    fixture,
    plain_session::{Client, command},
};

async fn running() -> (SharedClock, FakeContainers, SandboxId) {
    let clock: SharedClock = Arc::new(TestClock::new(3));
    let (fake, id) = (FakeContainers::new(clock.clone()), clock.sandbox_id());
    fake.create(&id, &start(&clock)).await.unwrap();
    (clock, fake, id)
}

fn start(clock: &SharedClock) -> StartSpec {
    StartSpec { deadline: clock.now() + Duration::from_secs(15), ..fixture::start() }
}

#[tokio::test(start_paused = true)]
async fn a_fault_is_met_once_and_leaves_everything_as_it_was() {
    let (clock, fake, id) = running().await;
    fake.inject("pause", ActionFault::Fail);
    fake.inject("pause", ActionFault::NoSpace);
    fake.inject("remove", ActionFault::Hang);
    assert!(matches!(fake.pause(&id).await, Err(Error::Failed { .. })));
    assert!(matches!(fake.pause(&id).await, Err(Error::NoSpace { .. })));
    assert_eq!(fake.watch(&id).borrow().container, Container::Running);
    fake.pause(&id).await.unwrap();
    fake.extend(&id, clock.now() + Duration::from_secs(600)).await.unwrap();
    let began = clock.now();
    assert!(matches!(fake.remove(&id).await, Err(Error::TimedOut { .. })));
    assert_eq!(clock.now() - began, baton_testkit::ACTION_TIMEOUT);
    fake.remove(&id).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn it_is_fenced_at_its_deadline_and_its_time_stands_still() {
    let (clock, fake, id) = running().await;
    let mut client = Client::attached(clock.clone(), &fake, &id);
    let exec = client.exec(command(&["bash", "-c", "tick 2000 10"]), Some(|n| format!("{n}\n"))).await;
    let mut seen = fake.watch(&id);
    client.read_for(Duration::from_secs(100)).await;
    assert_eq!(seen.borrow_and_update().container, Container::Fenced);
    assert_eq!(client.execs[&exec].stdout.lines(), 1500, "fifteen seconds of ticks");
    fake.extend(&id, clock.now() + Duration::from_secs(60)).await.unwrap();
    fake.resume(&id).await.unwrap();
    let began = clock.now();
    client.done(exec).await;
    let rest = clock.now() - began;
    assert!((4_900..5_100).contains(&rest.as_millis()), "the rest, no more and no less: {rest:?}");
}

#[tokio::test(start_paused = true)]
async fn without_credit_nothing_is_sent_and_a_full_ring_holds_the_command_back() {
    let (clock, fake, id) = running().await;
    let link = fake.open(&id).unwrap();
    let asked = serde_json::to_vec(&command(&["flood"])).unwrap();
    link.to_agent.send(Frame::new(FrameKind::Exec).exec(1).sequence(1).payload(asked)).await.unwrap();
    assert_eq!(stdout_of(link, &clock).await, (0, RING_ATTACHED));
    // The same after the grace, with nobody there: the oldest bytes go.
    fake.extend(&id, clock.now() + Duration::from_secs(600)).await.unwrap();
    clock.sleep(Duration::from_secs(61)).await;
    let (from, to) = stdout_of(fake.open(&id).unwrap(), &clock).await;
    assert!(from > 0 && to - from <= RING_DETACHED, "{from} to {to}");
}

async fn stdout_of(mut link: baton::runtime::FrameLink, clock: &SharedClock) -> (u64, u64) {
    link.to_agent.send(Frame::new(FrameKind::List)).await.unwrap();
    loop {
        let frame = clock.timeout(Duration::from_secs(1), link.from_agent.recv()).await.unwrap().unwrap();
        assert_ne!(frame.kind, FrameKind::Data);
        if frame.kind == FrameKind::Execs {
            let state: AgentState = serde_json::from_slice(&frame.payload).unwrap();
            return (state.execs[0].stdout.from, state.execs[0].stdout.to);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_read_is_sent_again_only_when_asked_for() {
    let (clock, fake, id) = running().await;
    let mut client = Client::attached(clock, &fake, &id);
    let exec = client.exec(AgentExec { stdin: true, ..command(&["cat"]) }, None).await;
    client.stdin(exec, b"abc").await;
    client.until("an echo", |client| client.execs[&exec].stdout.at == 3).await;
    client.reconnect(&fake, &id).await;
    client.stdin(exec, b"def").await;
    client.stdin_eof(exec).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"abcdef");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_and_a_signal_end_a_command() {
    let (clock, fake, id) = running().await;
    let mut client = Client::attached(clock, &fake, &id);
    let slow = client.exec(AgentExec { timeout_ms: Some(500), ..command(&["sleep", "60"]) }, None).await;
    let exit = client.done(slow).await.exit.clone().unwrap();
    assert_eq!((exit.timed_out, exit.signal, exit.duration_ms), (true, Some(9), 500));
    let cat = client.exec(AgentExec { stdin: true, ..command(&["cat"]) }, None).await;
    client.send(Frame::new(FrameKind::Signal).exec(cat).stream(Stream::Tree).offset(15)).await;
    assert_eq!(client.done(cat).await.exit.as_ref().unwrap().signal, Some(15));
    let failed = client.exec(command(&["fail", "7"]), None).await;
    assert_eq!(client.done(failed).await.exit.as_ref().unwrap().code, Some(7));
}

#[tokio::test(start_paused = true)]
async fn one_that_ends_by_itself_is_stopped_and_a_killed_instance_answers_nothing() {
    let (clock, fake, id) = running().await;
    let mut seen = fake.watch(&id);
    fake.end(&id);
    seen.wait_for(|seen| seen.container == Container::Stopped).await.unwrap();
    assert!(matches!(fake.resume(&id).await, Err(Error::NotIn(_))));
    fake.remove(&id).await.unwrap();
    fake.create(&id, &start(&clock)).await.unwrap();
    fake.kill();
    tokio::task::yield_now().await;
    assert!(matches!(fake.pause(&id).await, Err(Error::NotIn(_))));
}
