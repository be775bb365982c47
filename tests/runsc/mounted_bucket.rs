//! Servers that mount the bucket of their checkpoints and snapshots with the real gcsfuse, as on Cloud Run, beside one
//! that uses the same bucket without a mount. Locks and metadata lie in the bucket for all of them.

use serde_json::{Value, json};

use crate::{
    filesystem_snapshots::snapshot,
    fixture::eventually,
    gcsfuse_mount::Gcsfuse,
    live_handoff::ticking,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Mind, Socket},
};

/// The one bucket, and two mounts of it. They end before the bucket and after the servers.
struct Mounts {
    machine: Machine,
    paths: [String; 2],
    _mounts: [Gcsfuse; 2],
}

impl Mounts {
    async fn new() -> Self {
        let machine = Machine::with_a_bucket().await;
        let mounts =
            ["m1", "m2"].map(|name| Gcsfuse::mount(machine.bucket().url(), "b", &machine.directory.path().join(name)));
        let paths = [0, 1].map(|at| mounts[at].path().to_str().unwrap().to_owned());
        Self { machine, paths, _mounts: mounts }
    }

    /// With a mount whose bucket nobody names.
    async fn nameless(&self, name: &str, mount: usize) -> Server {
        let path = self.paths[mount].as_str();
        let settings = [
            ("SANDBOX_CHECKPOINT_MOUNT_PATH", path),
            ("FILESYSTEM_SNAPSHOT_MOUNT_PATH", path),
            ("SANDBOX_CHECKPOINT_BUCKET", ""),
            ("FILESYSTEM_SNAPSHOT_BUCKET", ""),
        ];
        self.machine.server_with(name, &settings).await
    }

    /// With a mount, and the name of its bucket beside it.
    async fn named(&self, name: &str, mount: usize) -> Server {
        let path = self.paths[mount].as_str();
        let settings = [("SANDBOX_CHECKPOINT_MOUNT_PATH", path), ("FILESYSTEM_SNAPSHOT_MOUNT_PATH", path)];
        self.machine.server_with(name, &settings).await
    }

    /// With the bucket and no mount.
    async fn direct(&self, name: &str) -> Server {
        self.machine.server(name).await
    }

    /// What lies in the bucket under the checkpoints of a sandbox, directories included.
    fn stored(&self, key: &Key) -> Vec<String> {
        let names = self.machine.bucket().names("b");
        names.into_iter().filter(|name| name.starts_with("sandbox_checkpoints/") && name.contains(&key.id)).collect()
    }

    /// What the lock calls the bucket of the head, which lies in it as an object in any case.
    fn head_bucket(&self, key: &Key) -> Value {
        let head = self.machine.lock(&key.id)["head"].clone();
        let manifest = format!("sandbox_checkpoints/{}/manifest.json", head["checkpoint_id"].as_str().unwrap());
        assert!(self.machine.object(&manifest).is_some(), "{head}");
        head["bucket"].clone()
    }
}

