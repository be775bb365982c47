//! Nothing forbidden is ever dialled, however a program or a name server writes it. Each probe is tried again below a
//! server whose operator named these very addresses, and there it succeeds.

use crate::{
    network_fixture::{FORBIDDEN, FORBIDDEN_V6, INNER, NetworkedMachine, PUBLIC, PUBLIC_V6},
    sandbox_programs::{AT_ONCE, Attempt, Programs},
    servers::Server,
};

/// The server that every probe is for, and one whose operator named the addresses.
async fn servers(machine: &NetworkedMachine) -> (Server, Server) {
    let mut exempt = [&FORBIDDEN[..], &FORBIDDEN_V6[..], &[INNER]].concat().join(",");
    exempt += ",::ffff:169.254.169.254";
    let named = [("BATON_EGRESS", "any"), ("BATON_EGRESS_EXEMPT", exempt.as_str())];
    tokio::join!(machine.server("one", &[("BATON_EGRESS", "any")]), machine.server("named", &named))
}

fn assert_refused(attempt: &Attempt) {
    assert!(["ECONNRESET", "NXDOMAIN"].contains(&attempt.how.as_str()), "{attempt:?}");
    assert!(attempt.seconds < AT_ONCE.as_secs_f64(), "{attempt:?}");
}

/// Runs the same program in both sandboxes. Nothing is dialled for the first.
async fn probe(machine: &NetworkedMachine, sandboxes: &mut [Programs; 2], code: &str) -> [Vec<Attempt>; 2] {
    let before = (machine.dials(), machine.outer.accepted().len());
    let refused = sandboxes[0].attempts(code).await;
    assert_eq!((machine.dials(), machine.outer.accepted().len()), before, "nothing is dialled: {refused:?}");
    [refused, sandboxes[1].attempts(code).await]
}

