//! The commands of one sandbox as one session tracks them: their start, input, output and exit.
//!
//! Frames from the agent arrive through [`ExecTable::hear`]; events for the client leave through the [`EventWriter`].
//! Nothing here waits.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    agent,
    event::{Event, ExecView, Kept, Output, Status, Update},
    frame::{Frame, Kind, Stream},
    id::ExecId,
    request::{Exec, Offsets, Refusal},
};

use self::replay::ReplayQueue;
use super::{
    agent_link::AgentLink,
    event_writer::EventWriter,
    exec_spec,
    input::{Input, No},
    output::{Delivery, Mark, StreamCursor, WINDOW},
};
use crate::clock::{Moment, SharedClock};

/// After a command exits its streams end too, unless a process it started holds them open. Then ask the agent.
const SETTLE: Duration = Duration::from_millis(20);

const IN_PROGRESS: &str = "An execution is already in progress.";
const NOT_RUNNING: &str = "The sandbox does not run at the moment.";
const NOT_READ: &str = "The command does not read its stdin (any more).";
const NOTHING_RUNS: &str = "No execution is in progress.";
const NO_NUMBER: &str = "The sandbox has no number left for another command.";
const STARTED_ANEW: &str = "The sandbox was started anew and the command is gone.";

#[derive(Debug)]
struct TrackedExec {
    exec_id: ExecId,
    is_running: bool,
    input: Input,
    /// The agent's state of the command when this session began.
    before: Option<agent::ExecState>,
    /// What this session sends to the client; `None` until the client names the command.
    delivery: Option<Delivery>,
    /// A client that does not follow the command killed it: send only its exit.
    tell_end: bool,
    /// Whether a plain client asked for every field about this command.
    details: bool,
    /// When to ask the agent how far the streams go.
    ask_at: Option<Moment>,
    /// How far the streams go; once all of that is taken, ask again.
    ask_after: Option<(u64, u64)>,
}

impl TrackedExec {
    fn new(exec_id: ExecId, input: Input) -> Self {
        Self {
            exec_id,
            is_running: true,
            input,
            before: None,
            delivery: None,
            tell_end: false,
            details: false,
            ask_at: None,
            ask_after: None,
        }
    }

    fn is_active(&self) -> bool {
        self.is_running || self.delivery.as_ref().is_some_and(|delivery| !delivery.is_done())
    }
}

#[derive(Debug)]
pub struct ExecTable {
    clock: SharedClock,
    pub line: AgentLink,
    /// Whether the agent has reported its state.
    is_known: bool,
    next_request: u64,
    next_exec: u32,
    /// Replay number of this session: tells its replayed frames from those requested before.
    replay: u64,
    known: BTreeMap<u32, TrackedExec>,
    owed: ReplayQueue,
}

impl ExecTable {
    pub fn new(clock: SharedClock) -> Self {
        let mut dice = [0; 8];
        clock.fill(&mut dice);
        let replay = u64::from_le_bytes(dice) | 1;
        Self {
            clock,
            line: AgentLink::default(),
            is_known: false,
            next_request: 1,
            next_exec: 1,
            replay,
            known: BTreeMap::new(),
            owed: ReplayQueue::default(),
        }
    }

    /// Opens a link and asks the agent for its state. Commands of an earlier container are gone.
    pub fn open(&mut self, link: crate::runtime::Link, writer: &mut EventWriter) {
        self.line.open(link);
        self.is_known = false;
        self.owed = ReplayQueue::default();
        self.line.send(Frame::new(Kind::List));
        for command in std::mem::take(&mut self.known).into_values() {
            if command.delivery.is_some_and(|delivery| !delivery.is_done()) {
                writer.say_all(&exec_refusal(Some(command.exec_id), STARTED_ANEW));
            }
        }
    }

    /// Whether a command of that name runs or is not fully delivered.
    pub fn is_active(&self, exec_id: &ExecId) -> bool {
        self.find(exec_id).is_some_and(|number| self.known[&number].is_active())
    }

    pub fn name_of(&self, number: u32) -> Option<ExecId> {
        self.known.get(&number).map(|command| command.exec_id.clone())
    }

    pub fn is_any_running(&self) -> bool {
        self.known.values().any(TrackedExec::is_active)
    }

    /// Bytes from clients that the sandbox has not taken yet.
    pub fn waiting(&self) -> usize {
        self.line.waiting() + self.known.values().map(|command| command.input.waiting()).sum::<usize>()
    }

