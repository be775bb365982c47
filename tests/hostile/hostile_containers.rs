//! Code in a sandbox that fights the limits of its container.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
    time::Duration,
};

use baton::runtime::{Container, Error, Lifecycle, StartSpec};
use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::real::{
    fixture::{Place, clock, eventually, piece, processes, sandbox, start},
    impostor::place_with,
    plain_session::{Client, command},
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

const MIB: u64 = 1 << 20;
/// Stops the agent, starts 30 processes of each of six users, and lets the agent go on once they are there and a while
/// has passed.
const STOPPED_BOMB: &str = "
import os, signal, sys, time
os.kill(1, signal.SIGSTOP)
for user in range(6):
    if os.fork() == 0:
        os.setuid(2000 + user)
        for _ in range(29):
            if os.fork() == 0: time.sleep(600)
        time.sleep(600)
while len([pid for pid in os.listdir('/proc') if pid.isdigit()]) < 180: time.sleep(0.05)
time.sleep(float(sys.argv[1]))
os.kill(1, signal.SIGCONT)
print('all there', flush=True)";

fn limited(value: Value) -> StartSpec {
    StartSpec { limits: serde_json::from_value(value).unwrap(), ..start() }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_processes_end_with_their_container_where_the_agent_is_stopped() {
    let place = Place::new().await;
    let bombed = async |limits: Value, pause: &str| {
        let id = sandbox();
        place.containers.create(&id, &limited(limits)).await.unwrap();
        let mut client = Client::attached(clock(), &*place.containers, &id);
        let bomb = client.exec(command(&["python3", "-c", STOPPED_BOMB, pause]), None).await;
        (id, client, bomb)
    };
    // Where they may be as many, all of them live and the agent hears nothing meanwhile.
    let (id, mut client, bomb) = bombed(json!({"pids": 1000}), "0").await;
    client.until("all are there", |client| client.execs[&bomb].stdout.bytes == b"all there\n").await;
    place.containers.remove(&id).await.unwrap();

    let (id, _client, _) = bombed(json!({"pids": 40}), "600").await;
    let mut seen = place.containers.watch(&id);
    let ended = seen.wait_for(|seen| seen.container == Container::Stopped);
    clock().timeout(Duration::from_secs(60), ended).await.expect("it is ended").unwrap();
    place.close().await;
}

/// Waits for the first byte after its start, which comes after a restore; then takes what it can get, and never answers.
const NEVER_SYNCS: &str = "
greet()
read(1)
for _ in range(100):
    if os.fork() == 0:
        while True: time.sleep(600)
x = []
for _ in range(400):
    x.append(bytearray(b'x') * (1 << 20))
    time.sleep(0.002)
while True: time.sleep(600)";

/// Bytes of memory that the one sandbox here holds.
fn held(place: &Place) -> u64 {
    let sentries = place.processes().into_iter().map(|process| PathBuf::from(format!("/proc/{}/fd", process.pid())));
    let files = sentries.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let memory = files.filter(|file| {
        fs::read_link(file.path()).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:runsc-memory "))
    });
    memory.filter_map(|file| Some(fs::metadata(file.path()).ok()?.blocks() * 512)).max().unwrap_or(0)
}

/// What its cgroup gives it of the CPUs, where there is one.
fn quota(place: &Place) -> Option<String> {
    let sentry = place.processes().first()?.pid();
    let text = fs::read_to_string(format!("/proc/{sentry}/cgroup")).ok()?;
    let line =
        text.lines().find(|line| line.contains("/baton-") && (line.contains(":cpu:") || line.contains("0::")))?;
    let group = line.splitn(3, ':').nth(2)?.trim_start_matches('/');
    let file = |name: &str| fs::read_to_string(PathBuf::from("/sys/fs/cgroup").join(name)).ok();
    file(&format!("cpu/{group}/cpu.cfs_quota_us")).or_else(|| file(&format!("{group}/cpu.max")))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_restored_is_limited_before_its_agent_has_answered() {
    let (place, _agent) = place_with(NEVER_SYNCS).await;
    let (id, first) = (sandbox(), start());
    place.containers.create(&id, &first).await.unwrap();
    let image = place.path("image");
    place.containers.pause(&id).await.unwrap();
    place.containers.checkpoint(&id, &image).await.unwrap();
    place.containers.remove(&id).await.unwrap();
    let restored = async |limits: Value| {
        let again = StartSpec { marker: first.marker, ..limited(limits) };
        place.containers.restore(&id, &again, &image).await
    };

    // Without limits it has all it wants for as long as the start may take.
    let (ended, ()) = tokio::join!(restored(json!({})), async {
        eventually("it has it all", || held(&place) > 400 * MIB).await;
        place.containers.remove(&id).await.unwrap();
    });
    assert!(matches!(ended, Err(Error::NotIn(_))), "{ended:?}");

    let mut most = 0;
    let clock = clock();
    let watching = async {
        loop {
            most = most.max(held(&place));
            clock.sleep(Duration::from_millis(1)).await;
        }
    };
    let ended = tokio::select! {
        ended = restored(json!({"memory": "64MiB"})) => ended,
        () = watching => unreachable!("it watches for ever"),
    };
    assert!(matches!(ended, Err(Error::Failed { .. })), "{ended:?}");
    assert!(most < 350 * MIB, "{most} bytes");

    // Processes, and its share of the CPUs.
    let has_cpus = place.containers.cgroups().is_ok_and(|shares| shares.cpus);
    let limits = if has_cpus { json!({"pids": 40, "cpus": 0.5}) } else { json!({"pids": 40}) };
    let (ended, ()) = tokio::join!(restored(limits), async {
        if has_cpus {
            eventually("it has its share", || quota(&place).is_some_and(|quota| quota.starts_with("50000"))).await;
        }
    });
    assert!(matches!(&ended, Err(Error::Failed { why, .. }) if why.contains("over its limits")), "{ended:?}");
    assert_eq!(place.containers.watch(&id).borrow().container, Container::Absent);
    place.close().await;
}

/// A runsc that restores nothing: it says so in a file, and hangs.
fn hanging_runsc(machine: &Machine) -> (PathBuf, PathBuf) {
    let (wrapper, sign) = (machine.directory.path().join("runsc"), machine.directory.path().join("hangs"));
    let hang = format!("case \" $* \" in *' restore --bundle '*) touch {}; sleep 1000;; esac", sign.display());
    fs::write(&wrapper, format!("#!/bin/sh\n{hang}\nexec {} \"$@\"\n", piece("BATON_RUNSC").display())).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    (wrapper, sign)
}

/// SIGTERM while an attach waits for a restore: the server ends, and the sandbox is as it was.
async fn drains(machine: &Machine, mut server: Server, mut socket: Socket, key: &Key, head: &Value) {
    server.signal(Signal::SIGTERM);
    assert_eq!(socket.end().await, Some(1012), "the client goes elsewhere");
    assert!(server.ended().await.success(), "{}", server.log());
    assert!(!server.log().contains("the drain time is up"), "{}", server.log());
    assert_eq!(processes(&server.state).len(), 0);
    let lock = machine.lock(&key.id);
    assert_eq!((&lock["lease"], &lock["head"]), (&json!(null), head));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_a_restore_that_hangs() {
    let machine = Machine::with_a_bucket().await;
    let one = machine.server("a").await;
    let config = json!({"enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null});
    let (mut socket, key) = Socket::create(&one, Dialect::Plain, config).await;
    socket.run("bash", "echo kept > /srv/kept").await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    let head = machine.lock(&key.id)["head"].clone();

    // Longer than any test waits.
    let patient = ("BATON_DRAIN", "10m");
    let (runsc, sign) = hanging_runsc(&machine);
    let two = machine.server_with("b", &[patient, ("BATON_RUNSC", runsc.to_str().unwrap())]).await;
    let socket = Socket::attach(&two, Dialect::Plain, &key).await;
    eventually("runsc hangs", || sign.exists()).await;
    drains(&machine, two, socket, &key, &head).await;

    machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Hang).on("pages.img").times(0));
    let mut three = machine.server_with("c", &[patient]).await;
    let socket = Socket::attach(&three, Dialect::Plain, &key).await;
    three.said("action=Restore").await;
    drains(&machine, three, socket, &key, &head).await;
    machine.bucket().clear_faults();

    let mut socket = Socket::attach(&one, Dialect::Plain, &key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /srv/kept").await.0, "kept\n");
    socket.kill().await;
    one.stop().await;
}
