//! Two networks of a test: servers with their sandboxes run in the inner one, and what they may reach is the outer one.
//!
//! ```text
//!  test ──door──▶ inner: baton serve, sandboxes ══veth══▶ outer: addresses of the Internet, [`OuterServers`], [`LyingNames`]
//! ```
//! A network lives as long as this process has it open, so that nothing is left of it, however the test ends.

use std::{
    fs::File,
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpStream as StdTcpStream},
    os::fd::AsRawFd,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use nix::sched::{CloneFlags, setns, unshare};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::{
    fixture::clock,
    lying_names::LyingNames,
    outer_servers::OuterServers,
    servers::{Machine, Server, get},
};

/// An ordinary address of the Internet, as far as anybody can tell.
pub const PUBLIC: &str = "93.184.216.34";
/// Another one.
pub const OTHER_PUBLIC: &str = "151.101.1.69";
pub const PUBLIC_V6: &str = "2606:2800:220:1::34";
/// The address of the machine that servers run on.
pub const INNER: &str = "198.41.0.2";
const OUTER: Ipv4Addr = Ipv4Addr::new(198, 41, 0, 1);

/// Addresses that exist in the outer network and that no sandbox may reach.
pub const FORBIDDEN: [&str; 13] = [
    "10.0.0.5",
    "172.16.0.1",
    "192.168.1.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "199.36.153.8",
    "192.0.0.192",
    "192.0.2.1",
    "198.51.100.7",
    "203.0.113.9",
    "240.0.0.1",
    "192.88.99.1",
];
pub const FORBIDDEN_V6: [&str; 3] = ["fd00:ec2::254", "2001:db8::5", "64:ff9b::a00:5"];

/// A network namespace.
#[derive(Debug)]
pub struct Network(File);

impl Network {
    fn new() -> Self {
        let made = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self(made.join().unwrap())
    }

    /// Where other processes find it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Does something in this network: sockets that are made there stay there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            there.join().unwrap()
        })
    }

    fn ip(&self, lines: &str) {
        self.within(|| {
            let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
            ip.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
            assert!(ip.wait().unwrap().success(), "ip refused:\n{lines}");
        });
    }
}

/// A machine with servers between two networks.
#[derive(Debug)]
pub struct NetworkedMachine {
    pub machine: Machine,
    pub outer: OuterServers,
    pub names: LyingNames,
    inner: Arc<Network>,
    pub outside: Arc<Network>,
    doors: parking_lot::Mutex<JoinSet<()>>,
}

impl NetworkedMachine {
    pub async fn new() -> Self {
        let machine = Machine::with_a_directory().await;
        let (inner, outside) = (Arc::new(Network::new()), Arc::new(Network::new()));
        connect(&inner, &outside);
        let outer = OuterServers::start(&outside);
        let names = LyingNames::start(&outside, OUTER);
        let resolver = machine.directory.path().join("resolv.conf");
        std::fs::write(&resolver, format!("nameserver {OUTER}\noptions timeout:1 attempts:2\n")).unwrap();
        let machine = machine.launched_by(launcher(&inner, &resolver));
        Self { machine, outer, names, inner, outside, doors: parking_lot::Mutex::default() }
    }

    /// A server in the inner network, at an address where the test reaches it.
    pub async fn server(&self, name: &str, settings: &[(&str, &str)]) -> Server {
        let mut server = self.machine.server_with(name, settings).await;
        server.address = self.door(server.address.parse().unwrap()).await.to_string();
        server
    }

    /// An address here that leads to one in the inner network.
    pub async fn door(&self, to: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let network = self.inner.clone();
        self.doors.lock().spawn(async move {
            let mut pairs = JoinSet::new();
            loop {
                let (mut here, _) = listener.accept().await.unwrap();
                let network = network.clone();
                pairs.spawn(async move {
                    let connected = tokio::task::spawn_blocking(move || network.within(|| StdTcpStream::connect(to)));
                    let Ok(there) = connected.await.unwrap() else { return };
                    there.set_nonblocking(true).unwrap();
                    let mut there = TcpStream::from_std(there).unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                });
            }
        });
        address
    }

    /// The value of a counter of a server, of all its processes together.
    pub async fn metric(&self, server: &Server, name: &str) -> u64 {
        let mut value = 0;
        for place in server.log().split("serving metrics address=").skip(1) {
            let door = self.door(place.split_whitespace().next().unwrap().parse().unwrap()).await;
            let page = get(&door.to_string(), "/metrics").await.unwrap().1;
            let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value += line.map_or(0, |number| number.parse::<u64>().unwrap());
        }
        value
    }

    /// How many connections the machine has tried to establish ever since, to wherever.
    pub fn dials(&self) -> u64 {
        // Opening a file of /proc/net in a thread of the network shows that network.
        let table = self.inner.within(|| std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
        let mut tcp = table.lines().filter_map(|line| line.strip_prefix("Tcp: ")).map(str::split_whitespace);
        let (mut names, mut values) = (tcp.next().unwrap(), tcp.next().unwrap());
        let at = names.position(|name| name == "ActiveOpens").unwrap();
        values.nth(at).unwrap().parse().unwrap()
    }
}

/// The words before those of a server: its network, and a name server of its own.
fn launcher(inner: &Network, resolver: &std::path::Path) -> Vec<String> {
    let network = format!("--net={}", inner.path());
    let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    let words = ["nsenter", &network, "unshare", "--mount", "sh", "-c", script, resolver.to_str().unwrap()];
    words.map(str::to_owned).to_vec()
}

fn connect(inner: &Network, outside: &Network) {
    inner.ip(&format!("link add in0 type veth peer name out0 netns {}\n", outside.path()));
    let mut lines = format!("link set lo up\nlink set out0 up\naddr add {OUTER}/24 dev out0\n");
    lines += "addr add 2606:2800:220:2::1/64 dev out0 nodad\n";
    for address in [PUBLIC, OTHER_PUBLIC].iter().chain(&FORBIDDEN) {
        lines += &format!("addr add {address}/32 dev lo\n");
    }
    for address in [PUBLIC_V6].iter().chain(&FORBIDDEN_V6) {
        lines += &format!("addr add {address}/128 dev lo nodad\n");
    }
    outside.ip(&lines);
    inner.ip(&format!(
        "link set lo up\nlink set in0 up\naddr add {INNER}/24 dev in0\naddr add 2606:2800:220:2::2/64 dev in0 nodad\n\
         route add default via {OUTER}\nroute add ::/0 via 2606:2800:220:2::1\n"
    ));
}

/// Waits for what must come true in the outer network.
pub async fn comes_true(what: &str, mut is_so: impl FnMut() -> bool) {
    let clock = clock();
    let waited = clock.timeout(Duration::from_secs(60), async {
        while !is_so() {
            clock.sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("it never came true: {what}"));
}
