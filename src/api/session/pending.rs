//! Waiting for admission: the session keeps reading from the client, and its request ends with it.

use baton_protocol::{
    id::SandboxId,
    request::{Refusal, Request},
};

use super::{End, MOST_MALFORMED, Waiting};
use crate::{
    api::{
        Api,
        close_code::Close,
        event_writer::EventWriter,
        session_registry::{LivenessProbe, SessionSlot},
        websocket::SocketEvent,
    },
    bus::AttachGuard,
};

/// A client that has its session slot while its sandbox waits for admission.
pub(super) struct PendingSession {
    pub(super) writer: EventWriter,
    pub(super) slot: SessionSlot,
    /// Requests that arrived so far.
    pub(super) waiting: Waiting,
    pub(super) liveness_probes: Vec<(u64, LivenessProbe)>,
    pub(super) malformed: u32,
}

/// Why a session is not admitted.
pub(super) enum Rejection {
    /// No sandbox here can be evicted, or none was in time.
    Full,
    /// The instance is draining.
    Draining,
    End(End),
}

impl PendingSession {
    pub(super) fn new(writer: EventWriter, slot: SessionSlot) -> Self {
        Self { writer, slot, waiting: Waiting::default(), liveness_probes: vec![], malformed: 0 }
    }

    /// Waits until the sandbox is admitted, which may take the eviction of another one.
    pub(super) async fn wait_for_room(&mut self, api: &Api, id: &SandboxId) -> Result<AttachGuard, Rejection> {
        let mut room = std::pin::pin!(api.bus.make_room(id, api.settings.max_sandboxes));
        let mut drain = api.settings.drain.clone();
        loop {
            let held_back = self.waiting.is_full() || self.writer.socket.is_paused();
            if held_back {
                self.writer.socket.excuse();
            }
            let wake_at = self.writer.socket.wake_at();
            let drains = async { drain.wait_for(|drain| *drain).await.is_ok() };
            let end = tokio::select! {
                biased;
                () = api.closing.cancelled() => Some(End::Close(Close::Restart)),
                true = drains => return Err(Rejection::Draining),
                knock = self.slot.knock() => self.knocked(knock),
                admitted = &mut room => return admitted.ok_or(Rejection::Full),
                turn = self.writer.socket.turn(!held_back) => self.turn(turn),
                () = api.clock.sleep_until(wake_at) => None,
            };
            if let Some(end) = end.or_else(|| self.look_at_the_clock()) {
                return Err(Rejection::End(end));
            }
        }
    }

    fn knocked(&mut self, knock: Option<LivenessProbe>) -> Option<End> {
        // Another client has taken the slot.
        let Some(knock) = knock else { return Some(End::Close(Close::Unavailable)) };
        self.liveness_probes.push((self.writer.socket.ping(vec![], true), knock));
        None
    }

    fn turn(&mut self, turn: SocketEvent) -> Option<End> {
        let refusal = match turn {
            // A message that is still too long is read after admission.
            SocketEvent::Wrote | SocketEvent::TooLong => return None,
            SocketEvent::Pong(_) => {
                let ponged = self.writer.socket.ponged();
                for (_, knock) in self.liveness_probes.extract_if(.., |(number, _)| *number <= ponged) {
                    // The session that sent the probe may have ended meanwhile.
                    let _ = knock.send(());
                }
                return None;
            }
            SocketEvent::Text(text) => match Request::parse(&text) {
                Err(refusal) if refusal.malformed => refusal,
                parsed => {
                    self.waiting.push(parsed, text.len());
                    return None;
                }
            },
            SocketEvent::Binary(_) => Refusal::malformed("Until the sandbox runs a message must be text."),
            SocketEvent::Broken(close) => return Some(End::Close(close)),
            SocketEvent::Gone => return Some(End::Gone),
        };
        self.writer.refuse(&refusal);
        self.malformed += 1;
        (self.malformed >= MOST_MALFORMED).then_some(End::Close(Close::BadData))
    }

    fn look_at_the_clock(&mut self) -> Option<End> {
        if self.writer.socket.is_gone() {
            return Some(End::Gone);
        }
        if self.writer.socket.is_ping_due() {
            self.writer.socket.ping_due(vec![]);
        }
        None
    }

    /// Frees the slot before the client sees the close frame: it may reconnect at once.
    pub(super) fn give_up_seat(self) -> EventWriter {
        self.writer
    }

    pub(super) async fn leave(self, end: End) {
        let writer = self.give_up_seat();
        match end {
            End::Close(close) => writer.socket.close(close).await,
            End::Gone => writer.socket.leave().await,
        }
    }
}
