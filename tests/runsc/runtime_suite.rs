//! What holds for every runtime, the real one and the fake.

use std::{path::PathBuf, sync::Arc, time::Duration};

use baton::{
    clock::{Moment, SharedClock},
    runtime::{AgentLinks, Container, Error, IMAGE_FILES, Lifecycle},
};
use baton_protocol::{
    agent::AgentState,
    frame::{Frame, FrameKind, Stream},
    id::SandboxId,
};
use baton_testkit::{FakeContainers, TestClock};

use crate::{
    fixture::{Place, directory, sandbox, start},
    plain_session::{Client, command},
};

/// One runtime under test.
struct Subject<'a> {
    life: &'a dyn Lifecycle,
    execs: &'a dyn AgentLinks,
    clock: SharedClock,
    scratch: PathBuf,
}

impl Subject<'_> {
    fn later(&self) -> Moment {
        self.clock.now() + Duration::from_secs(600)
    }

    fn client(&self, id: &SandboxId) -> Client {
        Client::attached(self.clock.clone(), self.execs, id)
    }

    fn start(&self) -> baton::runtime::StartSpec {
        baton::runtime::StartSpec { deadline: self.later(), ..start() }
    }
}

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        mod real {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                let place = super::Place::new().await;
                let subject = super::Subject {
                    life: &*place.containers,
                    execs: &*place.containers,
                    clock: crate::fixture::clock(),
                    scratch: place.path("scratch"),
                };
                super::$case(&subject).await;
                place.close().await;
            })*
        }
        mod fake {
            $(#[tokio::test(start_paused = true)]
            async fn $case() {
                let clock: super::SharedClock = super::Arc::new(super::TestClock::new(7));
                let fake = super::FakeContainers::new(clock.clone());
                let directory = super::directory();
                let scratch = directory.path().join("scratch");
                let subject = super::Subject { life: &fake, execs: &fake, clock, scratch };
                super::$case(&subject).await;
            })*
        }
    };
}

cases![
    a_command_runs_and_its_bytes_and_exit_status_arrive,
    stdin_reaches_the_command_and_ends,
    what_runs_is_counted,
    a_pause_stops_everything_and_a_resume_goes_on,
    input_that_came_during_a_pause_is_not_in_the_checkpoint,
    removing_is_safe_to_repeat_and_leaves_nothing,
    a_checkpoint_is_refused_unless_paused,
    a_command_moves_with_its_checkpoint,
    the_newer_link_wins,
    a_link_closes_with_its_container,
    a_fence_stops_it_and_a_deadline_in_the_future_lets_it_go_on,
    a_failed_restore_leaves_nothing,
    what_only_the_runtime_may_say_is_dropped,
];

async fn a_command_runs_and_its_bytes_and_exit_status_arrive(subject: &Subject<'_>) {
    let id = sandbox();
    assert!(subject.execs.open(&id).is_none());
    subject.life.create(&id, &subject.start()).await.unwrap();
    assert_eq!(subject.life.watch(&id).borrow().container, Container::Running);
    assert_eq!(subject.life.local_sandboxes(), std::slice::from_ref(&id));
    let mut client = subject.client(&id);
    let exec = client.exec(command(&["echo", "hello", "there"]), None).await;
    let done = client.done(exec).await;
    assert_eq!(done.stdout.bytes, b"hello there\n");
    assert!(done.started && done.stderr.bytes.is_empty());
    assert_eq!(done.exit.as_ref().unwrap().code, Some(0));
    let exec = client.exec(command(&["no-such-command"]), None).await;
    let done = client.done(exec).await;
    assert_eq!(done.stderr.bytes, b"no-such-command: command not found\n");
    assert_eq!(done.exit.as_ref().unwrap().code, Some(127));
    assert!(matches!(subject.life.create(&id, &subject.start()).await, Err(Error::NotIn("absent"))));
    subject.life.remove(&id).await.unwrap();
}

async fn stdin_reaches_the_command_and_ends(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut client = subject.client(&id);
    let exec = client.exec(baton_protocol::agent::AgentExec { stdin: true, ..command(&["cat"]) }, None).await;
    client.stdin(exec, b"one\n").await;
    client.until("an echo", |client| client.execs[&exec].stdout.bytes == b"one\n").await;
    client.stdin(exec, b"two\n").await;
    client.stdin_eof(exec).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"one\ntwo\n");
    subject.life.remove(&id).await.unwrap();
}

