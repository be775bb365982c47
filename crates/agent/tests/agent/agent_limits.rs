//! What a command may have, and what goes when the sandbox has too much.

use baton_protocol::{
    agent::{Assign, Relieve},
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, command, shell};

const WHY: &str = "the sandbox is over its memory limit of 512MiB";

fn relieve(used: u64) -> Frame {
    Frame::new(FrameKind::Relieve).payload(serde_json::to_vec(&Relieve { used, why: WHY.to_owned() }).unwrap())
}

/// A shell that holds many megabytes; done when it does.
fn greedy(probe: &mut AgentProcess, number: u32, script: &str) -> i32 {
    let pid = probe.started(number, &shell(script));
    probe.credit(number, Stream::Stdout, ALL);
    probe.credit(number, Stream::Stderr, ALL);
    probe.wait_for(FrameKind::Data, number);
    pid
}

const HOLD: &str = "x=$(head -c 40000000 /dev/zero | tr '\\0' a); echo held; sleep 1000 & wait";

#[test]
fn a_command_cannot_have_more_processes_and_open_files_than_it_was_given() {
    let mut probe = AgentProcess::assigned(Assign { pids: Some(77), files: Some(55), ..Assign::default() });
    // It begins a moment before it is held.
    let script = "until [ \"$(ulimit -Hn)\" = 55 ]; do :; done; ulimit -Hu; ulimit -Su; ulimit -Sn";
    assert_eq!(probe.run(1, &shell(script)).text(), "77\n77\n55\n");
    let child = probe.run(2, &shell(&format!("{script}; bash -c 'ulimit -Hu; ulimit -Hn'")));
    assert_eq!(child.text(), "77\n77\n55\n77\n55\n");
    let user = probe.run(3, &baton_protocol::agent::AgentExec { user: Some("nobody".to_owned()), ..shell(script) });
    assert_eq!(user.text(), "77\n77\n55\n");
}

#[test]
fn without_limits_a_command_has_what_the_agent_has() {
    let mut probe = AgentProcess::start();
    let own = std::process::Command::new("bash").args(["-c", "ulimit -Hu; ulimit -Hn"]).output().unwrap();
    assert_eq!(probe.run(1, &shell("ulimit -Hu; ulimit -Hn")).stdout, own.stdout);
}

#[test]
fn what_takes_most_is_ended_and_told_why() {
    let mut probe = AgentProcess::start();
    let other = probe.started(2, &command(&["sleep", "1000"]));
    let pid = greedy(&mut probe, 1, HOLD);
    probe.send(relieve(60_000_000));
    let exit = probe.exit(1);
    assert_eq!((exit.signal, exit.reason.as_deref()), (Some(9), Some(WHY)));
    let told = String::from_utf8(probe.wait_for(FrameKind::Data, 1).payload).unwrap();
    assert_eq!(told, format!("baton: process {pid} (bash) was killed: {WHY}\n"));
    assert!(probe.is_alive(other));
}

#[test]
fn a_child_that_takes_most_is_ended_alone_and_its_command_told() {
    let mut probe = AgentProcess::start();
    let child = HOLD.replace('$', "\\$");
    greedy(&mut probe, 1, &format!("bash -c \"{child}\" & wait $!; echo $? >&2; exit 3"));
    probe.send(relieve(60_000_000));
    let exit = probe.exit(1);
    assert_eq!((exit.code, exit.reason), (Some(3), None), "the command itself went on");
    let told = String::from_utf8(probe.wait_for(FrameKind::Data, 1).payload).unwrap();
    assert!(told.starts_with("baton: process ") && told.contains(WHY), "{told}");
}

#[test]
fn many_that_take_little_are_all_ended() {
    let mut probe = AgentProcess::start();
    let first = probe.started(1, &command(&["sleep", "1000"]));
    let second = probe.started(2, &shell("setsid sleep 1000 & sleep 1000"));
    probe.send(relieve(1 << 40));
    for number in [1, 2] {
        assert_eq!(probe.exit(number).reason.as_deref(), Some(WHY));
    }
    [first, second].into_iter().for_each(|pid| probe.wait_for_death(pid));
    assert_eq!(probe.run(3, &shell("echo alive")).text(), "alive\n");
    // Nothing runs any more: outside a sandbox there is nothing else to give.
    probe.send(relieve(1 << 40));
    assert_eq!(probe.run(4, &shell("echo alive")).text(), "alive\n");
}
