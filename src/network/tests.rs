//! The connections of a sandbox against real sockets, with an agent that is played here.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Duration};

use baton_protocol::{
    agent::{Dial, ListeningPorts, NameResolution, PORT_CONNECTION},
    frame::{Frame, FrameKind},
    sandbox_network::{Egress, EgressRule},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::task::TaskTracker;

use super::{
    Denials, DeniedConnections, NameResolver, NetworkContext, NetworkLink, NetworkView, PortError, SandboxConnections,
    credit_pool::LEAST_WINDOW,
};
use crate::{
    clock::{SharedClock, SystemClock},
    config::{EgressLimits, EgressSettings},
    metrics::Metrics,
};

/// Long enough on any machine.
const SOON: Duration = Duration::from_secs(20);

/// A sandbox whose agent is the test.
struct Sandbox {
    connections: SandboxConnections,
    to_agent: mpsc::Receiver<Frame>,
    from_agent: mpsc::Sender<Frame>,
    /// Frames that were read while another was wanted.
    seen: VecDeque<Frame>,
    denied: DeniedConnections,
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    let clock = SystemClock;
    let clock: &dyn crate::clock::Clock = &clock;
    clock.timeout(SOON, what).await.expect("it takes too long")
}

impl Sandbox {
    /// `exempt`: addresses of this machine that may be dialled.
    fn new(egress: &str, exempt: &[SocketAddr], limits: EgressLimits) -> Self {
        let clock: SharedClock = Arc::new(SystemClock);
        let exempt = exempt.iter().map(|address| address.to_string().parse::<EgressRule>().unwrap()).collect();
        let settings = EgressSettings { ceiling: Egress::Any, exempt, limits, ..EgressSettings::default() };
        let (denials, denied) = Denials::new(clock.clone());
        let context = Arc::new(NetworkContext {
            clock: clock.clone(),
            metrics: Metrics::default(),
            settings,
            resolver: NameResolver::of_machine(),
            denials,
        });
        let (link, to_agent, from_agent) = NetworkLink::new();
        let tasks = TaskTracker::new();
        let id = clock.sandbox_id();
        let connections = SandboxConnections::start(&id, link, &egress.parse().unwrap(), &context, &tasks);
        Self { connections, to_agent, from_agent, seen: VecDeque::new(), denied }
    }

    async fn send(&self, frame: Frame) {
        self.from_agent.send(frame).await.unwrap();
    }

    async fn dial(&self, number: u32, to: SocketAddr, credit: u64) {
        let std::net::IpAddr::V4(address) = to.ip() else { panic!("{to}") };
        let dial = Dial { name: None, address, port: to.port() };
        let payload = serde_json::to_vec(&dial).unwrap();
        self.send(Frame::new(FrameKind::Dial).exec(number).offset(credit).payload(payload)).await;
    }

    async fn output(&self, number: u32, offset: u64, bytes: &[u8]) {
        self.send(Frame::new(FrameKind::ConnectionOutput).exec(number).offset(offset).payload(bytes)).await;
    }

    /// The next frame for the connection; those of others are kept.
    async fn next(&mut self, number: u32) -> Frame {
        if let Some(at) = self.seen.iter().position(|frame| frame.exec == number) {
            return self.seen.remove(at).unwrap();
        }
        soon(async {
            loop {
                let frame = self.to_agent.recv().await.expect("the table has ended");
                if frame.exec == number {
                    return frame;
                }
                self.seen.push_back(frame);
            }
        })
        .await
    }

    async fn expect(&mut self, number: u32, kind: FrameKind) -> Frame {
        let frame = self.next(number).await;
        assert_eq!(frame.kind, kind, "{frame:?}");
        frame
    }
}

/// The agent's answer to `asked`.
fn ports(asked: &Frame, ports: &[u16]) -> Frame {
    let payload = serde_json::to_vec(&ListeningPorts { ports: ports.to_vec() }).unwrap();
    Frame::new(FrameKind::Ports).sequence(asked.sequence).payload(payload)
}

/// How many connections and names were refused, as the view says.
async fn denied_count(sandbox: &mut Sandbox) -> u64 {
    let Sandbox { connections, to_agent, from_agent, .. } = sandbox;
    let agent = async {
        let mut asked = soon(to_agent.recv()).await.unwrap();
        while asked.kind != FrameKind::ListPorts {
            asked = soon(to_agent.recv()).await.unwrap();
        }
        from_agent.send(ports(&asked, &[])).await.unwrap();
    };
    tokio::join!(connections.view(), agent).0.unwrap().denied
}

fn limits() -> EgressLimits {
    EgressLimits { opens: None, ..EgressLimits::default() }
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// An allowed connection: its peer, and the sandbox with the connection 1.
async fn connected(limits: EgressLimits) -> (Sandbox, TcpStream, SocketAddr) {
    let (listener, address) = listener().await;
    let mut sandbox = Sandbox::new("any", &[address], limits);
    sandbox.dial(1, address, 1 << 30).await;
    let (peer, _) = soon(listener.accept()).await.unwrap();
    let granted = sandbox.expect(1, FrameKind::Connected).await.offset;
    assert_eq!(granted, LEAST_WINDOW);
    (sandbox, peer, address)
}

#[tokio::test]
async fn bytes_pass_in_both_directions_and_each_direction_ends_by_itself() {
    let (listener, address) = listener().await;
    let mut sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 1 << 30).await;
    let (mut peer, _) = soon(listener.accept()).await.unwrap();
    sandbox.expect(1, FrameKind::Connected).await;
    sandbox.output(1, 0, b"question").await;
    let mut got = [0; 8];
    soon(peer.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"question");
    sandbox.send(Frame::new(FrameKind::ConnectionOutputEof).exec(1).offset(8)).await;
    assert_eq!(soon(peer.read(&mut got)).await.unwrap(), 0, "the program writes no more");
    peer.write_all(b"answer").await.unwrap();
    let answer = sandbox.expect(1, FrameKind::ConnectionInput).await;
    assert_eq!((answer.offset, &*answer.payload), (0, &b"answer"[..]));
    drop(peer);
    assert_eq!(sandbox.expect(1, FrameKind::ConnectionInputEof).await.offset, 6);
    // Nothing is left of the connection: its number can be used again.
    sandbox.dial(1, address, 1).await;
    assert_eq!(sandbox.next(1).await.kind, FrameKind::Connected);
}

#[tokio::test]
async fn megabytes_pass_within_the_credit_that_was_granted() {
    const TOTAL: usize = 8 << 20;
    let (mut sandbox, mut peer, _) = connected(limits()).await;
    let sent: Vec<u8> = (0..TOTAL).map(|at| ((at * 31) >> 3) as u8).collect();
    let expected = sent.clone();
    let reader = TaskTracker::new().spawn(async move {
        let mut got = Vec::new();
        peer.read_to_end(&mut got).await.unwrap();
        got == expected
    });
    let (mut at, mut granted) = (0, LEAST_WINDOW as usize);
    while at < TOTAL {
        if at == granted {
            granted = sandbox.expect(1, FrameKind::ConnectionCredit).await.offset as usize;
        }
        let end = granted.min(at + (64 << 10)).min(TOTAL);
        sandbox.output(1, at as u64, &sent[at..end]).await;
        at = end;
    }
    sandbox.send(Frame::new(FrameKind::ConnectionOutputEof).exec(1).offset(TOTAL as u64)).await;
    assert!(soon(reader).await.unwrap());
    assert!(granted - at <= 1 << 20, "no window is larger than a mebibyte");
}

#[tokio::test]
async fn the_peer_is_read_only_as_far_as_the_agent_has_given_credit() {
    let (listener, address) = listener().await;
    let mut sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 10).await;
    let (mut peer, _) = soon(listener.accept()).await.unwrap();
    sandbox.expect(1, FrameKind::Connected).await;
    peer.write_all(b"0123456789abcdef").await.unwrap();
    let first = sandbox.expect(1, FrameKind::ConnectionInput).await;
    assert_eq!(&*first.payload, b"0123456789");
    sandbox.send(Frame::new(FrameKind::ConnectionInputCredit).exec(1).offset(16)).await;
    let second = sandbox.expect(1, FrameKind::ConnectionInput).await;
    assert_eq!((second.offset, &*second.payload), (10, &b"abcdef"[..]));
}

