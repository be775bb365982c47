//! Requests of a client to a running sandbox.

use base64::Engine;
use baton_protocol::{
    event::{Event, Status},
    id::ExecId,
    metadata::{self, DesiredState},
    request::{Command, Data, Refusal, Request, Stdin},
};

use super::{End, Session, spec_edits::What};
use crate::api::{close_code::Close, intent, status_machine::Asked};

const LEAVING: &str = "The sandbox is about to leave this server: it takes no commands and no input.";

impl Session {
    pub(super) fn ask(&mut self, request: Request) -> Option<End> {
        tracing::debug!(request = request.word(), "a client asks");
        let is_v1 = self.writer.is_v1();
        let only_v1 = || Err(Refusal::of(Status::Error, "This needs the subprotocol `baton.v1`."));
        let answered = match request {
            Request::Config(_) => {
                let message = "A message needs `action`, `event`, or `language` and `code`; a config must be the first \
                               message on `/create`, sent at once.";
                Err(Refusal::of(Status::Error, message))
            }
            Request::Exec(_) | Request::Stdin(_) if self.status_machine.is_leaving() => {
                Err(Refusal::of(Status::ExecutionError, LEAVING))
            }
            Request::Exec(exec) if !is_v1 && matches!(exec.command, Command::File(_)) => only_v1(),
            Request::Exec(exec) => {
                // If a running command has this name, the name refers to that one.
                let about = exec.exec_id.clone().filter(|exec_id| !self.commands.is_active(exec_id));
                if let Err(refusal) = self.commands.start(&exec, &mut self.writer) {
                    self.writer.refuse_about(&refusal, about);
                }
                Ok(())
            }
            Request::Stdin(stdin) => {
                if let Err(refusal) = self.stdin(&stdin) {
                    self.refuse_stdin(&refusal, stdin.exec_id);
                }
                Ok(())
            }
            Request::KillProcess { exec_id } => self.commands.kill(exec_id.as_ref(), &mut self.writer),
            Request::Signal { .. } | Request::Resize { .. } | Request::Ack { .. } if !is_v1 => only_v1(),
            Request::Signal { exec_id, signal } => self.commands.signal(&exec_id, &signal),
            Request::Resize { exec_id, cols, rows } => self.commands.resize(&exec_id, cols, rows),
            Request::Ack { exec_id, offsets } => {
                self.commands.ack(&exec_id, offsets);
                Ok(())
            }
            Request::Reconnect { offsets, peek } => {
                if is_v1 {
                    self.commands.resume_named(&offsets, peek, &mut self.writer);
                } else {
                    self.commands.resume_last(&self.marks, &mut self.writer);
                }
                Ok(())
            }
            Request::Checkpoint { live, keep_running } => return self.checkpoint(live, keep_running),
            Request::Snapshot { name, full } => {
                self.writer.send(&Event::status(Status::FilesystemSnapshotCreating));
                let wished = intent::snapshot(self.api.abilities());
                wished.map(|()| self.wish(metadata::Request::Snapshot { name, full }))
            }
            Request::Fork { .. } if !is_v1 => only_v1(),
            Request::Fork { count } => {
                intent::fork(&self.spec, self.api.abilities()).map(|()| self.wish_for_copies(count))
            }
            Request::Handoff => intent::handoff(&self.spec).map(|()| {
                self.edit(What::Handoff, |spec| intent::desire(spec, DesiredState::HandedOff));
            }),
            Request::KillSandbox => {
                self.kill_sandbox();
                Ok(())
            }
        };
        if let Err(refusal) = answered {
            self.writer.refuse(&refusal);
        }
        None
    }

    /// Refuses a request that could not be parsed. If the answer to such a request starts with a status, that status is
    /// sent first.
    pub(super) fn refuse_unread(&mut self, refusal: &Refusal) {
        if refusal.status == Status::CheckpointError {
            self.writer.send(&Event::status(Status::Checkpointing));
        }
        if refusal.status == Status::FilesystemSnapshotError {
            self.writer.send(&Event::status(Status::FilesystemSnapshotCreating));
        }
        self.writer.refuse(refusal);
    }

    /// Refuses input only: the command continues, so only a STDIN_ERROR names it.
    pub(super) fn refuse_stdin(&mut self, refusal: &Refusal, exec_id: Option<ExecId>) {
        let about = exec_id.filter(|_| refusal.status == Status::StdinError);
        self.writer.refuse_about(refusal, about);
    }

    fn stdin(&mut self, stdin: &Stdin) -> Result<(), Refusal> {
        let decoded;
        let bytes = match &stdin.data {
            Data::Text(text) => text.as_bytes(),
            Data::Base64(text) => {
                decoded = base64::engine::general_purpose::STANDARD
                    .decode(text)
                    .map_err(|_| Refusal::of(Status::StdinError, "`data` is not base64."))?;
                &decoded
            }
        };
        self.commands.stdin(stdin.exec_id.as_ref(), stdin.offset, bytes, stdin.eof)
    }

    fn checkpoint(&mut self, live: bool, keep_running: bool) -> Option<End> {
        if self.status_machine.is_leaving() {
            self.writer.say_all(&Event::refusal(Status::Error, LEAVING));
            return None;
        }
        self.writer.send(&Event::status(Status::Checkpointing));
        let running = self.commands.is_any_running();
        if let Err(refusal) = intent::checkpoint(&self.spec, live, running, self.api.abilities()) {
            self.writer.refuse(&refusal);
            return (refusal.status == Status::CheckpointError).then_some(End::Close(Close::Fatal));
        }
        if keep_running {
            self.wish(metadata::Request::Checkpoint {});
        } else {
            self.status_machine.ask_checkpoint();
            self.edit(What::Checkpoint, |spec| intent::desire(spec, DesiredState::Checkpointed));
        }
        None
    }

    fn kill_sandbox(&mut self) {
        if self.status_machine.asked == Some(Asked::Kill) {
            return;
        }
        self.status_machine.asked = Some(Asked::Kill);
        self.writer.send(&Event::status(Status::Killing));
        self.edit(What::Kill, |spec| intent::desire(spec, DesiredState::Deleted));
    }
}
