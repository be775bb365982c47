//! Filesystem snapshots over the wire: taken from one sandbox, started from elsewhere.

use std::{os::unix::fs::MetadataExt, path::PathBuf, process::Command as Program};

use serde_json::{Value, json};

use crate::{
    fixture::piece,
    servers::{Machine, Server, files_under, is_proof},
    websocket_client::{Dialect, Key, Socket},
};

/// A tree with everything a file system can have, as large as told; and things removed from the base.
const FILL: &str = r##"
import os, shutil
count = int(os.environ["COUNT"])
for n in range(count):
    folder = f"/opt/lib/p{n % 97}/m{n % 7}"
    if n < 97 * 7: os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/f{n}.py", "w") as f: f.write(f"# {n}\n" * (n % 50))
    if n % 1000 == 0: print(n, flush=True)
os.makedirs("/opt/t/a/b")
open("/opt/t/f", "w").write("hello"); os.link("/opt/t/f", "/opt/t/a/hard"); os.link("/opt/t/f", "/opt/lib/third")
os.symlink("/etc/passwd", "/opt/t/absolute"); os.symlink("../nowhere", "/opt/t/dangling"); os.symlink("x" * 900, "/opt/t/far")
with open("/opt/t/sparse", "wb") as f: f.seek(40 << 20); f.write(b"end")
open("/opt/t/" + "n" * 255, "w").write("long")
open("/opt/t/\u00fcn\u00ef \u4f60\n\\", "w").write("u")
deep = "/opt/t/" + "d" * 200 + "/" + "e" * 200; os.makedirs(deep); open(deep + "/x", "w").write("deep")
os.setxattr("/opt/t/f", "user.colour", b"bl\0u\ne"); os.setxattr("/opt/t/a", "user.of", b"a directory")
os.utime("/opt/t/f", (1234567890, 1234567890)); os.utime("/opt/t/a", (1234567, 1234567))
os.chown("/opt/t/a/b", 1234, 5678); os.chmod("/opt/t/a/b", 0o3751); os.chmod("/etc/hosts", 0o600)
os.lchown("/opt/t/dangling", 99, 98); open("/opt/t/suid", "w").close(); os.chmod("/opt/t/suid", 0o4755)
os.mkfifo("/opt/t/fifo")
os.remove("/etc/hostname"); shutil.rmtree("/etc/dpkg"); shutil.rmtree("/etc/alternatives"); os.makedirs("/etc/alternatives")
open("/etc/alternatives/new", "w").write("n"); os.rename("/etc/apt", "/etc/apt.old")
open("/tmp/note", "w").write("in tmp")
"##;

/// A line about everything that is promised to be the same; runsc writes times to the nearest second.
const LOOK: &str = r##"
import os, hashlib
groups = {}
for top in os.environ["TOPS"].split():
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files + folders):
            p = os.path.join(folder, name)
            s = os.lstat(p)
            what = [p, oct(s.st_mode), s.st_uid, s.st_gid, int(s.st_mtime + 0.5)]
            if os.path.islink(p): what.append(os.readlink(p)[:40])
            elif os.path.isfile(p):
                what.append(hashlib.sha256(open(p, "rb").read()).hexdigest()[:16])
                if s.st_nlink > 1: groups.setdefault((s.st_dev, s.st_ino), []).append(p)
            if not os.path.islink(p) and p.startswith("/opt"): what.append(sorted((x, os.getxattr(p, x)) for x in os.listxattr(p)))
            print(ascii(what))
print(sorted(sorted(g) for g in groups.values() if len(g) > 1 and g[-1].startswith("/opt")))
"##;

/// How many files the tree has.
fn count() -> u32 {
    if is_proof() { 20_000 } else { 800 }
}

/// What is compared: in full everything that is no mount.
fn tops() -> &'static str {
    if is_proof() {
        "/bin /boot /etc /home /lib /lib64 /media /mnt /opt /root /run /sbin /srv /tmp /usr /var"
    } else {
        "/opt /etc /tmp /root /home /usr/sbin"
    }
}

