//! The commands of one connection: requested, resumed, ended, refused.

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::{
    event::{ExecView, Status, Update},
    id::ExecId,
    request::{Offsets, Request},
};

use super::Session;
use crate::{
    Error,
    client_exec::{ClientExec, Outcome},
    stdin_buffer::StdinConflict,
};

impl Session<'_> {
    pub(super) fn exec(&mut self, exec: Arc<ClientExec>) {
        if self.link.execs.contains_key(&exec.id) {
            let message = "the exec id is in use".to_owned();
            exec.ended(Err(Error::Refused { status: Status::ExecutionError, message }));
            return;
        }
        self.link.execs.insert(exec.id.clone(), exec.clone());
        if exec.request.is_some() {
            self.ask(&exec);
            return;
        }
        let view = self.link.mirror.borrow().execs.iter().find(|view| view.exec_id == exec.id).cloned();
        if let Some(view) = view {
            self.number(view.exec, &exec);
            if let Err(conflict) = exec.resume_stdin(Some(&view)) {
                self.end_lost(&exec, conflict.to_string());
                return;
            }
        }
        let (offsets, _) = exec.resume();
        let offsets = BTreeMap::from([(exec.id.clone(), offsets)]);
        self.wire.send_request(&Request::Reconnect { offsets, peek: exec.is_peek });
        self.feed();
    }

    fn ask(&mut self, exec: &ClientExec) {
        if let Some(request) = &exec.request {
            self.asked.push_back(exec.id.clone());
            self.wire.send_request(&Request::Exec(Box::new(request.clone())));
        }
    }

    fn number(&mut self, number: u32, exec: &Arc<ClientExec>) {
        self.by_number.insert(number, exec.clone());
        self.numbers.insert(exec.id.clone(), number);
    }

    /// RUNNING: resumes every command where it stopped.
    pub(super) fn begin(&mut self, views: Option<&[ExecView]>) {
        self.is_running = true;
        let (mut offsets, mut peeked): (BTreeMap<ExecId, Offsets>, BTreeMap<_, _>) = Default::default();
        let execs: Vec<Arc<ClientExec>> = self.link.execs.values().cloned().collect();
        for exec in execs {
            let view = views.unwrap_or_default().iter().find(|view| view.exec_id == exec.id);
            match view {
                Some(view) => {
                    self.number(view.exec, &exec);
                    exec.started();
                }
                // The request was lost with the last connection: send it again.
                None if exec.is_asked() => {
                    self.ask(&exec);
                    continue;
                }
                None if views.is_some() => {
                    self.end_lost(&exec, "the sandbox does not know the command any more".to_owned());
                    continue;
                }
                None => {}
            }
            if let Err(conflict) = exec.resume_stdin(view) {
                if conflict == StdinConflict::RolledBack {
                    exec.rolled_back();
                }
                self.end_lost(&exec, conflict.to_string());
                continue;
            }
            let (received, kill) = exec.resume();
            if exec.is_peek { &mut peeked } else { &mut offsets }.insert(exec.id.clone(), received);
            if kill {
                self.wire.send_request(&Request::KillProcess { exec_id: Some(exec.id.clone()) });
            }
        }
        if !offsets.is_empty() {
            self.wire.send_request(&Request::Reconnect { offsets, peek: false });
        }
        if !peeked.is_empty() {
            self.wire.send_request(&Request::Reconnect { offsets: peeked, peek: true });
        }
        self.link.mirror.send_modify(|mirror| {
            mirror.sessions += 1;
            mirror.is_open = true;
            mirror.execs = views.unwrap_or_default().to_vec();
        });
        self.feed();
    }

    fn end_lost(&mut self, exec: &ClientExec, error: String) {
        self.link.execs.remove(&exec.id);
        self.forget(exec);
        exec.ended(Ok(Outcome { error: Some(error), ..Outcome::default() }));
    }

    pub(super) fn started(&mut self, update: &Update) {
        let (Some(id), Some(number)) = (&update.exec_id, update.exec) else { return };
        let Some(exec) = self.link.execs.get(id).cloned() else { return };
        self.asked.retain(|asked| asked != id);
        self.number(number, &exec);
        exec.started();
        self.feed();
    }

    pub(super) fn done(&mut self, update: &Update) {
        let Some(exec) = update.exec_id.as_ref().and_then(|id| self.link.execs.remove(id)) else { return };
        self.forget(&exec);
        // Everything has arrived: the server need not keep it.
        self.wire.send_request(&Request::Ack { exec_id: exec.id.clone(), offsets: exec.received() });
        exec.ended(Ok(Outcome::of(update)));
    }

    /// A command did not start or is lost; without an exec id, something else was refused.
    pub(super) fn refused(&mut self, update: &Update) {
        if let Some(id) = &update.exec_id {
            self.lost(id, update);
            return;
        }
        match (self.asked.front().cloned(), self.asked.len(), self.link.execs.len()) {
            (None, ..) => {}
            // Only this command can be meant.
            (Some(id), 1, 1) => self.lost(&id, update),
            // Any of them, or input, may be meant. The reconnect makes the server name those that it does not know.
            (Some(_), ..) => {
                self.unclear = update.message.clone();
                let offsets = self.asked.iter().map(|id| (id.clone(), Offsets::default())).collect();
                self.wire.send_request(&Request::Reconnect { offsets, peek: false });
            }
        }
    }

    fn lost(&mut self, id: &ExecId, update: &Update) {
        let Some(exec) = self.link.execs.remove(id) else { return };
        self.asked.retain(|asked| asked != id);
        self.forget(&exec);
        let message = update.message.clone();
        exec.ended(if exec.is_asked() {
            Err(Error::of(&Update { message: self.unclear.take().or(message), ..update.clone() }))
        } else {
            let message = message.unwrap_or_else(|| "the command is gone".to_owned());
            Ok(Outcome { error: Some(message), ..Outcome::default() })
        });
    }

    /// Stdin is no longer read. Without an exec id, the only command with unacknowledged input is meant, if any.
    pub(super) fn stdin_refused(&mut self, update: &Update) {
        let mut about = self.link.execs.values().filter(|exec| match &update.exec_id {
            Some(id) => exec.id == *id,
            None => exec.has_stdin_under_way(),
        });
        if let (Some(exec), None) = (about.next(), about.next()) {
            exec.stdin_over();
        }
    }

    fn forget(&mut self, exec: &ClientExec) {
        if let Some(number) = self.numbers.remove(&exec.id) {
            self.by_number.remove(&number);
        }
    }
}