#[tokio::test]
async fn an_agent_that_sends_more_than_it_may_loses_the_connection() {
    let (mut sandbox, mut peer, _) = connected(limits()).await;
    sandbox.output(1, 0, &[7; LEAST_WINDOW as usize + 1]).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    assert!(soon(peer.read(&mut [0; 8])).await.is_err(), "its peer is told that it broke");
}

#[tokio::test]
async fn a_stuck_connection_holds_back_no_other() {
    let (listener, address) = listener().await;
    let mut sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 1 << 30).await;
    let (stuck, _) = soon(listener.accept()).await.unwrap();
    sandbox.expect(1, FrameKind::Connected).await;
    // Its peer never reads, and the agent sends all that it may: 64 MiB fit into no socket.
    let (mut at, mut granted) = (0, LEAST_WINDOW);
    while at < 64 << 20 {
        if at == granted {
            let more = sandbox.expect(1, FrameKind::ConnectionCredit);
            match futures::FutureExt::now_or_never(more) {
                Some(credit) => granted = credit.offset,
                None => break,
            }
        }
        let end = granted.min(at + (64 << 10));
        sandbox.output(1, at, &vec![1; (end - at) as usize]).await;
        at = end;
    }
    sandbox.dial(2, address, 1 << 30).await;
    let (mut peer, _) = soon(listener.accept()).await.unwrap();
    sandbox.expect(2, FrameKind::Connected).await;
    sandbox.output(2, 0, b"hello").await;
    let mut got = [0; 5];
    soon(peer.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"hello");
    drop(stuck);
}

