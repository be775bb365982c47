//! Frames from the agent, and confirmations from the client.

use baton_protocol::printable::printable_start;

use super::*;
use crate::api::delivered::Marks;

/// How many characters of the reason for an exit or a failed start are passed on.
const LONGEST_REASON: usize = 300;

impl ExecTable {
    /// Handles one frame. Returns whether it was the agent's first answer on this link.
    pub fn hear(&mut self, frame: Frame, writer: &mut EventWriter) -> bool {
        match frame.kind {
            Kind::Started => self.started(frame.exec, writer),
            Kind::Data => self.data(frame, writer),
            Kind::Eof => self.eof(&frame, writer),
            Kind::Exit => self.exit(&frame, writer),
            Kind::StdinAck => self.stdin_ack(&frame, writer),
            Kind::Execs => {
                // The agent is untrusted; the runtime has checked the frame and ends an agent that sends bad ones.
                let Ok(state) = serde_json::from_slice::<agent::State>(&frame.payload) else { return false };
                if !self.is_known {
                    self.learn(state);
                    return true;
                }
                self.compare(&state, writer);
            }
            Kind::Assign
            | Kind::Exec
            | Kind::Stdin
            | Kind::StdinEof
            | Kind::Ack
            | Kind::Credit
            | Kind::Replay
            | Kind::Signal
            | Kind::Resize
            | Kind::Attached
            | Kind::Detached
            | Kind::Resync
            | Kind::List
            | Kind::Restored
            | Kind::Forked
            | Kind::Ping
            | Kind::Relieve
            | Kind::Hello
            | Kind::ResyncAck
            | Kind::Pong
            | Kind::Log => {}
        }
        false
    }

    fn started(&mut self, number: u32, writer: &mut EventWriter) {
        let Some(command) = self.known.get(&number).filter(|command| command.delivery.is_some()) else { return };
        let running = Update {
            exec_id: Some(command.exec_id.clone()),
            exec: Some(number),
            ..Update::new(Status::ExecutionRunning)
        };
        writer.say_about(&Event::StatusUpdate(running), command.details);
    }

    fn data(&mut self, frame: Frame, writer: &mut EventWriter) {
        self.owed.came(frame.sequence);
        let Some(output) = output_of(frame.stream) else { return };
        let Some(command) = self.known.get_mut(&frame.exec) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let is_muted = delivery.is_muted;
        let flow = delivery.flow(output);
        let Some(taken) = flow.take(frame.offset, frame.sequence, frame.payload.len()) else { return };
        if is_muted {
            self.pass_on(frame.exec, output, u64::MAX);
            return;
        }
        if let Some((from, to)) = taken.gap {
            writer.send(&Event::OutputGap { exec_id: command.exec_id.clone(), stream: output, from, to });
        }
        let mut fresh = frame.payload;
        fresh.drain(..taken.skip);
        writer.output(frame.exec, output, taken.offset, fresh, flow);
        if command.ask_after.is_some_and(|(out, err)| delivery.stdout.next() >= out && delivery.stderr.next() >= err) {
            command.ask_after = None;
            self.line.send(Frame::new(Kind::List));
        }
        self.finish(frame.exec, writer);
    }

    fn eof(&mut self, frame: &Frame, writer: &mut EventWriter) {
        self.owed.came(frame.sequence);
        let Some(output) = output_of(frame.stream) else { return };
        let Some(command) = self.known.get_mut(&frame.exec) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let is_muted = delivery.is_muted;
        let flow = delivery.flow(output);
        let gap = flow.end(frame.offset, frame.sequence);
        if !is_muted {
            if let Some((from, to)) = gap {
                writer.send(&Event::OutputGap { exec_id: command.exec_id.clone(), stream: output, from, to });
            }
            if flow.has_ended() {
                writer.output_end(frame.exec, output, flow);
            }
        }
        self.finish(frame.exec, writer);
        self.forget_if_over(frame.exec);
    }

