//! Sandboxes that take all they can get: they get what they may, and live on; others notice nothing.

use std::{fs, path::PathBuf, time::Duration};

use baton::runtime::{Container, Lifecycle, StartSpec};
use baton_protocol::{
    agent::{AgentExec, Exit},
    frame::{Frame, FrameKind, Stream},
    id::SandboxId,
    limits::Limits,
};
use serde_json::{Value, json};

use crate::{
    fixture::{Place, clock, sandbox, start},
    impostor,
    plain_session::{Client, command},
    servers::{Machine, is_proof},
    websocket_client::{Dialect, Heard, Socket},
};

/// Fills memory to the end, and leaves a busy machine the time to look.
pub const GREEDY: &str =
    "import time\nx = []\nwhile True:\n    x.append(bytearray(b'x') * (1 << 20))\n    time.sleep(0.002)";
/// The same, by many processes of which none has much.
const GREEDY_TOGETHER: &str = "
import os, time
for _ in range(60):
    if os.fork() == 0:
        x = bytearray(b'x') * (6 << 20)
        time.sleep(600)
time.sleep(600)";
/// As many processes as there can be, for ever, of one user or of many.
const BOMB: &str = "
import os, sys, time
for user in reversed(range(int(sys.argv[1]))):
    if user and os.fork(): continue
    if user: os.setuid(2000 + user)
    while True:
        try:
            if os.fork() == 0: time.sleep(600)
        except OSError as error:
            print(error, flush=True)
            time.sleep(600)";

fn limits(value: Value) -> Limits {
    serde_json::from_value(value).unwrap()
}

fn limited(value: Value) -> StartSpec {
    StartSpec { limits: limits(value), ..start() }
}

fn shell(script: &str) -> AgentExec {
    command(&["bash", "-c", script])
}

fn python(script: &str) -> AgentExec {
    command(&["python3", "-c", script])
}

/// A sandbox with limits, and somebody in it.
struct Scene {
    place: Place,
    id: SandboxId,
    start: StartSpec,
    client: Client,
    images: u32,
}

impl Scene {
    async fn new(limits: Value) -> Self {
        let place = Place::new().await;
        let (id, start) = (sandbox(), limited(limits));
        place.containers.create(&id, &start).await.unwrap();
        let client = Client::attached(clock(), &*place.containers, &id);
        Self { place, id, start, client, images: 0 }
    }

    async fn run(&mut self, exec: AgentExec) -> (Exit, String, String) {
        let number = self.client.exec(exec, None).await;
        let done = self.client.done(number).await;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (done.exit.clone().unwrap(), text(&done.stdout.bytes), text(&done.stderr.bytes))
    }

    /// It is as usable as ever.
    async fn lives(&mut self) {
        let (exit, stdout, _) = self.run(python("print(6 * 7)")).await;
        assert_eq!((exit.code, stdout.as_str()), (Some(0), "42\n"));
        assert_eq!(self.place.containers.watch(&self.id).borrow().container, Container::Running);
    }

    /// Through a checkpoint into another container.
    async fn moves(&mut self) {
        self.images += 1;
        let (containers, image) = (&self.place.containers, self.place.path(&format!("image-{}", self.images)));
        containers.pause(&self.id).await.unwrap();
        containers.checkpoint(&self.id, &image).await.unwrap();
        containers.remove(&self.id).await.unwrap();
        containers.restore(&self.id, &self.start, &image).await.unwrap();
        self.client.attach(&**containers, &self.id);
    }

    async fn kill(&mut self, exec: u32) {
        self.client.send(Frame::new(FrameKind::Signal).exec(exec).stream(Stream::Tree).offset(9)).await;
        self.client.until("it is dead", |client| client.execs[&exec].exit.is_some()).await;
    }
}

