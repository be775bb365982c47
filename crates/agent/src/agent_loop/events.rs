//! Events other than frames: children that exit, streams that become ready, time that passes.

use std::{collections::VecDeque, os::fd::AsFd, time::Duration};

use baton_protocol::{agent::Relieve, frame::Stream};
use nix::sys::signal::Signal;
use rustix::{
    io,
    process::{WaitOptions, wait},
};

use super::Agent;
use crate::{
    oom::{self, Ended},
    outbox::Piece,
    poll::{NetworkSource, PollSource},
    process_tree,
    running_exec::{KillSweep, RunningExec},
};

/// How often a killed tree is scanned again, and at which interval.
const SWEEPS: u32 = 200;
const BETWEEN_SWEEPS: Duration = Duration::from_millis(25);
/// How often the clock is read, to tell a jump from time that passed.
const CLOCK_STEP_WITH_DEADLINE: Duration = Duration::from_millis(250);
const CLOCK_STEP: Duration = Duration::from_millis(500);
/// Maximum output written in one turn.
const MOST_SENT: usize = 1 << 20;
/// After this much idle time unused memory is released, because it would be part of every checkpoint.
const SHRINK_AFTER: Duration = Duration::from_millis(100);

/// How much was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendProgress {
    All,
    /// The server's pipe is full.
    Full,
    /// There is more, but other sources must have their turn.
    Part,
}