fn config(more: Value) -> Value {
    let mut config = json!({"idle_timeout": null, "env": {"COUNT": count().to_string(), "TOPS": tops()}});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

async fn create(server: &Server, more: Value) -> (Socket, Key) {
    Socket::create(server, Dialect::Plain, config(more)).await
}

async fn filled(server: &Server, more: Value) -> (Socket, Key, String) {
    let (mut socket, key) = create(server, more).await;
    let (written, done) = socket.run("python", FILL).await;
    assert_eq!(done["exit_code"], json!(0), "{written}");
    let seen = looked(&mut socket).await;
    (socket, key, seen)
}

async fn looked(socket: &mut Socket) -> String {
    let (seen, done) = socket.run("python", LOOK).await;
    assert_eq!(done["exit_code"], json!(0), "{seen}");
    seen
}

/// Complains about the first lines that differ.
fn assert_same(found: &str, expected: &str, what: &str) {
    let different = found.lines().zip(expected.lines()).filter(|(one, other)| one != other);
    let shown: Vec<_> = different.take(5).collect();
    assert!(shown.is_empty() && found.lines().count() == expected.lines().count(), "{what}: {shown:#?}");
    assert!(found.lines().count() > 800);
}

/// Takes a snapshot; what is said about it in the end.
pub async fn snapshot(socket: &mut Socket, name: &str, full: bool) -> Value {
    socket.send(json!({"action": "snapshot_filesystem", "name": name, "full": full})).await;
    socket
        .until("an answer", |event| {
            event["status"].as_str().is_some_and(|status| {
                status == "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED" || status == "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR"
            })
        })
        .await
}

pub async fn refused(server: &Server, config: Value) -> String {
    let mut socket = Socket::open(server, "/create?details=1", Dialect::Plain).await;
    socket.send(config).await;
    let refusal = socket.status("CREATION_ERROR").await;
    assert_eq!(socket.end().await, Some(4000));
    refusal["message"].as_str().unwrap().to_owned()
}

async fn a_snapshot_is_the_same_tree_elsewhere(machine: Machine) {
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, _, before) = filled(&one, json!({})).await;
    // A command runs while it is taken.
    socket.send(json!({"language": "bash", "code": "while :; do sleep 0.1; done"})).await;
    socket.status("EXECUTION_RUNNING").await;
    let from = socket.statuses.len();
    let made = snapshot(&mut socket, "tree", false).await;
    assert_eq!(socket.statuses[from..], ["FILESYSTEM_SNAPSHOT_CREATING", "FILESYSTEM_SNAPSHOT_CREATED"], "{made}");
    assert_eq!(made["snapshot"], json!("tree"));
    assert!(made["paused_ms"].as_u64().is_some_and(|paused| paused > 0), "{made}");
    let manifest = machine.json("filesystem_snapshots/tree/manifest.json");
    assert_eq!(manifest["kind"], json!("layer"));
    assert!(manifest["entries"].as_u64().unwrap() > u64::from(count()), "{manifest}");
    assert_eq!(manifest["size"], json!(machine.object("filesystem_snapshots/tree/tree.tar").unwrap().len()));
    let again = snapshot(&mut socket, "tree", true).await;
    assert!(again["message"].as_str().unwrap().contains("`tree` exists already"), "{again}");
    assert_eq!(machine.json("filesystem_snapshots/tree/manifest.json"), manifest, "never overwritten");
    let full = snapshot(&mut socket, "full", true).await;
    assert_eq!(full["status"], json!("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"), "{full}");
    assert_eq!(machine.json("filesystem_snapshots/full/manifest.json")["kind"], json!("rootfs"));
    let bad = snapshot(&mut socket, "../x", false).await;
    assert_eq!(bad["status"], json!("SANDBOX_FILESYSTEM_SNAPSHOT_ERROR"));
    socket.send(json!({"action": "kill_process"})).await;
    socket.status("EXECUTION_DONE").await;
    assert_same(&looked(&mut socket).await, &before, "the sandbox goes on as it was");
    socket.kill().await;

    for name in ["tree", "full"] {
        let (mut copy, _) = create(&two, json!({"filesystem_snapshot_name": name})).await;
        assert_same(&looked(&mut copy).await, &before, name);
        let (gone, _) = copy.run("bash", "ls -d /etc/hostname /etc/dpkg /etc/apt 2>/dev/null; cat /tmp/note").await;
        assert_eq!(gone, "in tmp");
        if name == "tree" {
            // What was made from a layer is a layer again.
            copy.run("bash", "echo more >/opt/t/more; rm -r /opt/lib/p1; echo new >/opt/t/f").await;
            let changed = looked(&mut copy).await;
            let made = snapshot(&mut copy, "second", false).await;
            assert_eq!(made["status"], json!("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"), "{made}");
            let second = machine.json("filesystem_snapshots/second/manifest.json");
            assert_eq!((&second["kind"], &second["base_digest"]), (&json!("layer"), &manifest["base_digest"]));
            copy.kill().await;
            let (mut third, _) = create(&one, json!({"filesystem_snapshot_name": "second"})).await;
            assert_same(&looked(&mut third).await, &changed, "a layer on a layer");
            third.kill().await;
        } else {
            copy.kill().await;
        }
    }
    let trees = trees(&two);
    assert_eq!(trees.len(), 2);
    for tree in &trees {
        let sparse = std::fs::metadata(tree.join("opt/t/sparse")).unwrap();
        assert!(sparse.len() > 40 << 20 && sparse.blocks() * 512 < 1 << 20, "holes are kept: {sparse:?}");
    }
    // What is not what the manifest says is not started from, and nothing of it stays.
    let archive = "filesystem_snapshots/second/second.tar";
    let mut bytes = machine.object(archive).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    machine.replace(archive, bytes);
    let message = refused(&two, config(json!({"filesystem_snapshot_name": "second"}))).await;
    assert!(message.contains("is not the one it was made from"), "{message}");
    assert_eq!(self::trees(&two), trees);
    assert_eq!(files_under(&two.staging()), 0);
    one.stop().await;
    two.stop().await;
}