fn assert_ended_for_memory(exit: &Exit, stderr: &str, limit: &str) {
    let why = format!("the sandbox is over its memory limit of {limit}");
    assert_eq!((exit.signal, exit.reason.as_deref()), (Some(9), Some(why.as_str())), "{stderr}");
    assert!(stderr.contains(&why), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_too_much_memory_is_ended_and_told_and_the_rest_lives() {
    let mut scene = Scene::new(json!({"memory": "256MiB"})).await;
    let other = scene.client.exec(shell("echo here; sleep 600"), None).await;
    scene.client.until("it runs", |client| client.execs[&other].stdout.at > 0).await;
    let (exit, _, stderr) = scene.run(python(GREEDY)).await;
    assert_ended_for_memory(&exit, &stderr, "256MiB");
    assert!(stderr.starts_with("baton: process ") && stderr.contains("(python3) was killed"), "{stderr}");
    scene.lives().await;
    assert!(scene.client.execs[&other].exit.is_none(), "nobody else was ended");

    // Many together, none of which takes too much: all go, and the sandbox stays.
    let (exit, _, stderr) = scene.run(python(GREEDY_TOGETHER)).await;
    assert_ended_for_memory(&exit, &stderr, "256MiB");
    scene.lives().await;

    // What lies in files in memory does not go with the one who wrote it.
    let (exit, ..) = scene.run(shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=300; exec sleep 600")).await;
    assert_eq!(exit.signal, Some(9));
    scene.client.read_for(Duration::from_millis(1500)).await;
    scene.lives().await;
    assert_eq!(scene.run(shell("ls /dev/shm | wc -l")).await.1, "0\n");
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_stops_at_its_limit_and_the_sandbox_answers() {
    let mut scene = Scene::new(json!({"pids": 64})).await;
    let bomb = scene.client.exec(command(&["python3", "-c", BOMB, "1"]), None).await;
    scene.client.until("it hits the limit", |client| client.execs[&bomb].stdout.at > 0).await;
    let said = String::from_utf8_lossy(&scene.client.execs[&bomb].stdout.bytes).into_owned();
    assert!(said.contains("Resource temporarily unavailable"), "{said}");
    let (exit, stdout, stderr) = scene.run(shell("set -- /proc/[0-9]*; echo $#")).await;
    assert_eq!(exit.code, Some(0), "there is a way in: {stderr}");
    let count: u32 = stdout.trim().parse().unwrap();
    assert!((60..=66).contains(&count), "{count}");
    scene.kill(bomb).await;
    scene.lives().await;

    // Each user has a limit of its own, and there are many: their sum is looked at from outside.
    let bomb = scene.client.exec(command(&["python3", "-c", BOMB, "6"]), None).await;
    scene.client.until("they are ended", |client| client.execs[&bomb].exit.is_some()).await;
    let exit = scene.client.execs[&bomb].exit.clone().unwrap();
    assert_eq!(exit.reason.as_deref(), Some("the sandbox is over its limit of 64 processes"));
    scene.lives().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_full_for_its_sandbox_alone_and_every_limit_survives_a_move() {
    // Enough for the processes of the bomb.
    let all = json!({"memory": "512MiB", "cpus": 1.5, "pids": 64, "disk": "64MiB", "files": 77});
    let mut scene = Scene::new(all).await;
    for _ in 0..2 {
        let (exit, stdout, stderr) =
            scene.run(shell("ulimit -Hu; ulimit -Hn; df -m --output=size / | tail -1 | tr -d ' '")).await;
        assert_eq!((exit.code, stdout.as_str()), (Some(0), "64\n77\n64\n"), "{stderr}");
        let (exit, _, stderr) = scene.run(shell("dd if=/dev/zero of=/srv/full bs=1M count=100")).await;
        assert!(exit.code == Some(1) && stderr.contains("No space left on device"), "{stderr}");
        let (exit, ..) = scene.run(shell("rm /srv/full && echo enough > /srv/small")).await;
        assert_eq!(exit.code, Some(0));
        let (exit, _, stderr) = scene.run(python("x = [open('/dev/null') for _ in range(100)]")).await;
        assert!(exit.code == Some(1) && stderr.contains("Too many open files"), "{stderr}");
        let (_, stdout, _) = scene.run(python("import resource as r; r.setrlimit(r.RLIMIT_NPROC, (70, 70))")).await;
        assert_eq!(stdout, "", "nobody raises what was given");
        let bomb = scene.client.exec(command(&["python3", "-c", BOMB, "1"]), None).await;
        scene.client.until("it hits the limit", |client| client.execs[&bomb].stdout.at > 0).await;
        scene.kill(bomb).await;
        let (exit, _, stderr) = scene.run(python(GREEDY)).await;
        assert_ended_for_memory(&exit, &stderr, "512MiB");
        scene.moves().await;
    }
    scene.lives().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_makes_no_room_is_ended_with_its_container() {
    let greedy = "greet()\nx = []\nwhile True:\n    x.append(bytearray(b'x') * (1 << 20)); time.sleep(0.001)";
    let (place, _agent) = impostor::place_with(greedy).await;
    let id = sandbox();
    place.containers.create(&id, &limited(json!({"memory": "64MiB"}))).await.unwrap();
    let mut seen = place.containers.watch(&id);
    let ended = seen.wait_for(|seen| seen.container == Container::Stopped);
    clock().timeout(Duration::from_secs(30), ended).await.expect("it is ended").unwrap();
    place.close().await;
}

/// The directories of the cgroups that belong to a server with this state directory.
fn groups(place: &Place) -> Vec<PathBuf> {
    let sentry = place.processes().first().expect("it runs").pid();
    let text = fs::read_to_string(format!("/proc/{sentry}/cgroup")).unwrap();
    let ours = text.lines().filter(|line| line.contains("/baton-"));
    let paths = ours.map(|line| {
        let mut words = line.splitn(3, ':').skip(1);
        let (controllers, path) = (words.next().unwrap(), words.next().unwrap());
        PathBuf::from("/sys/fs/cgroup").join(controllers).join(path.trim_start_matches('/'))
    });
    paths.collect()
}

/// Ticks of CPU time that the processes of a group have had.
fn ticks(group: &std::path::Path) -> u64 {
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    let used = members.lines().filter_map(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
        Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
    });
    used.sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_loops_get_their_share_of_the_cpus_and_no_more() {
    let mut scene = Scene::new(json!({"cpus": 0.5, "memory": "1GiB"})).await;
    if scene.place.containers.cgroups().is_err() {
        return scene.place.close().await;
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    assert!(!own.contains("/baton-"), "the server stays outside: {own}");
    let groups = groups(&scene.place);
    assert!(!groups.is_empty());
    let group = groups.iter().find(|group| group.to_string_lossy().contains("cpu")).unwrap_or(&groups[0]).clone();
    let share = async |scene: &mut Scene| {
        let busy = scene.client.exec(shell("for i in 1 2 3; do while :; do :; done & done; echo on; wait"), None).await;
        scene.client.until("they run", |client| client.execs[&busy].stdout.at > 0).await;
        scene.client.read_for(Duration::from_millis(300)).await;
        let (before, began) = (ticks(&group_of(scene, &group)), clock().now());
        scene.client.read_for(Duration::from_secs(2)).await;
        let (used, passed) = (ticks(&group_of(scene, &group)) - before, (clock().now() - began).as_secs_f64());
        scene.kill(busy).await;
        // A tick is a hundredth of a second.
        used as f64 / 100.0 / passed
    };
    for _ in 0..2 {
        let share = share(&mut scene).await;
        assert!((0.1..0.65).contains(&share), "{share}");
        scene.lives().await;
        scene.moves().await;
    }
    let id = scene.id.clone();
    let here = group_of(&scene, &group);
    scene.place.containers.remove(&id).await.unwrap();
    assert!(!here.exists(), "a removed container leaves no cgroup");
    let place = here.parent().unwrap().to_owned();
    scene.place.close().await;
    assert!(!place.exists(), "nor does a server");
}

/// The same hierarchy, for the container that is there now.
fn group_of(scene: &Scene, earlier: &std::path::Path) -> PathBuf {
    let place = earlier.parent().unwrap();
    groups(&scene.place).into_iter().find(|group| group.parent() == Some(place)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_server_left_of_cgroups_is_removed_at_the_next_start() {
    let machine = Machine::with_a_directory().await;
    let mut server = machine.server("a").await;
    let (_, body) = server.get("/status").await;
    let status: Value = serde_json::from_str(&body).unwrap();
    if status["limits"]["cgroup"] == "none" {
        return server.stop().await;
    }
    let (socket, _) = Socket::create(&server, Dialect::V1, json!({"limits": {"memory": "64MiB", "cpus": 1}})).await;
    let left = crate::fixture::processes(&server.state);
    let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", left[0].pid())).unwrap();
    let place =
        cgroup.lines().find_map(|line| Some(line[line.find("/baton-")?..].split('/').nth(1)?.to_owned())).unwrap();
    server.die().await;
    drop(socket);
    let find = |name: &str| {
        let found = std::process::Command::new("find").args(["/sys/fs/cgroup", "-name", name]).output().unwrap();
        String::from_utf8(found.stdout).unwrap()
    };
    assert_ne!(find(&place), "", "something is left");
    let server = machine.server("a").await;
    assert_eq!(find(&format!("{place}/*")), "");
    server.stop().await;
    assert_eq!(find(&place), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_clients_are_checked_kept_and_in_force_on_the_next_instance() {
    let machine = Machine::with_a_directory().await;
    let settings = [("BATON_LIMITS", "memory=128MiB/256MiB,pids=64/100,disk=64MiB")];
    let (one, two) = (machine.server_with("a", &settings).await, machine.server_with("b", &settings).await);
    for (limits, sentence) in [
        (json!({"memory": "1GiB"}), "`limits.memory` is 1GiB, and this server allows 256MiB at most."),
        (json!({"ram": 5}), "`limits.ram` is not a limit: there are memory, cpus, pids, disk, files."),
        (json!({"pids": "many"}), "`limits.pids` must be a whole number from 8 to 1048576."),
    ] {
        let mut socket = Socket::open(&one, "/create", Dialect::V1).await;
        socket.send(json!({"limits": limits})).await;
        assert_eq!(socket.status("CREATION_ERROR").await["message"], sentence);
    }
    let config = json!({
        "enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null,
        "limits": {"memory": "160MiB", "files": 99},
    });
    let (mut socket, key) = Socket::create(&one, Dialect::V1, config).await;
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    let kept = json!({"memory": 160 << 20, "pids": 64, "disk": 64 << 20, "files": 99});
    assert_eq!(metadata["limits"], kept);
    in_force(&mut socket).await;
    let mut socket = Socket::attach(&two, Dialect::V1, &key).await;
    socket.status("RUNNING").await;
    in_force(&mut socket).await;
    socket.send(json!({"action": "fork", "count": 1})).await;
    let copies = socket.until("a copy", |event| event["event"] == "forked" || event["event"] == "error").await;
    let copy = &copies["sandboxes"][0];
    let text = |field: &str| copy[field].as_str().expect("a copy").to_owned();
    let copy = crate::websocket_client::Key { id: text("sandbox_id"), token: text("sandbox_token") };
    assert_eq!(machine.json(&format!("sandboxes/{}/metadata.json", copy.id))["limits"], kept);
    let mut attached = Socket::attach(&one, Dialect::V1, &copy).await;
    attached.status("RUNNING").await;
    in_force(&mut attached).await;
    one.stop().await;
    two.stop().await;
}

async fn in_force(socket: &mut Socket) {
    let (_, output) =
        said(socket, json!(["bash", "-c", "ulimit -Hu; ulimit -Hn; df -m --output=size / | tail -1 | tr -d ' '"]))
            .await;
    assert_eq!(output, "64\n99\n64\n");
    let (done, output) = said(socket, json!(["python3", "-c", GREEDY])).await;
    let why = "the sandbox is over its memory limit of 160MiB";
    assert_eq!((&done["signal"], &done["message"]), (&json!(9), &json!(why)), "{output}");
    assert!(output.contains(why), "{output}");
}

/// A command's last word, and all it wrote.
pub async fn said(socket: &mut Socket, argv: Value) -> (Value, String) {
    socket.send(json!({"action": "exec", "argv": argv})).await;
    let mut written = Vec::new();
    loop {
        match socket.next().await {
            Heard::Bytes(bytes) => {
                written.extend_from_slice(baton_protocol::binary::BinaryChunk::decode(&bytes).unwrap().payload);
            }
            Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_DONE" => {
                return (event, String::from_utf8_lossy(&written).into_owned());
            }
            Heard::Event(_) => {}
            Heard::End(code) => panic!("closed with {code:?}"),
        }
    }
}

#[test]
fn what_a_cgroup_does_not_take_does_not_start() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    let own = std::process::id().to_string();
    let ended = command.args(["die-with", &own, "/nowhere", "--", "echo", "started"]).output().unwrap();
    assert_eq!((ended.status.code(), ended.stdout.as_slice()), (Some(125), &b""[..]));
}

/// All of it at once, while the leases of others have to be renewed.
#[tokio::test(flavor = "multi_thread")]
async fn neighbours_of_the_greediest_renew_in_time() {
    if !is_proof() {
        return;
    }
    let machine = Machine::with_a_directory().await;
    let settings = [
        ("BATON_LIMITS", "memory=512MiB,cpus=0.5,pids=200,disk=256MiB,files=256"),
        ("BATON_RATE_LIMIT", "off"),
        ("BATON_RENEW", "1s"),
        ("BATON_HOLD", "5s"),
        ("BATON_TAKEOVER", "12s"),
    ];
    let server = machine.server_with("a", &settings).await;
    let config = json!({"enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null});
    let mut neighbours = Vec::new();
    for _ in 0..20 {
        neighbours.push(Socket::create(&server, Dialect::V1, config.clone()).await.1);
    }
    let mut worst = Vec::new();
    let many_files = "import os\nos.mkdir('/srv/many')\nfor n in range(1000000): open(f'/srv/many/{n}', 'w').close()";
    for argv in [
        json!(["python3", "-c", BOMB, "9"]),
        json!(["python3", "-c", "x = bytearray(b'x') * (10 << 30)"]),
        json!(["python3", "-c", many_files]),
        json!(["bash", "-c", "for i in $(seq 50); do while :; do :; done & done; wait"]),
        json!(["dd", "if=/dev/zero", "of=/srv/full", "bs=1M"]),
    ] {
        let (mut socket, key) = Socket::create(&server, Dialect::V1, json!({"idle_timeout": null})).await;
        socket.send(json!({"action": "exec", "argv": argv})).await;
        socket.status("EXECUTION_RUNNING").await;
        worst.push(key);
    }
    clock().sleep(Duration::from_secs(40)).await;
    for key in neighbours.iter().chain(&worst) {
        let mut socket = Socket::attach(&server, Dialect::V1, key).await;
        socket.status("RUNNING").await;
        let (done, output) = said(&mut socket, json!(["echo", "fine"])).await;
        assert_eq!((&done["exit_code"], output.as_str()), (&json!(0), "fine\n"), "{} {done}", key.id);
    }
    for key in &neighbours {
        assert_eq!(machine.lock(&key.id)["epoch"], 1, "nobody lost its lease");
    }
    server.stop().await;
}
