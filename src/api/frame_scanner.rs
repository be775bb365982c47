//! Follows the frames of a WebSocket as their bytes arrive, to measure the message being received. Pure. The library
//! validates the frames.

/// Two bytes, a length of eight and a mask of four.
const LONGEST_HEAD: usize = 14;

#[derive(Debug)]
enum Part {
    Head { bytes: [u8; LONGEST_HEAD], len: usize },
    Payload { left: u64, frame: Frame },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    /// Text, binary or continuation; all others are control frames.
    is_data: bool,
    is_last: bool,
}

const NO_HEAD: Part = Part::Head { bytes: [0; LONGEST_HEAD], len: 0 };

#[derive(Debug)]
pub struct FrameScanner {
    part: Part,
    received: u64,
}

impl Default for FrameScanner {
    fn default() -> Self {
        Self { part: NO_HEAD, received: 0 }
    }
}

impl FrameScanner {
    /// Bytes received of a message that is not complete yet.
    pub fn received(&self) -> u64 {
        self.received
    }

    pub fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match &mut self.part {
                Part::Head { bytes: head, len } => {
                    head[*len] = bytes[0];
                    *len += 1;
                    bytes = &bytes[1..];
                    if let Some((frame, left)) = parse(&head[..*len]) {
                        self.part = Part::Payload { left, frame };
                        self.end_of_frame();
                    }
                }
                Part::Payload { left, frame } => {
                    let taken = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    bytes = &bytes[taken..];
                    *left -= taken as u64;
                    if frame.is_data {
                        self.received = self.received.saturating_add(taken as u64);
                    }
                    self.end_of_frame();
                }
            }
        }
    }

    fn end_of_frame(&mut self) {
        if let Part::Payload { left: 0, frame } = self.part {
            if frame.is_data && frame.is_last {
                self.received = 0;
            }
            self.part = NO_HEAD;
        }
    }
}

/// The frame and the length of its payload, once its head is complete.
fn parse(head: &[u8]) -> Option<(Frame, u64)> {
    let (first, second) = (*head.first()?, *head.get(1)?);
    let frame = Frame { is_data: first & 0x08 == 0, is_last: first & 0x80 != 0 };
    let (short, mask) = (second & 0x7f, if second & 0x80 == 0 { 0 } else { 4 });
    let extended = match short {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    if head.len() < 2 + extended + mask {
        return None;
    }
    let length = head[2..2 + extended].iter().fold(0, |length, byte| length << 8 | u64::from(*byte));
    Some((frame, if extended == 0 { u64::from(short) } else { length }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: u8 = 0x1;
    const MORE: u8 = 0x0;
    const PING: u8 = 0x9;
    const LAST: u8 = 0x80;

    fn frame(first: u8, length: usize) -> Vec<u8> {
        let mut bytes = vec![first];
        match length {
            0..126 => bytes.push(0x80 | length as u8),
            126..65_536 => {
                bytes.push(0x80 | 126);
                bytes.extend((length as u16).to_be_bytes());
            }
            _ => {
                bytes.push(0x80 | 127);
                bytes.extend((length as u64).to_be_bytes());
            }
        }
        bytes.extend([0xff; 4]);
        bytes.extend(vec![0x81; length]);
        bytes
    }

    /// A message in three pieces with a ping in between, and another one after it.
    #[test]
    fn a_message_is_counted_until_it_is_whole_however_its_bytes_are_cut() {
        let frames = [
            (frame(TEXT, 200), 200),
            (frame(PING | LAST, 125), 200),
            (frame(MORE, 70_000), 70_200),
            (frame(MORE, 0), 70_200),
            (frame(MORE | LAST, 5), 0),
            (frame(TEXT | LAST, 126), 0),
            (frame(TEXT, 1), 1),
        ];
        for cut in [1, 2, 3, 7, 1000, usize::MAX] {
            let mut scanner = FrameScanner::default();
            for (bytes, expected) in &frames {
                bytes.chunks(cut).for_each(|piece| scanner.feed(piece));
                assert_eq!(scanner.received(), *expected, "cut every {cut}");
            }
            let mut scanner = FrameScanner::default();
            let all = frames.iter().flat_map(|(bytes, _)| bytes.clone()).collect::<Vec<_>>();
            all.chunks(cut).for_each(|piece| scanner.feed(piece));
            assert_eq!(scanner.received(), 1, "cut every {cut}");
        }
    }

    #[test]
    fn what_has_come_of_a_frame_counts_before_the_rest_of_it_and_no_length_overflows() {
        let mut scanner = FrameScanner::default();
        scanner.feed(&frame(TEXT | LAST, 100)[..66]);
        assert_eq!(scanner.received(), 60);
        let mut scanner = FrameScanner::default();
        scanner.feed(&[TEXT | LAST, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        scanner.feed(&[0; 4096]);
        assert_eq!(scanner.received(), 4096);
    }

    #[test]
    fn frames_without_a_mask_are_followed_too() {
        let mut scanner = FrameScanner::default();
        scanner.feed(&[TEXT, 2, b'a', b'b', MORE | LAST, 1, b'c', TEXT, 3, b'd']);
        assert_eq!(scanner.received(), 1);
    }
}
