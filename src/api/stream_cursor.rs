//! Progress of the output of one command: read, sent, confirmed, and complete.
//! Pure: bytes and offsets in, bytes and offsets out. Offsets come from the agent, which may be hostile: all
//! arithmetic with them saturates.
//!
//! ```text
//!   confirmed ──── sent ──── next ──────────▶ credit = confirmed + window
//!     the client     sent to    taken from       the agent may
//!     has it         the client the agent        send so far
//! ```
//! `next - sent` is at most the beginning of one UTF-8 character.

use baton_protocol::{
    agent::{self, RING_ATTACHED},
    event::StdStream,
    frame::Stream,
};

/// How much of a stream may be in flight without the client having confirmed it.
pub const WINDOW: u64 = 1 << 20;
/// How much of each stream a peek at a running command leaves for others. The rest of the agent's buffer is room for
/// the command to go on.
pub const PEEK_KEEPS: u64 = RING_ATTACHED - WINDOW;
/// Confirmations are passed on in steps of this size, or when everything is confirmed.
const CONFIRM_STEP: u64 = 64 << 10;

/// How far a client had come with a command when a ping was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub exec: u32,
    pub stdout: u64,
    pub stderr: u64,
    /// Whether its exit was sent.
    pub done: bool,
}

/// Progress of one stream.
#[derive(Debug, Default)]
pub struct StreamCursor {
    next: u64,
    confirmed: u64,
    reported: u64,
    /// The replay number that frames must carry; `None` accepts every frame.
    replay: Option<u64>,
    ends_at: Option<u64>,
    /// The beginning of a split character.
    held: Vec<u8>,
}

/// What is new in a data frame.
#[derive(Debug, PartialEq, Eq)]
pub struct NewOutput {
    /// The range of bytes that are lost before the new ones.
    pub gap: Option<(u64, u64)>,
    /// Where the new bytes start in the stream and in the payload.
    pub offset: u64,
    pub skip: usize,
}

impl StreamCursor {
    /// Starts at `offset` with frames that carry `replay`.
    pub fn resumed(offset: u64, replay: u64) -> Self {
        Self { next: offset, confirmed: offset, reported: offset, replay: Some(replay), ..Self::default() }
    }

    /// Continues from the current position with frames that carry `replay`, after output was skipped.
    pub fn expect_replay(&mut self, replay: u64) {
        self.replay = Some(replay);
    }

    /// Returns what is new in a frame; `None` if nothing is.
    pub fn advance(&mut self, offset: u64, sequence: u64, len: usize) -> Option<NewOutput> {
        if self.replay.is_some_and(|replay| replay != sequence) {
            return None;
        }
        let end = offset.saturating_add(len as u64);
        if end <= self.next {
            return None;
        }
        let gap = (offset > self.next).then_some((self.next, offset));
        if gap.is_some() {
            self.held.clear();
            self.confirmed = offset;
        }
        let start = offset.max(self.next);
        self.next = end;
        Some(NewOutput { gap, offset: start, skip: (start - offset) as usize })
    }

    /// Ends the stream at `offset`. Returns the range that was lost before it.
    pub fn end(&mut self, offset: u64, sequence: u64) -> Option<(u64, u64)> {
        if self.replay.is_some_and(|replay| replay != sequence) {
            return None;
        }
        self.ends_at = Some(offset);
        let gap = (offset > self.next).then_some((self.next, offset));
        self.next = self.next.max(offset);
        gap
    }

    pub fn has_ended(&self) -> bool {
        self.ends_at.is_some()
    }

    pub fn next(&self) -> u64 {
        self.next
    }

