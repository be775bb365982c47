//! The agent's half of the network in a real sandbox; the test is the server.

use std::{net::Ipv4Addr, time::Instant};

use baton_protocol::{
    agent::{Dial, ListeningPorts, MAX_CONNECTION_PAYLOAD, NameResolution, PORT_CONNECTION},
    frame::{Frame, FrameKind},
};

use crate::{bare_sandbox::BareSandbox, fixture::permit};

/// As much as the agent may send of a connection at once.
const WINDOW: u64 = 1 << 20;
const MIB: usize = 1 << 20;

fn about(kind: FrameKind, number: u32) -> Frame {
    Frame::new(kind).exec(number)
}

/// The next connection that a program opens, and how much may be sent to it.
fn dialled(sandbox: &mut BareSandbox) -> (u32, Dial, u64) {
    let frame = sandbox.wait_until(|frame| frame.kind == FrameKind::Dial);
    (frame.exec, serde_json::from_slice(&frame.payload).unwrap(), frame.offset)
}

/// Sends `input` to an open connection as its credit allows, and returns all that the program writes, until both have
/// ended.
fn exchange(sandbox: &mut BareSandbox, number: u32, input: &[u8], mut may_send: u64) -> Vec<u8> {
    let (mut output, mut sent, mut has_ended, mut is_told) = (Vec::new(), 0, false, false);
    loop {
        while sent < input.len() && (sent as u64) < may_send {
            let end = input.len().min(sent + MAX_CONNECTION_PAYLOAD).min(may_send as usize);
            let piece = about(FrameKind::ConnectionInput, number).offset(sent as u64).payload(&input[sent..end]);
            sandbox.send(piece);
            sent = end;
        }
        if sent == input.len() && !std::mem::replace(&mut is_told, true) {
            sandbox.send(about(FrameKind::ConnectionInputEof, number).offset(sent as u64));
        }
        if has_ended && is_told {
            return output;
        }
        let frame = sandbox.wait_until(|frame| frame.exec == number && frame.kind.is_of_network());
        match frame.kind {
            FrameKind::ConnectionInputCredit => may_send = frame.offset,
            FrameKind::ConnectionOutput => {
                assert_eq!(frame.offset, output.len() as u64, "a byte lost or doubled");
                output.extend(frame.payload);
                sandbox.send(about(FrameKind::ConnectionCredit, number).offset(output.len() as u64 + WINDOW));
            }
            FrameKind::ConnectionOutputEof => {
                assert_eq!(frame.offset, output.len() as u64, "ended too early");
                has_ended = true;
            }
            other => panic!("{other:?} about connection {number}"),
        }
    }
}

/// Accepts the next connection of a program, and exchanges bytes with it.
fn serve(sandbox: &mut BareSandbox, input: &[u8]) -> (Dial, Vec<u8>) {
    let (number, dial, may_send) = dialled(sandbox);
    sandbox.send(about(FrameKind::Connected, number).offset(WINDOW));
    (dial, exchange(sandbox, number, input, may_send))
}

/// What a program of the same name makes.
fn pattern(length: usize) -> Vec<u8> {
    (0..length / 4).flat_map(|at| (at as u32).to_le_bytes()).collect()
}

