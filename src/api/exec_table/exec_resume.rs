//! Resuming commands that started before this session.

use baton_protocol::printable::printable_start;

use super::*;
use crate::api::delivered::Marks;

impl ExecTable {
    /// Takes over the agent's first answer on this link.
    pub(super) fn learn(&mut self, state: agent::AgentState) {
        self.has_state = true;
        self.numbers.request = state.last_request.saturating_add(1);
        self.numbers.exec = state.last_exec.saturating_add(1);
        for before in state.execs.into_iter().take(agent::MAX_EXECS) {
            let input = ExecInput::resumed(before.stdin, !before.stdin_closed);
            let mut command = TrackedExec::new(before.exec_id.clone(), input);
            command.is_running = before.exit.is_none();
            command.is_background = before.background;
            let number = before.exec;
            self.numbers.exec = self.numbers.exec.max(number.saturating_add(1));
            command.before = Some(before);
            self.tracked.insert(number, command);
        }
    }

    /// The commands listed in RUNNING after an attach.
    pub fn views(&self) -> Vec<ExecView> {
        let befores = self.tracked.values().filter_map(|command| command.before.as_ref());
        befores
            .map(|before| ExecView {
                exec_id: before.exec_id.clone(),
                exec: before.exec,
                running: before.exit.is_none(),
                // The agent is untrusted.
                command: Some(printable_start(&before.command, agent::SHOWN_COMMAND + 1))
                    .filter(|text| !text.is_empty()),
                started_ms: Some(before.started_ms).filter(|started| *started > 0),
                stdin: before.stdin,
                stdin_crc32: before.stdin_crc32,
                stdout: kept(&before.stdout),
                stderr: kept(&before.stderr),
                exit_code: before.exit.as_ref().and_then(|exit| exit.code),
                signal: before.exit.as_ref().and_then(|exit| exit.signal),
            })
            .collect()
    }

    /// Resumes the last command for a plain client, from where the client last confirmed.
    pub fn resume_last(&mut self, marks: &Marks, sink: &mut dyn EventSink) {
        let Some((number, command)) = self.tracked.iter().next_back() else { return };
        let (Some(before), None) = (&command.before, &command.delivery) else { return };
        let confirmed = marks.confirmed(*number);
        let offsets = Offsets {
            stdout: confirmed.map_or(before.stdout.from, |mark| mark.stdout.min(before.stdout.to)),
            stderr: confirmed.map_or(before.stderr.from, |mark| mark.stderr.min(before.stderr.to)),
        };
        self.resume(*number, offsets, false, sink);
    }

    /// Resumes the commands that a `baton.v1` client names, from the offsets it has, or lets it peek at them.
    pub fn resume_named(&mut self, offsets: &BTreeMap<ExecId, Offsets>, peek: bool, sink: &mut dyn EventSink) {
        for (exec_id, offsets) in offsets {
            match self.find(exec_id) {
                None => {
                    let message = "The sandbox no longer knows this command.";
                    sink.send_all(&exec_refusal(Some(exec_id.clone()), message));
                }
                // Already being delivered.
                Some(number) if self.tracked[&number].delivery.is_some() => {}
                Some(number) => self.resume(number, *offsets, peek, sink),
            }
        }
    }

    fn resume(&mut self, number: u32, offsets: Offsets, peek: bool, sink: &mut dyn EventSink) {
        let Some(command) = self.tracked.get_mut(&number) else { return };
        let Some(before) = command.before.clone() else { return };
        let running = Update {
            exec_id: Some(command.exec_id.clone()),
            exec: Some(number),
            ..Update::new(Status::ExecutionRunning)
        };
        sink.send(&Event::StatusUpdate(running));
        let mut delivery = Delivery::new(number);
        delivery.is_peek = peek;
        let streams = [
            (StdStream::Stdout, Stream::Stdout, before.stdout, offsets.stdout),
            (StdStream::Stderr, Stream::Stderr, before.stderr, offsets.stderr),
        ];
        for (output, stream, range, asked) in streams {
            let exec_id = command.exec_id.clone();
            if asked > range.to {
                sink.send(&Event::OutputRewound { exec_id, stream: output, to: range.to });
            } else if asked < range.from {
                sink.send(&Event::OutputGap { exec_id, stream: output, from: asked, to: range.from });
            }
            let from = range.nearest(asked);
            *delivery.cursor(output) = StreamCursor::resumed(from, self.numbers.replay);
            if from > range.from && !peek {
                self.link.send(Frame::new(FrameKind::Ack).exec(number).stream(stream).offset(from));
            }
            self.link.send(
                Frame::new(FrameKind::Replay).exec(number).stream(stream).offset(from).sequence(self.numbers.replay),
            );
            self.link
                .send(Frame::new(FrameKind::Credit).exec(number).stream(stream).offset(from.saturating_add(WINDOW)));
        }
        if let Some(exit) = before.exit {
            delivery.exited(exit);
            command.end_check.at = Some(self.clock.now() + END_CHECK_DELAY);
        }
        command.delivery = Some(delivery);
    }
}

fn kept(range: &agent::Range) -> Kept {
    Kept { from: range.from, to: range.to }
}