    pub fn sent(&self) -> u64 {
        self.next.saturating_sub(self.held.len() as u64)
    }

    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Decodes `bytes`, which follow what was decoded before. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.held.is_empty() {
            bytes
        } else {
            self.held.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.held);
            &joined
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(bad) = error.error_len() else {
                self.held = after.to_vec();
                return text;
            };
            text.push('\u{fffd}');
            rest = &after[bad..];
        }
    }

    /// U+FFFD for a character that started and will never be completed.
    pub fn decode_rest(&mut self) -> Option<String> {
        (!std::mem::take(&mut self.held).is_empty()).then(|| '\u{fffd}'.to_string())
    }

    /// Confirms that the client has everything below `offset`. If `Some`, tell the agent now.
    pub fn confirm(&mut self, offset: u64) -> Option<u64> {
        self.confirmed = self.confirmed.max(offset.min(self.sent()));
        let due = self.confirmed >= self.reported.saturating_add(CONFIRM_STEP) || self.confirmed == self.next;
        (due && self.confirmed > self.reported).then(|| {
            self.reported = self.confirmed;
            self.confirmed
        })
    }

    pub fn credit(&self) -> u64 {
        self.confirmed.saturating_add(WINDOW)
    }
}

/// The delivery of one command to the client of this session.
#[derive(Debug)]
pub struct Delivery {
    exec: u32,
    pub stdout: StreamCursor,
    pub stderr: StreamCursor,
    exit: Option<agent::Exit>,
    /// Nothing more is sent to the client; what arrives is confirmed unseen.
    pub is_muted: bool,
    /// The client only peeks: what it confirms is not freed.
    pub is_peek: bool,
    is_done: bool,
    /// Whether the client has confirmed the exit.
    is_exit_confirmed: bool,
    is_settled: bool,
}

impl Delivery {
    pub fn new(exec: u32) -> Self {
        Self {
            exec,
            stdout: StreamCursor::default(),
            stderr: StreamCursor::default(),
            exit: None,
            is_muted: false,
            is_peek: false,
            is_done: false,
            is_exit_confirmed: false,
            is_settled: false,
        }
    }

    pub fn cursor(&mut self, output: StdStream) -> &mut StreamCursor {
        match output {
            StdStream::Stdout => &mut self.stdout,
            StdStream::Stderr => &mut self.stderr,
        }
    }

    pub fn exited(&mut self, exit: agent::Exit) {
        self.exit = Some(exit);
    }

    pub fn has_exited(&self) -> bool {
        self.exit.is_some()
    }

    /// Takes over how far the streams go, which the agent reports after the exit. Returns whether more is to come.
    pub fn settle(&mut self, stdout: u64, stderr: u64) -> bool {
        self.is_settled = self.stdout.next >= stdout && self.stderr.next >= stderr;
        !self.is_settled
    }

    /// Returns the exit once, when the command has exited and all of its output was taken.
    pub fn take_exit(&mut self) -> Option<agent::Exit> {
        let all = self.is_settled || (self.stdout.has_ended() && self.stderr.has_ended());
        if self.is_done || !all {
            return None;
        }
        let exit = self.exit.take()?;
        self.is_done = true;
        Some(exit)
    }

    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// Notes that the client has confirmed the exit. Returns whether that is new.
    pub fn confirm_exit(&mut self) -> bool {
        !std::mem::replace(&mut self.is_exit_confirmed, true)
    }

    pub fn mark(&self) -> Mark {
        Mark { exec: self.exec, stdout: self.stdout.sent(), stderr: self.stderr.sent(), done: self.is_done }
    }

    /// Whether nothing more will come and the client has everything.
    pub fn is_over(&self) -> bool {
        let over = |cursor: &StreamCursor| cursor.ends_at.is_some_and(|end| cursor.confirmed >= end);
        self.is_exit_confirmed && over(&self.stdout) && over(&self.stderr)
    }
}

pub fn stream_of(output: StdStream) -> Stream {
    match output {
        StdStream::Stdout => Stream::Stdout,
        StdStream::Stderr => Stream::Stderr,
    }
}

