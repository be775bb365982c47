//! The agent: PID 1 of every sandbox. It starts commands and carries their streams, on one
//! thread, over frames on stdin and stdout.
//!
//! ```text
//!            frames                       pipes, terminals
//!  server ───────────▶ intake ─▶ agent ─────────────────────▶ commands
//!         ◀─────────── outbox ◀─ execs ◀─────────────────────
//! ```
//! Its children are hostile, and its input may be: neither can end it. It exits when the server is gone.

mod active_time;
mod agent_loop;
mod connection_input;
mod connection_table;
mod decoder;
mod dns_message;
mod exec_spawn;
mod file_exec;
mod inner_network;
mod input_credit;
mod listening_ports;
mod name_server;
mod name_table;
mod network_setup;
mod oom;
mod outbox;
mod output_pipe;
mod own_capabilities;
mod poll;
mod process_tree;
mod program_connection;
mod raw_sockopt;
mod redirect_rule;
mod resolver_file;
mod ring;
mod rlimits;
mod rtnetlink_address;
mod running_exec;
mod self_memfd;
mod stdin_pipe;
mod users;

use std::{process::ExitCode, time::Duration};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    process::{Resource, Rlimit},
    stdio::{stdin, stdout},
};

use crate::{
    agent_loop::{Agent, SendProgress},
    poll::{Epoll, PollSource},
};

/// Enough for three descriptors for each of a thousand commands, and one for each of two thousand connections.
const DESCRIPTORS: u64 = 8192;

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|word| word == file_exec::WORD) {
        return file_exec::main(arguments.next());
    }
    let served = self_memfd::into_memory().and_then(|()| run());
    if std::process::id() != 1 {
        process_tree::kill_all();
    }
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until the server is gone.
fn run() -> Result<(), Failure> {
    // The agent ignores every signal but SIGCHLD.
    SigSet::all().thread_block()?;
    let children =
        SignalFd::with_flags(&SigSet::from(Signal::SIGCHLD), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    if std::process::id() != 1 {
        // As PID 1 it would adopt orphans anyway.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    }
    raise_descriptors();
    let kept = own_capabilities::keep_from_commands();
    std::env::set_current_dir("/")?;
    for fd in [stdin(), stdout()] {
        fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        let _ = rustix::pipe::fcntl_setpipe_size(fd, 1 << 20);
    }

    let poll = Epoll::new()?;
    poll.watch_input(stdin(), PollSource::FromServer)?;
    poll.watch_input(&children, PollSource::Children)?;
    let mut agent = Agent::new(poll, active_time::now());
    if let Err(error) = kept {
        agent.outbox.log(&format!("commands are not kept from the agent's capabilities: {error}"));
    }
    let (mut listens, mut waits) = (true, false);
    loop {
        let sent = agent.send(stdout())?;
        if waits != (sent == SendProgress::Full) {
            waits = !waits;
            match waits {
                true => agent.poll().watch_output(stdout(), PollSource::ToServer)?,
                false => agent.poll().forget(stdout()),
            }
        }
        if agent.outbox.is_full() == listens {
            listens = !listens;
            match listens {
                true => agent.poll().watch_input(stdin(), PollSource::FromServer)?,
                false => agent.poll().forget(stdin()),
            }
        }
        let patience = if sent == SendProgress::Part { Some(Duration::ZERO) } else { agent.patience() };
        let ready = agent.poll().wait(patience)?;
        agent.tick(active_time::now());
        if ready.is_empty() && sent == SendProgress::All {
            agent.shrink();
        }
        for ready in ready {
            match ready.source {
                PollSource::FromServer => {
                    if !agent.listen(stdin()) {
                        return Ok(());
                    }
                }
                PollSource::ToServer => {}
                PollSource::Children => {
                    // The signal is pending once, however many children exited.
                    let _ = children.read_signal();
                    agent.reap();
                }
                PollSource::Stdin(_) | PollSource::Stdout(_) | PollSource::Stderr(_) => agent.ready(ready.source),
                PollSource::Network(source) => agent.network_ready(source, ready.is_broken),
            }
        }
    }
}

fn raise_descriptors() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
    if limit.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    }
}