#[tokio::test]
async fn what_is_not_allowed_is_never_dialled() {
    let (listener, address) = listener().await;
    // Everything is allowed, but this address is the server's own.
    let mut sandbox = Sandbox::new("any", &[], limits());
    sandbox.dial(1, address, 1).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    let denied = soon(sandbox.denied.next()).await;
    assert_eq!((denied.host.as_str(), denied.port, denied.why), ("127.0.0.1", Some(address.port()), "loopback"));
    // The same address, but the sandbox has no policy for it.
    let mut sandbox = Sandbox::new("8.8.8.8", &[address], limits());
    sandbox.dial(1, address, 1).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    assert_eq!(soon(sandbox.denied.next()).await.why, "policy");
    assert_eq!(denied_count(&mut sandbox).await, 1);
    // The control: with both, it is dialled, and nobody was before.
    let sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 1).await;
    let (peer, _) = soon(listener.accept()).await.unwrap();
    drop(peer);
    let none = futures::FutureExt::now_or_never(listener.accept());
    assert!(none.is_none(), "only one connection ever arrived");
}

#[tokio::test]
async fn a_name_that_is_not_allowed_is_not_looked_up() {
    let mut sandbox = Sandbox::new("a.example", &[], limits());
    let ask = |number: u32, name: &str| Frame::new(FrameKind::Resolve).exec(number).payload(name.as_bytes());
    sandbox.send(ask(7, "b.example")).await;
    let answer = sandbox.expect(7, FrameKind::Resolved).await;
    assert_eq!(serde_json::from_slice::<NameResolution>(&answer.payload).unwrap(), NameResolution::Denied {});
    let denied = soon(sandbox.denied.next()).await;
    assert_eq!((denied.host.as_str(), denied.port), ("b.example", None));
    for odd in ["", "a b", "..", "\u{e4}.example", "127.0.0.1"] {
        sandbox.send(ask(8, odd)).await;
        let answer = sandbox.expect(8, FrameKind::Resolved).await;
        assert_eq!(
            serde_json::from_slice::<NameResolution>(&answer.payload).unwrap(),
            NameResolution::Missing {},
            "{odd:?}"
        );
    }
}