impl Agent {
    /// Reaps every child that has exited, orphans included.
    pub fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get();
            let Some(exec) = self.execs.values_mut().find(|exec| exec.pid == pid && exec.is_running()) else {
                continue;
            };
            exec.end(status.exit_status(), status.terminating_signal(), self.ran.total());
            exec.emit_exit(self.outbox.answers());
        }
        self.forget_old();
    }

    /// Handles a command's stream that can be read or written.
    pub fn ready(&mut self, source: PollSource) {
        let number = match source {
            PollSource::Stdin(number) | PollSource::Stdout(number) | PollSource::Stderr(number) => number,
            PollSource::FromServer | PollSource::ToServer | PollSource::Children | PollSource::Network(_) => return,
        };
        let Some(exec) = self.execs.get_mut(&number) else { return };
        let flushed = match source {
            PollSource::Stdin(_) => exec.stdin.flush(&self.poll, source),
            PollSource::Stdout(_) => {
                exec.stdout.fill(&self.poll, &mut self.scratch, self.attached);
                Ok(())
            }
            PollSource::Stderr(_) => {
                exec.stderr.fill(&self.poll, &mut self.scratch, self.attached);
                Ok(())
            }
            PollSource::FromServer | PollSource::ToServer | PollSource::Children | PollSource::Network(_) => Ok(()),
        };
        self.check(flushed, number);
        self.watch(number);
    }

    /// Handles a socket of the network that is ready.
    pub fn network_ready(&mut self, source: NetworkSource, is_broken: bool) {
        self.network.ready(source, is_broken, &self.poll, &mut self.outbox);
    }

    /// Sends what may be sent, in a bounded number of writes.
    pub fn send(&mut self, to: impl AsFd) -> io::Result<SendProgress> {
        for _ in 0..4 {
            self.refill();
            if !self.outbox.is_waiting() {
                return Ok(SendProgress::All);
            }
            let execs = &self.execs;
            let held = |piece: &Piece| {
                let exec = execs.get(&piece.exec);
                exec.map_or([&[][..]; 2], |exec| exec.held(piece.stream, piece.offset, piece.len))
            };
            if !self.outbox.write(&to, held)? {
                return Ok(SendProgress::Full);
            }
        }
        Ok(SendProgress::Part)
    }

    /// Adds acknowledgements of stdin, then output, while there is more: commands and connections take turns, and among
    /// themselves they do too.
    fn refill(&mut self) {
        if !self.outbox.refill() {
            return;
        }
        self.execs.values_mut().for_each(|exec| exec.emit_stdin(self.outbox.bytes()));
        let most = self.outbox.size() + MOST_SENT;
        let turns = self.execs.range(self.turn..).chain(self.execs.range(..self.turn));
        let mut turns: VecDeque<u32> = turns.map(|(number, _)| *number).collect();
        loop {
            let has_sent = self.emit_exec(&mut turns) | self.network.emit(&mut self.scratch, &mut self.outbox);
            if !has_sent {
                return;
            }
            if self.outbox.size() >= most {
                self.turn = turns.front().copied().unwrap_or(self.turn);
                return;
            }
        }
    }

    /// Adds one frame from each stream of the next command that has one. Commands without one lose their turn.
    fn emit_exec(&mut self, turns: &mut VecDeque<u32>) -> bool {
        while let Some(number) = turns.pop_front() {
            let Some(exec) = self.execs.get_mut(&number) else { continue };
            let has_sent = exec.stdout.emit(number, Stream::Stdout, &mut self.outbox)
                | exec.stderr.emit(number, Stream::Stderr, &mut self.outbox);
            // A command that is done holds no output, so nothing remains to be written from its rings.
            if has_sent && exec.is_done() {
                self.remove(number);
            } else if has_sent {
                turns.push_back(number);
            }
            if has_sent {
                return true;
            }
        }
        false
    }

    /// Handles deadlines and the survivors of a kill.
    pub fn tick(&mut self, now: Duration) {
        self.ran.step(now);
        let ran = self.ran.total();
        let is_due =
            |exec: &mut RunningExec| exec.take_deadline(ran) || exec.sweep.is_some_and(|sweep| sweep.at <= ran);
        let due: Vec<u32> = self.execs.values_mut().filter_map(|exec| is_due(exec).then_some(exec.number)).collect();
        due.into_iter().for_each(|number| self.signal_tree(number, Signal::SIGKILL));
    }

    /// Signals the command and all its descendants. A killed tree is scanned again later, because a process may
    /// have been starting another one at that moment.
    pub(super) fn signal_tree(&mut self, number: u32, signal: Signal) {
        let Some(root) = self.root(number) else { return };
        let found = process_tree::signal(root, signal);
        let at = self.ran.total() + BETWEEN_SWEEPS;
        if let Some(exec) = self.execs.get_mut(&number)
            && signal == Signal::SIGKILL
        {
            let left = exec.sweep.map_or(SWEEPS, |sweep| sweep.left - 1);
            exec.sweep = (found && left > 0).then_some(KillSweep { left, at });
        }
    }

    /// The root of a command's process tree.
    fn root(&self, number: u32) -> Option<process_tree::TreeRoot> {
        let exec = self.execs.get(&number)?;
        let is_reused = self.execs.values().any(|other| other.number != number && other.pid == exec.pid);
        let pid = (exec.pid > 1 && !is_reused).then_some(exec.pid);
        Some(process_tree::TreeRoot { exec: number, pid, is_alive: exec.is_running() })
    }

    /// Handles a sandbox over its limit: ends the largest consumer and notifies the affected commands.
    pub(super) fn relieve(&mut self, asked: &Relieve) {
        let processes = if asked.used == 0 { None } else { oom::scan_memory() };
        let ended = processes.as_ref().map_or_else(oom::end_all, |found| oom::relieve(found, asked.used));
        let processes: Vec<_> = processes.into_iter().flatten().map(|(process, _)| process).collect();
        let (numbers, text) = match ended {
            Ended::One { pid, name } => {
                let is_root = |exec: &RunningExec| exec.pid == pid && exec.is_running();
                let own = self.execs.values().find(|exec| is_root(exec)).map(|exec| exec.number);
                let number = own.or_else(|| {
                    let mut roots = self.execs.keys().filter_map(|number| self.root(*number));
                    roots.find(|root| process_tree::contains(*root, &processes, pid)).map(|root| root.exec)
                });
                if let Some(exec) = own.and_then(|number| self.execs.get_mut(&number)) {
                    exec.reason = Some(asked.why.clone());
                }
                (number.into_iter().collect(), format!("{name} was killed: {}", asked.why))
            }
            Ended::All => {
                let running: Vec<u32> =
                    self.execs.values().filter(|exec| exec.is_running()).map(|exec| exec.number).collect();
                for exec in self.execs.values_mut().filter(|exec| exec.is_running()) {
                    exec.reason = Some(asked.why.clone());
                }
                (running, format!("everything was killed: {}", asked.why))
            }
            Ended::Files => (Vec::new(), format!("the files in /dev/shm were removed: {}", asked.why)),
        };
        for number in numbers {
            if let Some(exec) = self.execs.get_mut(&number) {
                exec.note(&format!("baton: {text}"));
            }
        }
        self.outbox.log(&text);
    }

    /// How long the agent may wait for events before it has to run again.
    pub fn patience(&self) -> Option<Duration> {
        let ran = self.ran.total();
        let of_execs = self.execs.values().filter_map(|exec| {
            let sweep = exec.sweep.map(|sweep| sweep.at.saturating_sub(ran));
            let deadline = exec.time_left(ran).map(|left| left.min(CLOCK_STEP_WITH_DEADLINE));
            let step = exec.is_running().then_some(CLOCK_STEP);
            sweep.into_iter().chain(deadline).chain(step).min()
        });
        of_execs.chain(self.is_slack().then_some(SHRINK_AFTER)).min()
    }

    fn is_slack(&self) -> bool {
        self.outbox.is_slack() || self.execs.values().any(RunningExec::is_slack)
    }

    /// Releases unused memory after an idle period.
    pub fn shrink(&mut self) {
        self.intake.shrink();
        self.outbox.shrink();
        self.execs.values_mut().for_each(RunningExec::shrink);
    }
}
