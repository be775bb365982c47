//! Replays for streams that fell behind because the client reads more slowly than its commands write in total.
//!
//! The window of one stream always fits into the queue; those of many streams do not. Output that did not fit was
//! skipped; it is requested again once the output before it is delivered, a few streams at a time. While one stream
//! waits, no other gets new credit ahead of it: streams take turns.

use std::collections::VecDeque;

use super::*;
use crate::api::stream_cursor::{output_of, stream_of};

/// How many streams are replayed at once: their windows fit into the queue.
const MAX_REPLAYS: usize = 4;
/// How long the next streams wait for the first bytes of the last replay.
const REPLAY_TIMEOUT: Duration = Duration::from_millis(100);

/// Streams waiting for a replay or for credit.
#[derive(Debug, Default)]
pub struct ReplayQueue {
    pending: VecDeque<PendingReplay>,
    /// The last replay requested, until some of it arrives.
    requested: Option<(u64, Moment)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingReplay {
    exec: u32,
    output: StdStream,
    /// Whether output was skipped; otherwise the stream only waits for credit.
    is_skipped: bool,
}

impl ReplayQueue {
    /// Whether the stream has to wait for the credit it would get now.
    pub fn defers(&mut self, exec: u32, output: StdStream) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        self.add(PendingReplay { exec, output, is_skipped: false });
        true
    }

    fn add(&mut self, replay: PendingReplay) {
        match self.pending.iter_mut().find(|known| (known.exec, known.output) == (replay.exec, replay.output)) {
            Some(known) => known.is_skipped |= replay.is_skipped,
            None => self.pending.push_back(replay),
        }
    }

    /// Output of this replay has arrived.
    pub fn arrived(&mut self, replay: u64) {
        self.requested.take_if(|(requested, _)| *requested == replay);
    }

    /// When to continue even if nothing has arrived.
    pub fn wake_at(&self) -> Option<Moment> {
        self.requested.map(|(_, until)| until).filter(|_| !self.pending.is_empty())
    }
}

impl ExecTable {
    /// Requests the skipped output, if the client has room for it.
    pub fn catch_up(&mut self, has_room: bool) {
        for (exec, stream) in self.link.take_behind() {
            if let Some(output) = output_of(stream) {
                self.replays.add(PendingReplay { exec, output, is_skipped: true });
                // Output of the requested replay may have been skipped, too.
                self.replays.requested = None;
            }
        }
        if self.replays.pending.is_empty() {
            return;
        }
        let now = self.clock.now();
        self.replays.requested.take_if(|(_, until)| *until <= now);
        if self.replays.requested.is_some() || !has_room || !self.link.is_drained() {
            return;
        }
        let mut room = MAX_REPLAYS;
        while room > 0
            && let Some(replay) = self.replays.pending.pop_front()
        {
            // A command that is not followed misses nothing.
            let Some(delivery) = self.tracked.get_mut(&replay.exec).and_then(|command| command.delivery.as_mut())
            else {
                continue;
            };
            let cursor = delivery.cursor(replay.output);
            let frame = |kind| Frame::new(kind).exec(replay.exec).stream(stream_of(replay.output));
            if replay.is_skipped && !cursor.has_ended() {
                self.numbers.replay = self.numbers.replay.wrapping_add(2);
                cursor.expect_replay(self.numbers.replay);
                self.replays.requested = Some((self.numbers.replay, now + REPLAY_TIMEOUT));
                self.link.send(frame(FrameKind::Replay).offset(cursor.next()).sequence(self.numbers.replay));
            }
            self.link.send(frame(FrameKind::Credit).offset(cursor.credit()));
            room -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_waits_behind_what_was_left_out_and_each_stream_stands_there_once() {
        let mut replays = ReplayQueue::default();
        assert!(!replays.defers(1, StdStream::Stdout));
        replays.add(PendingReplay { exec: 2, output: StdStream::Stdout, is_skipped: true });
        assert!(
            replays.defers(1, StdStream::Stdout)
                && replays.defers(1, StdStream::Stdout)
                && replays.defers(2, StdStream::Stdout)
        );
        replays.add(PendingReplay { exec: 1, output: StdStream::Stdout, is_skipped: true });
        let pending: Vec<_> = replays.pending.into_iter().map(|replay| (replay.exec, replay.is_skipped)).collect();
        assert_eq!(pending, [(2, true), (1, true)]);
    }
}
