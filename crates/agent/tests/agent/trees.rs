//! Killing a command with all it started, and commands whose time is up.

use std::time::{Duration, Instant};

use baton_protocol::{
    agent::AgentExec,
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, command, shell};

fn kill_tree(number: u32) -> Frame {
    Frame::new(FrameKind::Signal).exec(number).stream(Stream::Tree).offset(9)
}

/// The process numbers a command prints, one a line, up to `count`.
fn pids(probe: &mut AgentProcess, number: u32, count: usize) -> Vec<i32> {
    probe.credit(number, Stream::Stdout, ALL);
    let mut text = String::new();
    while text.matches('\n').count() < count {
        text += &String::from_utf8(probe.wait_for(FrameKind::Data, number).payload).unwrap();
    }
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// A child, a job in a session of its own, and a daemon that left by forking twice.
const FAMILY: &str = "sleep 1000 & echo $!
setsid sleep 1000 & echo $!
(setsid bash -c 'echo $BASHPID; exec sleep 1000' &)
exec sleep 1000";

#[test]
fn a_killed_tree_leaves_nobody_not_even_a_daemon() {
    let mut probe = AgentProcess::start();
    let other = probe.started(2, &command(&["sleep", "1000"]));
    let root = probe.started(1, &shell(FAMILY));
    let family = pids(&mut probe, 1, 3);
    for pid in &family {
        assert!(probe.is_alive(*pid), "{pid}");
    }
    probe.send(kill_tree(1));
    assert_eq!(probe.exit(1).signal, Some(9));
    for pid in family.into_iter().chain([root]) {
        probe.wait_for_death(pid);
    }
    assert!(probe.is_alive(other));
    // Nobody holds its streams any more.
    probe.wait_for_state(|state| state.execs[0].stdout.eof && state.execs[0].stderr.eof);
}

#[test]
fn an_orphan_is_killed_with_its_tree_after_the_command_itself_ended() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &shell("(setsid bash -c 'echo $BASHPID; exec sleep 1000' &)"));
    assert_eq!(probe.exit(1).code, Some(0));
    let orphan = pids(&mut probe, 1, 1)[0];
    probe.ack(1, Stream::Exit, 0);
    let state = probe.state();
    assert!(!state.execs[0].stdout.eof, "the orphan holds the pipe, so the command is still listed");
    assert!(probe.is_alive(orphan));
    probe.send(kill_tree(1));
    probe.wait_for_death(orphan);
}

#[test]
fn a_fork_bomb_is_put_out() {
    let mut probe = AgentProcess::start();
    let script = "f() { sleep 1000 & [ $1 -gt 0 ] && { f $(($1-1)) & f $(($1-1)) & }; wait; }; f 5";
    probe.started(1, &shell(script));
    probe.send(kill_tree(1));
    assert_eq!(probe.exit(1).signal, Some(9));
    probe.wait_for_state(|state| state.execs[0].stdout.eof && state.execs[0].stderr.eof);
}

#[test]
fn a_milder_signal_reaches_the_tree_as_well() {
    let mut probe = AgentProcess::start();
    probe.exec(
        1,
        &shell("setsid bash -c 'trap \"echo bye; exit 0\" TERM; echo 1; while :; do sleep 0.05; done' & wait"),
    );
    pids(&mut probe, 1, 1);
    probe.send(Frame::new(FrameKind::Signal).exec(1).stream(Stream::Tree).offset(15));
    let bye = probe.wait_for(FrameKind::Data, 1);
    assert_eq!(bye.payload, b"bye\n");
}

#[test]
fn a_command_whose_time_is_up_is_killed_with_its_tree() {
    let mut probe = AgentProcess::start();
    let began = Instant::now();
    let exec = AgentExec { timeout_ms: Some(300), ..shell("sleep 1000 & echo $!; wait") };
    probe.exec(1, &exec);
    let child = pids(&mut probe, 1, 1)[0];
    let exit = probe.exit(1);
    assert_eq!((exit.signal, exit.timed_out), (Some(9), true));
    assert!(began.elapsed() >= Duration::from_millis(300) && exit.duration_ms >= 300, "{exit:?}");
    probe.wait_for_death(child);
}

#[test]
fn time_in_which_the_agent_stood_still_does_not_count() {
    let mut probe = AgentProcess::start();
    let exec = AgentExec { timeout_ms: Some(4000), ..command(&["sleep", "5"]) };
    probe.started(1, &exec);
    let agent = rustix::process::Pid::from_raw(probe.child.id() as i32).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(5500));
    rustix::process::kill_process(agent, rustix::process::Signal::CONT).unwrap();
    let exit = probe.exit(1);
    assert_eq!((exit.code, exit.timed_out), (Some(0), false), "{exit:?}");
    assert!(exit.duration_ms < 4000, "{exit:?}");
}
