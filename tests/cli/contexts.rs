//! `baton context`, and the verbs that use a context without any variable.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Output};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::get,
};
use baton_protocol::{
    event::{Event, Status},
    request::{Persistence, Request},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, process::Command, task::JoinSet};

use crate::{
    cli_exec::{leaves, output},
    operators,
    script::{ID, Server, sandbox_id, soon, token},
};

/// A person without any variable but a home.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn baton(&self, arguments: &[&str]) -> Command {
        let mut command = crate::pipes::baton("");
        command.env("HOME", self.path()).env_remove("BATON_URL").args(arguments);
        command
    }

    async fn sees(&self, arguments: &[&str]) -> Output {
        output(self.baton(arguments).spawn().unwrap()).await
    }

    /// What is printed; it must work.
    async fn gets(&self, arguments: &[&str]) -> String {
        let ran = self.sees(arguments).await;
        assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    }

    async fn fails(&self, arguments: &[&str], code: i32) -> String {
        let ran = self.sees(arguments).await;
        assert_eq!(ran.status.code(), Some(code), "{arguments:?}: {ran:?}");
        String::from_utf8(ran.stderr).unwrap()
    }
}

/// A server that lists one sandbox in its memory to whoever shows the key.
struct Listing {
    url: String,
    _task: JoinSet<()>,
}

impl Listing {
    async fn start(key: &'static str) -> Self {
        let view = json!({"sandbox_id": ID, "phase": "running", "labels": {"team": "red"}, "age_seconds": 3});
        let list = move |State(view): State<Value>, headers: HeaderMap| async move {
            let is_right = headers.get("x-api-key").is_some_and(|given| given == key);
            is_right.then(|| Json(json!({"sandboxes": [view], "next": null}))).ok_or(StatusCode::UNAUTHORIZED)
        };
        let one = |State(view): State<Value>| async move { Json(view) };
        let site =
            Router::new().route("/sandboxes", get(list)).route(&format!("/sandboxes/{ID}"), get(one)).with_state(view);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("ws://{}", listener.local_addr().unwrap());
        let mut task = JoinSet::new();
        task.spawn(async move { axum::serve(listener, site).await.unwrap() });
        Self { url, _task: task }
    }
}

