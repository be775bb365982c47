//! Both ends in one process, over a real socket.

use std::{os::unix::fs::PermissionsExt, sync::Arc, time::Duration};

use baton_protocol::{
    frame::{Frame, FrameKind},
    id::SandboxId,
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    bus::{Bus, Evictability, StartKind},
    clock::{SharedClock, SystemClock},
    network::PortError,
    runtime::{Lifecycle, StartSpec},
    storage::{
        memory::Memory,
        store::{PollResult, Precondition, Store},
    },
    testkit::{FakeContainers, FakePorts},
};

struct Pair {
    directory: tempfile::TempDir,
    clock: SharedClock,
    bus: Arc<Bus>,
    containers: Arc<FakeContainers>,
    memory: Arc<dyn Store>,
    ports: Arc<FakePorts>,
    leaving: watch::Sender<bool>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Pair {
    fn new() -> Self {
        let clock: SharedClock = Arc::new(SystemClock);
        let directory = tempfile::tempdir().unwrap();
        let bus = Bus::new(clock.clone());
        let containers = Arc::new(FakeContainers::new(clock.clone()));
        let memory: Arc<dyn Store> = Arc::new(Memory::new(clock.clone()));
        let ports = Arc::new(FakePorts::default());
        let (leaving, leaving_seen) = watch::channel(false);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let back = IpcServer {
            hello: IpcHello::new(clock.instance_id(), "one".to_owned(), Err("none".to_owned()), LeaseTimes::DEFAULT),
            clock: clock.clone(),
            bus: bus.clone(),
            execs: containers.clone(),
            lifecycle: containers.clone(),
            memory: memory.clone(),
            ports: ports.clone(),
            leaving: leaving_seen,
            api_user: ipc_socket::own_user(),
        };
        let listener = listen(directory.path(), ipc_socket::own_user()).unwrap();
        tasks.spawn(back.serve(listener, stop.clone()));
        Self { directory, clock, bus, containers, memory, ports, leaving, stop, tasks }
    }

    async fn front(&self) -> IpcClient {
        for _ in 0..500 {
            match connect(self.directory.path(), &self.clock, &self.tasks).await {
                Ok(front) => return front,
                // An API that has just gone keeps the connection for a moment.
                Err(_) => self.clock.sleep(Duration::from_millis(10)).await,
            }
        }
        panic!("the halves never met");
    }

    async fn create(&self) -> SandboxId {
        let id = self.clock.sandbox_id();
        self.containers.create(&id, &self.start()).await.unwrap();
        self.bus.set_held(&id, true);
        id
    }

    fn start(&self) -> StartSpec {
        StartSpec {
            marker: [1; 16],
            env: [].into(),
            cwd: None,
            limits: Default::default(),
            rootfs: None,
            runsc: None,
            layout: Default::default(),
            egress: Default::default(),
            forked_from: None,
            deadline: self.clock.now() + Duration::from_secs(600),
        }
    }

    async fn eventually(&self, what: &str, is_so: impl Fn() -> bool) {
        for _ in 0..1_000 {
            if is_so() {
                return;
            }
            self.clock.sleep(Duration::from_millis(5)).await;
        }
        panic!("it never came true: {what}");
    }
}

async fn within<T>(clock: &SharedClock, work: impl Future<Output = T>) -> T {
    clock.timeout(Duration::from_secs(20), work).await.expect("in time")
}

#[tokio::test]
async fn what_sessions_do_arrives_on_the_other_board_and_ends_with_the_api() {
    let pair = Pair::new();
    let front = pair.front().await;
    assert_eq!(front.hello.runsc_version, "one");
    let id = pair.clock.sandbox_id();
    let attached = front.bus.attach(&id);
    let mut subscription = front.bus.follow(&id);
    front.bus.wake(&id);
    assert_eq!(within(&pair.clock, pair.bus.next_wakeup()).await, id);
    assert!(pair.bus.presence(&id).attached, "what was said before a nudge is known with it");

    pair.bus.post(&id, LifecycleEvent::Acquiring);
    pair.bus.set_held(&id, true);
    assert_eq!(within(&pair.clock, subscription.next()).await.passing, LifecycleEvent::Acquiring);
    pair.eventually("the hold is seen", || front.bus.held_count() == 1).await;
    drop((attached, subscription));
    pair.eventually("the session has left", || !pair.bus.presence(&id).attached).await;

    let second = TaskTracker::new();
    assert!(connect(pair.directory.path(), &pair.clock, &second).await.is_err(), "one API at a time");
    drop(front);
    assert_eq!(pair.front().await.bus.held_count(), 1, "the next one finds what is held");
    pair.stop.cancel();
}

#[tokio::test]
async fn a_sign_of_life_is_asked_for_and_given_across_the_socket() {
    let pair = Pair::new();
    let front = pair.front().await;
    let id = pair.clock.sandbox_id();
    let _attached = front.bus.attach(&id);
    let mut subscription = front.bus.follow(&id);
    pair.eventually("the session is known", || pair.bus.presence(&id).attached).await;
    let number = pair.bus.probe(&id);
    assert_eq!(within(&pair.clock, subscription.next()).await.passing, LifecycleEvent::Probe { number });
    front.bus.alive(&id, number);
    pair.eventually("the answer has come", || pair.bus.is_alive(&id, number)).await;
    pair.stop.cancel();
}

#[tokio::test]
async fn the_place_of_a_sandbox_is_wanted_across_the_socket_and_no_longer_than_the_api_lives() {
    let pair = Pair::new();
    let front = pair.front().await;
    let id = pair.create().await;
    pair.bus.set_tenure(&id, Evictability::Spare { since: pair.clock.now() });
    let is_spare =
        || front.bus.held_places().values().any(|evictability| matches!(evictability, Evictability::Spare { .. }));
    pair.eventually("the place is seen", is_spare).await;
    for how in 0..3 {
        let applicant = pair.clock.sandbox_id();
        let mut waiting = Box::pin(front.bus.make_room(&applicant, 1));
        assert!(futures::poll!(&mut waiting).is_pending());
        pair.eventually("it is wanted", || pair.bus.is_wanted(&id)).await;
        match how {
            0 => drop(waiting),
            // A session has attached to the sandbox.
            1 => {
                let attached = front.bus.attach(&id);
                assert!(within(&pair.clock, waiting).await.is_none());
                drop(attached);
            }
            _ => {
                pair.bus.set_held(&id, false);
                assert!(within(&pair.clock, waiting).await.is_some());
            }
        }
        pair.eventually("it is not wanted any more", || !pair.bus.is_wanted(&id)).await;
    }
    pair.bus.set_held(&id, true);
    pair.bus.set_tenure(&id, Evictability::Spare { since: pair.clock.now() });
    pair.eventually("the place is seen", is_spare).await;
    let applicant = pair.clock.sandbox_id();
    let mut waiting = Box::pin(front.bus.make_room(&applicant, 1));
    assert!(futures::poll!(&mut waiting).is_pending());
    pair.eventually("it is wanted", || pair.bus.is_wanted(&id)).await;
    drop(front.hold);
    pair.eventually("it is not wanted any more", || !pair.bus.is_wanted(&id)).await;
    pair.stop.cancel();
}

#[tokio::test]
async fn frames_go_both_ways_and_a_link_closes_with_its_container() {
    let pair = Pair::new();
    let id = pair.create().await;
    let front = pair.front().await;
    let mut link = front.execs.open(&id).expect("it was told before the API was ready");
    link.to_agent.send(Frame::new(FrameKind::List)).await.unwrap();
    let answer = within(&pair.clock, link.from_agent.recv()).await.unwrap();
    assert_eq!(answer.kind, FrameKind::Execs);

    let mut newer = front.execs.open(&id).unwrap();
    within(&pair.clock, async { while link.from_agent.recv().await.is_some() {} }).await;
    newer.to_agent.send(Frame::new(FrameKind::List)).await.unwrap();
    assert_eq!(
        within(&pair.clock, newer.from_agent.recv()).await.unwrap().kind,
        FrameKind::Execs,
        "the newer link wins"
    );

    pair.containers.remove(&id).await.unwrap();
    within(&pair.clock, async { while newer.from_agent.recv().await.is_some() {} }).await;
    assert!(front.execs.open(&id).is_none(), "a session that sees the end opens no other link");
    pair.stop.cancel();
}

#[tokio::test]
async fn who_hears_that_a_sandbox_runs_can_open_a_link() {
    let pair = Pair::new();
    let front = pair.front().await;
    for _ in 0..20 {
        let id = pair.clock.sandbox_id();
        let attached = front.bus.attach(&id);
        let mut subscription = front.bus.follow(&id);
        front.bus.wake(&id);
        // The previous session also woke its sandbox when it left.
        within(&pair.clock, async { while pair.bus.next_wakeup().await != id {} }).await;
        pair.bus.set_held(&id, true);
        pair.containers.create(&id, &pair.start()).await.unwrap();
        pair.bus.post(&id, LifecycleEvent::Running { boot: StartKind::Fresh });
        within(&pair.clock, subscription.next()).await;
        assert!(front.execs.open(&id).is_some());
        drop(attached);
    }
    pair.leaving.send_replace(true);
    let mut draining = front.draining.clone();
    within(&pair.clock, draining.wait_for(|draining| *draining)).await.unwrap();
    pair.stop.cancel();
    within(&pair.clock, front.gone.cancelled()).await;
}

#[tokio::test]
async fn the_memory_of_the_other_half_is_a_store() {
    let pair = Pair::new();
    let front = pair.front().await;
    let first = front.memory.put("a/b", "1".into(), Precondition::Absent).await.unwrap().version;
    assert_eq!(front.memory.get_if_changed("a/b", Some(&first)).await.unwrap(), PollResult::Unchanged);
    assert!(matches!(
        front.memory.put("a/b", "2".into(), Precondition::Absent).await,
        Err(crate::storage::store::Error::Conflict(_))
    ));
    let second = pair.memory.put("a/b", "2".into(), Precondition::Is(first.clone())).await.unwrap().version;
    assert_eq!(
        front.memory.get_if_changed("a/b", Some(&first)).await.unwrap(),
        PollResult::Changed("2".into(), second.clone())
    );
    assert_eq!(front.memory.list("a/", None).await.unwrap().entries.len(), 1);
    front.memory.delete("a/b", Precondition::Is(second)).await.unwrap();
    assert_eq!(front.memory.get_if_changed("a/b", None).await.unwrap(), PollResult::Missing);
    pair.stop.cancel();
}

#[tokio::test]
async fn the_socket_is_its_users_alone_and_a_second_reconciler_is_refused() {
    let pair = Pair::new();
    let path = ipc_socket::path(pair.directory.path());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let refused = listen(pair.directory.path(), ipc_socket::own_user()).unwrap_err().to_string();
    assert!(refused.contains("another reconciler"), "{refused}");
    let stream = UnixStream::connect(&path).await.unwrap();
    let stranger = ipc_socket::check(&stream, &[ipc_socket::own_user() + 1]).unwrap_err();
    assert!(stranger.to_string().contains("no business"), "{stranger}");
    pair.stop.cancel();
    pair.tasks.close();
}

#[tokio::test]
async fn halves_of_different_builds_do_not_speak() {
    let pair = Pair::new();
    let mut wire = wire(ipc_socket::dial(&ipc_socket::path(pair.directory.path())).await.unwrap());
    use futures::{SinkExt, StreamExt};
    wire.send(packed(&Handshake::Board { version: "other".to_owned() }).unwrap()).await.unwrap();
    let hello: FromReconciler = unpacked(within(&pair.clock, wire.next()).await.unwrap()).unwrap();
    assert!(matches!(hello, FromReconciler::Hello(hello) if hello.version == VERSION), "it says who it is");
    assert!(within(&pair.clock, wire.next()).await.is_none(), "and nothing more");
    pair.stop.cancel();
}

#[tokio::test]
async fn the_lease_of_a_new_sandbox_is_known_over_there_before_its_nudge() {
    let pair = Pair::new();
    let front = pair.front().await;
    let (kept, dropped) = (pair.clock.sandbox_id(), pair.clock.sandbox_id());
    front.bus.lease(&dropped);
    front.bus.unlease(&dropped);
    let lease = front.bus.lease(&kept);
    front.bus.wake(&kept);
    assert_eq!(within(&pair.clock, pair.bus.next_wakeup()).await, kept);
    assert_eq!(pair.bus.take_lease(&kept), Some(lease));
    assert_eq!((pair.bus.take_lease(&kept), pair.bus.take_lease(&dropped)), (None, None));
    assert_eq!((front.hello.hold, front.hello.takeover), (LeaseTimes::DEFAULT.hold, LeaseTimes::DEFAULT.takeover));
}

/// A listener that stands for a port inside, and a connection to it through the socket.
async fn port_inside(pair: &Pair, front: &IpcClient) -> (crate::network::PortStream, tokio::net::TcpStream) {
    let id = pair.clock.sandbox_id();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    pair.ports.listen(&id, 80, listener.local_addr().unwrap());
    assert_eq!(front.ports.connect(&id, 80).await.unwrap_err(), PortError::NotRunning);
    pair.ports.set_running(&id, true);
    assert_eq!(front.ports.connect(&id, 81).await.unwrap_err(), PortError::Refused);
    assert_eq!(front.ports.view(&id).await.map(|view| view.listening), Ok(vec![80]));
    let (outside, inside) = tokio::join!(front.ports.connect(&id, 80), listener.accept());
    (outside.unwrap(), inside.unwrap().0)
}

#[tokio::test]
async fn the_bytes_of_a_port_cross_the_socket_and_each_direction_ends_by_itself() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let pair = Pair::new();
    let front = pair.front().await;
    let (outside, mut inside) = port_inside(&pair, &front).await;
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    let (mut reader, mut writer) = tokio::io::split(outside);
    let talk = async {
        let sent = async {
            writer.write_all(&bytes).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let heard = async {
            let mut heard = Vec::new();
            inside.read_to_end(&mut heard).await.unwrap();
            assert!(heard == bytes);
            // One direction has ended, and the other one has not begun.
            inside.write_all(&bytes).await.unwrap();
            inside.shutdown().await.unwrap();
        };
        let answered = async {
            let mut answer = Vec::new();
            reader.read_to_end(&mut answer).await.unwrap();
            assert!(answer == bytes);
        };
        tokio::join!(sent, heard, answered);
    };
    within(&pair.clock, talk).await;
    pair.stop.cancel();
}

#[tokio::test]
async fn a_port_connection_that_is_dropped_is_reset_on_the_other_side_even_if_it_is_silent() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let pair = Pair::new();
    let front = pair.front().await;
    let (outside, mut inside) = port_inside(&pair, &front).await;
    drop(outside);
    let reset = within(&pair.clock, inside.read(&mut [0; 16])).await;
    assert_eq!(reset.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    let (outside, inside) = port_inside(&pair, &front).await;
    let mut outside = crate::network::PortBytes::new(outside);
    inside.set_zero_linger().unwrap();
    drop(inside);
    let reset = within(&pair.clock, outside.read(&mut [0; 16])).await;
    assert_eq!(reset.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    // Its own direction had ended, and it says nothing.
    let (mut outside, mut inside) = port_inside(&pair, &front).await;
    outside.shutdown().await.unwrap();
    assert_eq!(within(&pair.clock, inside.read(&mut [0; 16])).await.unwrap(), 0);
    drop(outside);
    within(&pair.clock, async { while inside.write_all(&[0; 64]).await.is_ok() {} }).await;
    pair.stop.cancel();
}
