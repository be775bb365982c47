//! Programs that are root in a sandbox and mean harm: they get no further than the policy, and others notice nothing.

use std::time::Duration;

use crate::{
    fixture::clock,
    network_fixture::{INNER, NetworkedMachine, OTHER_PUBLIC, PUBLIC},
    sandbox_programs::Programs,
};

/// Everything with which the network of a sandbox could be changed, tried as root.
const MEDDLE: &str = r#"
import ctypes, fcntl
libc = ctypes.CDLL(None, use_errno=True)
def refuse(what, work):
    try:
        work()
        print(what, 'WORKED')
    except OSError as error:
        print(what, error.errno in (errno.EPERM, errno.EACCES, errno.EADDRINUSE, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT,
                                    errno.ENOPROTOOPT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY) or how_it_failed(error))
def call(result):
    if result < 0: raise OSError(ctypes.get_errno(), 'refused')
def netlink(kind, flags, body):
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.bind((0, 0))
    link.send(struct.pack('=IHHII', 16 + len(body), kind, flags, 1, 0) + body)
    answer = link.recv(4096)
    code = struct.unpack('=i', answer[16:20])[0]
    if code < 0: raise OSError(-code, 'refused')
def everything(who):
    refuse(who + ' raw socket', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP))
    refuse(who + ' packet socket', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
    # RTM_NEWADDR with 10.9.9.9/32 on lo, RTM_DELADDR of 127.0.0.1/8, RTM_DELLINK.
    address = struct.pack('=BBBBI', 2, 32, 0, 0, 1) + struct.pack('=HH4s', 8, 2, bytes([10, 9, 9, 9]))
    refuse(who + ' new address', lambda: netlink(20, 5 | 0x400, address))
    loopback = struct.pack('=BBBBI', 2, 8, 0, 0, 1) + struct.pack('=HH4s', 8, 2, bytes([127, 0, 0, 1]))
    refuse(who + ' no address', lambda: netlink(21, 5, loopback))
    def table():
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link.setsockopt(socket.SOL_IP, 64, bytes(512))
    refuse(who + ' rule', table)
    refuse(who + ' trace', lambda: call(libc.ptrace(16, 1, 0, 0)))
    refuse(who + ' reach into', lambda: open('/proc/1/mem', 'r+b').read(1))
    def other_descriptor():
        opened = libc.syscall(434, 1, 0)
        call(opened)
        call(libc.syscall(438, opened, 0, 0))
    refuse(who + ' descriptor', other_descriptor)
status = dict(line.split(':\t') for line in open('/proc/self/status').read().splitlines() if line.startswith('Cap'))
for name in ['CapBnd', 'CapEff', 'CapPrm', 'CapInh', 'CapAmb']:
    print(name, int(status[name], 16) & (1 << 12 | 1 << 13 | 1 << 19) == 0)
everything('root')
refuse('the name server', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(('127.0.0.1', 53)))
refuse('the name server by TCP', lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).bind(('127.0.0.1', 53)))
def share():
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    link.bind(('127.0.0.1', 53))
refuse('the shared name server', share)
# In a user namespace of its own a process has every capability, but not over the network that it came with.
if os.fork() == 0:
    if libc.unshare(0x10000000) == 0: everything('namespace')
    os._exit(0)
os.wait()
attempt('93.184.216.34')
attempt('www.example.org')
"#;