    pub fn start(&mut self, exec: &Exec, writer: &mut EventWriter) -> Result<(), Refusal> {
        let refuse = |message: &str| Err(Refusal::of(Status::ExecutionError, message));
        if !self.line.is_open() || !self.is_known {
            return refuse(NOT_RUNNING);
        }
        if !writer.is_v1() && self.is_any_running() {
            return refuse(IN_PROGRESS);
        }
        if exec.exec_id.as_ref().is_some_and(|exec_id| self.is_active(exec_id)) {
            return refuse("`exec_id` is that of a command that runs.");
        }
        if self.known.len() >= agent::MAX_EXECS {
            return refuse("Too many commands: wait for one to end, and confirm its output.");
        }
        let number = self.next_exec;
        // The agent reports the last number it used.
        let Some(next_exec) = number.checked_add(1) else { return refuse(NO_NUMBER) };
        let exec_id = match &exec.exec_id {
            Some(exec_id) => exec_id.clone(),
            None => self.free_name(number),
        };
        let start = exec_spec::start(exec, &exec_id, writer.is_v1())?;
        if !writer.is_v1() {
            self.mute_done();
        }
        self.next_exec = next_exec;
        self.line.send(Frame::new(Kind::Exec).exec(number).sequence(self.next_request).payload(start.payload));
        self.next_request = self.next_request.saturating_add(1);
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.line.send(Frame::new(Kind::Credit).exec(number).stream(stream).offset(WINDOW));
        }
        let mut input = Input::new(start.stdin);
        if !start.prelude.is_empty() {
            input.prelude(start.prelude);
        }
        let mut command = TrackedExec::new(exec_id.clone(), input);
        command.delivery = Some(Delivery::new(number, exec_id));
        command.details = exec.details;
        self.known.insert(number, command);
        self.feed(number);
        Ok(())
    }

    /// A plain client follows one command only: the output of processes that an earlier one left running is muted.
    fn mute_done(&mut self) {
        for command in self.known.values_mut() {
            if let Some(delivery) = &mut command.delivery {
                delivery.is_muted = true;
            }
        }
    }

    fn free_name(&self, number: u32) -> ExecId {
        let name = |suffix: u32| ExecId::parse(&format!("exec-{number}{}", ".x".repeat(suffix as usize)));
        let free = (0..8).filter_map(|suffix| name(suffix).ok()).find(|exec_id| self.find(exec_id).is_none());
        free.unwrap_or_else(|| ExecId::parse("exec").expect("a valid name"))
    }

    /// The newest command of that name.
    fn find(&self, exec_id: &ExecId) -> Option<u32> {
        self.known.iter().rev().find(|(_, command)| command.exec_id == *exec_id).map(|(number, _)| *number)
    }

    /// The command a request refers to: the named one, or the only one that runs.
    fn meant(&self, exec_id: Option<&ExecId>) -> Result<Option<u32>, &'static str> {
        if let Some(exec_id) = exec_id {
            return self.find(exec_id).map(Some).ok_or("There is no such command.");
        }
        let mut running = self.known.iter().filter(|(_, command)| command.is_active()).map(|(number, _)| *number);
        match (running.next(), running.next()) {
            (only, None) => Ok(only),
            (_, Some(_)) => Err("`exec_id` is missing, and several commands run."),
        }
    }

    pub fn stdin(
        &mut self,
        exec_id: Option<&ExecId>,
        offset: Option<u64>,
        bytes: &[u8],
        eof: bool,
    ) -> Result<(), Refusal> {
        let refuse = |status, message: &str| Err(Refusal::of(status, message));
        let number = match self.meant(exec_id) {
            Ok(Some(number)) => number,
            Ok(None) => return refuse(Status::ExecutionError, NOTHING_RUNS),
            Err(message) => return refuse(Status::ExecutionError, message),
        };
        self.stdin_of(number, offset, bytes, eof)
    }

    /// Input by the number of the command, as in binary messages.
    pub fn stdin_of(&mut self, number: u32, offset: Option<u64>, bytes: &[u8], eof: bool) -> Result<(), Refusal> {
        let refuse = |status, message: &str| Err(Refusal::of(status, message));
        let Some(command) = self.known.get_mut(&number) else {
            return refuse(Status::ExecutionError, NOTHING_RUNS);
        };
        match command.input.push(offset, bytes, eof) {
            Ok(()) => {}
            Err(No::Closed) => return refuse(Status::StdinError, NOT_READ),
            Err(No::Gap) => return refuse(Status::StdinError, "Bytes before these are missing."),
        }
        self.feed(number);
        Ok(())
    }

    fn feed(&mut self, number: u32) {
        let Some(command) = self.known.get_mut(&number) else { return };
        while let Some(frame) = command.input.next_frame(number) {
            self.line.send(frame);
        }
    }

    /// Kills the command and all its descendants. The client gets FORCE_KILLED, then DONE.
    pub fn kill(&mut self, exec_id: Option<&ExecId>, writer: &mut EventWriter) -> Result<(), Refusal> {
        let number = self.meant(exec_id).map_err(|message| Refusal::of(Status::ExecutionForceKillError, message))?;
        let mut update = Update::new(Status::ExecutionForceKilled);
        if let Some(number) = number
            && let Some(command) = self.known.get_mut(&number)
        {
            update.exec_id = Some(command.exec_id.clone());
            command.tell_end = command.is_running && command.delivery.is_none();
            self.line.send(Frame::new(Kind::Signal).exec(number).stream(Stream::Tree).offset(9));
        }
        writer.send(&Event::StatusUpdate(update));
        Ok(())
    }

    pub fn signal(&mut self, exec_id: &ExecId, name: &str) -> Result<(), Refusal> {
        let number = self.running(exec_id)?;
        let signal = exec_spec::signal(name).ok_or_else(|| Refusal::of(Status::Error, "There is no such signal."))?;
        self.line.send(Frame::new(Kind::Signal).exec(number).stream(Stream::Stdin).offset(signal));
        Ok(())
    }

    pub fn resize(&mut self, exec_id: &ExecId, cols: u16, rows: u16) -> Result<(), Refusal> {
        let number = self.running(exec_id)?;
        let size = u64::from(cols) | u64::from(rows) << 32;
        self.line.send(Frame::new(Kind::Resize).exec(number).offset(size));
        Ok(())
    }

    fn running(&self, exec_id: &ExecId) -> Result<u32, Refusal> {
        let number = self.find(exec_id).filter(|number| self.known[number].is_running);
        number.ok_or_else(|| Refusal::of(Status::ExecutionError, NOTHING_RUNS))
    }
}

fn exec_refusal(exec_id: Option<ExecId>, message: &str) -> [Event; 2] {
    let update = Update { message: Some(message.to_owned()), exec_id, ..Update::new(Status::ExecutionError) };
    [Event::StatusUpdate(update), Event::Error { message: message.to_owned() }]
}

mod agent_frames;
mod exec_resume;
mod replay;
