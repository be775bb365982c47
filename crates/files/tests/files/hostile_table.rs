//! The archives of `clients/suite/hostile_archives.json`, which every client unpacks: the very same bytes, and one judge.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use baton_files::{Fault, TransferTotals, Trust};
use serde_json::{Map, Value, json};

fn suite() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/suite")
}

/// Runs the program that prepares the scenes and judges them.
fn ask(verb: &str, place: &Path, input: &str) -> Output {
    let mut child = Command::new("python3")
        .arg(suite().join("hostile_archives.py"))
        .arg(verb)
        .arg(place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Unpacks every archive of the table by `way`; what the judge says of each.
fn complaints(way: impl Fn(&[u8], &Path) -> Result<TransferTotals, Fault>) -> Map<String, Value> {
    let place = tempfile::tempdir().unwrap();
    assert!(ask("prepare", place.path(), "").status.success());
    let mut outcomes = Map::new();
    for scene in fs::read_dir(place.path()).unwrap() {
        let scene = scene.unwrap();
        let archive = fs::read(scene.path().join("archive.tar")).unwrap();
        let outcome = match way(&archive, &scene.path().join("scene/target")) {
            Ok(done) => json!({"left_out": done.faults}),
            Err(fault) => json!({"error": fault.to_string()}),
        };
        outcomes.insert(scene.file_name().into_string().unwrap(), outcome);
    }
    assert!(outcomes.len() >= 50, "{} archives", outcomes.len());
    let judged = ask("judge", place.path(), &Value::from(outcomes).to_string());
    let complaints: Map<String, Value> = serde_json::from_slice(&judged.stdout).unwrap();
    assert!(complaints.len() >= 50, "{} verdicts", complaints.len());
    complaints.into_iter().filter(|(_, found)| *found != json!([])).collect()
}

#[test]
fn every_hostile_archive_leaves_behind_what_the_table_says() {
    let unpacked =
        |mut archive: &[u8], target: &Path| baton_files::unpack(&mut archive, target, Trust::Stranger, &mut |_| {});
    assert_eq!(complaints(unpacked), Map::new());
    let fetched =
        |mut archive: &[u8], target: &Path| baton_files::fetch(&mut archive, target, Trust::Stranger, &mut |_| {});
    assert_eq!(complaints(fetched), Map::new());
}

#[test]
fn the_judge_sees_what_unpacking_of_a_known_archive_does_otherwise() {
    let trusted =
        |mut archive: &[u8], target: &Path| baton_files::unpack(&mut archive, target, Trust::Known, &mut |_| {});
    let found = complaints(trusted);
    for name in ["other-users", "file-through-relative-link", "dressed-link"] {
        assert!(found.contains_key(name), "{name} is not noticed: {found:?}");
    }
    let touched = found.values().any(|complaints| complaints.to_string().contains("outside, "));
    assert!(!touched, "also of a known archive no member is written outside: {found:?}");
}
