//! Frames from the agent, and confirmations from the client.

use baton_protocol::printable::printable_start;

use super::*;
use crate::api::{
    client_connection::ClientConnection,
    delivered::Marks,
    stream_cursor::{PEEK_KEEPS, output_of, stream_of},
};

/// How many characters of the reason for an exit or a failed start are passed on.
const MAX_REASON_CHARS: usize = 300;

impl ExecTable {
    /// Handles one frame. Returns whether it was the agent's first answer on this link.
    pub fn handle_frame(&mut self, frame: Frame, sink: &mut dyn EventSink) -> bool {
        match frame.kind {
            FrameKind::Started => self.started(frame.exec, sink),
            FrameKind::Data => self.data(frame, sink),
            FrameKind::Eof => self.eof(&frame, sink),
            FrameKind::Exit => self.exit(&frame, sink),
            FrameKind::StdinAck => self.stdin_ack(&frame, sink),
            FrameKind::Execs => {
                // The agent is untrusted; the runtime has checked the frame and ends an agent that sends bad ones.
                let Ok(state) = serde_json::from_slice::<agent::AgentState>(&frame.payload) else { return false };
                if !self.has_state {
                    self.learn(state);
                    return true;
                }
                self.settle(&state, sink);
            }
            FrameKind::Assign
            | FrameKind::Exec
            | FrameKind::Stdin
            | FrameKind::StdinEof
            | FrameKind::Ack
            | FrameKind::Credit
            | FrameKind::Replay
            | FrameKind::Signal
            | FrameKind::Resize
            | FrameKind::Attached
            | FrameKind::Detached
            | FrameKind::Resync
            | FrameKind::List
            | FrameKind::Restored
            | FrameKind::Forked
            | FrameKind::Ping
            | FrameKind::Relieve
            | FrameKind::Network
            | FrameKind::Resolved
            | FrameKind::Connect
            | FrameKind::Connected
            | FrameKind::ConnectionInput
            | FrameKind::ConnectionInputEof
            | FrameKind::ConnectionCredit
            | FrameKind::ConnectionReset
            | FrameKind::ListPorts
            | FrameKind::Resolve
            | FrameKind::Dial
            | FrameKind::Accepted
            | FrameKind::ConnectionOutput
            | FrameKind::ConnectionOutputEof
            | FrameKind::ConnectionInputCredit
            | FrameKind::ConnectionClosed
            | FrameKind::Ports
            | FrameKind::Hello
            | FrameKind::ResyncAck
            | FrameKind::Pong
            | FrameKind::Log => {}
        }
        false
    }

    fn started(&mut self, number: u32, sink: &mut dyn EventSink) {
        let Some(command) = self.tracked.get(&number).filter(|command| command.delivery.is_some()) else { return };
        let running = Update {
            exec_id: Some(command.exec_id.clone()),
            exec: Some(number),
            ..Update::new(Status::ExecutionRunning)
        };
        sink.send_about(&Event::StatusUpdate(running), command.details);
    }

    fn data(&mut self, frame: Frame, sink: &mut dyn EventSink) {
        self.replays.arrived(frame.sequence);
        let Some(output) = output_of(frame.stream) else { return };
        let Some(command) = self.tracked.get_mut(&frame.exec) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let is_muted = delivery.is_muted;
        let cursor = delivery.cursor(output);
        let Some(new) = cursor.advance(frame.offset, frame.sequence, frame.payload.len()) else { return };
        if is_muted {
            self.confirm_output(frame.exec, output, u64::MAX);
            return;
        }
        if let Some((from, to)) = new.gap {
            sink.send(&Event::OutputGap { exec_id: command.exec_id.clone(), stream: output, from, to });
        }
        let mut fresh = frame.payload;
        fresh.drain(..new.skip);
        sink.output(frame.exec, output, new.offset, fresh, cursor);
        if command
            .end_check
            .after
            .is_some_and(|(out, err)| delivery.stdout.next() >= out && delivery.stderr.next() >= err)
        {
            command.end_check.after = None;
            self.link.send(Frame::new(FrameKind::List));
        }
        self.finish(frame.exec, sink);
    }