/// Attaches elsewhere while the old connection is open, and goes on where that one stopped.
async fn moves(mind: &mut Mind, mut from: Socket, to: &Server, key: &Key) -> Socket {
    let mut next = Socket::attach(to, Dialect::V1, key).await;
    let code = loop {
        if let Some(code) = mind.step(&mut from).await {
            break code;
        }
    };
    assert_eq!(code, Some(1000), "heard {:?}", from.statuses);
    mind.resume(&mut next).await;
    let lines = mind.commands["tick"].stdout.lines();
    mind.until(&mut next, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
    next
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_command_moves_between_mounts_and_the_bucket_itself_and_loses_no_byte() {
    let mounts = Mounts::new().await;
    let (a, b, c) = tokio::join!(mounts.nameless("a", 0), mounts.named("b", 1), mounts.direct("c"));
    let (mut socket, key, mut mind) = ticking(&a).await;
    let (unknown, named) = (Value::Null, json!("b"));
    // Each way from each of the three to each other one, and what the one that lets go calls the bucket.
    let ways = [(&b, &unknown), (&a, &named), (&c, &unknown), (&b, &named), (&c, &named), (&a, &named)];
    for (to, bucket) in ways {
        socket = moves(&mut mind, socket, to, &key).await;
        assert_eq!(mounts.head_bucket(&key), *bucket);
    }
    assert_eq!(mounts.machine.lock(&key.id)["epoch"], json!(7));
    socket.kill().await;
    eventually("a purge leaves no file and no directory in the bucket", || mounts.stored(&key).is_empty()).await;
    for server in [a, b, c] {
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_made_through_a_mount_starts_sandboxes_without_one_and_the_other_way_round() {
    let mounts = Mounts::new().await;
    let (a, c) = tokio::join!(mounts.nameless("a", 0), mounts.direct("c"));
    for (name, maker, starter) in [("mounted", &a, &c), ("direct", &c, &a)] {
        let (mut socket, _) = Socket::create(maker, Dialect::Plain, json!({"idle_timeout": null})).await;
        socket.run("bash", &format!("echo {name} >/etc/made-by")).await;
        let made = snapshot(&mut socket, name, false).await;
        assert_eq!(made["status"], json!("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"), "{made}");
        socket.kill().await;

        let config = json!({"filesystem_snapshot_name": name, "enable_checkpoint": true, "idle_timeout": null});
        let (mut socket, key) = Socket::create(starter, Dialect::Plain, config).await;
        let look = "cat /etc/made-by";
        assert_eq!(socket.run("bash", look).await.0, format!("{name}\n"));
        // Its checkpoint says where the snapshot lies, and whoever restores it looks there by its own way.
        socket.send(json!({"action": "checkpoint"})).await;
        assert_eq!(socket.end().await, Some(1000), "heard {:?}", socket.statuses);
        let mut socket = Socket::attach(maker, Dialect::Plain, &key).await;
        socket.status("RUNNING").await;
        assert_eq!(socket.run("bash", look).await.0, format!("{name}\n"));
        socket.kill().await;
    }
    a.stop().await;
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_no_way_leads_to_is_refused_with_a_reason_and_kept() {
    let mounts = Mounts::new().await;
    let elsewhere = mounts.machine.directory.path().join("another directory");
    let settings = [
        ("SANDBOX_CHECKPOINT_MOUNT_PATH", elsewhere.to_str().unwrap()),
        ("SANDBOX_CHECKPOINT_BUCKET", ""),
        ("FILESYSTEM_SNAPSHOT_BUCKET", ""),
    ];
    let (b, d) = tokio::join!(mounts.named("b", 0), mounts.machine.server_with("d", &settings));
    let config = json!({"enable_checkpoint": true, "idle_timeout": null});
    let (mut socket, key) = Socket::create(&b, Dialect::Plain, config).await;
    socket.run("bash", "echo kept >/root/file").await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000), "heard {:?}", socket.statuses);
    let stored = mounts.stored(&key);
    eventually("the metadata name the bucket behind the mount", || {
        let metadata = mounts.machine.json(&format!("sandboxes/{}/metadata.json", key.id));
        metadata["latest_sandbox_checkpoint"]["bucket"] == json!("b") && mounts.head_bucket(&key) == json!("b")
    })
    .await;

    let mut socket = Socket::attach(&d, Dialect::Plain, &key).await;
    let refusal = socket.status("RESTORE_ERROR").await;
    let message = refusal["message"].as_str().unwrap();
    assert!(message.contains("is in bucket b"), "{message}");
    assert_eq!(socket.end().await, Some(4000));
    assert_eq!(mounts.stored(&key), stored, "nothing is erased");

    eventually("the lease is free again", || mounts.machine.lock(&key.id)["lease"].is_null()).await;
    let mut socket = Socket::attach(&b, Dialect::Plain, &key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /root/file").await.0, "kept\n");
    socket.kill().await;
    b.stop().await;
    d.stop().await;
}
