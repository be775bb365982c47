//! The tail of one output stream: bytes with offsets, kept until they are acknowledged.

use std::io::IoSliceMut;

/// Holds the bytes `base..end` of a stream. An empty ring allocates nothing.
///
/// Bytes are read into it and written from it in place: [`spare`](Self::spare) and [`pieces`](Self::pieces) have
/// two parts because the ring wraps around.
#[derive(Debug, Default)]
pub struct Ring {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    base: u64,
}

impl Ring {
    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn end(&self) -> u64 {
        self.base + self.len as u64
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes fit without a larger buffer.
    pub fn free(&self) -> usize {
        self.bytes.len() - self.len
    }

    /// The buffers for the next bytes, at most `most` of them. Call [`commit`](Self::commit) after filling them.
    pub fn spare(&mut self, most: usize) -> [IoSliceMut<'_>; 2] {
        let most = most.min(self.free());
        let end = self.start + self.len;
        let (front, back) = match end.checked_sub(self.bytes.len()) {
            Some(at) => (&mut self.bytes[at..at + most], &mut [][..]),
            None => {
                let (before, after) = self.bytes.split_at_mut(end);
                let first = most.min(after.len());
                (&mut after[..first], &mut before[..most - first])
            }
        };
        [IoSliceMut::new(front), IoSliceMut::new(back)]
    }

    /// Marks the first `count` bytes of the spare buffers as filled.
    pub fn commit(&mut self, count: usize) {
        self.len += count.min(self.free());
    }

    /// Appends `bytes`; drops the oldest if more than `limit` would be held.
    pub fn push(&mut self, bytes: &[u8], limit: usize) {
        let over = (self.len + bytes.len()).saturating_sub(limit);
        let old = over.min(self.len);
        self.drop_front(old);
        let fresh = &bytes[over - old..];
        self.base += (over - old) as u64;
        let wanted = self.len + fresh.len();
        if wanted > self.bytes.len() {
            // Double, but never beyond the limit: reserved memory is part of every checkpoint.
            self.resize(wanted.max(self.bytes.len() * 2).min(limit.max(wanted)));
        }
        let mut rest = fresh;
        for mut part in self.spare(fresh.len()) {
            let (now, later) = rest.split_at(part.len().min(rest.len()));
            part[..now.len()].copy_from_slice(now);
            rest = later;
        }
        self.commit(fresh.len());
    }

    /// Drops everything below `offset`.
    pub fn free_below(&mut self, offset: u64) {
        let count = offset.clamp(self.base, self.end()) - self.base;
        self.drop_front(count as usize);
    }

    fn drop_front(&mut self, count: usize) {
        self.base += count as u64;
        self.len -= count;
        // An empty ring starts at the front again, which touches fewer pages.
        self.start = match (self.len, self.start + count) {
            (0, _) => 0,
            (_, start) if start >= self.bytes.len() => start - self.bytes.len(),
            (_, start) => start,
        };
    }

    /// At most `most` bytes starting at `from`, in two pieces because the ring wraps around.
    pub fn pieces(&self, from: u64, most: usize) -> [&[u8]; 2] {
        let skip = (from.clamp(self.base, self.end()) - self.base) as usize;
        let count = most.min(self.len - skip);
        let at = self.start + skip;
        match at.checked_sub(self.bytes.len()) {
            Some(at) => [&self.bytes[at..at + count], &[]],
            None => {
                let first = count.min(self.bytes.len() - at);
                [&self.bytes[at..at + first], &self.bytes[..count - first]]
            }
        }
    }

    /// Releases memory that is mostly unused.
    pub fn shrink(&mut self) {
        if self.is_slack() {
            self.resize(self.len);
        }
    }

    pub fn is_slack(&self) -> bool {
        self.bytes.len() > 4096 && self.bytes.len() / 4 > self.len
    }

    fn resize(&mut self, capacity: usize) {
        // The kernel zeroes pages only when they are first touched.
        let mut bytes = vec![0; capacity];
        let [front, back] = self.pieces(self.base, self.len);
        bytes[..front.len()].copy_from_slice(front);
        bytes[front.len()..self.len].copy_from_slice(back);
        (self.bytes, self.start) = (bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unused_ring_holds_no_memory_and_a_tidied_one_gives_it_back() {
        let mut ring = Ring::default();
        assert_eq!(ring.bytes.len(), 0);
        ring.push(&[7; 100_000], 1 << 20);
        ring.free_below(100_000);
        assert!(ring.is_slack());
        ring.shrink();
        assert_eq!(ring.bytes.len(), 0);
        assert_eq!((ring.base(), ring.end()), (100_000, 100_000));
    }

    #[test]
    fn what_is_reserved_never_passes_the_limit() {
        let mut ring = Ring::default();
        for _ in 0..100 {
            ring.push(&[1; 30_000], 1 << 20);
            assert!(ring.bytes.len() <= 1 << 20);
        }
    }

    proptest! {
        #[test]
        fn a_ring_is_a_window_on_all_bytes_ever_pushed(
            steps in prop::collection::vec((0usize..700, 0u64..5000, 0usize..900, any::<[bool; 2]>()), 1..60),
        ) {
            const LIMIT: usize = 1000;
            let (mut ring, mut all) = (Ring::default(), Vec::new());
            for (count, from, most, [acknowledged, in_place]) in steps {
                let count = if in_place { count.min(ring.free()) } else { count };
                let bytes: Vec<u8> = (0..count).map(|at| (at * 31 + all.len()) as u8).collect();
                all.extend_from_slice(&bytes);
                if in_place {
                    let mut rest = &bytes[..];
                    for mut part in ring.spare(count) {
                        let (now, later) = rest.split_at(part.len());
                        part.copy_from_slice(now);
                        rest = later;
                    }
                    prop_assert!(rest.is_empty());
                    ring.commit(count);
                } else {
                    ring.push(&bytes, LIMIT);
                }
                prop_assert_eq!(ring.end(), all.len() as u64);
                prop_assert!(ring.len() <= LIMIT);
                if acknowledged {
                    ring.free_below(from);
                    prop_assert!(ring.base() >= from.min(ring.end()));
                }
                let start = from.clamp(ring.base(), ring.end()) as usize;
                let got = ring.pieces(from, most).concat();
                prop_assert_eq!(&got[..], &all[start..all.len().min(start + most)]);
            }
        }
    }
}