#[tokio::test]
async fn contexts_are_set_listed_selected_shown_without_their_keys_and_removed() {
    let home = Home::new();
    assert_eq!(home.gets(&["context", "list", "-o", "name"]).await, "");
    let mine = ["context", "set", "mine", "--url", "wss://a.example", "--api-key", "s3cret", "--use"];
    home.gets(&mine).await;
    home.gets(&["context", "set", "other", "--storage", "SANDBOX_METADATA_BUCKET=b"]).await;
    let file = home.path().join(".config/baton/contexts.json");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(home.gets(&["context", "list", "-o", "name"]).await, "mine\nother\n");
    let listed = home.gets(&["context", "list"]).await;
    assert!(listed.contains("*  mine   wss://a.example  api   -") && listed.contains("other"), "{listed}");
    for shown in [home.gets(&["context", "show"]).await, home.gets(&["context", "show", "mine", "-o", "json"]).await] {
        assert!(shown.contains("(redacted)") && !shown.contains("s3cret"), "{shown}");
    }
    // What is not given stays; an empty value removes it.
    home.gets(&["context", "set", "mine", "--api-key", "", "--storage", "BATON_TAKEOVER=1m"]).await;
    let shown: Value = serde_json::from_str(&home.gets(&["context", "show", "-o", "json"]).await).unwrap();
    assert_eq!((&shown["url"], &shown["api_key"]), (&json!("wss://a.example"), &Value::Null));
    assert_eq!(shown["storage"]["BATON_TAKEOVER"], "1m");
    home.gets(&["context", "use", "other"]).await;
    home.gets(&["context", "rm", "other"]).await;
    let error = home.fails(&["context", "show"], 2).await;
    assert!(error.contains("no context is selected"), "{error}");
    for arguments in [&["context", "use", "gone"][..], &["list", "--context", "gone"], &["context", "rm", "gone"]] {
        let error = home.fails(arguments, 2).await;
        assert!(error.contains("no context `gone`"), "{error}");
    }
    let error = home.fails(&["context", "set", "x", "--storage", "BATON_LISTEN=1"], 2).await;
    assert!(error.contains("not a variable of the storage"), "{error}");
    // A file that is not understood is named, and not overwritten.
    fs::write(&file, "{\"contexts\": 3}").unwrap();
    for arguments in [&["list"][..], &["create"], &["context", "set", "x", "--url", "ws://x"]] {
        let error = home.fails(arguments, 1).await;
        assert!(error.contains("contexts.json is damaged"), "{error}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"contexts\": 3}");
}

type Variables<'a> = &'a [(&'a str, &'a str)];

#[tokio::test]
async fn a_new_sandbox_goes_to_the_selected_server_with_its_key_and_options_and_variables_come_first() {
    let (here, there) = (Server::start().await, Server::start().await);
    let home = Home::new();
    home.gets(&["context", "set", "here", "--url", &here.url(), "--api-key", "of-here", "--use"]).await;
    home.gets(&["context", "set", "there", "--url", &there.url(), "--api-key", "of-there"]).await;
    let url = there.url();
    let cases: [(&Server, &str, &[&str], Variables<'_>); 5] = [
        (&here, "of-here", &["create"], &[]),
        (&there, "of-there", &["create", "--context", "there"], &[]),
        (&there, "of-there", &["create"], &[("BATON_CONTEXT", "there")]),
        (&there, "of-there", &["--context", "there", "create"], &[("BATON_URL", "ws://127.0.0.1:1")]),
        (&here, "given", &["create", "--api-key", "given"], &[("BATON_API_KEY", "variable")]),
    ];
    for (server, key, arguments, variables) in cases {
        let child = home.baton(arguments).envs(variables.iter().copied()).spawn().unwrap();
        let peer = server.create().await;
        assert_eq!(peer.headers["x-api-key"], key, "{arguments:?}");
        leaves(peer).await;
        assert!(output(child).await.status.success());
    }
    // Keys are not sent to a server that is named otherwise.
    for (arguments, variables) in [(vec!["create", "--url", &url], vec![]), (vec!["create"], vec![("BATON_URL", &url)])]
    {
        let child = home.baton(&arguments).envs(variables).spawn().unwrap();
        let peer = there.create().await;
        assert!(!peer.headers.contains_key("x-api-key"), "{arguments:?}");
        leaves(peer).await;
        assert!(output(child).await.status.success());
    }
}

#[tokio::test]
async fn sandboxes_in_memory_and_stored_ones_are_listed_shown_and_watched_by_a_context() {
    let (server, home) = (Listing::start("admin").await, Home::new());
    let store = tempfile::tempdir().unwrap();
    let stored = operators::put(store.path(), 7);
    let storage = format!("CHECKPOINT_AND_RESTORE_PATH={}", store.path().display());
    let set = ["context", "set", "local", "--url", &server.url, "--admin-key", "admin", "--storage", &storage, "--use"];
    home.gets(&set).await;
    assert_eq!(home.gets(&["list", "-o", "name"]).await, format!("{ID}\n"));
    let listed = home.gets(&["list", "--phase", "running", "--label", "team=red"]).await;
    assert!(listed.contains(ID) && listed.starts_with("SANDBOX"), "{listed}");
    assert!(!home.gets(&["list", "--phase", "failed"]).await.contains(ID));
    // By the beginning of the id: the one in memory from the server, the other from the storage.
    let shown = home.gets(&["get", &ID[8..14]]).await;
    assert!(shown.contains(ID) && shown.contains("running"), "{shown}");
    let shown = home.gets(&["get", &stored.as_str()[8..16]]).await;
    assert!(shown.contains(stored.as_str()) && shown.contains("holder"), "{shown}");
    let watched = home.gets(&["watch", "--for", "1", "--every", "0.2"]).await;
    assert!(watched.contains(ID), "{watched}");
    // Operators' verbs use the storage of the context.
    home.gets(&["edit", &stored.as_str()[8..16], "--set", "labels.team=blue"]).await;
    // A server that is gone does not hide what is stored.
    home.gets(&["context", "set", "local", "--url", "ws://127.0.0.1:1"]).await;
    let ran = home.sees(&["list"]).await;
    let (out, err) = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap());
    assert!(ran.status.success() && out.contains(stored.as_str()) && err.contains("no server answers"), "{out}{err}");
    // Variables of the storage take the place of all that the context says.
    let other = tempfile::tempdir().unwrap();
    let mut command = home.baton(&["list", "-o", "json"]);
    let ran = output(command.env("CHECKPOINT_AND_RESTORE_PATH", other.path()).spawn().unwrap()).await;
    assert_eq!(ran.stdout, b"[]\n");
    let mut command = home.baton(&["list", "-o", "name", "--context", "local"]);
    let ran = output(command.env("CHECKPOINT_AND_RESTORE_PATH", other.path()).spawn().unwrap()).await;
    assert_eq!(ran.stdout, format!("{stored}\n").as_bytes());
}

#[tokio::test]
async fn a_context_is_made_from_the_settings_of_a_server() {
    let home = Home::new();
    let mut command =
        home.baton(&["context", "set", "local", "--from-server", "--use", "--", "--listen", "0.0.0.0:9090"]);
    command.env("BATON_ADMIN_KEY", "s3cret").env("CHECKPOINT_AND_RESTORE_PATH", "/data");
    let ran = output(command.spawn().unwrap()).await;
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let file = fs::read_to_string(home.path().join(".config/baton/contexts.json")).unwrap();
    let file: Value = serde_json::from_str(&file).unwrap();
    let expected = json!({"current": "local", "contexts": {"local": {
        "url": "ws://127.0.0.1:9090", "admin_key": "s3cret", "storage": {"CHECKPOINT_AND_RESTORE_PATH": "/data"}
    }}});
    assert_eq!(file, expected);
}

#[tokio::test]
async fn a_sandbox_is_kept_where_that_is_possible_unless_it_is_said_otherwise() {
    let cases: [(&[&str], Option<Persistence>, bool); 4] = [
        (&["create"], Some(Persistence::Auto), false),
        (&["create", "--persistent"], Some(Persistence::Yes), false),
        (&["create", "--ephemeral"], Some(Persistence::No), false),
        (&["create", "--checkpoint"], None, true),
    ];
    for (arguments, persistent, checkpoint) in cases {
        let (server, home) = (Server::start().await, Home::new());
        let child = home.baton(arguments).env("BATON_URL", server.url()).spawn().unwrap();
        let mut peer = server.accept().await;
        peer.hello().await;
        peer.status(Status::Creating).await;
        let Request::Config(config) = peer.request().await else { panic!("no config") };
        assert_eq!((config.persistent, config.enable_checkpoint), (persistent, checkpoint), "{arguments:?}");
        let event = Event::SandboxId { sandbox_id: sandbox_id(), sandbox_token: token(), persistent: Some(false) };
        peer.say(&event).await;
        peer.status(Status::Running).await;
        leaves(peer).await;
        let ran = output(child).await;
        assert_eq!(ran.stdout, format!("{ID}\n").as_bytes());
        let is_told = String::from_utf8(ran.stderr).unwrap().contains("the server has no storage");
        assert_eq!(is_told, persistent == Some(Persistence::Auto), "{arguments:?}");
    }
    let home = Home::new();
    home.fails(&["create", "--ephemeral", "--persistent"], 2).await;
    let help = home.gets(&["create", "--help"]).await;
    assert!(help.contains("How long it lives") && help.contains("--checkpoint"), "{help}");
    let short = home.gets(&["create", "-h"]).await;
    assert!(short.contains("--ephemeral") && !short.contains("--auto-checkpoint"), "{short}");
}

#[tokio::test]
async fn values_are_completed_from_saved_tokens_storage_reasons_and_contexts() {
    let home = Home::new();
    let store = tempfile::tempdir().unwrap();
    let stored = operators::put(store.path(), 7);
    let storage = format!("CHECKPOINT_AND_RESTORE_PATH={}", store.path().display());
    home.gets(&["context", "set", "local", "--storage", &storage, "--use"]).await;
    let complete = async |words: &[&str]| home.gets(&[&["complete-values", "--"][..], words].concat()).await;
    assert_eq!(complete(&["delete", ""]).await, format!("{stored}\n"));
    assert_eq!(complete(&["delete", "0000"]).await, format!("{}\n", &stored.as_str()[8..]));
    assert_eq!(complete(&["explain", "lockm"]).await, "LockMissing\n");
    assert_eq!(complete(&["context", "use", ""]).await, "local\n");
    assert_eq!(complete(&["lis"]).await, "");
    // The script for bash asks for them.
    let script = home.gets(&["completions", "bash"]).await;
    let script =
        script + "\nCOMP_WORDS=(baton delete sandbox-0); COMP_CWORD=2; _baton_values; echo \"${COMPREPLY[@]}\"";
    let program = Path::new(env!("CARGO_BIN_EXE_baton")).parent().unwrap();
    let mut bash = Command::new("bash");
    let file = home.path().join("completions.bash");
    fs::write(&file, script).unwrap();
    bash.arg(file).env_clear().env("HOME", home.path());
    bash.env("PATH", format!("{}:/usr/bin:/bin", program.display()));
    let ran = soon(bash.output()).await.unwrap();
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), format!("{stored}\n"), "{:?}", ran.stderr);
}

#[tokio::test]
async fn the_help_of_a_verb_on_the_storage_fits_a_screen() {
    let home = Home::new();
    for verb in ["list", "delete", "import", "export"] {
        let help = home.gets(&["snapshot", verb, "--help"]).await;
        let screen = if verb == "list" { 24 } else { 40 };
        assert!(help.lines().count() <= screen, "{help}");
        // The options of the server are still accepted.
        let error = home.fails(&["snapshot", verb, "--filesystem-snapshot-bucket"], 2).await;
        assert!(error.contains("value is required"), "{error}");
    }
}
