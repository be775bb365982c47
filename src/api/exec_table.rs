//! The commands of one sandbox as one session tracks them: their start, input, output and exit.
//!
//! Frames from the agent arrive through [`ExecTable::handle_frame`]; events for the client leave through an [`EventSink`].
//! Nothing here waits.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    agent,
    event::{Event, ExecView, Kept, Status, StdStream, Update},
    frame::{Frame, FrameKind, Stream},
    id::ExecId,
    request::{Command, ExecRequest, Offsets, Refusal},
};

use self::replay::ReplayQueue;
use super::{
    agent_link::{AgentLink, LinkEvent},
    client_connection::EventSink,
    exec_input::{ExecInput, InputError},
    exec_spec,
    stream_cursor::{Delivery, Mark, StreamCursor, WINDOW},
};
use crate::{
    clock::{Moment, SharedClock},
    runtime::FrameLink,
};

/// After a command exits its streams end too, unless a process it started holds them open. Ask the agent after this.
const END_CHECK_DELAY: Duration = Duration::from_millis(20);

const IN_PROGRESS: &str = "An execution is already in progress.";
const NOT_RUNNING: &str = "The sandbox is not running at the moment.";
const STDIN_CLOSED: &str = "The command no longer reads its stdin.";
const NO_EXEC_RUNNING: &str = "No execution is in progress.";
const NO_EXEC_NUMBER: &str = "The sandbox has no number left for another command.";
const RESTARTED: &str = "The sandbox was restarted and the command is gone.";

#[derive(Debug)]
struct TrackedExec {
    exec_id: ExecId,
    is_running: bool,
    /// It only waits for something to happen: it does not keep the sandbox from a checkpoint.
    is_background: bool,
    input: ExecInput,
    /// The agent's state of the command when this session began.
    before: Option<agent::ExecState>,
    /// What this session sends to the client; `None` until the client names the command.
    delivery: Option<Delivery>,
    /// A client that does not follow the command killed it: only its exit is sent.
    reports_exit: bool,
    /// Whether a plain client asked for every field about this command.
    details: bool,
    end_check: EndCheck,
}

/// When to ask the agent how far the streams of a command that has exited go.
#[derive(Debug, Default)]
struct EndCheck {
    at: Option<Moment>,
    /// Once the streams are delivered up to these offsets.
    after: Option<(u64, u64)>,
}

impl TrackedExec {
    fn new(exec_id: ExecId, input: ExecInput) -> Self {
        Self {
            exec_id,
            is_running: true,
            is_background: false,
            input,
            before: None,
            delivery: None,
            reports_exit: false,
            details: false,
            end_check: EndCheck::default(),
        }
    }

    fn is_active(&self) -> bool {
        self.is_running || self.delivery.as_ref().is_some_and(|delivery| !delivery.is_done())
    }
}

#[derive(Debug)]
pub struct ExecTable {
    clock: SharedClock,
    link: AgentLink,
    /// Whether the agent has reported its state on this link.
    has_state: bool,
    numbers: NextNumbers,
    tracked: BTreeMap<u32, TrackedExec>,
    replays: ReplayQueue,
}

/// The numbers of what is requested next from the agent.
#[derive(Debug)]
struct NextNumbers {
    request: u64,
    exec: u32,
    /// Replay number of this session: tells its replayed frames from those requested before.
    replay: u64,
}

impl ExecTable {
    pub fn new(clock: SharedClock) -> Self {
        let mut random = [0; 8];
        clock.fill(&mut random);
        let replay = u64::from_le_bytes(random) | 1;
        Self {
            clock,
            link: AgentLink::default(),
            has_state: false,
            numbers: NextNumbers { request: 1, exec: 1, replay },
            tracked: BTreeMap::new(),
            replays: ReplayQueue::default(),
        }
    }

    /// Opens a link and asks the agent for its state. Commands of an earlier container are gone.
    pub fn open(&mut self, link: FrameLink, sink: &mut dyn EventSink) {
        self.link.open(link);
        self.has_state = false;
        self.replays = ReplayQueue::default();
        self.link.send(Frame::new(FrameKind::List));
        for command in std::mem::take(&mut self.tracked).into_values() {
            if command.delivery.is_some_and(|delivery| !delivery.is_done()) {
                sink.send_all(&exec_refusal(Some(command.exec_id), RESTARTED));
            }
        }
    }

