//! Start and end: of the agent, of commands, and of what is remembered of them.

use std::{collections::BTreeMap, time::Instant};

use baton_protocol::{
    agent::{Assign, Exit, KEPT_EXITS, MAX_EXECS, Restored},
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, FRAME_TIMEOUT, command, on_terminal, shell};

#[test]
fn an_echo_comes_back_with_its_exit_code() {
    let mut probe = AgentProcess::start();
    let outcome = probe.run(1, &shell("echo out; echo err >&2; exit 3"));
    assert_eq!((outcome.stdout, outcome.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));
    assert_eq!((outcome.exit.code, outcome.exit.signal, outcome.exit.error), (Some(3), None, None));
}

#[test]
fn the_agent_runs_from_sealed_memory() {
    let probe = AgentProcess::start();
    // From outside: a command may not look.
    let program = std::fs::read_link(format!("/proc/{}/exe", probe.child.id())).unwrap();
    assert!(program.to_string_lossy().contains("memfd:baton-agent"), "{program:?}");
}

#[test]
fn a_signal_is_told_as_one() {
    let mut probe = AgentProcess::start();
    assert_eq!(probe.run(1, &shell("kill -SEGV $$")).exit.signal, Some(11));
    probe.started(2, &command(&["sleep", "1000"]));
    probe.send(Frame::new(FrameKind::Signal).exec(2).offset(15));
    assert_eq!(probe.exit(2).signal, Some(15));
}

#[test]
fn a_command_begins_with_no_signal_ignored_or_blocked() {
    let mut probe = AgentProcess::start();
    assert_eq!(probe.run(1, &shell("yes | head -1; echo ${PIPESTATUS[0]}")).text(), "y\n141\n");
    let masks = probe.run(2, &command(&["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"])).text();
    // Two above the named ones belong to the C library.
    let named = |line: &str| u64::from_str_radix(line.split_once('\t').unwrap().1, 16).unwrap() & 0x7fff_ffff;
    assert_eq!(masks.lines().map(named).collect::<Vec<_>>(), [0, 0], "{masks}");
}

#[test]
fn what_cannot_start_says_why() {
    let mut probe = AgentProcess::start();
    let mut lost = command(&["true"]);
    lost.cwd = Some("/nowhere".to_owned());
    let mut stranger = command(&["true"]);
    stranger.user = Some("nobody-knows".to_owned());
    let cases = [
        (command(&[]), "The command is empty"),
        (command(&["a\0b"]), "The command has a zero byte in it"),
        (lost, "No such file or directory: /nowhere"),
        (stranger, "No such user: nobody-knows"),
    ];
    for (number, (exec, error)) in (1..).zip(cases) {
        let outcome = probe.run(number, &exec);
        assert_eq!(outcome.exit.error.as_deref(), Some(error));
        assert_eq!((outcome.exit.code, outcome.exit.signal), (None, None));
    }
    probe.send(Frame::new(FrameKind::Exec).exec(90).sequence(1000).payload(*b"{}"));
    assert!(probe.exit(90).error.is_some());
    assert_eq!(probe.settle().len(), 0);
    assert_eq!(probe.state().execs, []);
}

/// As in a shell.
#[test]
fn a_program_that_cannot_be_run_is_an_exit_code_and_a_line() {
    let mut probe = AgentProcess::start();
    let cases = [
        ("no-such-program", 127, "no-such-program: command not found"),
        ("/no/such\n/path", 127, "/no/such?/path: No such file or directory"),
        ("/etc/passwd/x", 127, "/etc/passwd/x: Not a directory"),
        ("/etc/passwd", 126, "/etc/passwd: Permission denied"),
    ];
    for (number, (program, code, text)) in (1..).zip(cases) {
        let outcome = probe.run(number, &command(&[program]));
        assert_eq!((outcome.exit.code, outcome.exit.error), (Some(code), None), "{program}");
        assert_eq!(String::from_utf8(outcome.stderr).unwrap(), format!("{text}\n"));
        let outcome = probe.run(number + 10, &on_terminal(command(&[program])));
        assert_eq!((outcome.exit.code, outcome.stdout), (Some(code), format!("{text}\r\n").into_bytes()));
    }
    assert_eq!(probe.state().execs, []);
}

#[test]
fn a_command_finds_its_environment_and_directory() {
    let env = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let mut probe = AgentProcess::assigned(Assign {
        env: env(&[("A", "sandbox"), ("B", "sandbox")]),
        cwd: Some("/usr".to_owned()),
        ..Assign::default()
    });
    let mut exec =
        shell("grep -z -c ^TERM= /proc/$$/environ; echo $A $B $HOME $LANG $BATON_EXEC $PWD; ls /proc/self/fd");
    exec.env = env(&[("B", "exec")]);
    exec.cwd = Some("lib".to_owned());
    let text = probe.run(1, &exec).text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["0", "sandbox exec /root C.UTF-8 1 /usr/lib"]);
    // Nothing of the agent's but the three streams, and what `ls` itself opened.
    assert!(lines[2..].iter().all(|number| ["0", "1", "2", "3"].contains(number) || is_inherited(number)), "{lines:?}");

    let restored = Restored { env: env(&[("A", "restored")]) };
    probe.send(Frame::new(FrameKind::Restored).payload(serde_json::to_vec(&restored).unwrap()));
    assert_eq!(probe.run(2, &shell("echo $A; pwd")).text(), "restored\n/usr\n");
}

/// A descriptor that whoever runs the tests left open for everybody.
fn is_inherited(number: &str) -> bool {
    std::fs::exists(format!("/proc/self/fd/{number}")).unwrap()
}