    fn exit(&mut self, frame: &Frame, writer: &mut EventWriter) {
        let Ok(exit) = serde_json::from_slice::<agent::Exit>(&frame.payload) else { return };
        let Some(command) = self.known.get_mut(&frame.exec) else { return };
        command.is_running = false;
        command.input.close();
        tracing::info!(
            exec = frame.exec,
            code = exit.code,
            signal = exit.signal,
            started = exit.error.is_none(),
            duration_ms = exit.duration_ms,
            "a command ended"
        );
        if let Some(error) = &exit.error {
            let events = exec_refusal(Some(command.exec_id.clone()), &printable_start(error, LONGEST_REASON));
            let followed = command.delivery.is_some();
            self.known.remove(&frame.exec);
            self.line.send(Frame::new(Kind::Ack).exec(frame.exec).stream(Stream::Exit));
            if followed {
                writer.say_all(&events);
            }
            return;
        }
        if std::mem::take(&mut command.tell_end) {
            writer.say_about(&done(frame.exec, &command.exec_id, &exit), command.details);
        }
        if let Some(before) = &mut command.before {
            before.exit = Some(exit.clone());
        }
        if let Some(delivery) = command.delivery.as_mut().filter(|delivery| !delivery.is_done()) {
            delivery.exited(exit);
            command.ask_at = Some(self.clock.now() + SETTLE);
        }
        self.finish(frame.exec, writer);
    }

    /// Sends the exit once everything before it was sent.
    fn finish(&mut self, number: u32, writer: &mut EventWriter) {
        let Some(command) = self.known.get_mut(&number) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let Some(exit) = delivery.take_exit() else { return };
        (command.ask_at, command.ask_after) = (None, None);
        writer.say_about(&done(number, &command.exec_id, &exit), command.details);
        // The pong confirms that the exit arrived.
        let marks = self.marks_sent(writer);
        writer.socket.ping(marks, false);
    }

    /// The agent has reported how far the streams of exited commands go.
    fn compare(&mut self, state: &agent::State, writer: &mut EventWriter) {
        for told in &state.execs {
            let Some(command) = self.known.get_mut(&told.exec) else { continue };
            let Some(delivery) = command.delivery.as_mut().filter(|delivery| delivery.has_exited()) else { continue };
            if delivery.compare(told.stdout.to, told.stderr.to) {
                command.ask_after = Some((told.stdout.to, told.stderr.to));
            }
            self.finish(told.exec, writer);
        }
    }

    fn stdin_ack(&mut self, frame: &Frame, writer: &mut EventWriter) {
        let Some(command) = self.known.get_mut(&frame.exec) else { return };
        if frame.stream == Stream::Exit {
            // A plain client does not count its bytes, and many commands leave some unread.
            if command.input.close() && writer.is_v1() {
                let refusal = Refusal::of(Status::StdinError, NOT_READ);
                writer.refuse_about(&refusal, Some(command.exec_id.clone()));
            }
            return;
        }
        command.input.took(frame.offset);
        if writer.is_v1() && command.input.is_open {
            writer.send(&Event::StdinAck { exec_id: command.exec_id.clone(), offset: frame.offset });
        }
        self.feed(frame.exec);
    }

    /// Sends a liveness ping with how far every command has come.
    pub fn ping(&self, writer: &mut EventWriter) -> u64 {
        let marks = self.marks_sent(writer);
        writer.socket.ping(marks, true)
    }

    /// Sends a ping if one is due.
    pub fn ping_if_due(&self, writer: &mut EventWriter) {
        if writer.socket.is_ping_due() {
            let marks = self.marks_sent(writer);
            writer.socket.ping_due(marks);
        }
    }

    /// How far every command has come, after sending all coalesced output.
    fn marks_sent(&self, writer: &mut EventWriter) -> Vec<Mark> {
        writer.flush();
        let deliveries = self.known.values().filter_map(|command| command.delivery.as_ref());
        deliveries.map(Delivery::mark).collect()
    }

    /// Handles a pong: a plain client has everything up to the marks; any client has the exits it was sent.
    pub fn confirm(&mut self, marks: &[Mark], is_v1: bool) {
        for mark in marks {
            let delivery = self.known.get_mut(&mark.exec).and_then(|command| command.delivery.as_mut());
            if delivery.is_some_and(|delivery| mark.done && delivery.heard() && !delivery.is_peek) {
                self.line.send(Frame::new(Kind::Ack).exec(mark.exec).stream(Stream::Exit));
            }
            if !is_v1 {
                self.pass_on(mark.exec, Output::Stdout, mark.stdout);
                self.pass_on(mark.exec, Output::Stderr, mark.stderr);
            }
            self.forget_if_over(mark.exec);
        }
    }

