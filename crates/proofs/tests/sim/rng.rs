//! Chance, from one seed: the same throws every time.

use std::{sync::Mutex, time::Duration};

#[derive(Debug)]
pub struct Rng(Mutex<u64>);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d))
    }

    /// A generator for one part of the world, so that its draws do not shift those of the others.
    pub fn fork(&self) -> Self {
        Self::new(self.word())
    }

    /// SplitMix64.
    pub fn word(&self) -> u64 {
        let mut state = self.0.lock().unwrap();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = *state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub fn below(&self, end: u64) -> u64 {
        self.word() % end.max(1)
    }

    pub fn pick<'a, T>(&self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    /// True in `percent` of a hundred throws.
    pub fn falls(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn millis(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from + 1))
    }

    pub fn seconds(&self, from: u64, to: u64) -> Duration {
        self.millis(from * 1000, to * 1000)
    }

    pub fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