#[test]
fn a_command_runs_as_the_user_it_names_and_the_agent_stays_itself() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mut probe = AgentProcess::start();
    let mut exec = shell("id -u; id -g; id -G; echo $HOME; grep -E 'Uid|Gid|CapEff' /proc/self/status");
    exec.user = Some("12345".to_owned());
    let text = probe.run(1, &exec).text();
    assert_eq!(
        text,
        "12345\n12345\n12345\n/\nUid:\t12345\t12345\t12345\t12345\nGid:\t12345\t12345\t12345\t12345\nCapEff:\t0000000000000000\n"
    );
    let mut terminal = on_terminal(shell("id -u; tty"));
    terminal.user = Some("daemon".to_owned());
    assert!(probe.run(2, &terminal).text().starts_with("1\r\n/dev/pts/"));
    assert_eq!(probe.run(3, &shell("id -u")).text(), "0\n");
}

#[test]
fn a_repeated_request_and_a_known_exec_are_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().display();
    let mut probe = AgentProcess::start();
    let exec = shell(&format!("mkdir -p {file}; echo ran >> {file}/ran; sleep 1000"));
    let frame = probe.exec_frame(1, &exec);
    probe.send(frame.clone());
    probe.send(frame.clone());
    probe.send(frame.exec(2));
    probe.exec(1, &exec);
    probe.wait_for(FrameKind::Started, 1);
    assert_eq!(probe.state().execs.len(), 1);
    assert_eq!(probe.settle().iter().filter(|frame| frame.kind == FrameKind::Started).count(), 0);
    let seen = probe.run(3, &shell(&format!("until [ -s {file}/ran ]; do sleep 0.02; done; cat {file}/ran")));
    assert_eq!(seen.text(), "ran\n");
}

#[test]
fn before_the_assignment_only_a_ping_is_answered() {
    let mut probe = AgentProcess::unassigned();
    probe.exec(1, &command(&["true"]));
    let frames = probe.settle();
    assert_eq!(frames.iter().map(|frame| frame.kind).collect::<Vec<_>>(), [FrameKind::Log]);
}

#[test]
fn when_the_server_is_gone_the_agent_goes_too_with_all_commands() {
    let mut probe = AgentProcess::start();
    let pid = probe.started(1, &command(&["sleep", "1000"]));
    let began = Instant::now();
    drop(probe.stdin.take());
    assert!(probe.child.wait().unwrap().success());
    assert!(began.elapsed() < FRAME_TIMEOUT);
    let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    assert_eq!(words, "", "the command still runs");
}

#[test]
fn two_hundred_commands_at_once_mix_nothing_up() {
    let mut probe = AgentProcess::start();
    for number in 1..=200 {
        probe.exec(number, &shell(&format!("echo {number}; sleep 0.2; echo {number} >&2; exit {}", number % 7)));
    }
    for number in 1..=200 {
        let outcome = probe.collect(number, ALL);
        let line = format!("{number}\n").into_bytes();
        assert_eq!((&outcome.stdout, &outcome.stderr), (&line, &line));
        assert_eq!(outcome.exit.code, Some((number % 7) as i32));
    }
    probe.wait_for_state(|state| state.execs.is_empty());
}

#[test]
fn a_finished_command_is_remembered_until_all_of_it_is_acknowledged() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &shell("echo hello"));
    probe.exit(1);
    probe.wait_for_state(|state| state.execs[0].stdout.eof && state.execs[0].stderr.eof);
    probe.ack(1, Stream::Exit, 0);
    probe.credit(1, Stream::Stdout, ALL);
    probe.wait_until(|frame| frame.kind == FrameKind::Eof && frame.stream == Stream::Stdout);
    let state = probe.state();
    assert_eq!((state.execs[0].stdout.from, state.execs[0].stdout.to), (0, 6));
    assert_eq!(state.execs[0].exit.as_ref().and_then(|exit| exit.code), Some(0));
    probe.ack(1, Stream::Stdout, 6);
    let state = probe.state();
    assert_eq!((state.execs.len(), state.last_exec, state.last_request), (0, 1, 1));
}

#[test]
fn with_nobody_there_only_the_newest_exits_are_kept() {
    let mut probe = AgentProcess::start();
    let count = KEPT_EXITS as u32 + 20;
    for number in 1..=count {
        probe.exec(number, &command(&["true"]));
    }
    for number in 1..=count {
        probe.exit(number);
    }
    assert_eq!(probe.state().execs.len(), count as usize);
    probe.send(Frame::new(FrameKind::Detached));
    let state = probe.state();
    assert_eq!((state.execs.len(), state.execs[0].exec), (KEPT_EXITS, 21));
}

#[test]
fn more_commands_than_can_be_kept_are_refused_and_the_state_still_fits() {
    let mut probe = AgentProcess::start();
    let most = MAX_EXECS as u32;
    let (running, hopeless) = (most - KEPT_EXITS as u32, command(&["\u{1F980}\"\\".repeat(40).as_str()]));
    for number in 1..=running {
        probe.exec(number, &command(&["sleep", "1000"]));
    }
    for number in running + 1..=most {
        probe.exec(number, &hopeless);
    }
    assert_eq!(probe.state().execs.len(), MAX_EXECS);
    probe.exec(most + 1, &command(&["true"]));
    let Exit { error, .. } = probe.exit(most + 1);
    assert_eq!(error.as_deref(), Some("There are 1024 commands already"));
    assert_eq!(probe.state().execs.len(), MAX_EXECS);
}
