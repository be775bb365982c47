//! When to ping a client, what its pongs confirm, and when it counts as gone. Pure.

use std::{collections::VecDeque, time::Duration};

use super::stream_cursor::Mark;
use crate::clock::Moment;

/// A ping is sent after this much silence, and after this much output.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_BYTES: u64 = 256 << 10;
/// A plain client confirms by pong: the ping goes out at most this long after a send, so that hardly anything is sent
/// again after a reconnect.
const CONFIRM_DELAY: Duration = Duration::from_millis(100);
/// The client counts as gone if it shows no sign of life for this long after a ping.
const PONG_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct SentPing {
    number: u64,
    at: Moment,
    marks: Vec<Mark>,
    /// Whether the client counts as gone if it does not answer. A ping that only confirms may follow any event, and a
    /// client may leave that unread for a while.
    proves_life: bool,
}

#[derive(Debug)]
pub struct Pings {
    /// Whether only pongs tell how far the client has come.
    confirms_by_pong: bool,
    unanswered: VecDeque<SentPing>,
    last_number: u64,
    /// When the next liveness ping is due.
    due_at: Moment,
    /// When to send the ping that confirms what was sent.
    confirm_at: Option<Moment>,
    bytes_since: u64,
    /// The client's last sign of life.
    alive_at: Moment,
}

impl Pings {
    pub fn new(now: Moment, confirms_by_pong: bool) -> Self {
        Self {
            confirms_by_pong,
            unanswered: VecDeque::new(),
            last_number: 0,
            due_at: now + PING_INTERVAL,
            confirm_at: None,
            bytes_since: 0,
            alive_at: now,
        }
    }

    /// Notes a message to the client with this much output in it.
    pub fn sent(&mut self, output_bytes: usize, now: Moment) {
        self.bytes_since += output_bytes as u64;
        if self.confirms_by_pong {
            self.confirm_at.get_or_insert(now + CONFIRM_DELAY);
        }
    }

    pub fn is_due(&self, now: Moment) -> bool {
        self.is_liveness_due(now) || self.confirm_at.is_some_and(|at| now >= at)
    }

    pub fn is_liveness_due(&self, now: Moment) -> bool {
        self.bytes_since >= PING_BYTES || now >= self.due_at
    }

    /// Notes a ping and returns its number.
    pub fn ping(&mut self, marks: Vec<Mark>, proves_life: bool, now: Moment) -> u64 {
        self.last_number += 1;
        self.bytes_since = 0;
        self.confirm_at = None;
        if proves_life {
            self.due_at = now + PING_INTERVAL;
        }
        self.unanswered.push_back(SentPing { number: self.last_number, at: now, marks, proves_life });
        self.last_number
    }

    /// The marks that a pong confirms; `None` if it answers no ping.
    pub fn pong(&mut self, payload: &[u8]) -> Option<Vec<Mark>> {
        let number = u64::from_be_bytes(payload.try_into().ok()?);
        let mut marks = None;
        while self.unanswered.front().is_some_and(|ping| ping.number <= number) {
            marks = self.unanswered.pop_front().map(|ping| ping.marks);
        }
        marks
    }

    /// The number of the newest ping that was answered.
    pub fn answered(&self) -> u64 {
        self.unanswered.front().map_or(self.last_number, |ping| ping.number - 1)
    }

    pub fn note_alive(&mut self, now: Moment) {
        self.alive_at = now;
    }

    /// When the next ping is due.
    pub fn wake_at(&self) -> Moment {
        self.confirm_at.map_or(self.due_at, |at| at.min(self.due_at))
    }

    /// When the client counts as gone.
    pub fn gone_at(&self) -> Option<Moment> {
        let oldest = self.unanswered.iter().find(|ping| ping.proves_life);
        oldest.map(|ping| ping.at.max(self.alive_at) + PONG_TIMEOUT)
    }
}
