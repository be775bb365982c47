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

fn id(number: u32) -> SandboxId {
    SandboxId::parse(&format!("sandbox-{number:08x}-6f0e-4b1c-9d3e-0123456789ab")).unwrap()
}

/// What a create and an end without a checkpoint leave.
fn put(store: &Path, number: u32) -> SandboxId {
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
