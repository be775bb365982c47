//! The tail of one output stream: bytes with offsets, kept until they are acknowledged.

use std::collections::VecDeque;

/// Holds the bytes `base..end` of a stream. An empty one costs nothing.
#[derive(Debug, Default)]
pub struct Ring {
    bytes: VecDeque<u8>,
    base: u64,
}

impl Ring {
    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends `bytes`; the oldest go when more than `limit` would be held.
    pub fn push(&mut self, bytes: &[u8], limit: usize) {
        let over = (self.bytes.len() + bytes.len()).saturating_sub(limit);
        let old = over.min(self.bytes.len());
        self.bytes.drain(..old);
        let fresh = &bytes[over - old..];
        self.base += over as u64;
        let wanted = self.bytes.len() + fresh.len();
        if wanted > self.bytes.capacity() {
            // Doubling, but never past the limit: what is reserved lies in every checkpoint.
            let capacity = wanted.max(self.bytes.capacity() * 2).min(limit.max(wanted));
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend(fresh);
    }

    /// Forgets everything below `offset`.
    pub fn free_below(&mut self, offset: u64) {
        let count = offset.clamp(self.base, self.end()) - self.base;
        self.bytes.drain(..count as usize);
        self.base += count;
    }

    /// At most `most` bytes from `from` on, in two pieces since the ring wraps around.
    pub fn pieces(&self, from: u64, most: usize) -> [&[u8]; 2] {
        let start = (from.clamp(self.base, self.end()) - self.base) as usize;
        let end = self.bytes.len().min(start + most);
        let (front, back) = self.bytes.as_slices();
        let cut = |piece: usize| piece.min(front.len());
        [&front[cut(start)..cut(end)], &back[start - cut(start)..end - cut(end)]]
    }

    /// Gives back memory that is mostly unused.
    pub fn tidy(&mut self) {
        if self.is_slack() {
            self.bytes.shrink_to_fit();
        }
    }

    pub fn is_slack(&self) -> bool {
        self.bytes.capacity() > 4096 && self.bytes.capacity() / 4 > self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unused_ring_holds_no_memory_and_a_tidied_one_gives_it_back() {
        let mut ring = Ring::default();
        assert_eq!(ring.bytes.capacity(), 0);
        ring.push(&[7; 100_000], 1 << 20);
        ring.free_below(100_000);
        assert!(ring.is_slack());
        ring.tidy();
        assert_eq!(ring.bytes.capacity(), 0);
        assert_eq!((ring.base(), ring.end()), (100_000, 100_000));
    }

    #[test]
    fn what_is_reserved_never_passes_the_limit() {
        let mut ring = Ring::default();
        for _ in 0..100 {
            ring.push(&[1; 30_000], 1 << 20);
            assert!(ring.bytes.capacity() <= 1 << 20);
        }
    }

    proptest! {
        #[test]
        fn a_ring_is_a_window_on_all_bytes_ever_pushed(
            steps in prop::collection::vec((0usize..700, 0u64..5000, 0usize..900, any::<bool>()), 1..60),
        ) {
            const LIMIT: usize = 1000;
            let (mut ring, mut all) = (Ring::default(), Vec::new());
            for (count, from, most, acknowledged) in steps {
                let bytes: Vec<u8> = (0..count).map(|at| (at * 31 + all.len()) as u8).collect();
                all.extend_from_slice(&bytes);
                ring.push(&bytes, LIMIT);
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