    fn eof(&mut self, frame: &Frame, sink: &mut dyn EventSink) {
        self.replays.arrived(frame.sequence);
        let Some(output) = output_of(frame.stream) else { return };
        let Some(command) = self.tracked.get_mut(&frame.exec) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let is_muted = delivery.is_muted;
        let cursor = delivery.cursor(output);
        let gap = cursor.end(frame.offset, frame.sequence);
        if !is_muted {
            if let Some((from, to)) = gap {
                sink.send(&Event::OutputGap { exec_id: command.exec_id.clone(), stream: output, from, to });
            }
            if cursor.has_ended() {
                sink.end_output(frame.exec, output, cursor);
            }
        }
        self.finish(frame.exec, sink);
        self.forget_if_delivered(frame.exec);
    }

    fn exit(&mut self, frame: &Frame, sink: &mut dyn EventSink) {
        let Ok(exit) = serde_json::from_slice::<agent::Exit>(&frame.payload) else { return };
        let Some(command) = self.tracked.get_mut(&frame.exec) else { return };
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
            let events = exec_refusal(Some(command.exec_id.clone()), &printable_start(error, MAX_REASON_CHARS));
            let followed = command.delivery.is_some();
            self.tracked.remove(&frame.exec);
            self.link.send(Frame::new(FrameKind::Ack).exec(frame.exec).stream(Stream::Exit));
            if followed {
                sink.send_all(&events);
            }
            return;
        }
        if std::mem::take(&mut command.reports_exit) {
            sink.send_about(&exit_event(frame.exec, &command.exec_id, &exit), command.details);
        }
        if let Some(before) = &mut command.before {
            before.exit = Some(exit.clone());
        }
        if let Some(delivery) = command.delivery.as_mut().filter(|delivery| !delivery.is_done()) {
            delivery.exited(exit);
            command.end_check.at = Some(self.clock.now() + END_CHECK_DELAY);
        }
        self.finish(frame.exec, sink);
    }

    /// Sends the exit once everything before it was sent.
    fn finish(&mut self, number: u32, sink: &mut dyn EventSink) {
        let Some(command) = self.tracked.get_mut(&number) else { return };
        let Some(delivery) = &mut command.delivery else { return };
        let Some(exit) = delivery.take_exit() else { return };
        (command.end_check.at, command.end_check.after) = (None, None);
        sink.send_about(&exit_event(number, &command.exec_id, &exit), command.details);
        // The pong confirms that the exit arrived.
        sink.ping(self.marks_sent(), false);
    }

    /// The agent has reported how far the streams of exited commands go.
    fn settle(&mut self, state: &agent::AgentState, sink: &mut dyn EventSink) {
        for reported in &state.execs {
            let Some(command) = self.tracked.get_mut(&reported.exec) else { continue };
            let Some(delivery) = command.delivery.as_mut().filter(|delivery| delivery.has_exited()) else { continue };
            if delivery.settle(reported.stdout.to, reported.stderr.to) {
                command.end_check.after = Some((reported.stdout.to, reported.stderr.to));
            }
            self.finish(reported.exec, sink);
        }
    }

    fn stdin_ack(&mut self, frame: &Frame, sink: &mut dyn EventSink) {
        let Some(command) = self.tracked.get_mut(&frame.exec) else { return };
        if frame.stream == Stream::Exit {
            // A plain client does not count its bytes, and many commands leave some unread.
            if command.input.close() && sink.is_v1() {
                let refusal = Refusal::of(Status::StdinError, STDIN_CLOSED);
                sink.refuse_about(&refusal, Some(command.exec_id.clone()));
            }
            return;
        }
        command.input.acknowledge(frame.offset);
        if sink.is_v1() && command.input.is_open {
            sink.send(&Event::StdinAck { exec_id: command.exec_id.clone(), offset: frame.offset });
        }
        self.send_input(frame.exec);
    }

    /// Sends a liveness ping with how far every command has come.
    pub fn ping(&self, sink: &mut dyn EventSink) -> u64 {
        sink.ping(self.marks_sent(), true)
    }

    /// Sends a ping if one is due.
    pub fn ping_if_due(&self, connection: &mut dyn ClientConnection) {
        if connection.is_ping_due() {
            connection.ping_due(self.marks_sent());
        }
    }

    /// How far every command has come.
    fn marks_sent(&self) -> Vec<Mark> {
        let deliveries = self.tracked.values().filter_map(|command| command.delivery.as_ref());
        deliveries.map(Delivery::mark).collect()
    }

    /// Handles a pong: a plain client has everything up to the marks; any client has the exits it was sent.
    pub fn confirm(&mut self, marks: &[Mark], is_v1: bool) {
        for mark in marks {
            let delivery = self.tracked.get_mut(&mark.exec).and_then(|command| command.delivery.as_mut());
            if delivery.is_some_and(|delivery| mark.done && delivery.confirm_exit() && !delivery.is_peek) {
                self.link.send(Frame::new(FrameKind::Ack).exec(mark.exec).stream(Stream::Exit));
            }
            if !is_v1 {
                self.confirm_output(mark.exec, StdStream::Stdout, mark.stdout);
                self.confirm_output(mark.exec, StdStream::Stderr, mark.stderr);
            }
            self.forget_if_delivered(mark.exec);
        }
    }

    /// Handles an acknowledgement of a `baton.v1` client.
    pub fn ack(&mut self, exec_id: &ExecId, offsets: Offsets) {
        // A late acknowledgement of a forgotten command is not an error.
        if let Some(number) = self.find(exec_id) {
            self.confirm_output(number, StdStream::Stdout, offsets.stdout);
            self.confirm_output(number, StdStream::Stderr, offsets.stderr);
        }
    }

    fn confirm_output(&mut self, number: u32, output: StdStream, offset: u64) {
        let Some(command) = self.tracked.get_mut(&number) else { return };
        let is_running = command.is_running;
        let Some(delivery) = command.delivery.as_mut() else { return };
        let is_peek = delivery.is_peek;
        let cursor = delivery.cursor(output);
        if let Some(confirmed) = cursor.confirm(offset) {
            let frame = |kind| Frame::new(kind).exec(number).stream(stream_of(output));
            let freed = match is_peek {
                false => Some(confirmed),
                // A command whose buffer is full would stand still while it is watched.
                true => confirmed.checked_sub(PEEK_KEEPS).filter(|freed| *freed > 0 && is_running),
            };
            if let Some(freed) = freed {
                self.link.send(frame(FrameKind::Ack).offset(freed));
            }
            if !self.replays.defers(number, output) {
                self.link.send(frame(FrameKind::Credit).offset(cursor.credit()));
            }
        }
        self.forget_if_delivered(number);
    }

    fn forget_if_delivered(&mut self, number: u32) {
        let over = |command: &TrackedExec| command.delivery.as_ref().is_some_and(Delivery::is_over);
        if self.tracked.get(&number).is_some_and(|command| !command.is_running && over(command)) {
            self.tracked.remove(&number);
        }
    }

    /// How far the client has come with the commands it follows; the others stay where `earlier` sessions left them.
    pub fn marks(&self, earlier: &Marks) -> Vec<Mark> {
        if !self.has_state {
            return earlier.all();
        }
        let unfollowed = self.tracked.iter().filter(|(_, command)| command.delivery.is_none());
        let left = unfollowed.filter_map(|(number, _)| earlier.confirmed(*number));
        let deliveries = self.tracked.values().filter_map(|command| command.delivery.as_ref());
        let confirmed = |delivery: &Delivery| Mark {
            stdout: delivery.stdout.confirmed(),
            stderr: delivery.stderr.confirmed(),
            ..delivery.mark()
        };
        deliveries.filter(|delivery| !delivery.is_muted && !delivery.is_peek).map(confirmed).chain(left).collect()
    }

    pub fn wake_at(&self) -> Option<Moment> {
        self.tracked.values().filter_map(|command| command.end_check.at).chain(self.replays.wake_at()).min()
    }

    /// Asks how far the streams of exited commands go, if that is due.
    pub fn check_ends_due(&mut self) {
        let now = self.clock.now();
        let mut due = false;
        for command in self.tracked.values_mut() {
            due |= command.end_check.at.take_if(|at| *at <= now).is_some();
        }
        if due {
            self.link.send(Frame::new(FrameKind::List));
        }
    }
}

fn exit_event(number: u32, exec_id: &ExecId, exit: &agent::Exit) -> Event {
    Event::StatusUpdate(Update {
        exec_id: Some(exec_id.clone()),
        exec: Some(number),
        exit_code: exit.code,
        signal: exit.signal,
        timed_out: exit.timed_out,
        duration_ms: Some(exit.duration_ms),
        // The text of an agent is untrusted: a client gets one short line of it.
        message: exit.reason.as_ref().map(|text| printable_start(text, MAX_REASON_CHARS)),
        ..Update::new(Status::ExecutionDone)
    })
}