#[tokio::test]
async fn a_policy_that_changes_ends_what_it_no_longer_allows() {
    let (mut sandbox, mut peer, address) = connected(limits()).await;
    sandbox.connections.set_egress(&format!("{address}").parse().unwrap());
    sandbox.output(1, 0, b"still").await;
    let mut got = [0; 5];
    soon(peer.read_exact(&mut got)).await.unwrap();
    sandbox.connections.set_egress(&Egress::None);
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    assert!(soon(peer.read(&mut got)).await.is_err(), "its peer is told that it broke");
    sandbox.dial(2, address, 1).await;
    sandbox.expect(2, FrameKind::ConnectionReset).await;
}

#[tokio::test]
async fn a_connection_that_cannot_be_established_is_reset_at_once() {
    let (listener, address) = listener().await;
    drop(listener);
    let mut sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 1).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    assert_eq!(denied_count(&mut sandbox).await, 0, "nobody has refused it");
}

#[tokio::test]
async fn limits_end_what_exceeds_them() {
    let (listener, address) = listener().await;
    let one = EgressLimits { connections: 1, ..limits() };
    let mut sandbox = Sandbox::new("any", &[address], one);
    sandbox.dial(1, address, 1).await;
    sandbox.expect(1, FrameKind::Connected).await;
    sandbox.dial(2, address, 1).await;
    sandbox.expect(2, FrameKind::ConnectionReset).await;
    drop(listener);

    let silent = EgressLimits { idle: Some(Duration::from_millis(50)), ..limits() };
    let (mut sandbox, _peer, _) = connected(silent).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;

    let few = EgressLimits { total: Some(100), ..limits() };
    let (mut sandbox, mut peer, _) = connected(few).await;
    sandbox.output(1, 0, &[1; 101]).await;
    sandbox.expect(1, FrameKind::ConnectionReset).await;
    let mut got = Vec::new();
    let _ = soon(peer.read_to_end(&mut got)).await;
    assert!(got.len() <= 101);
}

#[tokio::test]
async fn a_rate_is_kept() {
    let slow = EgressLimits { rate: Some(100_000), ..limits() };
    let (mut sandbox, mut peer, _) = connected(slow).await;
    let clock: SharedClock = Arc::new(SystemClock);
    let began = clock.now();
    let reader = TaskTracker::new().spawn(async move {
        let mut got = vec![0; 80_000];
        peer.read_exact(&mut got).await.unwrap();
    });
    let (mut at, mut granted) = (0, LEAST_WINDOW);
    while at < 80_000 {
        if at == granted {
            granted = sandbox.expect(1, FrameKind::ConnectionCredit).await.offset;
        }
        let end = granted.min(80_000);
        sandbox.output(1, at, &vec![0; (end - at) as usize]).await;
        at = end;
    }
    soon(reader).await.unwrap();
    assert!(clock.now() - began > Duration::from_millis(200), "80 kB at 100 kB/s, less a burst and what is under way");
}