async fn sandboxes(one: &Server, named: &Server) -> [Programs; 2] {
    tokio::join!(
        Programs::start_as(one, crate::live_handoff::movable()),
        Programs::start_as(named, crate::live_handoff::movable())
    )
    .into()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_forbidden_address_is_dialled_in_any_spelling() {
    let machine = NetworkedMachine::new().await;
    let (one, named) = servers(&machine).await;
    let mut sandboxes = sandboxes(&one, &named).await;

    // As a program can write an address: numbers of all kinds, and mapped into IPv6.
    // The kernel inside knows no way to one of them.
    let written: Vec<_> = FORBIDDEN.into_iter().filter(|address| *address != "240.0.0.1").collect();
    let literals = format!(
        "
for host in {written:?}:
    a, b, c, d = (int(part) for part in host.split('.'))
    for spelling in [host, str(a << 24 | b << 16 | c << 8 | d), '0x%02x%02x%02x%02x' % (a, b, c, d),
                     '0%o.0x%x.%d' % (a, b, c << 8 | d)]:
        attempt(spelling)
    attempt('::ffff:' + host, 7, socket.AF_INET6)"
    );
    let [refused, reached] = probe(&machine, &mut sandboxes, &literals).await;
    assert_eq!(refused.len(), written.len() * 5);
    refused.iter().for_each(assert_refused);
    reached.iter().for_each(Attempt::assert_reached);

    // There is no IPv6 inside; and these ranges do not even exist outside.
    let nowhere = format!(
        "
for host in {FORBIDDEN_V6:?} + ['fe80::1', '::1', '2002:a9fe:a9fe::1']:
    attempt(host, 7, socket.AF_INET6)
for host in ['240.0.0.1', '0.1.2.3', '224.0.0.1', '239.1.2.3', '255.255.255.255', '198.18.77.77', '198.19.255.255', '127.0.0.9', '0.0.0.0']:
    attempt(host)"
    );
    let [refused, _] = probe(&machine, &mut sandboxes, &nowhere.replace('\"', "'")).await;
    for attempt in &refused {
        assert!(attempt.how.starts_with('E') && attempt.seconds < 1.0, "{attempt:?}");
    }

    // The machine itself, by its address: where the API listens.
    for (sandbox, listens) in sandboxes.iter_mut().zip([false, true]) {
        let server = if listens { &named } else { &one };
        let port = server.log().split("serving address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        let port = port.rsplit_once(':').unwrap().1.to_owned();
        let dials = machine.dials();
        let tried = sandbox.attempts(&format!("attempt('{INNER}', {port})\nattempt('127.0.0.1', {port})")).await;
        assert!(tried.iter().all(|attempt| attempt.how.starts_with('E')), "{tried:?}");
        // The control: it is dialled where it is named, though the API does not listen there.
        assert_eq!(machine.dials() - dials, u64::from(listens));
    }
    for sandbox in sandboxes {
        sandbox.kill().await;
    }
    one.stop().await;
    named.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_name_leads_to_a_forbidden_address() {
    let machine = NetworkedMachine::new().await;
    let (one, named) = servers(&machine).await;
    let mut sandboxes = sandboxes(&one, &named).await;
    let names = &machine.names;
    let answers = FORBIDDEN.iter().chain(&FORBIDDEN_V6).chain(&["::ffff:169.254.169.254"]);
    let mut hosts: Vec<_> = answers
        .enumerate()
        .map(|(number, address)| {
            let name = format!("lie-{number}.example.org");
            names.add(&name, &[address]);
            name
        })
        .collect();
    names.add("metadata.google.internal", &["169.254.169.254"]);
    hosts.push("metadata.google.internal".to_owned());
    let [refused, reached] = probe(&machine, &mut sandboxes, &format!("[attempt(host) for host in {hosts:?}]")).await;
    refused.iter().for_each(assert_refused);
    reached.iter().for_each(Attempt::assert_reached);

    // Answers that name nothing which could be dialled for the control.
    let nowhere = [
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:0:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::10.0.0.5",
        "2002:a9fe:a9fe::1",
        "2001:0:53aa:64c::1",
        "ff02::1",
        INNER,
    ];
    let hosts: Vec<_> = nowhere.iter().enumerate().map(|(number, _)| format!("no-{number}.example.org")).collect();
    hosts.iter().zip(nowhere).for_each(|(name, address)| names.add(name, &[address]));
    let before = machine.dials();
    let refused = sandboxes[0].attempts(&format!("[attempt(host) for host in {hosts:?}]")).await;
    assert_eq!(machine.dials(), before, "{refused:?}");
    refused.iter().for_each(assert_refused);

    // Of several addresses only the ordinary ones are tried.
    names.add("mixed.example.org", &["169.254.169.254", "10.0.0.5", PUBLIC, "::ffff:169.254.169.254", PUBLIC_V6]);
    let forbidden = |machine: &NetworkedMachine| machine.outer.accepted_at("169.254.169.254");
    let before = (machine.outer.accepted_at(PUBLIC), forbidden(&machine));
    sandboxes[0].attempt("mixed.example.org", 7).await.assert_reached();
    assert_eq!((machine.outer.accepted_at(PUBLIC), forbidden(&machine)), (before.0 + 1, before.1));

    // First an ordinary address and then a forbidden one, and the other way round; the control follows along.
    let metadata = &["169.254.169.254"][..];
    for (name, lists) in [("rebound", [&[PUBLIC][..], metadata]), ("bounced", [metadata, &[PUBLIC][..]])] {
        for (number, sandbox) in sandboxes.iter_mut().enumerate() {
            let name = format!("{name}-{number}.example.org");
            names.add_changing(&name, &lists);
            let before = (machine.dials(), forbidden(&machine));
            let tried = sandbox.attempt(&name, 7).await;
            match (number, lists[1] == metadata) {
                (0, _) => {
                    assert_refused(&tried);
                    assert_eq!((machine.dials(), forbidden(&machine)), before, "{name}");
                }
                (_, rebound) => {
                    tried.assert_reached();
                    assert_eq!(forbidden(&machine) - before.1, usize::from(rebound), "{name}");
                }
            }
        }
    }

    // A redirect is a connection like any other.
    let follow = format!(
        "
import urllib.request
for host in ['169.254.169.254', '0xa9fea9fe', 'metadata.google.internal']:
    try:
        print(urllib.request.urlopen('http://{PUBLIC}/to/' + host, timeout=20).read().decode())
    except OSError as error:
        print('refused')"
    );
    let before = (machine.dials(), forbidden(&machine));
    assert_eq!(sandboxes[0].python(&follow).await, "refused\n".repeat(3));
    assert_eq!((machine.dials(), forbidden(&machine)), (before.0 + 3, before.1), "only the redirects were read");
    assert_eq!(sandboxes[1].python(&follow).await, "169.254.169.254\n".repeat(3));
    for sandbox in sandboxes {
        sandbox.kill().await;
    }
    one.stop().await;
    named.stop().await;
}