#[tokio::test(flavor = "multi_thread")]
async fn root_in_a_sandbox_cannot_change_its_network() {
    let machine = NetworkedMachine::new().await;
    machine.names.add("www.example.org", &[PUBLIC]);
    let server = machine.server("one", &[("BATON_EGRESS", "any")]).await;
    let mut sandbox = Programs::start_as(&server, crate::live_handoff::movable()).await;
    let written = sandbox.python(MEDDLE).await;
    let (refused, reached) = written.split_at(written.find('{').unwrap());
    assert!(refused.lines().count() > 14, "{written}");
    for line in refused.lines() {
        assert!(line.ends_with(" True"), "{line}\n{written}");
    }
    assert_eq!(reached.matches("\"hello\"").count(), 2, "the network is as it was: {written}");
    sandbox.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_reaches_neither_the_server_nor_another_sandbox() {
    let machine = NetworkedMachine::new().await;
    let settings = [("BATON_EGRESS", "any"), ("BATON_LISTEN", "0.0.0.0:0"), ("BATON_ADMIN_LISTEN", "0.0.0.0:0")];
    let mut server = machine.server("one", &settings).await;
    let admin = server.said("serving metrics address=").await;
    let api = server.said("serving address=").await;
    let port = |address: &str| address.rsplit_once(':').unwrap().1.to_owned();
    let [mut evil, mut good] = [
        Programs::start_as(&server, crate::live_handoff::movable()).await,
        Programs::start_as(&server, crate::live_handoff::movable()).await,
    ];
    let listener = "
link = socket.create_server(('0.0.0.0', 5555))
open('/tmp/listens', 'w').close()
link.accept()
open('/tmp/reached', 'w').close()";
    good.spawn_python(listener).await;
    good.python("while not os.path.exists('/tmp/listens'): time.sleep(0.05)").await;
    let before = machine.dials();
    let code = format!(
        "
for host in ['{INNER}', '127.0.0.1', '127.0.0.53', '0.0.0.0', 'localhost', '10.0.0.5', '198.41.0.2', '0xc6290002']:
    for port in [{}, {}, 5555, 22]: attempt(host, port)
for host in ['{PUBLIC}', '198.18.0.1', '198.19.255.254']: attempt(host, 5555)",
        port(&api),
        port(&admin)
    );
    let tried = evil.attempts(&code).await;
    for tried in &tried {
        assert!(["ECONNREFUSED", "ECONNRESET"].contains(&tried.how.as_str()) && tried.seconds < 1.0, "{tried:?}");
    }
    // A public address is dialled, as it may be; nothing listens there.
    assert_eq!(machine.dials() - before, 1);
    assert_eq!(good.python("print(os.path.exists('/tmp/reached'))").await, "False\n");
    evil.kill().await;
    good.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_connections_and_of_names_hold_up_nobody() {
    const FLOOD: &str = "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
def dial(first):
    for number in range(1000):
        try:
            link = socket.socket(); link.setblocking(False)
            links.append(link)
            link.connect_ex((hosts[number % 2], 7))
        except OSError: pass
links = []
hosts = ['93.184.216.34', '10.0.0.5']
threads = [threading.Thread(target=dial, args=(number,)) for number in range(5)]
[thread.start() for thread in threads]
def ask(first):
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range(1000):
        name = b'\\x06' + b'%06d' % (first * 1000 + number) + b'\\x07example\\x03net\\x00'
        link.sendto(struct.pack('>HHHHHH', number, 0x100, 1, 0, 0, 0) + name + b'\\x00\\x01\\x00\\x01', ('127.0.0.1', 53))
askers = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
[thread.start() for thread in askers]
[thread.join() for thread in threads + askers]
print(len(links))
open('/tmp/flooded', 'w').close()";
    let machine = NetworkedMachine::new().await;
    machine.names.add("www.example.org", &[OTHER_PUBLIC]);
    let server = machine.server("one", &[("BATON_EGRESS", "any")]).await;
    let [mut evil, mut good] = [
        Programs::start_as(&server, crate::live_handoff::movable()).await,
        Programs::start_as(&server, crate::live_handoff::movable()).await,
    ];
    evil.spawn_python(FLOOD).await;
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let began = clock().now();
        let (written, ..) = evil.run(&["head", "-c", "100000", "/dev/zero"], &[]).await;
        assert_eq!(written.len(), 100_000, "output of the flooding sandbox flows");
        slowest = slowest.max(clock().now() - began);
        let tried = good.attempts("attempt('93.184.216.34')\nattempt('www.example.org')").await;
        for tried in &tried {
            tried.assert_reached();
            assert!(tried.seconds < 2.0, "{tried:?}");
        }
    }
    println!("while it floods, the slowest command took {slowest:?}");
    evil.python("while not os.path.exists('/tmp/flooded'): time.sleep(0.05)").await;
    // Afterwards it has what it had before.
    let tried = evil.attempts("time.sleep(1)\nattempt('93.184.216.34')\nattempt('www.example.org')").await;
    assert!(tried.iter().all(|tried| tried.how == "hello"), "{tried:?}");
    evil.kill().await;
    good.kill().await;
    server.stop().await;
}
