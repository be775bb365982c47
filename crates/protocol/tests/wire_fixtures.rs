//! Every fixture is read, written again and found unchanged, and every variant has one.
//! Clients in other languages test against the same files.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, fs, path::Path};

use baton_protocol::{
    event::{EndReason, Event, Status},
    file_work::{FileChange, FileChangeKind, FileEntry, FileKind},
    lock::Lock,
    manifest,
    metadata::{Metadata, SpecRequest as Wish},
    request::{Command, Request},
    versioned::{self, Unreadable, Versioned},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn fixtures(folder: &str) -> BTreeMap<String, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(folder);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    files
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(path).unwrap()))
        .collect()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn every_request_comes_back_as_it_was() {
    for (name, text) in fixtures("requests") {
        let request = Request::parse(&text).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
        assert_eq!(json(&request.to_json()), json(&text), "{name}");
        assert_eq!(Request::parse(&request.to_json()).unwrap(), request, "{name}");
    }
}

#[test]
fn every_kind_of_request_has_its_fixture() {
    let mut words: Vec<_> = fixtures("requests").values().map(|text| Request::parse(text).unwrap().word()).collect();
    words.sort_unstable();
    words.dedup();
    let all = [
        "ack",
        "checkpoint",
        "config",
        "exec",
        "fork",
        "handoff",
        "kill_process",
        "kill_sandbox",
        "list_files",
        "make_directory",
        "read_file",
        "reconnect",
        "remove_file",
        "rename_file",
        "resize",
        "set_idle_timeout",
        "signal",
        "snapshot_filesystem",
        "stdin",
        "watch_files",
        "write_file",
    ];
    assert_eq!(words, all);
    let argv = Request::parse(&fixtures("requests")["exec_argv"]).unwrap();
    assert!(matches!(argv, Request::Exec(exec) if matches!(exec.command, Command::Argv(_))));
}

#[test]
fn every_event_comes_back_as_it_was_and_has_its_fixture() {
    let found = fixtures("events");
    for (name, text) in &found {
        let event = Event::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(json(&event.to_json()), json(text), "{name}");
        let word = match event {
            Event::StatusUpdate(_) => "status_update",
            Event::SandboxId { .. } => "sandbox_id",
            Event::Stdout { .. } => "stdout",
            Event::Stderr { .. } => "stderr",
            Event::Error { .. } => "error",
            Event::Hello { .. } => "hello",
            Event::StdinAck { .. } => "stdin_ack",
            Event::OutputGap { .. } => "output_gap",
            Event::RolledBack { .. } => "rolled_back",
            Event::EgressDenied { .. } => "egress_denied",
            Event::OutputRewound { .. } => "output_rewound",
            Event::Forked { .. } => "forked",
            Event::IdleTimeout { .. } => "idle_timeout",
        };
        assert_eq!(name, word);
    }
    assert_eq!(found.len(), 12, "all but status_update, which has a folder");
}

#[test]
fn every_status_comes_back_as_it_was_and_has_its_fixture() {
    let found = fixtures("events/status_update");
    for status in Status::ALL {
        let name = status.as_str().strip_prefix("SANDBOX_").unwrap().to_lowercase();
        let text = found.get(&name).unwrap_or_else(|| panic!("{name} has no fixture"));
        let Ok(Event::StatusUpdate(update)) = Event::parse(text) else { panic!("{name}") };
        assert_eq!(update.status, *status);
        assert_eq!(json(&Event::StatusUpdate(update).to_json()), json(text), "{name}");
    }
    assert_eq!(found.len(), Status::ALL.len());
}

#[test]
fn every_kind_of_listed_file_comes_back_as_it_was() {
    let text = &fixtures("files")["list"];
    let entries: Vec<FileEntry> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let again: Vec<Value> = entries.iter().map(|entry| serde_json::to_value(entry).unwrap()).collect();
    assert_eq!(again, text.lines().map(json).collect::<Vec<_>>());
    let kinds: Vec<_> = entries.iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [FileKind::File, FileKind::Directory, FileKind::Symlink, FileKind::Other]);
    let later = r#"{"name":"x","kind":"whiteout","later":1}"#;
    assert_eq!(serde_json::from_str::<FileEntry>(later).unwrap().kind, FileKind::Other);
}

