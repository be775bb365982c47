//! Requests of a client to a running sandbox.

use base64::Engine;
use baton_protocol::{
    event::{Event, Status},
    id::ExecId,
    metadata::{self, DesiredState},
    request::{Command, Data, Idle, Refusal, Request, StdinRequest},
};

use super::{Session, spec_edits::EditPurpose};
use crate::api::{
    close_code::{Close, SessionEnd},
    intent,
    status_machine::EndingRequest,
};

const LEAVING: &str = "The sandbox is about to leave this server: it accepts no commands and no input.";

impl Session {
    pub(super) fn handle_request(&mut self, request: Request) -> Option<SessionEnd> {
        tracing::debug!(request = request.word(), "client request");
        let is_v1 = self.client.is_v1();
        let needs_v1 = || Err(Refusal::of(Status::Error, "This needs the subprotocol `baton.v1`."));
        let result = match request {
            Request::Config(_) => {
                let message = "A message needs `action`, `event`, or `language` and `code`; a config must be the first \
                               message on `/create`, sent at once.";
                Err(Refusal::of(Status::Error, message))
            }
            Request::Exec(_) | Request::Stdin(_) if self.status_machine.is_leaving() => {
                Err(Refusal::of(Status::ExecutionError, LEAVING))
            }
            Request::Exec(exec) if !is_v1 && matches!(exec.command, Command::File(_)) => needs_v1(),
            Request::Exec(exec) => {
                // If a running command has this name, the name refers to that one.
                let about = exec.exec_id.clone().filter(|exec_id| !self.execs.is_active(exec_id));
                if let Err(refusal) = self.execs.start(&exec, &mut *self.client) {
                    self.client.refuse_about(&refusal, about);
                }
                Ok(())
            }
            Request::Stdin(stdin) => {
                if let Err(refusal) = self.stdin(&stdin) {
                    self.refuse_stdin(&refusal, stdin.exec_id);
                }
                Ok(())
            }
            Request::KillProcess { exec_id } => self.execs.kill(exec_id.as_ref(), &mut *self.client),
            Request::Signal { .. } | Request::Resize { .. } | Request::Ack { .. } if !is_v1 => needs_v1(),
            Request::Signal { exec_id, signal } => self.execs.signal(&exec_id, &signal),
            Request::Resize { exec_id, cols, rows } => self.execs.resize(&exec_id, cols, rows),
            Request::Ack { exec_id, offsets } => {
                self.execs.ack(&exec_id, offsets);
                Ok(())
            }
            Request::Reconnect { offsets, peek } => {
                if is_v1 {
                    self.execs.resume_named(&offsets, peek, &mut *self.client);
                } else {
                    self.execs.resume_last(&self.delivered, &mut *self.client);
                }
                Ok(())
            }
            Request::Checkpoint { live, keep_running } => return self.checkpoint(live, keep_running),
            Request::Snapshot { name, full } => {
                self.client.send(&Event::status(Status::FilesystemSnapshotCreating));
                let allowed = intent::snapshot(self.api.abilities());
                allowed.map(|()| self.request(metadata::SpecRequest::Snapshot { name, full }))
            }
            Request::Fork { .. } if !is_v1 => needs_v1(),
            Request::Fork { count } => {
                intent::fork(&self.sandbox.spec, self.api.abilities()).map(|()| self.request_copies(count))
            }
            Request::Handoff => intent::handoff(&self.sandbox.spec).map(|()| {
                self.status_machine.has_requested_handoff = true;
                self.edit(EditPurpose::Handoff, |spec| intent::desire(spec, DesiredState::HandedOff));
            }),
            Request::SetIdleTimeout(_) if !is_v1 => needs_v1(),
            Request::SetIdleTimeout(idle) => self.set_idle_timeout(idle),
            Request::KillSandbox => {
                self.kill_sandbox();
                Ok(())
            }
        };
        if let Err(refusal) = result {
            self.client.refuse(&refusal);
        }
        None
    }

    /// Refuses a request that could not be parsed. If the answer to such a request starts with a status, that status is
    /// sent first.
    pub(super) fn refuse_unparsed(&mut self, refusal: &Refusal) {
        if refusal.status == Status::CheckpointError {
            self.client.send(&Event::status(Status::Checkpointing));
        }
        if refusal.status == Status::FilesystemSnapshotError {
            self.client.send(&Event::status(Status::FilesystemSnapshotCreating));
        }
        self.client.refuse(refusal);
    }

    /// Refuses input only: the command continues, so only a STDIN_ERROR names it.
    pub(super) fn refuse_stdin(&mut self, refusal: &Refusal, exec_id: Option<ExecId>) {
        let about = exec_id.filter(|_| refusal.status == Status::StdinError);
        self.client.refuse_about(refusal, about);
    }

    fn stdin(&mut self, stdin: &StdinRequest) -> Result<(), Refusal> {
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
        self.execs.stdin(stdin.exec_id.as_ref(), stdin.offset, bytes, stdin.eof)
    }

    fn checkpoint(&mut self, live: bool, keep_running: bool) -> Option<SessionEnd> {
        if self.status_machine.is_leaving() {
            self.client.send_all(&Event::refusal(Status::Error, LEAVING));
            return None;
        }
        self.client.send(&Event::status(Status::Checkpointing));
        let running = self.execs.is_any_running();
        if let Err(refusal) = intent::checkpoint(&self.sandbox.spec, live, running, self.api.abilities()) {
            self.client.refuse(&refusal);
            return (refusal.status == Status::CheckpointError).then_some(SessionEnd::Close(Close::Fatal));
        }
        if keep_running {
            self.request(metadata::SpecRequest::Checkpoint {});
        } else {
            self.status_machine.request_checkpoint();
            self.edit(EditPurpose::Checkpoint, |spec| intent::desire(spec, DesiredState::Checkpointed));
        }
        None
    }

    /// Writes the idle timeout into the spec, as an operator would.
    fn set_idle_timeout(&mut self, idle: Idle) -> Result<(), Refusal> {
        let quota = self.api.settings.quotas.of(self.sandbox.spec.tenant.as_ref());
        let seconds = intent::idle_seconds(Some(idle), None, &quota);
        let seconds = seconds.map_err(|sentence| Refusal::of(Status::Error, sentence))?;
        self.edit(EditPurpose::IdleTimeout(seconds), move |spec| intent::set_idle_timeout(spec, seconds));
        Ok(())
    }

    fn kill_sandbox(&mut self) {
        if self.status_machine.requested == Some(EndingRequest::Kill) {
            return;
        }
        self.status_machine.requested = Some(EndingRequest::Kill);
        self.client.send(&Event::status(Status::Killing));
        self.edit(EditPurpose::Kill, |spec| intent::desire(spec, DesiredState::Deleted));
    }
}
