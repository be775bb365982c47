//! Replays for streams that fell behind because the client reads more slowly than its commands write in total.
//!
//! The window of one stream always fits into the queue; those of many streams do not. Output that did not fit was
//! skipped; it is requested again once the output before it is delivered, a few streams at a time. While one stream
//! waits, no other gets new credit ahead of it: streams take turns.

use std::collections::VecDeque;

use super::{
    agent_frames::{output_of, stream_of},
    *,
};

/// How many streams are replayed at once: their windows fit into the queue.
const AT_ONCE: usize = 4;
/// How long the next streams wait for the first bytes of the last replay.
const PATIENCE: Duration = Duration::from_millis(100);

/// Streams waiting for a replay or for credit.
#[derive(Debug, Default)]
pub struct ReplayQueue {
    debts: VecDeque<PendingReplay>,
    /// The last replay requested, until some of it arrives.
    asked: Option<(u64, Moment)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingReplay {
    exec: u32,
    output: Output,
    /// Whether output was skipped; otherwise the stream only waits for credit.
    left_out: bool,
}

impl ReplayQueue {
    /// Whether the stream has to wait for the credit it would get now.
    pub fn defers(&mut self, exec: u32, output: Output) -> bool {
        if self.debts.is_empty() {
            return false;
        }
        self.add(PendingReplay { exec, output, left_out: false });
        true
    }

    fn add(&mut self, debt: PendingReplay) {
        match self.debts.iter_mut().find(|known| (known.exec, known.output) == (debt.exec, debt.output)) {
            Some(known) => known.left_out |= debt.left_out,
            None => self.debts.push_back(debt),
        }
    }

    /// Output of this replay has arrived.
    pub fn came(&mut self, replay: u64) {
        self.asked.take_if(|(asked, _)| *asked == replay);
    }

    /// When to continue even if nothing has arrived.
    pub fn wake_at(&self) -> Option<Moment> {
        self.asked.map(|(_, until)| until).filter(|_| !self.debts.is_empty())
    }
}

impl ExecTable {
    /// Requests the skipped output, if the client has room for it.
    pub fn catch_up(&mut self, has_room: bool) {
        for (exec, stream) in self.line.take_behind() {
            if let Some(output) = output_of(stream) {
                self.owed.add(PendingReplay { exec, output, left_out: true });
                // Output of the requested replay may have been skipped, too.
                self.owed.asked = None;
            }
        }
        if self.owed.debts.is_empty() {
            return;
        }
        let now = self.clock.now();
        self.owed.asked.take_if(|(_, until)| *until <= now);
        if self.owed.asked.is_some() || !has_room || !self.line.is_drained() {
            return;
        }
        let mut room = AT_ONCE;
        while room > 0
            && let Some(debt) = self.owed.debts.pop_front()
        {
            // A command that is not followed misses nothing.
            let Some(delivery) = self.known.get_mut(&debt.exec).and_then(|command| command.delivery.as_mut()) else {
                continue;
            };
            let flow = delivery.flow(debt.output);
            let frame = |kind| Frame::new(kind).exec(debt.exec).stream(stream_of(debt.output));
            if debt.left_out && !flow.has_ended() {
                self.replay = self.replay.wrapping_add(2);
                flow.again(self.replay);
                self.owed.asked = Some((self.replay, now + PATIENCE));
                self.line.send(frame(Kind::Replay).offset(flow.next()).sequence(self.replay));
            }
            self.line.send(frame(Kind::Credit).offset(flow.credit()));
            room -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_waits_behind_what_was_left_out_and_each_stream_stands_there_once() {
        let mut owed = ReplayQueue::default();
        assert!(!owed.defers(1, Output::Stdout));
        owed.add(PendingReplay { exec: 2, output: Output::Stdout, left_out: true });
        assert!(owed.defers(1, Output::Stdout) && owed.defers(1, Output::Stdout) && owed.defers(2, Output::Stdout));
        owed.add(PendingReplay { exec: 1, output: Output::Stdout, left_out: true });
        let debts: Vec<_> = owed.debts.into_iter().map(|debt| (debt.exec, debt.left_out)).collect();
        assert_eq!(debts, [(2, true), (1, true)]);
    }
}