pub fn output_of(stream: Stream) -> Option<StdStream> {
    match stream {
        Stream::Stdout => Some(StdStream::Stdout),
        Stream::Stderr => Some(StdStream::Stderr),
        Stream::Stdin | Stream::Exit | Stream::Tree => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(gap: Option<(u64, u64)>, offset: u64, skip: usize) -> Option<NewOutput> {
        Some(NewOutput { gap, offset, skip })
    }

    #[test]
    fn every_byte_is_taken_once_and_a_gap_is_seen() {
        let mut cursor = StreamCursor::default();
        assert_eq!(cursor.advance(0, 0, 10), taken(None, 0, 0));
        assert_eq!(cursor.advance(4, 0, 6), None);
        assert_eq!(cursor.advance(4, 0, 10), taken(None, 10, 6));
        assert_eq!(cursor.advance(20, 0, 5), taken(Some((14, 20)), 20, 0));
        assert_eq!(cursor.end(30, 0), Some((25, 30)));
        assert_eq!(cursor.confirmed(), 20);
    }

    #[test]
    fn frames_of_another_replay_are_not_taken() {
        let mut cursor = StreamCursor::resumed(100, 7);
        assert_eq!(cursor.advance(100, 6, 10), None);
        assert_eq!(cursor.end(100, 6), None);
        assert!(!cursor.has_ended());
        assert_eq!(cursor.advance(100, 7, 10), Some(NewOutput { gap: None, offset: 100, skip: 0 }));
    }

    #[test]
    fn a_client_confirms_no_more_than_it_was_sent_and_the_agent_hears_it_in_steps() {
        let mut cursor = StreamCursor::default();
        cursor.advance(0, 0, 1 << 20);
        assert_eq!(cursor.confirm(10), None);
        assert_eq!(cursor.confirm(CONFIRM_STEP), Some(CONFIRM_STEP));
        assert_eq!(cursor.credit(), CONFIRM_STEP + WINDOW);
        assert_eq!(cursor.confirm(u64::MAX), Some(1 << 20));
        assert_eq!(cursor.confirm(u64::MAX), None);
        assert_eq!(cursor.confirm(5), None);
    }

    #[test]
    fn a_begun_character_counts_as_not_sent() {
        let mut cursor = StreamCursor::default();
        cursor.advance(0, 0, 3);
        assert_eq!(cursor.decode("aé".as_bytes().split_at(2).0), "a");
        assert_eq!((cursor.sent(), cursor.next()), (2, 3));
        assert_eq!(cursor.decode_rest().as_deref(), Some("\u{fffd}"));
        assert_eq!(cursor.decode_rest(), None);
    }

    #[test]
    fn the_end_is_told_once_after_all_output() {
        let mut delivery = Delivery::new(1);
        delivery.exited(agent::Exit { code: Some(0), ..agent::Exit::default() });
        assert_eq!(delivery.take_exit(), None);
        delivery.stdout.advance(0, 0, 5);
        delivery.stdout.end(5, 0);
        assert_eq!(delivery.take_exit(), None);
        assert!(delivery.settle(5, 3), "stderr is behind");
        delivery.stderr.advance(0, 0, 3);
        assert!(!delivery.settle(5, 3));
        assert!(delivery.take_exit().is_some());
        assert_eq!(delivery.take_exit(), None);
        assert!(!delivery.is_over());
        delivery.stderr.end(3, 0);
        delivery.stdout.confirm(5);
        delivery.stderr.confirm(3);
        assert!(!delivery.is_over(), "the client has not confirmed the exit");
        assert!(delivery.confirm_exit() && !delivery.confirm_exit());
        assert!(delivery.is_over());
    }

    proptest! {
        #[test]
        fn text_is_the_same_wherever_it_is_cut(bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0xc0..=0xf5u8, 0x80..=0xbfu8], 0..60), cuts in prop::collection::vec(0usize..60, 0..8)) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let mut cursor = StreamCursor::default();
            let mut text: String = cuts.windows(2).map(|cut| {
                cursor.advance(cut[0] as u64, 0, cut[1] - cut[0]);
                let text = cursor.decode(&bytes[cut[0]..cut[1]]);
                assert!(cursor.next() - cursor.sent() < 4);
                text
            }).collect();
            text.extend(cursor.decode_rest());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
