//! The one task behind a sandbox's handle: connects, follows the sandbox, ends for a reason.
//!
//! ```text
//!   connect ──▶ session ──▶ verdict ──fatal──▶ end: every waiting caller gets the error
//!      ▲                       │
//!      └─── pause, jittered ◀──┘ retry
//! ```

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::{
    event::Update,
    id::ExecId,
    request::{Request, SandboxConfig},
};
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};

use crate::{
    Error,
    client_clock::{self, Instant},
    client_exec::ClientExec,
    client_session::Session,
    client_socket::ClientSocket,
    client_state::SandboxState,
    connect::{Address, Cookies, connect},
    options::Connection,
    retry_policy::RetryPolicy,
};

#[derive(Debug)]
pub(crate) enum ConnectionCommand {
    /// Starts a command, or follows one that is known to run.
    Exec(Arc<ClientExec>),
    /// A request whose caller waits for an answer; `sent` reports when it was sent.
    Ask {
        request: Request,
        sent: oneshot::Sender<SentMark>,
    },
    /// A request without an answer.
    Tell(Request),
    Close,
}

/// When a request was sent: how much had been received by then, and in which session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentMark {
    pub(crate) heard: u64,
    pub(crate) session: u64,
}

#[derive(Debug)]
pub(crate) struct ConnectionContext {
    pub(crate) address: Address,
    pub(crate) options: Connection,
    /// Used for a sandbox that does not exist yet.
    pub(crate) config: SandboxConfig,
    pub(crate) cookies: Cookies,
    pub(crate) commands: mpsc::Receiver<ConnectionCommand>,
    /// Notified when a handle reads, writes or is dropped.
    pub(crate) look: Arc<Notify>,
    pub(crate) mirror: watch::Sender<SandboxState>,
    pub(crate) updates: broadcast::Sender<Update>,
    pub(crate) execs: BTreeMap<ExecId, Arc<ClientExec>>,
}

impl ConnectionContext {
    pub(crate) async fn run(mut self) {
        let end = self.follow().await;
        self.end(&end);
    }

    async fn follow(&mut self) -> Error {
        let mut attempt = 0;
        let mut give_up = None;
        loop {
            let sessions = self.mirror.borrow().sessions;
            let verdict = self.session(give_up).await;
            let (now_sessions, is_placed) = {
                let mirror = self.mirror.borrow();
                (mirror.sessions, mirror.place.is_some())
            };
            let (error, elsewhere) = match verdict {
                RetryPolicy::Fatal(error) => return error,
                RetryPolicy::Retry { error, elsewhere } => (error, elsewhere),
            };
            self.mirror.send_modify(|mirror| {
                mirror.is_open = false;
                mirror.lost = Some(error.clone());
            });
            let Some(patience) = self.options.reconnect_for else { return error };
            // A caller that creates or attaches should learn at once that there is no server; only
            // a draining instance asks it to reconnect.
            if !is_placed || (now_sessions == 0 && !elsewhere) {
                return error;
            }
            if elsewhere {
                self.cookies.forget();
            }
            if now_sessions > sessions {
                (attempt, give_up) = (0, None);
            }
            let now = client_clock::now();
            if now >= *give_up.get_or_insert(now + patience) {
                return error;
            }
            client_clock::sleep_until(now + client_clock::pause(attempt, client_clock::dice())).await;
            attempt += 1;
        }
    }

    async fn session(&mut self, give_up: Option<Instant>) -> RetryPolicy {
        let place = self.mirror.borrow().place.clone();
        let socket = match connect(&self.address, place.as_ref(), &mut self.cookies, &self.options).await {
            Ok(socket) => socket,
            Err(verdict) => return verdict,
        };
        let mut wire = ClientSocket::new(socket);
        if place.is_none() {
            wire.send_request(&Request::Config(Box::new(self.config.clone())));
        }
        Session::new(self, wire, give_up).run().await
    }

    fn end(&mut self, error: &Error) {
        self.mirror.send_if_modified(|mirror| {
            let open = mirror.end.is_none();
            if open {
                mirror.end = Some(error.clone());
                mirror.is_open = false;
            }
            open
        });
        for exec in std::mem::take(&mut self.execs).into_values() {
            exec.ended(Err(error.clone()));
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let ConnectionCommand::Exec(exec) = command {
                exec.ended(Err(error.clone()));
            }
        }
    }
}

/// Also runs when the task is dropped midway, so that no caller waits forever.
impl Drop for ConnectionContext {
    fn drop(&mut self) {
        self.end(&Error::Ended("its handle was dropped".into()));
    }
}
