//! Reasons: nobody makes one up, and every one there is can come about.

use baton_protocol::reason::Reason;

use crate::repo_files::{read, rust_files};

fn text() -> String {
    rust_files("src").iter().map(|path| read(path)).collect()
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
