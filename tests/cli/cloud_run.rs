//! What a server says where `K_SERVICE` is set: one JSON object a line, as Cloud Logging reads it, from the first line
//! to the reason of its end.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};

fn baton(verb: &str, place: &tempfile::TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg(verb).env_clear().env("K_SERVICE", "baton").env("BATON_LISTEN", "127.0.0.1:0");
    command.env("BATON_ADMIN_LISTEN", "off").env("BATON_SOCKET_DIR", place.path().join("halves"));
    command.env("BATON_STATE_DIR", place.path().join("state")).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn line(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[tokio::test]
async fn every_line_of_a_server_is_an_object_with_severity_and_message() {
    let place = tempfile::tempdir().unwrap();
    let mut command = tokio::process::Command::from(baton("api", &place));
    let mut server = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let heard = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            let said = line(&lines.next_line().await.unwrap().expect("it says that it waits"));
            assert!(said["message"].is_string() && said["severity"].is_string(), "{said}");
            if said["message"] == "the reconciler cannot be reached yet" {
                return said;
            }
        }
    });
    let said = heard.await.expect("in time");
    assert_eq!(said["severity"], "WARNING");
    assert!(said["error"].as_str().is_some_and(|why| why.contains("baton.sock")), "its fields beside it: {said}");
    server.start_kill().unwrap();
    server.wait().await.unwrap();
}

#[tokio::test]
async fn what_ends_a_server_is_one_entry_of_severity_error() {
    let place = tempfile::tempdir().unwrap();
    for (verb, name, value, complaint) in [
        ("serve", "BATON_RUNSC", "/nowhere/runsc", "there is no"),
        ("api", "BATON_DRAIN", "soon", "BATON_DRAIN is 'soon'"),
        ("reconciler", "BATON_LOG", "baton=loud", "BATON_LOG"),
    ] {
        let mut command = tokio::process::Command::from(baton(verb, &place));
        let output = command.env(name, value).kill_on_drop(true).output();
        let output = tokio::time::timeout(Duration::from_secs(60), output).await.expect("it ends by itself").unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        let said = line(&said);
        assert_eq!(said["severity"], "ERROR");
        assert!(said["message"].as_str().is_some_and(|text| text.contains(complaint)), "{said}");
    }
}
