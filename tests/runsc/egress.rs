//! Programs in sandboxes reach out by policy: what is allowed works as on any machine, and the rest is refused at once.

use serde_json::json;

use crate::{
    commandline::Person,
    lying_names::Answer,
    network_fixture::{NetworkedMachine, OTHER_PUBLIC, PUBLIC, PUBLIC_V6, comes_true},
    outer_servers::{ECHO, NOTHING},
    sandbox_programs::{Attempt, Programs},
    websocket_client::{Dialect, Socket},
};

/// Names that tests use.
fn plant(machine: &NetworkedMachine) {
    let names = &machine.names;
    names.add("echo.example.org", &[PUBLIC]);
    names.add("other.example.org", &[OTHER_PUBLIC]);
    names.add("www.example.net", &[OTHER_PUBLIC]);
    names.add("example.net", &[OTHER_PUBLIC]);
    names.add("six.example.org", &[PUBLIC_V6]);
    names.add("empty.example.org", &[]);
    names.set("silent.example.org", Answer::Silence);
    names.set("failing.example.org", Answer::Failure);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_policy_allows_is_reached_and_the_rest_is_refused_at_once() {
    let machine = NetworkedMachine::new().await;
    plant(&machine);
    let server = machine.server("one", &[("BATON_EGRESS_LIMITS", "connect=3s")]).await;

    // A list, in the config message.
    let mut list = Programs::start(&server, json!(["echo.example.org:7", "*.example.net", "151.101.0.0/16:7"])).await;
    let tried = list
        .attempts(
            "
for host in ['echo.example.org', 'ECHO.Example.ORG.', 'www.example.net', '151.101.1.69', 'other.example.org',
             'example.net', 'missing.example.net', '93.184.216.34', '198.41.0.1', '192.0.2.1']:
    attempt(host)
attempt('echo.example.org', 80)
attempt('151.101.1.69', 80)
attempt('www.example.net', 7005)",
        )
        .await;
    tried[..4].iter().for_each(Attempt::assert_reached);
    tried[4..7].iter().for_each(|refused| refused.assert_refused("NXDOMAIN"));
    tried[7..13].iter().for_each(|refused| refused.assert_refused("ECONNRESET"));
    assert_eq!(machine.names.times_asked("other.example.org"), 0, "a name that is refused does not leave the sandbox");
    let event = list.hears_denied("other.example.org").await;
    assert_eq!((&event["port"], &event["reason"]), (&json!(null), &json!("policy")), "{event}");
    assert!(server.log().contains("host=\"other.example.org\""), "{}", server.log());

    // Nothing, which is the default: as without any network.
    let dials = machine.dials();
    let mut none = Programs::start_as(&server, crate::live_handoff::movable()).await;
    let tried = none.attempts("[attempt(host) for host in ['93.184.216.34', '10.0.0.5', 'echo.example.org']]").await;
    for refused in &tried[..2] {
        assert!(["ENETUNREACH", "EADDRNOTAVAIL", "ECONNREFUSED"].contains(&refused.how.as_str()), "{refused:?}");
        assert!(refused.seconds < 1.0, "{refused:?}");
    }
    assert!(["NXDOMAIN", "AGAIN"].contains(&tried[2].how.as_str()), "{tried:?}");
    assert_eq!(machine.dials(), dials + 1, "only the client's own connection was made");

    // Anything of the Internet; names of all kinds.
    let mut any = Programs::start(&server, json!("any")).await;
    let tried = any
        .attempts(
            "
for host in ['93.184.216.34', 'echo.example.org', 'six.example.org', 'missing.example.org', 'empty.example.org',
             'failing.example.org', 'silent.example.org']:
    attempt(host)
attempt('2606:2800:220:1::34', 7, socket.AF_INET6)
attempt('93.184.216.34', 7005)",
        )
        .await;
    tried[..3].iter().for_each(Attempt::assert_reached);
    tried[3..5].iter().for_each(|missing| missing.assert_refused("NXDOMAIN"));
    assert_eq!(tried[5].how, "AGAIN");
    assert!(tried[6].how == "AGAIN" && tried[6].seconds < 25.0, "{:?}", tried[6]);
    assert!(tried[7].how.starts_with('E') && tried[7].seconds < 1.0, "there is no IPv6 inside: {:?}", tried[7]);
    tried[8].assert_refused("ECONNRESET");
    assert_eq!(machine.outer.accepted().iter().filter(|(_, port)| *port == NOTHING).count(), 0);
    assert_eq!(machine.outer.accepted_at(PUBLIC_V6), 1);
    assert!(machine.outer.accepted().iter().all(|(_, port)| *port == ECHO));

    // UDP other than for names, at once and without a word on the outside.
    let written = any
        .python(
            "
for port in [53, 443, 9999]:
    began = time.monotonic()
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.settimeout(5)
    try:
        link.connect(('93.184.216.34', port))
        link.send(b'x'); link.recv(10)
        print('answered')
    except OSError as error:
        print(how_it_failed(error), time.monotonic() - began < 1)",
        )
        .await;
    assert_eq!(written, "ECONNREFUSED True\n".repeat(3));

    let metric = |verdict: &str| format!("baton_egress_connections_total{{verdict=\"{verdict}\"}}");
    assert_eq!(machine.metric(&server, &metric("denied")).await, 7, "{}", server.log());
    list.kill().await;
    none.kill().await;
    any.kill().await;
    server.stop().await;
}

/// Opens a connection, and says how it ended.
const HOLD: &str = "
link = connect(HOST, 7)
open('/tmp/held-' + HOST, 'w').close()
link.settimeout(60)
try: print('EOF' if not link.recv(1) else 'answered')
except OSError as error: print(how_it_failed(error))";

async fn hold(sandbox: &mut Programs, host: &str) -> String {
    let program = HOLD.replace("HOST", &format!("'{host}'"));
    let held = sandbox.spawn_python(&program).await;
    sandbox.python(&format!("while not os.path.exists('/tmp/held-{host}'): time.sleep(0.05)")).await;
    held
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_of_an_operator_counts_at_once_and_ends_what_it_forbids() {
    let machine = NetworkedMachine::new().await;
    plant(&machine);
    let settings = [("BATON_EGRESS", "*.example.org"), ("BATON_EGRESS_MAX", "*.example.org,*.example.net")];
    let server = machine.server("one", &settings).await;
    let person = Person::at(&machine.machine, format!("ws://{}", server.address));
    let mut sandbox = Programs::start_as(&server, crate::live_handoff::movable()).await;
    let id = sandbox.key.id.clone();
    let held = hold(&mut sandbox, "echo.example.org").await;
    sandbox.attempt("other.example.org", 7).await.assert_reached();
    sandbox.attempt("www.example.net", 7).await.assert_refused("NXDOMAIN");
    comes_true("one is open", || machine.outer.open() == 1).await;

    let edit = async |egress: serde_json::Value| {
        let edit = format!("network={}", json!({"egress": egress}));
        let mut command = person.types(&["edit", &id, "--set", &edit]);
        let output = command.env("CHECKPOINT_AND_RESTORE_PATH", machine.machine.data()).output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    edit(json!(["other.example.org", "www.example.net"])).await;
    let (written, ..) = sandbox.finish(&held).await;
    assert_eq!(written, "ECONNRESET\n");
    comes_true("it is closed outside", || machine.outer.open() == 0).await;
    let tried = sandbox
        .attempts("[attempt(host) for host in ['echo.example.org', 'other.example.org', 'www.example.net']]")
        .await;
    tried[0].assert_refused("NXDOMAIN");
    tried[1..].iter().for_each(Attempt::assert_reached);

    let held = hold(&mut sandbox, "other.example.org").await;
    edit(json!("none")).await;
    let (written, ..) = sandbox.finish(&held).await;
    assert_eq!(written, "ECONNRESET\n");
    comes_true("it is closed outside", || machine.outer.open() == 0).await;
    let tried = sandbox.attempt("93.184.216.34", 7).await;
    assert!(tried.how.starts_with('E') && tried.seconds < 1.0, "{tried:?}");
    // More than the operator's ceiling is cut down to it.
    edit(json!("any")).await;
    let tried = sandbox.attempts("attempt('www.example.net')\nattempt('93.184.216.34')").await;
    tried[0].assert_reached();
    tried[1].assert_refused("ECONNRESET");
    let event = sandbox.hears_denied(PUBLIC).await;
    assert_eq!((&event["port"], &event["reason"]), (&json!(7), &json!("ceiling")), "{event}");

    // And a client that asks for more is told.
    let mut config = crate::live_handoff::movable();
    config["network"] = json!({"egress": "any"});
    let mut socket = Socket::open(&server, "/create", Dialect::V1).await;
    socket.send(config).await;
    let refusal = socket.until("a refusal", |event| event["event"] == "error").await;
    assert!(refusal.to_string().contains("BATON_EGRESS_MAX"), "{refusal}");
    sandbox.kill().await;
    server.stop().await;
}
