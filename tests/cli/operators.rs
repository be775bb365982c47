//! The operator's verbs as programs, on a directory, without a server.

use std::{fs, path::Path, process::Stdio, time::Instant};

use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Metadata, Phase, SandboxStatus, Spec},
};
use serde_json::Value;

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

async fn baton(store: &Path, args: &[&str], editor: Option<&str>) -> Ran {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("CHECKPOINT_AND_RESTORE_PATH", store);
    if let Some(editor) = editor {
        command.env("EDITOR", editor);
    }
    let child = command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let output = tokio::time::timeout(std::time::Duration::from_secs(120), child.wait_with_output()).await;
    let output = output.expect("it ends").unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub fn id(number: u32) -> SandboxId {
    SandboxId::parse(&format!("sandbox-{number:08x}-6f0e-4b1c-9d3e-0123456789ab")).unwrap()
}

/// What a create and an end without a checkpoint leave.
pub fn put(store: &Path, number: u32) -> SandboxId {
    let id = id(number);
    let folder = store.join(format!("sandboxes/{id}"));
    fs::create_dir_all(&folder).unwrap();
    let me = InstanceId::from_bits([1; 16]);
    let mut spec = Spec::new(id.clone(), String::new(), "2026-11-16T10:00:00Z".to_owned(), me);
    (spec.enable_sandbox_checkpoint, spec.desired_state) = (true, DesiredState::Checkpointed);
    spec.labels.insert("half".to_owned(), (number % 2).to_string());
    let status = SandboxStatus { phase: Phase::Checkpointed, ..SandboxStatus::default() };
    let record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
    fs::write(folder.join("lock.json"), serde_json::to_vec(&Lock::new(id.clone())).unwrap()).unwrap();
    fs::write(folder.join("metadata.json"), serde_json::to_vec(&record).unwrap()).unwrap();
    id
}

#[tokio::test]
async fn ten_thousand_sandboxes_are_listed_in_pages() {
    let store = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for number in 0..10_000 {
        put(store.path(), number);
    }
    let began = Instant::now();
    let ran = baton(store.path(), &["list", "--label", "half=1", "-o", "json"], None).await;
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let listed: Vec<Value> = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(listed.len(), 5_000);
    assert!(listed.iter().zip(0..).all(|(row, at)| row["sandbox_id"] == id(2 * at + 1).as_str()), "out of order");
    println!("10,000 listed in {:?}", began.elapsed());
}

#[tokio::test]
async fn sandboxes_are_killed_without_a_server() {
    let store = tempfile::tempdir().unwrap();
    let (first, second) = (put(store.path(), 1), put(store.path(), 2));
    let ran = baton(store.path(), &["kill", "00000001", second.as_str()], None).await;
    assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(0), "", ""));
    for id in [first, second] {
        assert!(!store.path().join(format!("sandboxes/{id}/metadata.json")).exists());
    }
    let ran = baton(store.path(), &["kill", "00000003"], None).await;
    assert!(ran.code == Some(1) && ran.err.contains("00000003"), "{}", ran.err);
}

#[tokio::test]
async fn a_sandbox_is_shown_edited_and_deleted_without_a_server() {
    let store = tempfile::tempdir().unwrap();
    let id = put(store.path(), 1);
    let name = id.as_str();
    let ran = baton(store.path(), &["get", name], None).await;
    assert!(ran.code == Some(0) && ran.out.contains("checkpointed"), "{}{}", ran.out, ran.err);

    let ran = baton(store.path(), &["edit", name, "--set", "labels.team=blue"], None).await;
    assert!(ran.code == Some(0) && ran.err.contains("blue"), "{}{}", ran.out, ran.err);
    let ran = baton(store.path(), &["edit", name], Some("sed -i s/blue/green/")).await;
    assert!(ran.code == Some(0) && ran.err.contains("green"), "{}{}", ran.out, ran.err);
    let ran = baton(store.path(), &["edit", name], Some("sed -i s/checkpointed/dancing/")).await;
    assert!(ran.code == Some(1) && ran.err.contains("InvalidSpec"), "{}{}", ran.out, ran.err);
    let ran = baton(store.path(), &["edit", name], Some("true")).await;
    assert!(ran.code == Some(0) && ran.out.contains("nothing"), "{}{}", ran.out, ran.err);
    let ran = baton(store.path(), &["list", "--label", "team=green"], None).await;
    assert_eq!(ran.out.lines().count(), 2, "{}", ran.out);

    fs::remove_file(store.path().join(format!("sandboxes/{id}/lock.json"))).unwrap();
    let ran = baton(store.path(), &["repair", name], None).await;
    assert!(ran.code == Some(3) && ran.out.contains("LockMissing"), "{}{}", ran.out, ran.err);
    let ran = baton(store.path(), &["repair", name, "--nobody-runs-it"], None).await;
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);

    let ran = baton(store.path(), &["delete", name], None).await;
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), format!("{id} is deleted\n").as_str()), "{}", ran.err);
    let ran = baton(store.path(), &["gc", "--tombstones-after", "0s"], None).await;
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(!store.path().join(format!("sandboxes/{id}/lock.json")).exists());
    let ran = baton(store.path(), &["get", name], None).await;
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    assert_eq!(baton(store.path(), &["get", "nonsense"], None).await.code, Some(1));
    assert_eq!(baton(store.path(), &["get", "no sense"], None).await.code, Some(2));
    assert_eq!(baton(store.path(), &["watch", "--for", "1s"], None).await.code, Some(0));
}

