//! Decodes what the server sends: bytes in, whole frames out, wherever the stream was cut.
//!
//! ```text
//!   whole frames ── part of a frame ── marker ── marker ── whole frames
//!        taken          dropped        skipped                taken
//! ```
//! After a restore the old pipe may end in the middle of a frame. The sandbox's marker shows where the new
//! server's bytes begin; without it nothing after a broken frame is accepted.

use baton_protocol::frame::{Broken, Decoder, Frame, Marker};

#[derive(Debug, Default)]
pub struct AgentDecoder {
    decoder: Decoder,
    marker: Option<Marker>,
    /// Where in the pending bytes the next marker begins, once it was found.
    cut: Option<usize>,
    /// The number of pending bytes known not to begin a marker.
    searched: usize,
    /// The frame boundary is unknown: only a marker restores it.
    lost: bool,
}

impl AgentDecoder {
    pub fn set_marker(&mut self, marker: Marker) {
        self.marker = Some(marker);
        self.cut = None;
        self.searched = 0;
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
    }

    /// The next whole frame, or `None` until more bytes arrive. An error is returned once; then everything up to
    /// the next marker is dropped.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Broken> {
        loop {
            self.search();
            let Some(cut) = self.cut else {
                if self.lost {
                    self.forget();
                    return Ok(None);
                }
                return match self.next_within(usize::MAX) {
                    Err(broken) => {
                        self.lost = true;
                        Err(broken)
                    }
                    taken => taken,
                };
            };
            if !self.lost
                && let Ok(Some(frame)) = self.next_within(cut)
            {
                return Ok(Some(frame));
            }
            let end = self.cut.take().unwrap_or(0) + size_of::<Marker>();
            self.decoder.skip(end);
            self.searched = 0;
            self.lost = false;
        }
    }

    /// Releases memory when nothing is pending.
    pub fn shrink(&mut self) {
        if self.decoder.pending().is_empty() {
            *self = Self { marker: self.marker, lost: self.lost, ..Self::default() };
        }
    }

    fn next_within(&mut self, limit: usize) -> Result<Option<Frame>, Broken> {
        let before = self.decoder.pending().len();
        let taken = self.decoder.next_frame_within(limit);
        let count = before - self.decoder.pending().len();
        self.searched = self.searched.saturating_sub(count);
        self.cut = self.cut.map(|cut| cut - count);
        taken
    }

    fn search(&mut self) {
        let (Some(marker), None) = (self.marker, self.cut) else { return };
        let pending = self.decoder.pending();
        self.cut = pending[self.searched..]
            .windows(marker.len())
            .position(|window| window[0] == marker[0] && window == marker)
            .map(|at| self.searched + at);
        self.searched = (pending.len() + 1).saturating_sub(marker.len()).max(self.searched);
    }

    /// Drops what cannot be the beginning of a marker.
    fn forget(&mut self) {
        let keep = if self.marker.is_some() { size_of::<Marker>() - 1 } else { 0 };
        let count = self.decoder.pending().len().saturating_sub(keep);
        self.decoder.skip(count);
        self.searched = self.searched.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use baton_protocol::frame::FrameKind;
    use proptest::{prelude::*, sample::Index};

    use super::*;

    /// Drawn as one number instead of byte by byte, which would dominate the time of a million cases.
    fn any_bytes(length: Range<usize>) -> impl Strategy<Value = Vec<u8>> {
        (any::<u64>(), length).prop_map(|(seed, length)| {
            let mut state = seed;
            let words = std::iter::repeat_with(|| {
                // SplitMix64.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut word = state;
                word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                word ^ (word >> 31)
            });
            words.flat_map(u64::to_le_bytes).take(length).collect()
        })
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        (any::<u32>(), any::<u64>(), any_bytes(0..120))
            .prop_map(|(exec, offset, payload)| Frame::new(FrameKind::Stdin).exec(exec).offset(offset).payload(payload))
    }

    fn bytes_of(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        bytes
    }

    /// Pushes the bytes in pieces of the given sizes and takes all frames after each.
    fn feed(intake: &mut AgentDecoder, bytes: &[u8], pieces: &[usize]) -> Vec<Frame> {
        let (mut frames, mut rest) = (Vec::new(), bytes);
        for piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            intake.push(now);
            loop {
                match intake.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(_) => {}
                }
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        frames
    }

    fn intake(marker: Marker) -> AgentDecoder {
        let mut intake = AgentDecoder::default();
        intake.set_marker(marker);
        intake
    }

    /// `make proof` runs a million cases.
    #[expect(clippy::disallowed_methods, reason = "the tier is chosen by who runs the tests")]
    fn cases() -> ProptestConfig {
        let proof = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof");
        ProptestConfig::with_cases(if proof { 1_000_000 } else { 4_000 })
    }

    proptest! {
        #![proptest_config(cases())]

        #[test]
        fn after_any_cut_whole_frames_were_taken_once_and_all_after_the_markers_is_understood(
            marker in any::<Marker>(),
            // Frames of the old server, each after some markers: that server may have resynced too.
            old in prop::collection::vec((0usize..3, any_frame()), 0..6),
            new in prop::collection::vec((0usize..3, any_frame()), 1..4),
            cut in any::<Index>(),
            pieces in prop::collection::vec(1usize..100, 1..20),
        ) {
            let (mut bytes, mut ends) = (Vec::new(), Vec::new());
            for (markers, frame) in &old {
                bytes.extend(marker.repeat(*markers));
                frame.encode(&mut bytes);
                ends.push(bytes.len());
            }
            let cut = cut.index(bytes.len() + 1);
            let whole = ends.iter().filter(|end| **end <= cut).count();
            // The marker may begin with the bytes that were cut off: then the frame is whole after all.
            let completed = ends.get(whole).is_some_and(|end| marker.repeat(2).starts_with(&bytes[cut..*end]));
            bytes.truncate(cut);
            bytes.extend(marker.repeat(2));
            for (markers, frame) in &new {
                frame.encode(&mut bytes);
                bytes.extend(marker.repeat(*markers));
            }
            let wanted = |whole: usize| -> Vec<Frame> {
                old[..whole].iter().chain(&new).map(|(_, frame)| frame.clone()).collect()
            };
            let taken = feed(&mut intake(marker), &bytes, &pieces);
            if !completed || taken != wanted(whole + 1) {
                prop_assert_eq!(taken, wanted(whole));
            }
        }

        #[test]
        fn after_damage_nothing_is_believed_until_the_marker(
            marker in any::<Marker>(),
            old in prop::collection::vec(any_frame(), 1..6),
            new in any_frame(),
            place in any::<Index>(),
            bit in 0u8..8,
            pieces in prop::collection::vec(1usize..100, 1..20),
        ) {
            let mut bytes = bytes_of(&old);
            let at = place.index(bytes.len());
            bytes[at] ^= 1 << bit;
            bytes.extend(marker.repeat(2));
            new.encode(&mut bytes);
            let mut wanted = Vec::new();
            let mut end = 0;
            for frame in &old {
                end += bytes_of(std::slice::from_ref(frame)).len();
                if end <= at {
                    wanted.push(frame.clone());
                }
            }
            wanted.push(new);
            prop_assert_eq!(feed(&mut intake(marker), &bytes, &pieces), wanted);
        }

        #[test]
        fn garbage_is_dropped_and_does_not_pile_up(
            marker in any::<Marker>(),
            garbage in any_bytes(32..2000),
            new in any_frame(),
            pieces in prop::collection::vec(1usize..300, 1..20),
        ) {
            let mut intake = intake(marker);
            // Too long for any frame, so that the boundary is lost at once.
            prop_assert!(feed(&mut intake, &[&[0xff; 32], &garbage[..]].concat(), &pieces).is_empty());
            prop_assert!(intake.decoder.pending().len() < 16);
            let bytes = [marker.to_vec(), bytes_of(std::slice::from_ref(&new))].concat();
            prop_assert_eq!(feed(&mut intake, &bytes, &pieces), [new]);
        }
    }

    #[test]
    fn a_marker_learnt_in_the_middle_holds_for_what_was_already_there() {
        let (marker, mut intake) = ([0x5a; 16], AgentDecoder::default());
        let frames = [1, 2, 3].map(|number| Frame::new(FrameKind::Ping).sequence(number));
        let mut bytes = bytes_of(&frames[..2]);
        bytes.truncate(bytes.len() - 5);
        bytes.extend(marker.repeat(2));
        frames[2].encode(&mut bytes);
        intake.push(&bytes);
        assert_eq!(intake.next_frame(), Ok(Some(frames[0].clone())));
        intake.set_marker(marker);
        assert_eq!(intake.next_frame(), Ok(Some(frames[2].clone())));
        assert_eq!(intake.next_frame(), Ok(None));
    }

    #[test]
    fn a_broken_frame_is_told_once_and_tidying_does_not_find_the_way_back() {
        let mut intake = intake([0x5a; 16]);
        intake.push(&[0xff; 100]);
        assert_eq!(intake.next_frame(), Err(Broken::TooLong(u32::MAX)));
        assert_eq!(intake.next_frame(), Ok(None));
        intake.shrink();
        intake.push(&bytes_of(&[Frame::new(FrameKind::Ping)]));
        assert_eq!(intake.next_frame(), Ok(None));
    }
}