async fn what_runs_is_counted(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut seen = subject.life.watch(&id);
    assert_eq!(seen.borrow().running_execs, 0);
    let mut client = subject.client(&id);
    let exec = client.exec(command(&["sleep", "600"]), None).await;
    client.until("it runs", |client| client.execs[&exec].started).await;
    seen.wait_for(|seen| seen.running_execs == 1).await.unwrap();
    client.send(Frame::new(FrameKind::Signal).stream(Stream::Tree).exec(exec).offset(9)).await;
    client.until("it ends", |client| client.execs[&exec].exit.is_some()).await;
    assert_eq!(client.execs[&exec].exit.as_ref().unwrap().signal, Some(9));
    seen.wait_for(|seen| seen.running_execs == 0).await.unwrap();
    subject.life.remove(&id).await.unwrap();
}

async fn a_pause_stops_everything_and_a_resume_goes_on(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut client = subject.client(&id);
    subject.life.pause(&id).await.unwrap();
    assert_eq!(subject.life.watch(&id).borrow().container, Container::Paused);
    subject.life.pause(&id).await.unwrap();
    let exec = client.exec(command(&["echo", "later"]), None).await;
    client.read_for(Duration::from_millis(100)).await;
    assert!(!client.execs[&exec].started, "frames wait while it is paused");
    subject.life.resume(&id).await.unwrap();
    assert_eq!(subject.life.watch(&id).borrow().container, Container::Running);
    assert_eq!(client.done(exec).await.stdout.bytes, b"later\n");
    subject.life.resume(&id).await.unwrap();
    subject.life.remove(&id).await.unwrap();
}

async fn input_that_came_during_a_pause_is_not_in_the_checkpoint(subject: &Subject<'_>) {
    let (id, start) = (sandbox(), subject.start());
    subject.life.create(&id, &start).await.unwrap();
    let mut client = subject.client(&id);
    subject.life.pause(&id).await.unwrap();
    client.exec(command(&["sleep", "600"]), None).await;
    client.read_for(Duration::from_millis(50)).await;
    subject.life.checkpoint(&id, &subject.scratch).await.unwrap();
    subject.life.remove(&id).await.unwrap();
    subject.life.restore(&id, &start, &subject.scratch).await.unwrap();
    let mut link = subject.execs.open(&id).unwrap();
    link.to_agent.send(Frame::new(FrameKind::List)).await.unwrap();
    let frame = subject.clock.timeout(Duration::from_secs(20), link.from_agent.recv()).await.unwrap().unwrap();
    let state: AgentState = serde_json::from_slice(&frame.payload).unwrap();
    assert_eq!((state.last_request, state.execs.len()), (0, 0));
    subject.life.remove(&id).await.unwrap();
}

async fn removing_is_safe_to_repeat_and_leaves_nothing(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.remove(&id).await.unwrap();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let seen = subject.life.watch(&id);
    subject.life.pause(&id).await.unwrap();
    subject.life.remove(&id).await.unwrap();
    assert_eq!(seen.borrow().container, Container::Absent);
    assert!(subject.life.local_sandboxes().is_empty() && subject.execs.open(&id).is_none());
    subject.life.remove(&id).await.unwrap();
    assert!(matches!(subject.life.pause(&id).await, Err(Error::NotIn(_))));
    assert!(matches!(subject.life.extend(&id, subject.later()).await, Err(Error::NotIn(_))));
    subject.life.create(&id, &subject.start()).await.unwrap();
    subject.life.remove(&id).await.unwrap();
}

async fn a_checkpoint_is_refused_unless_paused(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    assert!(matches!(subject.life.checkpoint(&id, &subject.scratch).await, Err(Error::NotIn("paused"))));
    assert_eq!(subject.life.watch(&id).borrow().container, Container::Running);
    subject.life.remove(&id).await.unwrap();
}