#[tokio::test]
async fn without_storage_and_for_an_unknown_reason_the_error_says_what_to_do() {
    let nowhere = Path::new("");
    let ran = baton(nowhere, &["list"], None).await;
    assert!(ran.code == Some(1) && ran.err.contains("SANDBOX_METADATA_BUCKET"), "{}", ran.err);
    let ran = baton(nowhere, &["explain", "lockmissing"], None).await;
    assert!(ran.code == Some(0) && ran.out.contains("baton repair"), "{}", ran.out);
    assert_eq!(baton(nowhere, &["explain", "Nonsense"], None).await.code, Some(1));
}

#[tokio::test]
async fn a_check_ends_with_what_does_not_work_and_not_with_good_news() {
    let store = tempfile::tempdir().unwrap();
    let check = ["config", "--check"];
    let ran = baton(store.path(), &check, None).await;
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert_eq!(ran.out.lines().last(), Some("Sandboxes can outlive this instance."));
    // Nothing listens there.
    let broken = [&check[..], &["--sandbox-metadata-bucket", "b", "--storage-emulator-host", "127.0.0.1:1"]].concat();
    let ran = baton(store.path(), &broken, None).await;
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    assert_eq!(ran.out.lines().last(), Some("2 of 4 stores do not work: what needs them fails."), "{}", ran.out);
}

/// The command that a message names between backticks, as its words; it must be the only one.
fn named_command(message: &str, id: &SandboxId) -> Vec<String> {
    let quoted = message.split('`').skip(1).step_by(2).filter(|quoted| quoted.starts_with("baton "));
    let commands: Vec<_> = quoted.collect();
    let [command] = commands[..] else { panic!("{commands:?} in: {message}") };
    assert!(command.contains(id.as_str()), "{command} names no sandbox");
    command.split_whitespace().skip(1).map(str::to_owned).collect()
}

#[tokio::test]
async fn the_command_that_a_message_names_helps() {
    /// Breaks one object of a sandbox.
    type Break = fn(&Path);
    let garbled: Break = |folder| fs::write(folder.join("metadata.json"), "{ not json").unwrap();
    let invalid: Break = |folder| {
        let text = fs::read_to_string(folder.join("metadata.json")).unwrap();
        fs::write(folder.join("metadata.json"), text.replace("\"checkpointed\"", "\"dancing\"")).unwrap();
    };
    let no_metadata: Break = |folder| fs::remove_file(folder.join("metadata.json")).unwrap();
    let no_lock: Break = |folder| fs::remove_file(folder.join("lock.json")).unwrap();
    let bad_lock: Break = |folder| fs::write(folder.join("lock.json"), "{").unwrap();
    let verbs: [&[&str]; 3] = [&["get"], &["repair"], &["edit", "--set", "ttl=60"]];
    for (what, broken, helps) in [
        ("garbled metadata", garbled, "repair"),
        ("no metadata", no_metadata, "repair"),
        ("no lock", no_lock, "repair"),
        ("an unusable lock", bad_lock, "repair"),
    ] {
        for verb in verbs {
            // `repair` makes lost metadata again by itself.
            if what == "no metadata" && verb[0] == "repair" {
                continue;
            }
            let store = tempfile::tempdir().unwrap();
            let id = put(store.path(), 1);
            broken(&store.path().join(format!("sandboxes/{id}")));
            let ran = baton(store.path(), &[&verb[..1], &[id.as_str()], &verb[1..]].concat(), None).await;
            let said = format!("{}{}", ran.out, ran.err);
            let command = named_command(&said, &id);
            assert_eq!(command[0], helps, "{what}, {verb:?}: {said}");
            let words: Vec<_> = command.iter().map(String::as_str).collect();
            let ran = baton(store.path(), &words, None).await;
            assert_eq!(ran.code, Some(0), "{what}, {verb:?}: {words:?}: {}{}", ran.out, ran.err);
            for after in
                [&["get", id.as_str()][..], &["edit", id.as_str(), "--set", "ttl=60"], &["delete", id.as_str()]]
            {
                let ran = baton(store.path(), after, None).await;
                assert_eq!(ran.code, Some(0), "{what}, {after:?}: {}{}", ran.out, ran.err);
            }
        }
    }
    // A wrong value is corrected by an edit, and repair says so.
    let store = tempfile::tempdir().unwrap();
    let id = put(store.path(), 1);
    invalid(&store.path().join(format!("sandboxes/{id}")));
    let ran = baton(store.path(), &["repair", id.as_str()], None).await;
    assert_eq!(named_command(&ran.out, &id), ["edit", id.as_str()]);
    let ran = baton(store.path(), &["edit", id.as_str(), "--set", "desired_state=checkpointed"], None).await;
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
}