    pub fn is_linked(&self) -> bool {
        self.link.is_open()
    }

    /// Drops the link to a container that has ended.
    pub fn unlink(&mut self) {
        self.link.close();
    }

    /// See [`AgentLink::next_event`]. Cancel safe.
    pub async fn next_event(&mut self, is_listening: bool) -> LinkEvent {
        self.link.next_event(is_listening).await
    }

    /// A frame from the agent that has arrived already.
    pub fn try_next_frame(&mut self) -> Option<Frame> {
        self.link.try_next()
    }

    /// Whether a command of that name runs or is not fully delivered.
    pub fn is_active(&self, exec_id: &ExecId) -> bool {
        self.find(exec_id).is_some_and(|number| self.tracked[&number].is_active())
    }

    pub fn name_of(&self, number: u32) -> Option<ExecId> {
        self.tracked.get(&number).map(|command| command.exec_id.clone())
    }

    pub fn is_any_running(&self) -> bool {
        self.tracked.values().any(|command| command.is_active() && !command.is_background)
    }

    /// Bytes from clients that the sandbox has not taken yet.
    pub fn buffered(&self) -> usize {
        self.link.buffered() + self.tracked.values().map(|command| command.input.buffered()).sum::<usize>()
    }

    pub fn start(&mut self, exec: &ExecRequest, sink: &mut dyn EventSink) -> Result<(), Refusal> {
        let refuse = |message: &str| Err(Refusal::of(Status::ExecutionError, message));
        if !self.link.is_open() || !self.has_state {
            return refuse(NOT_RUNNING);
        }
        if !sink.is_v1() && self.is_any_running() {
            return refuse(IN_PROGRESS);
        }
        if exec.exec_id.as_ref().is_some_and(|exec_id| self.is_active(exec_id)) {
            return refuse("`exec_id` is that of a command that runs.");
        }
        if self.tracked.len() >= agent::MAX_EXECS {
            return refuse("Too many commands: wait for one to end, and confirm its output.");
        }
        let number = self.numbers.exec;
        // The agent reports the last number it used.
        let Some(next_exec) = number.checked_add(1) else { return refuse(NO_EXEC_NUMBER) };
        let exec_id = match &exec.exec_id {
            Some(exec_id) => exec_id.clone(),
            None => self.unused_name(number),
        };
        let start = exec_spec::start(exec, &exec_id, sink.is_v1())?;
        if !sink.is_v1() {
            self.mute_others();
        }
        self.numbers.exec = next_exec;
        self.link.send(Frame::new(FrameKind::Exec).exec(number).sequence(self.numbers.request).payload(start.payload));
        self.numbers.request = self.numbers.request.saturating_add(1);
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.link.send(Frame::new(FrameKind::Credit).exec(number).stream(stream).offset(WINDOW));
        }
        let mut input = ExecInput::new(start.stdin);
        if !start.prelude.is_empty() {
            input.set_prelude(start.prelude);
        }
        let mut command = TrackedExec::new(exec_id, input);
        command.delivery = Some(Delivery::new(number));
        command.details = exec.details;
        command.is_background = matches!(&exec.command, Command::File(work) if work.is_background());
        self.tracked.insert(number, command);
        self.send_input(number);
        Ok(())
    }

    /// A plain client follows one command only: the output of processes that an earlier one left running is muted.
    fn mute_others(&mut self) {
        for command in self.tracked.values_mut() {
            if let Some(delivery) = &mut command.delivery {
                delivery.is_muted = true;
            }
        }
    }

    fn unused_name(&self, number: u32) -> ExecId {
        let name = |suffix: u32| ExecId::parse(&format!("exec-{number}{}", ".x".repeat(suffix as usize)));
        let free = (0..8).filter_map(|suffix| name(suffix).ok()).find(|exec_id| self.find(exec_id).is_none());
        free.unwrap_or_else(|| ExecId::parse("exec").expect("a valid name"))
    }

    /// The newest command of that name.
    fn find(&self, exec_id: &ExecId) -> Option<u32> {
        self.tracked.iter().rev().find(|(_, command)| command.exec_id == *exec_id).map(|(number, _)| *number)
    }

    /// The command a request refers to: the named one, or the only one that runs.
    fn resolve(&self, exec_id: Option<&ExecId>) -> Result<Option<u32>, &'static str> {
        if let Some(exec_id) = exec_id {
            return self.find(exec_id).map(Some).ok_or("There is no such command.");
        }
        let mut running = self.tracked.iter().filter(|(_, command)| command.is_active()).map(|(number, _)| *number);
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
        let number = match self.resolve(exec_id) {
            Ok(Some(number)) => number,
            Ok(None) => return refuse(Status::ExecutionError, NO_EXEC_RUNNING),
            Err(message) => return refuse(Status::ExecutionError, message),
        };
        self.stdin_of(number, offset, bytes, eof)
    }

    /// Input by the number of the command, as in binary messages.
    pub fn stdin_of(&mut self, number: u32, offset: Option<u64>, bytes: &[u8], eof: bool) -> Result<(), Refusal> {
        let refuse = |status, message: &str| Err(Refusal::of(status, message));
        let Some(command) = self.tracked.get_mut(&number) else {
            return refuse(Status::ExecutionError, NO_EXEC_RUNNING);
        };
        match command.input.push(offset, bytes, eof) {
            Ok(()) => {}
            Err(InputError::Closed) => return refuse(Status::StdinError, STDIN_CLOSED),
            Err(InputError::Gap) => return refuse(Status::StdinError, "Bytes before these are missing."),
        }
        self.send_input(number);
        Ok(())
    }

    fn send_input(&mut self, number: u32) {
        let Some(command) = self.tracked.get_mut(&number) else { return };
        while let Some(frame) = command.input.next_frame(number) {
            self.link.send(frame);
        }
    }

    /// Kills the command and all its descendants. The client gets FORCE_KILLED, then DONE.
    pub fn kill(&mut self, exec_id: Option<&ExecId>, sink: &mut dyn EventSink) -> Result<(), Refusal> {
        let number = self.resolve(exec_id).map_err(|message| Refusal::of(Status::ExecutionForceKillError, message))?;
        let mut update = Update::new(Status::ExecutionForceKilled);
        if let Some(number) = number
            && let Some(command) = self.tracked.get_mut(&number)
        {
            update.exec_id = Some(command.exec_id.clone());
            command.reports_exit = command.is_running && command.delivery.is_none();
            self.link.send(Frame::new(FrameKind::Signal).exec(number).stream(Stream::Tree).offset(9));
        }
        sink.send(&Event::StatusUpdate(update));
        Ok(())
    }

    pub fn signal(&mut self, exec_id: &ExecId, name: &str) -> Result<(), Refusal> {
        let number = self.running(exec_id)?;
        let signal = exec_spec::signal(name).ok_or_else(|| Refusal::of(Status::Error, "There is no such signal."))?;
        self.link.send(Frame::new(FrameKind::Signal).exec(number).stream(Stream::Stdin).offset(signal));
        Ok(())
    }

    pub fn resize(&mut self, exec_id: &ExecId, cols: u16, rows: u16) -> Result<(), Refusal> {
        let number = self.running(exec_id)?;
        let size = u64::from(cols) | u64::from(rows) << 32;
        self.link.send(Frame::new(FrameKind::Resize).exec(number).offset(size));
        Ok(())
    }

    fn running(&self, exec_id: &ExecId) -> Result<u32, Refusal> {
        let number = self.find(exec_id).filter(|number| self.tracked[number].is_running);
        number.ok_or_else(|| Refusal::of(Status::ExecutionError, NO_EXEC_RUNNING))
    }
}

fn exec_refusal(exec_id: Option<ExecId>, message: &str) -> [Event; 2] {
    let update = Update { message: Some(message.to_owned()), exec_id, ..Update::new(Status::ExecutionError) };
    [Event::StatusUpdate(update), Event::Error { message: message.to_owned() }]
}

mod exec_resume;
mod incoming_frames;
mod replay;
