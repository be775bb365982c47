//! Which messages are refused, and with which status.

use super::*;

fn refused(text: &str) -> Refusal {
    Request::parse(text).expect_err(text)
}

#[test]
fn what_is_no_object_is_malformed() {
    for text in ["", "hello", "[]", "17", "null", "\"exec\"", "{\"code\":", "{}{}"] {
        assert!(refused(text).malformed, "{text}");
    }
}

#[test]
fn a_message_without_a_tag_is_a_config() {
    let Ok(Request::Config(config)) = Request::parse(r#"{"idle_timeout":"5m","unknown":[1,{}]}"#) else { panic!() };
    assert_eq!(config.idle_timeout, Some(Idle::After(std::time::Duration::from_secs(300))));
    let Ok(Request::Config(config)) = Request::parse(r#"{"idle_timeout":null,"cwd":null}"#) else { panic!() };
    assert_eq!((config.idle_timeout, config.cwd), (Some(Idle::Never), None));
}

#[test]
fn an_explicit_flag_wins_over_persistent_and_a_contradiction_is_refused() {
    let read = |text: &str| match Request::parse(text) {
        Ok(Request::Config(config)) => (config.persistent, config.enable_checkpoint),
        _ => panic!("{text}"),
    };
    assert_eq!(read(r#"{"persistent":"auto"}"#), (Some(Persistence::Auto), false));
    assert_eq!(read(r#"{"persistent":true,"enable_checkpoint":true}"#), (Some(Persistence::Yes), true));
    assert_eq!(read(r#"{"persistent":true,"enable_checkpoint":false}"#), (Some(Persistence::No), false));
    assert_eq!(read(r#"{"persistent":null,"enable_checkpoint":false}"#), (None, false));
    let refusal = refused(r#"{"persistent":false,"enable_checkpoint":true}"#);
    assert_eq!(refusal.status, Status::CreationError);
    assert!(refusal.message.contains("`enable_checkpoint` is true"), "{}", refusal.message);
}

#[test]
fn a_config_field_of_the_wrong_type_is_named() {
    for (text, field) in [
        (r#"{"idle_timeout":-1}"#, "idle_timeout"),
        (r#"{"idle_timeout":[]}"#, "idle_timeout"),
        (r#"{"enable_checkpoint":"yes"}"#, "enable_checkpoint"),
        (r#"{"persistent":"yes"}"#, "persistent"),
        (r#"{"persistent":1}"#, "persistent"),
        (r#"{"enable_sandbox_handoff":1}"#, "enable_sandbox_handoff"),
        (r#"{"filesystem_snapshot_name":"../x"}"#, "filesystem_snapshot_name"),
        (r#"{"labels":{"a":1}}"#, "labels"),
        (r#"{"env":{"A=B":"x"}}"#, "env"),
        (r#"{"cwd":"relative"}"#, "cwd"),
        (r#"{"limits":7}"#, "limits"),
        (r#"{"limits":{"memory":"much"}}"#, "limits.memory"),
        (r#"{"limits":{"memory":[[]]}}"#, "limits.memory"),
        (r#"{"limits":{"ram":1}}"#, "limits.ram"),
        (r#"{"on_incompatible":"try"}"#, "on_incompatible"),
        (r#"{"from_checkpoint":"x"}"#, "from_checkpoint"),
    ] {
        let refusal = refused(text);
        assert_eq!((refusal.status, refusal.malformed), (Status::CreationError, false), "{text}");
        assert!(refusal.message.starts_with(&format!("`{field}`")), "{text}: {}", refusal.message);
    }
}

#[test]
fn a_refusal_has_the_status_of_what_was_tried() {
    for (text, status) in [
        (r#"{"language":"perl","code":"1"}"#, Status::ExecutionUnsupportedLanguageError),
        (r#"{"language":"python"}"#, Status::ExecutionError),
        (r#"{"code":"1"}"#, Status::ExecutionError),
        (r#"{"language":7,"code":"1"}"#, Status::ExecutionError),
        (r#"{"action":"exec","argv":[]}"#, Status::ExecutionError),
        (r#"{"action":"exec","argv":["a\u0000"]}"#, Status::ExecutionError),
        (r#"{"action":"exec","argv":["a"],"pty":{"cols":0,"rows":1}}"#, Status::ExecutionError),
        (r#"{"action":"exec","argv":["a"],"timeout":"later"}"#, Status::ExecutionError),
        (r#"{"action":"exec","argv":["a"],"exec_id":"../x"}"#, Status::ExecutionError),
        (r#"{"action":"read_file"}"#, Status::ExecutionError),
        (r#"{"action":"read_file","path":""}"#, Status::ExecutionError),
        (r#"{"action":"read_file","path":"/a","archive":true,"offset":1}"#, Status::ExecutionError),
        (r#"{"action":"read_file","path":"/a","length":-1}"#, Status::ExecutionError),
        (r#"{"action":"write_file","path":"/a\u0000"}"#, Status::ExecutionError),
        (r#"{"action":"write_file","path":"/a","mode":4096}"#, Status::ExecutionError),
        (r#"{"action":"write_file","path":"/a","mtime_ms":"now"}"#, Status::ExecutionError),
        (r#"{"action":"list_files","path":"/a","depth":257}"#, Status::ExecutionError),
        (r#"{"action":"rename_file","path":"/a"}"#, Status::ExecutionError),
        (r#"{"action":"rename_file","path":"/a","to":""}"#, Status::ExecutionError),
        (r#"{"action":"make_directory","path":"/a","mode":4096}"#, Status::ExecutionError),
        (r#"{"action":"remove_file","path":"/a","recursive":"x"}"#, Status::ExecutionError),
        (r#"{"action":"watch_files"}"#, Status::ExecutionError),
        (r#"{"action":"set_idle_timeout"}"#, Status::Error),
        (r#"{"action":"set_idle_timeout","idle_timeout":0}"#, Status::Error),
        (r#"{"event":"stdin"}"#, Status::StdinError),
        (r#"{"event":"stdin","data":7}"#, Status::StdinError),
        (r#"{"event":"output"}"#, Status::Error),
        (r#"{"action":"dance"}"#, Status::Error),
        (r#"{"action":7}"#, Status::Error),
        (r#"{"action":"signal","exec_id":"a"}"#, Status::Error),
        (r#"{"action":"ack","exec_id":"a","stdout":-1}"#, Status::Error),
        (r#"{"action":"fork","count":0}"#, Status::Error),
        (r#"{"action":"checkpoint","live":"x"}"#, Status::CheckpointError),
        (r#"{"action":"snapshot_filesystem","name":"../x"}"#, Status::FilesystemSnapshotError),
    ] {
        let refusal = refused(text);
        assert_eq!((refusal.status, refusal.malformed), (status, false), "{text}: {}", refusal.message);
    }
}

#[test]
fn a_request_prints_nothing_of_its_content() {
    let request = Request::parse(r#"{"language":"bash","code":"secret"}"#).unwrap();
    assert_eq!(format!("{request:?}"), "Request(exec)");
}
