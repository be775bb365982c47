//! Waiting for room: the client is listened to meanwhile, and what it wants ends with it.

use baton_protocol::{
    id::SandboxId,
    request::{Refusal, Request},
};

use super::{End, MOST_MALFORMED, Waiting};
use crate::{
    api::{
        Api,
        close::Close,
        registry::{Knock, Seat},
        speaker::Speaker,
        wire::Turn,
    },
    storage::board::Attached,
};

/// A client that has its seat and no place for its sandbox yet.
pub(super) struct Newcomer {
    pub(super) speaker: Speaker,
    pub(super) seat: Seat,
    /// What it asked for until now.
    pub(super) waiting: Waiting,
    pub(super) knocks: Vec<(u64, Knock)>,
    pub(super) malformed: u32,
}

/// Why a newcomer does not come in.
pub(super) enum Turned {
    /// Nobody here can make room, or not in time.
    Full,
    /// The instance is on its way out.
    Draining,
    End(End),
}

impl Newcomer {
    pub(super) fn new(speaker: Speaker, seat: Seat) -> Self {
        Self { speaker, seat, waiting: Waiting::default(), knocks: vec![], malformed: 0 }
    }

    /// A place for the sandbox, once others have made it.
    pub(super) async fn wait_for_room(&mut self, api: &Api, id: &SandboxId) -> Result<Attached, Turned> {
        let mut room = std::pin::pin!(api.board.make_room(id, api.settings.max_sandboxes));
        let mut drain = api.settings.drain.clone();
        loop {
            let held_back = self.waiting.is_full() || self.speaker.wire.is_paused();
            if held_back {
                self.speaker.wire.excuse();
            }
            let wake_at = self.speaker.wire.wake_at();
            let drains = async { drain.wait_for(|drain| *drain).await.is_ok() };
            let end = tokio::select! {
                biased;
                () = api.closing.cancelled() => Some(End::Close(Close::Restart)),
                true = drains => return Err(Turned::Draining),
                knock = self.seat.knock() => self.knocked(knock),
                admitted = &mut room => return admitted.ok_or(Turned::Full),
                turn = self.speaker.wire.turn(!held_back) => self.turn(turn),
                () = api.clock.sleep_until(wake_at) => None,
            };
            if let Some(end) = end.or_else(|| self.look_at_the_clock()) {
                return Err(Turned::End(end));
            }
        }
    }

    fn knocked(&mut self, knock: Option<Knock>) -> Option<End> {
        // Another client has its seat.
        let Some(knock) = knock else { return Some(End::Close(Close::Unavailable)) };
        self.knocks.push((self.speaker.wire.ping(vec![], true), knock));
        None
    }

    fn turn(&mut self, turn: Turn) -> Option<End> {
        let refusal = match turn {
            // What is too long as yet is read once there is a place.
            Turn::Wrote | Turn::TooLong => return None,
            Turn::Pong(_) => {
                let ponged = self.speaker.wire.ponged();
                for (_, knock) in self.knocks.extract_if(.., |(number, _)| *number <= ponged) {
                    // Who knocked may have left meanwhile.
                    let _ = knock.send(());
                }
                return None;
            }
            Turn::Text(text) => match Request::parse(&text) {
                Err(refusal) if refusal.malformed => refusal,
                parsed => {
                    self.waiting.push(parsed, text.len());
                    return None;
                }
            },
            Turn::Binary(_) => Refusal::malformed("Until the sandbox runs a message must be text."),
            Turn::Broken(close) => return Some(End::Close(close)),
            Turn::Gone => return Some(End::Gone),
        };
        self.speaker.refuse(&refusal);
        self.malformed += 1;
        (self.malformed >= MOST_MALFORMED).then_some(End::Close(Close::BadData))
    }

    fn look_at_the_clock(&mut self) -> Option<End> {
        if self.speaker.wire.is_gone() {
            return Some(End::Gone);
        }
        if self.speaker.wire.is_ping_due() {
            self.speaker.wire.ping_due(vec![]);
        }
        None
    }

    /// Its seat is free before the client hears the end: it may come back at once.
    pub(super) fn give_up_seat(self) -> Speaker {
        self.speaker
    }

    pub(super) async fn leave(self, end: End) {
        let speaker = self.give_up_seat();
        match end {
            End::Close(close) => speaker.wire.close(close).await,
            End::Gone => speaker.wire.leave().await,
        }
    }
}