async fn a_command_moves_with_its_checkpoint(subject: &Subject<'_>) {
    let (id, start) = (sandbox(), subject.start());
    subject.life.create(&id, &start).await.unwrap();
    let mut client = subject.client(&id);
    let exec = client.exec(baton_protocol::agent::AgentExec { stdin: true, ..command(&["cat"]) }, None).await;
    client.stdin(exec, b"before\n").await;
    client.until("an echo", |client| client.execs[&exec].stdout.bytes == b"before\n").await;
    subject.life.pause(&id).await.unwrap();
    subject.life.checkpoint(&id, &subject.scratch).await.unwrap();
    assert_eq!(subject.life.watch(&id).borrow().container, Container::Paused);
    for name in IMAGE_FILES {
        assert!(std::fs::metadata(subject.scratch.join(name)).unwrap().len() > 0, "{name}");
    }
    subject.life.remove(&id).await.unwrap();
    subject.life.restore(&id, &start, &subject.scratch).await.unwrap();
    let seen = *subject.life.watch(&id).borrow();
    assert_eq!((seen.container, seen.running_execs), (Container::Running, 1));
    client.reconnect(subject.execs, &id).await;
    client.stdin(exec, b"after\n").await;
    client.stdin_eof(exec).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"before\nafter\n");
    subject.life.remove(&id).await.unwrap();
}

async fn the_newer_link_wins(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut old = subject.client(&id);
    let mut new = subject.client(&id);
    let exec = new.exec(command(&["echo", "mine"]), None).await;
    assert_eq!(new.done(exec).await.stdout.bytes, b"mine\n");
    assert!(!old.step().await, "the old link is closed");
    subject.life.remove(&id).await.unwrap();
}

async fn a_link_closes_with_its_container(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut client = subject.client(&id);
    subject.life.remove(&id).await.unwrap();
    assert!(!client.step().await);
}

async fn a_fence_stops_it_and_a_deadline_in_the_future_lets_it_go_on(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut client = subject.client(&id);
    let mut seen = subject.life.watch(&id);
    subject.life.fence(&id).await.unwrap();
    seen.wait_for(|seen| seen.container == Container::Fenced).await.unwrap();
    let exec = client.exec(command(&["echo", "later"]), None).await;
    client.read_for(Duration::from_millis(100)).await;
    assert!(!client.execs[&exec].started);
    assert!(matches!(subject.life.pause(&id).await, Err(Error::NotIn(_))));
    subject.life.extend(&id, subject.clock.now()).await.unwrap();
    assert!(matches!(subject.life.resume(&id).await, Err(Error::NotIn(_))));
    assert_eq!(seen.borrow().container, Container::Fenced);
    subject.life.extend(&id, subject.later()).await.unwrap();
    assert_eq!(seen.borrow().container, Container::Fenced, "only a resume lets it go on");
    subject.life.resume(&id).await.unwrap();
    assert_eq!(seen.borrow().container, Container::Running);
    assert_eq!(client.done(exec).await.stdout.bytes, b"later\n");
    subject.life.fence(&id).await.unwrap();
    subject.life.remove(&id).await.unwrap();
    assert_eq!(seen.borrow().container, Container::Absent);
}

async fn a_failed_restore_leaves_nothing(subject: &Subject<'_>) {
    let id = sandbox();
    std::fs::create_dir_all(&subject.scratch).unwrap();
    for name in IMAGE_FILES {
        std::fs::write(subject.scratch.join(name), "this is no image").unwrap();
    }
    let seen = subject.life.watch(&id);
    let error = subject.life.restore(&id, &subject.start(), &subject.scratch).await.unwrap_err().to_string();
    assert!(error.starts_with("restore failed: "), "{error}");
    assert!(!error.contains(subject.scratch.parent().unwrap().to_str().unwrap()), "{error}");
    assert_eq!(seen.borrow().container, Container::Absent);
    assert!(subject.life.local_sandboxes().is_empty());
}

async fn what_only_the_runtime_may_say_is_dropped(subject: &Subject<'_>) {
    let id = sandbox();
    subject.life.create(&id, &subject.start()).await.unwrap();
    let mut client = subject.client(&id);
    let own = [
        FrameKind::Assign,
        FrameKind::Resync,
        FrameKind::Restored,
        FrameKind::Forked,
        FrameKind::Detached,
        FrameKind::Hello,
        FrameKind::Data,
    ];
    for kind in own {
        client.send(Frame::new(kind).payload(&b"{}"[..])).await;
    }
    client.send(Frame::new(FrameKind::Stdin).payload(vec![0; 2 << 20])).await;
    let exec = client.exec(command(&["echo", "well"]), None).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"well\n");
    client.send(Frame::new(FrameKind::Ping).sequence(5)).await;
    client.until("a pong", |client| client.pongs == 1).await;
    subject.life.remove(&id).await.unwrap();
}