const PATTERN: &str = "import socket, array
def pattern(length): return array.array('I', range(length // 4)).tobytes()
";

fn megabytes_a_second(bytes: usize, since: Instant) -> f64 {
    bytes as f64 / 1e6 / since.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_reaches_out_by_address_and_by_name_also_after_a_restore() {
    let mut sandbox = BareSandbox::start(permit().await);
    for round in 0..2 {
        let by_address = sandbox.python(
            "import socket; s = socket.create_connection(('93.184.216.34', 80)); s.sendall(b'hello'); \
             s.shutdown(1); print(s.makefile('rb').read())",
        );
        let (dial, output) = serve(&mut sandbox, b"world");
        assert_eq!(dial, Dial { name: None, address: Ipv4Addr::new(93, 184, 216, 34), port: 80 });
        assert_eq!(output, b"hello");
        assert_eq!(sandbox.output(by_address).text, "b'world'");

        let by_name = sandbox.python(
            "import socket; s = socket.create_connection(('Example.org', 443)); \
             print(s.getpeername()[0], s.recv(9), socket.gethostbyaddr('198.18.0.1')[0])",
        );
        sandbox.answer_name("example.org", NameResolution::Found {});
        let (dial, _) = serve(&mut sandbox, b"");
        assert_eq!((dial.name.as_deref(), dial.port), (Some("example.org"), 443));
        assert_eq!(sandbox.output(by_name).text, "198.18.0.1 b'' example.org");
        if round == 0 {
            sandbox.checkpoint_and_restore();
            sandbox.set_egress(true);
            // A program may remember the address of a name for longer.
            let remembered = sandbox.python("import socket; socket.create_connection(('198.18.0.1', 22)).recv(1)");
            assert_eq!(serve(&mut sandbox, b"").0.name.as_deref(), Some("example.org"));
            assert_eq!(sandbox.output(remembered).code, Some(0));
        }
    }
    let complaints: Vec<Frame> = sandbox.settle().into_iter().filter(|frame| frame.kind == FrameKind::Log).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_to_be_had_fails_at_once_and_clearly() {
    let mut sandbox = BareSandbox::start(permit().await);
    let failing = |attempt: &str| {
        format!(
            "import socket, time\nbegin = time.monotonic()\ntry:\n  {attempt}\n  print('no error')\n\
             except OSError as error: print(type(error).__name__, error.errno)\nassert time.monotonic() - begin < 5"
        )
    };
    let connect = |to: &str| failing(&format!("s = socket.create_connection({to}); s.sendall(b'x'); s.recv(1)"));

    let refused = sandbox.python(&connect("('93.184.216.34', 81)"));
    let (number, ..) = dialled(&mut sandbox);
    sandbox.send(about(FrameKind::ConnectionReset, number));
    assert_eq!(sandbox.output(refused).text, "ConnectionResetError 104");

    for (name, outcome, expected) in [
        ("denied.example", NameResolution::Denied {}, "gaierror -2"),
        ("missing.example", NameResolution::Missing {}, "gaierror -2"),
        ("failed.example", NameResolution::Failed {}, "gaierror -3"),
    ] {
        let asked = sandbox.python(&connect(&format!("('{name}', 80)")));
        sandbox.answer_name(name, outcome);
        assert_eq!(sandbox.output(asked).text, expected, "{name}");
    }

    let udp = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('93.184.216.34', 443)); s.send(b'x'); s.recv(1)";
    for (attempt, expected) in [
        (connect("('198.18.77.77', 80)"), "ConnectionResetError 104"),
        (connect("('2001:db8::1', 443)"), "OSError 101"),
        (connect("('224.0.0.1', 80)"), "OSError 101"),
        (connect("('255.255.255.255', 80)"), "OSError 101"),
        (connect("('127.3.3.3', 80)"), "ConnectionRefusedError 111"),
        (connect("('0.0.0.0', 80)"), "ConnectionRefusedError 111"),
        (failing(udp), "ConnectionRefusedError 111"),
    ] {
        assert_eq!(sandbox.run_python(&attempt), expected, "{attempt}");
    }
    let asked = sandbox.settle();
    assert!(!asked.iter().any(|frame| frame.kind == FrameKind::Dial), "the server was asked: {asked:?}");
    let names = "import socket; print(socket.gethostbyname('localhost'), socket.gethostbyname(socket.gethostname()))";
    assert_eq!(sandbox.run_python(names), "127.0.0.1 127.0.0.1");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_answered_by_tcp_as_well_and_nonsense_is_not_answered() {
    let mut sandbox = BareSandbox::start(permit().await);
    let program = sandbox.python(
        "import socket, struct\n\
         query = bytes.fromhex('00070100000100000000000001610162') + b'\\0' + struct.pack('>HH', 1, 1)\n\
         udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.connect(('127.0.0.1', 53))\n\
         for nonsense in [b'', b'x', b'\\xff' * 600, query[:-1]]: udp.send(nonsense)\n\
         tcp = socket.create_connection(('127.0.0.1', 53)); framed = struct.pack('>H', len(query)) + query\n\
         tcp.sendall(framed[:5]); tcp.sendall(framed[5:] + framed)\n\
         length, = struct.unpack('>H', tcp.recv(2, socket.MSG_WAITALL)); answer = tcp.recv(length, socket.MSG_WAITALL)\n\
         print(answer[:2].hex(), socket.inet_ntoa(answer[-4:]))\n\
         udp.send(query); print(socket.inet_ntoa(udp.recv(512)[-4:]))",
    );
    sandbox.answer_name("a.b", NameResolution::Found {});
    assert_eq!(sandbox.output(program).text, "0007 198.18.0.1\n198.18.0.1");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_arrives_once_in_both_directions_and_fast() {
    let mut sandbox = BareSandbox::start(permit().await);
    let (bytes, length) = (pattern(64 * MIB), 64 * MIB);
    // Its data is made before it connects, so that only the way is measured.
    let script = |work: &str| {
        format!("{PATTERN}data = pattern({length}); s = socket.create_connection(('203.0.113.1', 5432))\n{work}")
    };

    let writer = sandbox.python(&script("s.recv(1); s.sendall(data); s.shutdown(1); s.recv(1)"));
    let (number, _, may_send) = dialled(&mut sandbox);
    sandbox.send(about(FrameKind::Connected, number).offset(WINDOW));
    let begin = Instant::now();
    let output = exchange(&mut sandbox, number, b"!", may_send);
    println!("one stream out of the sandbox: {:.0} MB/s", megabytes_a_second(length, begin));
    assert!(output == bytes);
    assert_eq!(sandbox.output(writer).code, Some(0));

    let reader = sandbox.python(&script(
        "got = bytearray(len(data)); view = memoryview(got); at = 0\n\
         while at < len(got):\n  count = s.recv_into(view[at:])\n  assert count\n  at += count\n\
         assert got == data and s.recv(1) == b''; s.sendall(b'done')",
    ));
    let (number, _, may_send) = dialled(&mut sandbox);
    sandbox.send(about(FrameKind::Connected, number).offset(WINDOW));
    let begin = Instant::now();
    let output = exchange(&mut sandbox, number, &bytes, may_send);
    println!("one stream into the sandbox: {:.0} MB/s", megabytes_a_second(length, begin));
    assert_eq!(output, b"done");
    assert_eq!(sandbox.output(reader).text, "");

    let echo = sandbox.python(&script(
        "import threading\nwriter = threading.Thread(target=lambda: (s.sendall(data), s.shutdown(1))); writer.start()\n\
         got = s.makefile('rb').read(); writer.join(); assert got == data",
    ));
    let (_, output) = serve(&mut sandbox, &bytes);
    assert!(output == bytes);
    assert_eq!(sandbox.output(echo).text, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_connections_are_made_and_none_is_left() {
    const COUNT: usize = 1000;
    let mut sandbox = BareSandbox::start(permit().await);
    let begin = Instant::now();
    let program = sandbox.python(&format!(
        "import socket\nfor at in range({COUNT}):\n  s = socket.create_connection(('203.0.113.1', 80))\n  \
         s.sendall(b'%d' % at); s.shutdown(1); assert s.recv(9) == b''; s.close()",
    ));
    for at in 0..COUNT {
        assert_eq!(serve(&mut sandbox, b"").1, at.to_string().as_bytes());
    }
    println!("one after the other: {:.0} connections per second", COUNT as f64 / begin.elapsed().as_secs_f64());
    assert_eq!(sandbox.output(program).text, "");

    // At once: all are open before the first is answered.
    let program = sandbox.python(&format!(
        "import socket\nall = [socket.create_connection(('203.0.113.1', 80)) for at in range({COUNT})]\n\
         for s in all: s.sendall(b'x'); s.shutdown(1)\nfor s in all: assert s.recv(9) == b'ok'",
    ));
    let dialled: Vec<_> = (0..COUNT).map(|_| dialled(&mut sandbox)).collect();
    for (number, _, may_send) in dialled {
        sandbox.send(about(FrameKind::Connected, number).offset(WINDOW));
        assert_eq!(exchange(&mut sandbox, number, b"ok", may_send), b"x");
    }
    assert_eq!(sandbox.output(program).text, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_inside_are_listed_and_reached_and_survive_a_restore_while_connections_are_reset() {
    let mut sandbox = BareSandbox::start(permit().await);
    let listeners = sandbox.python(
        "import socket, threading\n\
         def echo(s):\n  while True:\n    c = s.accept()[0]\n    while data := c.recv(65536): c.sendall(data)\n    c.close()\n\
         four = socket.create_server(('127.0.0.1', 8080))\n\
         six = socket.create_server(('::1', 3000), family=socket.AF_INET6)\n\
         threading.Thread(target=echo, args=[six]).start()\nprint('ready', flush=True)\necho(four)",
    );
    sandbox.wait_until(|frame| frame.exec == listeners && frame.payload == b"ready\n");
    let open = sandbox.python(
        "import socket\ns = socket.create_connection(('203.0.113.1', 80)); print('open', flush=True)\n\
         try:\n  assert s.recv(1) == b''\n  for _ in range(2): s.sendall(b'x')\nexcept (BrokenPipeError, ConnectionResetError): print('broken')",
    );
    let (number, ..) = dialled(&mut sandbox);
    sandbox.send(about(FrameKind::Connected, number).offset(WINDOW));
    sandbox.wait_until(|frame| frame.exec == open && frame.payload == b"open\n");

    let mut last = PORT_CONNECTION;
    for round in 0..2 {
        sandbox.send(Frame::new(FrameKind::ListPorts).sequence(5));
        let ports = sandbox.wait_until(|frame| frame.kind == FrameKind::Ports && frame.sequence == 5);
        let ports: ListeningPorts = serde_json::from_slice(&ports.payload).unwrap();
        assert_eq!(ports.ports, [3000, 8080]);
        for (port, is_open) in [(8080, true), (3000, true), (4000, false)] {
            last += 1;
            let number = last;
            sandbox.send(about(FrameKind::Connect, number).offset(port));
            let is_answer = |frame: &Frame| {
                frame.exec == number && matches!(frame.kind, FrameKind::Accepted | FrameKind::ConnectionClosed)
            };
            let answer = sandbox.wait_until(is_answer);
            assert_eq!(answer.kind == FrameKind::Accepted, is_open, "{port}");
            if is_open {
                sandbox.send(about(FrameKind::ConnectionCredit, number).offset(WINDOW));
                let bytes = pattern(MIB);
                assert!(exchange(&mut sandbox, number, &bytes, answer.offset) == bytes);
            }
        }
        if round == 0 {
            sandbox.checkpoint_and_restore();
            assert_eq!(sandbox.output(open).text, "open\nbroken");
            sandbox.set_egress(true);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_egress_nothing_is_left_of_the_network() {
    let mut sandbox = BareSandbox::start(permit().await);
    let before = "import os, socket\nprint(repr(open('/etc/resolv.conf').read()), os.path.exists('/etc/resolv.conf.kept'))\n\
                  try: socket.create_connection(('203.0.113.1', 80))\nexcept OSError as error: print(error.errno)";
    for _ in 0..2 {
        sandbox.set_egress(false);
        assert_eq!(sandbox.run_python(before), "'' False\n101");
        sandbox.set_egress(true);
        let program = sandbox.python("import socket; print(socket.create_connection(('203.0.113.1', 80)).recv(9))");
        serve(&mut sandbox, b"hello");
        assert_eq!(sandbox.output(program).text, "b'hello'");
    }
    let open = sandbox.python(
        "import socket\ns = socket.create_connection(('203.0.113.1', 80))\ntry: s.recv(1)\nexcept OSError as error: print(error.errno)",
    );
    let (number, ..) = dialled(&mut sandbox);
    sandbox.set_egress(false);
    sandbox.wait_for(FrameKind::ConnectionClosed, number);
    assert_eq!(sandbox.output(open).text, "104");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_have_none_of_the_agents_capabilities_and_no_way_to_them() {
    let mut sandbox = BareSandbox::start(permit().await);
    // NET_ADMIN, NET_RAW and SYS_PTRACE.
    const OWN: u64 = 1 << 12 | 1 << 13 | 1 << 19;
    for user in [None, Some("nobody")] {
        let number = sandbox.exec_as(user, &["grep", "-E", "^Cap(Prm|Eff|Bnd|Inh|Amb)", "/proc/self/status"]);
        let sets = sandbox.output(number).text;
        let sets: Vec<u64> = sets.lines().map(|line| u64::from_str_radix(line[7..].trim(), 16).unwrap()).collect();
        assert_eq!(sets.len(), 5);
        assert!(sets.iter().all(|set| set & OWN == 0), "{user:?}: {sets:x?}");
    }
    let attempts = [
        "open('/proc/1/mem', 'r+b')",
        "open('/proc/1/environ', 'rb')",
        "open('/proc/1/fd/0', 'rb')",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 255)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)",
        "fcntl.ioctl(open('/dev/net/tun', 'r+b', buffering=0), 0x400454ca, struct.pack('16sH22x', b't', 1))",
        // 10.255.255.1 is removed from the loopback.
        "netlink(struct.pack('IHHIIBBBBIHH4s', 32, 21, 5, 1, 0, 2, 1, 0, 254, 1, 8, 2, bytes([10, 255, 255, 1])))",
        "trace(16, 1)",
    ];
    let script = format!(
        "import ctypes, fcntl, os, socket, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n\
         def check(result):\n  if result < 0: raise OSError(ctypes.get_errno(), 'refused')\n\
         def trace(request, pid): check(libc.ptrace(request, pid, 0, 0))\n\
         def netlink(message):\n  s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.send(message)\n  \
         code, = struct.unpack('i', s.recv(99)[16:20])\n  if code: raise OSError(-code, 'refused')\n\
         def refused(attempt):\n  try: attempt()\n  except OSError as error: return error.errno in (1, 13)\n\
         for at, attempt in enumerate([{}]): assert refused(attempt), at\n",
        attempts.map(|attempt| format!("lambda: {attempt}")).join(", ")
    );
    sandbox.run_python(&script);
    // Its own user namespace, but the network of the sandbox.
    let inside = sandbox.exec_as(None, &["unshare", "-Ur", "python3", "-c", &script]);
    let output = sandbox.output(inside);
    assert_eq!((output.code, output.text.as_str()), (Some(0), ""));

    // A debugger of an own child works.
    let traced = sandbox.run_python(
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\npid = os.fork()\n\
         if pid == 0:\n  libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); os._exit(7)\n\
         assert os.WIFSTOPPED(os.waitpid(pid, 0)[1]); libc.ptrace(7, pid, 0, 0)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    );
    assert_eq!(traced, "7");
}