#[tokio::test]
async fn an_unsigned_lock_is_signed_by_the_command_that_every_verb_names() {
    let store = tempfile::tempdir().unwrap();
    let id = put(store.path(), 1);
    let signed = async |args: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        command.env_clear().env("CHECKPOINT_AND_RESTORE_PATH", store.path());
        command.env("BATON_HMAC_KEY", "a-key-of-at-least-thirty-two-bytes-").args(args).stdin(Stdio::null());
        let output = command.output().await.unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    for verb in [&["get", id.as_str()][..], &["edit", id.as_str(), "--set", "ttl=60"], &["delete", id.as_str()]] {
        let (_, said) = signed(verb).await;
        assert_eq!(named_command(&said, &id), ["repair", id.as_str(), "--sign"], "{verb:?}");
    }
    let (code, said) = signed(&["repair", id.as_str(), "--sign"]).await;
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = signed(&["edit", id.as_str(), "--set", "ttl=70"]).await;
    assert_eq!(code, Some(0), "{said}");
}

#[tokio::test]
async fn an_edit_refuses_what_is_not_an_operators_unless_it_is_forced() {
    let store = tempfile::tempdir().unwrap();
    let id = put(store.path(), 1);
    let edit = async |more: &[&str]| baton(store.path(), &[&["edit", "00000001"][..], more].concat(), None).await;
    for (setting, named) in [
        ("env.A=b", "the client sets it"),
        ("desired_sate=running", "there is no field `desired_sate`"),
        ("sandbox_id=sandbox-x", "it is fixed"),
        ("status.phase=running", "only the instance that holds"),
    ] {
        let ran = edit(&["--set", setting]).await;
        assert!(ran.code == Some(2) && ran.err.contains(named), "{setting}: {:?} {}", ran.code, ran.err);
    }
    let ran = edit(&["--force", "--set", "env.A=b", "--set", "note=mine"]).await;
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert_eq!(edit(&["--force", "--set", "status.phase=running"]).await.code, Some(2));
    let text = fs::read_to_string(store.path().join(format!("sandboxes/{id}/metadata.json"))).unwrap();
    assert!(text.contains("\"note\": \"mine\""), "{text}");
    // Nobody starts it: what was asked for stays asked for.
    let ran = edit(&["--timeout", "1", "--set", "desired_state=running", "--set", "placement=null"]).await;
    assert!(ran.code == Some(4) && ran.err.contains("waiting for the sweep"), "{}{}", ran.out, ran.err);
}

#[tokio::test]
async fn ids_are_abbreviated_in_every_verb_on_the_storage() {
    let store = tempfile::tempdir().unwrap();
    let (one, two) = (put(store.path(), 0x1a), put(store.path(), 0x1b));
    for verb in [&["get"][..], &["checkpoints"], &["repair"], &["edit", "--set", "ttl=9"], &["delete", "--no-wait"]] {
        let ran = baton(store.path(), &[verb, &["0000001"]].concat(), None).await;
        assert!(ran.code == Some(1) && ran.err.contains("is ambiguous"), "{verb:?}: {}", ran.err);
        let ran = baton(store.path(), &[verb, &["0000001a"]].concat(), None).await;
        assert_eq!(ran.code, Some(0), "{verb:?}: {}{}", ran.out, ran.err);
        let ran = baton(store.path(), &[verb, &["ffff"]].concat(), None).await;
        assert!(ran.code == Some(1) && ran.err.contains("begins with `ffff`"), "{verb:?}: {}", ran.err);
    }
    let read = |id: &SandboxId| fs::read_to_string(store.path().join(format!("sandboxes/{id}/metadata.json"))).unwrap();
    assert!(read(&one).contains("\"deleted\"") && !read(&two).contains("\"deleted\""));
}

#[tokio::test]
async fn one_broken_object_does_not_keep_a_snapshot() {
    let store = tempfile::tempdir().unwrap();
    let (broken, garbled) = (put(store.path(), 1), put(store.path(), 2));
    fs::write(store.path().join(format!("sandboxes/{broken}/metadata.json")), "{").unwrap();
    fs::write(store.path().join(format!("sandboxes/{garbled}/lock.json")), "{").unwrap();
    let archive = store.path().join("tools.tar");
    fs::write(&archive, [0; 1024]).unwrap();
    let ran = baton(store.path(), &["snapshot", "import", archive.to_str().unwrap()], None).await;
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    // What still names it in an object that is not valid counts.
    let record = store.path().join(format!("sandboxes/{broken}/metadata.json"));
    fs::write(&record, r#"{"filesystem_snapshot_name": "tools"}"#).unwrap();
    let ran = baton(store.path(), &["snapshot", "delete", "tools"], None).await;
    assert!(ran.code == Some(1) && ran.err.contains(broken.as_str()), "{}", ran.err);
    fs::write(&record, "{").unwrap();
    let ran = baton(store.path(), &["snapshot", "delete", "tools"], None).await;
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!([&broken, &garbled].iter().all(|id| ran.err.contains(id.as_str())), "{}", ran.err);
}