#[tokio::test]
async fn a_port_inside_is_reached_and_one_where_nothing_listens_is_refused() {
    let mut sandbox = Sandbox::new("none", &[], limits());
    let first = PORT_CONNECTION;
    let (stream, ()) = {
        let Sandbox { connections, to_agent, from_agent, .. } = &mut sandbox;
        let agent = async {
            let asked = soon(to_agent.recv()).await.unwrap();
            assert_eq!((asked.kind, asked.exec, asked.offset), (FrameKind::Connect, first, 8080));
            from_agent.send(Frame::new(FrameKind::Accepted).exec(first).offset(100)).await.unwrap();
        };
        tokio::join!(connections.connect(8080), agent)
    };
    let mut stream = stream.unwrap();
    assert!(sandbox.expect(first, FrameKind::ConnectionCredit).await.offset > 0);
    stream.write_all(b"GET /").await.unwrap();
    assert_eq!(&*sandbox.expect(first, FrameKind::ConnectionInput).await.payload, b"GET /");
    sandbox.output(first, 0, b"200 OK").await;
    sandbox.send(Frame::new(FrameKind::ConnectionOutputEof).exec(first).offset(6)).await;
    let mut got = Vec::new();
    soon(stream.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"200 OK");
    drop(stream);
    assert_eq!(sandbox.next(first).await.kind, FrameKind::ConnectionInputEof);

    let refused = {
        let Sandbox { connections, to_agent, from_agent, .. } = &mut sandbox;
        let agent = async {
            let asked = soon(to_agent.recv()).await.unwrap();
            from_agent.send(Frame::new(FrameKind::ConnectionClosed).exec(asked.exec)).await.unwrap();
        };
        tokio::join!(connections.connect(9), agent).0
    };
    assert_eq!(refused.unwrap_err(), PortError::Refused);
}

#[tokio::test]
async fn the_listening_ports_are_those_that_the_agent_reports() {
    let mut sandbox = Sandbox::new("none", &[], limits());
    let Sandbox { connections, to_agent, from_agent, .. } = &mut sandbox;
    let agent = async {
        let asked = soon(to_agent.recv()).await.unwrap();
        assert_eq!(asked.kind, FrameKind::ListPorts);
        // An answer to another question is not for us.
        from_agent.send(ports(&Frame::new(FrameKind::ListPorts), &[1])).await.unwrap();
        from_agent.send(ports(&asked, &[22, 8080])).await.unwrap();
    };
    let (view, ()) = tokio::join!(connections.view(), agent);
    assert_eq!(view.unwrap(), NetworkView { listening: vec![22, 8080], denied: 0 });
}

#[tokio::test]
async fn when_the_container_ends_its_connections_do() {
    let (sandbox, mut peer, _) = connected(limits()).await;
    let Sandbox { connections, to_agent, from_agent, .. } = sandbox;
    drop((to_agent, from_agent));
    assert!(soon(peer.read(&mut [0; 8])).await.is_err(), "its peer is told that it broke");
    assert_eq!(connections.connect(80).await.unwrap_err(), PortError::NotRunning);
}

#[tokio::test]
async fn a_sandbox_that_leaves_loses_its_connections_before_it_is_paused_and_may_stay_after_all() {
    let (listener, address) = listener().await;
    let mut sandbox = Sandbox::new("any", &[address], limits());
    sandbox.dial(1, address, 1).await;
    let (mut peer, _) = soon(listener.accept()).await.unwrap();
    sandbox.expect(1, FrameKind::Connected).await;
    let Sandbox { connections, to_agent, from_agent, .. } = &mut sandbox;
    let agent = async {
        let reset = to_agent.recv().await.unwrap();
        assert_eq!((reset.exec, reset.kind), (1, FrameKind::ConnectionReset));
        // What is under way for it is ignored, and it is over outside too.
        from_agent.send(Frame::new(FrameKind::ConnectionOutput).exec(1).payload(b"late")).await.unwrap();
        assert!(peer.read(&mut [0; 8]).await.is_err());
        let asked = to_agent.recv().await.unwrap();
        assert_eq!(asked.kind, FrameKind::ListPorts);
        from_agent.send(ports(&asked, &[])).await.unwrap();
    };
    soon(async { tokio::join!(connections.leave(), agent) }).await;
    sandbox.dial(2, address, 1).await;
    sandbox.expect(2, FrameKind::ConnectionReset).await;
    sandbox.connections.stay();
    sandbox.dial(3, address, 1).await;
    sandbox.expect(3, FrameKind::Connected).await;
}