    /// Handles an acknowledgement of a `baton.v1` client.
    pub fn ack(&mut self, exec_id: &ExecId, offsets: Offsets) {
        // A late acknowledgement of a forgotten command is not an error.
        if let Some(number) = self.find(exec_id) {
            self.pass_on(number, Output::Stdout, offsets.stdout);
            self.pass_on(number, Output::Stderr, offsets.stderr);
        }
    }

    fn pass_on(&mut self, number: u32, output: Output, offset: u64) {
        let Some(delivery) = self.known.get_mut(&number).and_then(|command| command.delivery.as_mut()) else { return };
        let is_peek = delivery.is_peek;
        let flow = delivery.flow(output);
        if let Some(confirmed) = flow.confirm(offset) {
            let frame = |kind| Frame::new(kind).exec(number).stream(stream_of(output));
            if !is_peek {
                self.line.send(frame(Kind::Ack).offset(confirmed));
            }
            if !self.owed.defers(number, output) {
                self.line.send(frame(Kind::Credit).offset(flow.credit()));
            }
        }
        self.forget_if_over(number);
    }

    fn forget_if_over(&mut self, number: u32) {
        let over = |command: &TrackedExec| command.delivery.as_ref().is_some_and(Delivery::is_over);
        if self.known.get(&number).is_some_and(|command| !command.is_running && over(command)) {
            self.known.remove(&number);
        }
    }

    /// How far the client has come with the commands it follows; the others stay where `earlier` sessions left them.
    pub fn marks(&self, earlier: &Marks) -> Vec<Mark> {
        if !self.is_known {
            return earlier.all();
        }
        let unfollowed = self.known.iter().filter(|(_, command)| command.delivery.is_none());
        let left = unfollowed.filter_map(|(number, _)| earlier.confirmed(*number));
        let deliveries = self.known.values().filter_map(|command| command.delivery.as_ref());
        let confirmed = |delivery: &Delivery| Mark {
            stdout: delivery.stdout.confirmed(),
            stderr: delivery.stderr.confirmed(),
            ..delivery.mark()
        };
        deliveries.filter(|delivery| !delivery.is_muted && !delivery.is_peek).map(confirmed).chain(left).collect()
    }

    pub fn wake_at(&self) -> Option<Moment> {
        self.known.values().filter_map(|command| command.ask_at).chain(self.owed.wake_at()).min()
    }

    /// Asks how far the streams of exited commands go, if that is due.
    pub fn ask_due(&mut self) {
        let now = self.clock.now();
        let mut due = false;
        for command in self.known.values_mut() {
            due |= command.ask_at.take_if(|at| *at <= now).is_some();
        }
        if due {
            self.line.send(Frame::new(Kind::List));
        }
    }
}

pub(super) fn stream_of(output: Output) -> Stream {
    match output {
        Output::Stdout => Stream::Stdout,
        Output::Stderr => Stream::Stderr,
    }
}

pub(super) fn output_of(stream: Stream) -> Option<Output> {
    match stream {
        Stream::Stdout => Some(Output::Stdout),
        Stream::Stderr => Some(Output::Stderr),
        Stream::Stdin | Stream::Exit | Stream::Tree => None,
    }
}

fn done(number: u32, exec_id: &ExecId, exit: &agent::Exit) -> Event {
    Event::StatusUpdate(Update {
        exec_id: Some(exec_id.clone()),
        exec: Some(number),
        exit_code: exit.code,
        signal: exit.signal,
        timed_out: exit.timed_out,
        duration_ms: Some(exit.duration_ms),
        // The text of an agent is untrusted: a client gets one short line of it.
        message: exit.reason.as_ref().map(|text| printable_start(text, LONGEST_REASON)),
        ..Update::new(Status::ExecutionDone)
    })
}
