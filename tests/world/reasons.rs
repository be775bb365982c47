//! Reasons: nobody makes one up, and every one there is can come about.

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton_protocol::reason::Reason;

fn sources(below: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

fn text() -> String {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

#[test]
fn every_reason_that_is_reported_can_be_explained() {
    // A reason is a value of one enum, so what the code reports is in it; what is left to check
    // is that no place goes around it with a text of its own.
    for line in text().lines() {
        let made_up = ["{ reason: \"", "status.reason = \"", "reason: String::from"];
        assert!(!made_up.iter().any(|text| line.contains(text)), "take it from Reason: {line}");
    }
}

#[test]
fn every_reason_that_can_be_explained_is_reported_somewhere() {
    let text = text();
    for reason in Reason::ALL {
        assert!(text.contains(&format!("Reason::{reason:?}")), "nothing reports {reason}");
    }
}