#[test]
fn every_kind_of_change_comes_back_as_it_was() {
    let text = &fixtures("files")["watch"];
    let changes: Vec<FileChange> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let again: Vec<Value> = changes.iter().map(|change| serde_json::to_value(change).unwrap()).collect();
    assert_eq!(again, text.lines().map(json).collect::<Vec<_>>());
    let later = r#"{"type":"mount","name":"x"}"#;
    assert_eq!(serde_json::from_str::<FileChange>(later).unwrap().kind, FileChangeKind::Other);
}

#[test]
fn every_reason_of_an_end_is_told_by_its_name_and_an_unknown_one_is_no_fault() {
    for reason in EndReason::ALL {
        assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
    }
    let later = r#"{"event":"status_update","status":"SANDBOX_DELETED","reason":"comet"}"#;
    let Ok(Event::StatusUpdate(update)) = Event::parse(later) else { panic!() };
    assert_eq!(update.reason, Some(EndReason::Unknown));
}

#[test]
fn what_a_client_does_not_know_it_ignores() {
    let event = Event::parse(r#"{"event":"stdout","data":"x","later":{"field":1}}"#).unwrap();
    assert_eq!(event, Event::Stdout { data: "x".into() });
}

fn record<T: Serialize + DeserializeOwned>(name: &str) -> T {
    let text = &fixtures("records")[name];
    let record: T = serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(serde_json::to_value(&record).unwrap(), json(text), "{name}");
    record
}

#[test]
fn records_come_back_as_they_were_with_keys_nobody_here_knows() {
    let metadata: Metadata = record("metadata");
    assert!(metadata.spec.unknown.contains_key("somebody_elses_key"));
    assert_eq!(metadata.spec.requests.values().filter(|wish| **wish == Wish::Checkpoint {}).count(), 1);
    assert!(metadata.spec.traceparent.is_some_and(|context| context.sampled));
    let lock: Lock = record("lock");
    assert!(lock.unknown.contains_key("a_later_key"));
}

/// The fixtures of one kind of manifest whose version is `version`.
fn manifests(kind: &str, version: u32) -> Vec<(String, String)> {
    let prefix = format!("{kind}_v{version}");
    let is_one =
        |name: &String| name.strip_prefix(&prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
    fixtures("manifests").into_iter().filter(|(name, _)| is_one(name)).collect()
}

/// Every version ever written has a fixture and is read; what is written now is what was written with this version.
fn every_version_is_read<T: Versioned + Serialize>(kind: &str) {
    for version in 1..=T::VERSION {
        let fixtures = manifests(kind, version);
        assert!(!fixtures.is_empty(), "{kind} version {version} has no fixture");
        for (name, text) in fixtures {
            let manifest: T = versioned::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"));
            if version == T::VERSION {
                assert_eq!(serde_json::to_string_pretty(&manifest).unwrap() + "\n", text, "{name}");
            }
        }
    }
    let (name, text) = manifests(kind, T::VERSION).remove(0);
    let mut later = json(&text);
    later["version"] = (T::VERSION + 1).into();
    let error = versioned::parse::<T>(later.to_string().as_bytes()).map(|_| name).unwrap_err();
    assert!(matches!(error, Unreadable::Newer { .. }), "{error:?}");
}

#[test]
fn manifests_of_every_version_are_read_and_the_format_of_the_newest_stays() {
    every_version_is_read::<manifest::CheckpointManifest>("checkpoint");
    every_version_is_read::<manifest::SnapshotManifest>("snapshot");
}

#[test]
fn a_record_of_the_source_documents_is_enough() {
    let id = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
    let text = format!(
        r#"{{"sandbox_id":"{id}","created_timestamp":"2026-11-16T10:00:00Z","token_sha256":"","desired_state":"running"}}"#
    );
    let metadata: Metadata = serde_json::from_str(&text).unwrap();
    assert_eq!(metadata.spec.traceparent, None);
    assert_eq!((metadata.spec.idle_timeout, metadata.spec.requests.len()), (None, 0));
}

#[test]
fn a_broken_trace_context_is_no_reason_to_refuse_a_record() {
    let text = fixtures("records")["metadata"].clone();
    for broken in ["\"00-0-0-0\"", "7", "null", "{}"] {
        let mut record: Value = json(&text);
        record["traceparent"] = json(broken);
        let metadata: Metadata = serde_json::from_value(record).unwrap();
        assert_eq!(metadata.spec.traceparent, None, "{broken}");
        assert!(serde_json::to_value(&metadata).unwrap().get("traceparent").is_none());
    }
}