/// The root file systems that a server has extracted.
fn trees(server: &Server) -> Vec<PathBuf> {
    let mut cache = server.state.clone().into_os_string();
    cache.push("-cache");
    let all = std::fs::read_dir(PathBuf::from(cache).join("extracted")).unwrap();
    let mut found: Vec<_> =
        all.map(|entry| entry.unwrap().path().join("rootfs")).filter(|tree| tree.is_dir()).collect();
    found.sort();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_in_a_directory_is_the_same_tree_elsewhere() {
    a_snapshot_is_the_same_tree_elsewhere(Machine::with_a_directory().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_in_a_bucket_is_the_same_tree_elsewhere() {
    a_snapshot_is_the_same_tree_elsewhere(Machine::with_a_bucket().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_somebody_put_there_is_a_root_file_system() {
    let machine = Machine::with_a_directory().await;
    let folder = machine.data().join("filesystem_snapshots");
    let names = [("plain", "-c", "tar"), ("zipped", "-cz", "tar.gz"), ("packed", "-c", "tar.zst")];
    for (name, flag, end) in names {
        let at = folder.join(name);
        std::fs::create_dir_all(&at).unwrap();
        // As `docker export` writes it: everything, without `./`, and a mark of its own.
        let mut tar = Program::new("tar");
        let file = at.join(format!("{name}.{end}"));
        tar.args([flag, "-f"]).arg(&file).arg("-C").arg(piece("BATON_TEST_ROOTFS"));
        tar.args(["--exclude=./tmp/*", "--exclude=.baton", "--transform=s,^\\./,,", "--numeric-owner", "."]);
        // A link more to a file is a change to tar, and other tests make some.
        assert!(matches!(tar.status().unwrap().code(), Some(0 | 1)));
        if name == "packed" {
            let plain = at.join("plain");
            std::fs::rename(&file, &plain).unwrap();
            let (from, to) = (std::fs::File::open(&plain).unwrap(), std::fs::File::create(&file).unwrap());
            zstd::stream::copy_encode(from, to, 1).unwrap();
            std::fs::remove_file(plain).unwrap();
        }
    }
    let server = machine.server("a").await;
    for (name, _, _) in names {
        let asked = json!({"filesystem_snapshot_name": name, "enable_checkpoint": true});
        let (mut socket, key) = create(&server, asked).await;
        assert_eq!(socket.run("python", "print(6 * 7)").await.0, "42\n");
        socket.run("bash", "echo kept >/tmp/kept").await;
        if name != "zipped" {
            socket.kill().await;
            continue;
        }
        // It comes back on a server that has never seen it.
        socket.send(json!({"action": "checkpoint"})).await;
        assert_eq!(socket.end().await, Some(1000));
        let other = machine.server(&format!("b-{name}")).await;
        let mut socket = Socket::attach(&other, Dialect::Plain, &key).await;
        socket.status("RUNNING").await;
        assert_eq!(socket.run("bash", "cat /tmp/kept").await.0, "kept\n");
        socket.kill().await;
        other.stop().await;
    }
    let message = refused(&server, json!({"filesystem_snapshot_name": "nothing"})).await;
    assert!(message.contains("`nothing` does not exist"), "{message}");
    let broken = folder.join("broken");
    std::fs::create_dir_all(&broken).unwrap();
    std::fs::write(broken.join("broken.tar"), "this is no archive").unwrap();
    let message = refused(&server, json!({"filesystem_snapshot_name": "broken"})).await;
    assert!(message.contains("cannot be extracted"), "{message}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_made_from_a_snapshot_moves_to_where_it_was_never_seen() {
    let machine = Machine::with_a_bucket().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut source, _) = create(&one, json!({})).await;
    source.run("bash", "echo base >/opt/base; rm /etc/hostname").await;
    let made = snapshot(&mut source, "start", false).await;
    assert_eq!(made["status"], json!("SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"), "{made}");
    source.kill().await;
    let asked = json!({"filesystem_snapshot_name": "start", "enable_checkpoint": true, "enable_sandbox_handoff": true});
    let (mut socket, key) = create(&one, asked).await;
    socket.run("bash", "echo mine >/opt/mine").await;
    let mut next = Socket::attach(&two, Dialect::Plain, &key).await;
    next.status("RUNNING").await;
    let head = machine.lock(&key.id)["head"]["checkpoint_id"].as_str().unwrap().to_owned();
    for image in ["checkpoint.img", "pages.img", "pages_meta.img"] {
        let name = format!("sandbox_checkpoints/{head}/{image}");
        let size = machine.object(&name).unwrap().len() as u64;
        assert_eq!(machine.bucket().sent("b", &name), size, "{image} is fetched once");
    }
    let (written, _) = next.run("bash", "cat /opt/base /opt/mine; ls /etc/hostname 2>&1 | grep -c cannot").await;
    assert_eq!(written, "base\nmine\n1\n");
    let manifest = machine.json(&format!("sandbox_checkpoints/{head}/manifest.json"));
    assert_eq!(manifest["rootfs"]["archive"]["path"], json!("filesystem_snapshots/start/start.tar"));
    next.kill().await;
    one.stop().await;
    two.stop().await;
}
