//! Numbers that a hostile agent makes up: offsets at the end of all offsets, ranges that end before they begin.
//! A session takes them as they are and goes on. The tests are built with overflow checks, under which every sum that
//! does not saturate ends the session.

use baton_protocol::{
    agent::{AgentState, ExecState, Exit, Range},
    frame::{Frame, FrameKind, MAX_PAYLOAD, Stream},
    id::ExecId,
};

use crate::scripted::{
    test_server::World,
    wire_client::{Client, V1},
};

/// Where no sum has room any more, and shortly before.
const OFFSETS: [u64; 5] = [u64::MAX, u64::MAX - 1, u64::MAX - (1 << 20), 1 << 63, 1 << 32];

fn data(stream: Stream, offset: u64, length: usize) -> Frame {
    Frame::new(FrameKind::Data).stream(stream).offset(offset).payload(vec![b'x'; length])
}

fn exit() -> Frame {
    let exit = Exit { code: Some(0), duration_ms: u64::MAX, ..Exit::default() };
    Frame::new(FrameKind::Exit).payload(serde_json::to_vec(&exit).unwrap())
}

/// All that a stream can say, in an order that no honest one has.
fn forged(offset: u64) -> Vec<Frame> {
    let streams = [Stream::Stdout, Stream::Stderr];
    let of = |stream| {
        [
            data(stream, offset, 1),
            data(stream, offset.saturating_sub(2), 5),
            // A character is begun there.
            data(stream, offset, 1).payload(vec![b'x', 0xf0, 0x9f]),
            data(stream, offset.saturating_sub(9), MAX_PAYLOAD),
            Frame::new(FrameKind::StdinAck).offset(offset),
            Frame::new(FrameKind::Eof).stream(stream).offset(offset),
            Frame::new(FrameKind::Eof).stream(stream).offset(0),
        ]
    };
    streams.into_iter().flat_map(of).chain([exit()]).collect()
}

/// The session still does what it is asked.
async fn lives(client: &mut Client) {
    client.says(r#"{"action":"dance"}"#).await;
    until(client, "ERROR").await;
}

/// Whatever else is said before it; an end of the session is not.
async fn until(client: &mut Client, wanted: &str) {
    loop {
        let word = client.word().await;
        assert!(word != "broken" && !word.starts_with("close:"), "the session ended before {wanted}");
        if word == wanted {
            return;
        }
    }
}

#[tokio::test]
async fn forged_offsets_of_output_and_input_do_not_end_a_session() {
    for offset in OFFSETS {
        for is_v1 in [false, true] {
            let world = World::new().await;
            let mut client = match is_v1 {
                false => Client::running(&world, "{}").await,
                true => Client::running_v1(&world, "{}").await,
            };
            world.agent().lock().unwrap().forged = forged(offset);
            client.exec("sleep").await;
            client.hears("EXECUTION_RUNNING").await;
            until(&mut client, "EXECUTION_DONE").await;
            client.says(r#"{"event":"stdin","data":"more"}"#).await;
            client.says(r#"{"action":"ack","exec_id":"exec-1","stdout":18446744073709551615,"stderr":1}"#).await;
            lives(&mut client).await;
        }
    }
}

/// A command as an agent tells of it that makes up every number.
fn exec_state(exec: u32, stdin: u64, range: (u64, u64), exit: Option<Exit>) -> ExecState {
    let range = Range { from: range.0, to: range.1, eof: false };
    let exec_id = ExecId::parse("forged").unwrap();
    let (command, started_ms) = (String::new(), u64::MAX);
    ExecState {
        exec,
        exec_id,
        pid: -1,
        pty: false,
        command,
        started_ms,
        background: false,
        stdin,
        stdin_crc32: Some(exec),
        stdin_closed: false,
        stdout: range,
        stderr: range,
        exit,
    }
}

#[tokio::test]
async fn forged_numbers_of_commands_do_not_end_a_session_that_comes_back() {
    let ranges = [(u64::MAX, u64::MAX), (9, 2), (u64::MAX, 0), (0, u64::MAX), (u64::MAX - 3, u64::MAX - 1)];
    for (range, exit) in ranges.into_iter().flat_map(|range| [(range, None), (range, Some(Exit::default()))]) {
        let world = World::new().await;
        let mut first = Client::running(&world, "{}").await;
        first.socket.close(None).await.unwrap();
        for is_v1 in [false, true] {
            let execs = vec![exec_state(u32::MAX, u64::MAX, range, exit.clone())];
            let state = AgentState { version: 255, last_request: u64::MAX, last_exec: u32::MAX, execs };
            world.agent().lock().unwrap().forged_state = Some(state);
            let mut client = first.again(&world, if is_v1 { &V1 } else { &[] }).await;
            until(&mut client, "RUNNING").await;
            let offsets = r#"{"forged":{"stdout":5,"stderr":18446744073709551615}}"#;
            client.says(&format!(r#"{{"action":"reconnect","offsets":{offsets}}}"#)).await;
            until(&mut client, "EXECUTION_RUNNING").await;
            client.says(r#"{"event":"stdin","exec_id":"forged","data":"more"}"#).await;
            lives(&mut client).await;
            // No number is left: the agent would take the next command for one that it has.
            client.says(r#"{"action":"exec","argv":["bash","-c","exit 0"]}"#).await;
            until(&mut client, "EXECUTION_ERROR").await;
            lives(&mut client).await;
            client.socket.close(None).await.unwrap();
        }
    }
}
