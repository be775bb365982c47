//! What arrives from the client of a session and cannot be answered at once: requests, and probes for its liveness.

use std::collections::VecDeque;

use baton_protocol::request::{Refusal, Request};

use crate::api::{
    client_connection::ClientConnection,
    close_code::{Close, SessionEnd},
    session_registry::LivenessProbe,
};

/// The session ends after this many messages that could not be parsed.
const MAX_MALFORMED: u32 = 10;
/// How many requests may wait for the sandbox to run before the session stops reading from the client.
const MAX_WAITING: usize = 64;
/// How many bytes may wait for the sandbox to take them before the session stops reading from the client.
pub const MAX_WAITING_BYTES: usize = 1 << 20;

/// Requests that arrived before the sandbox ran.
#[derive(Debug, Default)]
pub struct IncomingRequests {
    waiting: VecDeque<Result<Request, Refusal>>,
    bytes: usize,
    /// How many messages could not be parsed.
    malformed: u32,
}

impl IncomingRequests {
    /// Whether the session stops reading from the client.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING || self.bytes >= MAX_WAITING_BYTES
    }

    /// Keeps a request until the sandbox runs. `bytes` is the length of its text.
    pub fn push(&mut self, request: Result<Request, Refusal>, bytes: usize) {
        self.bytes += bytes;
        self.waiting.push_back(request);
    }

    pub fn pop(&mut self) -> Option<Result<Request, Refusal>> {
        let request = self.waiting.pop_front();
        if self.waiting.is_empty() {
            self.bytes = 0;
        }
        request
    }

    /// Refuses a message that could not be parsed. Too many of them end the session.
    pub fn reject_malformed(&mut self, client: &mut dyn ClientConnection, refusal: &Refusal) -> Option<SessionEnd> {
        client.refuse(refusal);
        self.malformed += 1;
        (self.malformed >= MAX_MALFORMED).then_some(SessionEnd::Close(Close::BadData))
    }
}

/// Probes that the client answers by answering a ping: each is kept with the number of that ping.
#[derive(Debug, Default)]
pub struct Probes {
    of_sessions: Vec<(u64, LivenessProbe)>,
    /// The numbers of the reconciler's probes.
    of_reconciler: Vec<(u64, u64)>,
}

impl Probes {
    /// A probe of another session that wants the slot.
    pub fn add_session(&mut self, ping: u64, probe: LivenessProbe) {
        self.of_sessions.push((ping, probe));
    }

    pub fn add_reconciler(&mut self, ping: u64, number: u64) {
        self.of_reconciler.push((ping, number));
    }

    /// Answers the probes up to the `answered` ping; returns the reconciler's among them.
    pub fn answer(&mut self, answered: u64) -> Vec<u64> {
        for (_, probe) in self.of_sessions.extract_if(.., |(ping, _)| *ping <= answered) {
            // The session that sent the probe may have ended meanwhile.
            let _ = probe.send(());
        }
        self.of_reconciler.extract_if(.., |(ping, _)| *ping <= answered).map(|(_, number)| number).collect()
    }
}
