//! How much the server may send to all connections together, before their programs read it.
//!
//! Bytes that a program does not read yet are held by the agent, whose memory is part of every checkpoint. One
//! connection alone gets a large window; where there are many, each gets a small one.

use baton_protocol::agent::MAX_CONNECTIONS;

/// The window of a connection while there are few.
const LARGEST_WINDOW: u64 = 256 << 10;
/// The window that every connection gets, however many there are.
const SMALLEST_WINDOW: u64 = 4 << 10;
/// What all windows beyond that have in common. Together with the smallest windows it stays below 16 MiB.
const SHARED: u64 = 6 << 20;
const _: () = assert!(SHARED + SMALLEST_WINDOW * (MAX_CONNECTIONS as u64) < 16 << 20);

/// Counts the bytes that the server may send at present.
#[derive(Debug, Default)]
pub struct InputCredit {
    promised: u64,
}

impl InputCredit {
    /// Raises `outstanding`, which a connection may still be sent, to its window. Returns by how much: 0 while the
    /// window is still mostly open, so that not every byte costs a frame.
    pub fn raise(&mut self, outstanding: u64, connections: usize) -> u64 {
        let window = (SHARED / connections.max(1) as u64).clamp(SMALLEST_WINDOW, LARGEST_WINDOW);
        if outstanding + window / 4 > window {
            return 0;
        }
        let least = SMALLEST_WINDOW.saturating_sub(outstanding);
        let more = (window - outstanding).min(SHARED.saturating_sub(self.promised).max(least));
        self.promised += more;
        more
    }

    /// Counts bytes that a connection was promised and that need no memory any more.
    pub fn release(&mut self, count: u64) {
        self.promised = self.promised.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_connections_get_large_windows_and_all_together_stay_below_the_limit() {
        let mut credit = InputCredit::default();
        let mut outstanding = Vec::new();
        for count in 1..=MAX_CONNECTIONS {
            outstanding.push(credit.raise(0, count));
        }
        assert_eq!(outstanding[..20], [LARGEST_WINDOW; 20]);
        assert!(outstanding.iter().all(|window| *window >= SMALLEST_WINDOW));
        assert!(outstanding.iter().sum::<u64>() < 16 << 20);
        // They use up what they have and are given more, over and over.
        for round in 0..50 {
            for (at, window) in outstanding.iter_mut().enumerate() {
                if (at + round) % 3 == 0 {
                    credit.release(*window);
                    *window = credit.raise(0, MAX_CONNECTIONS);
                }
            }
        }
        assert!(outstanding.iter().sum::<u64>() < 16 << 20);
        assert_eq!(credit.promised, outstanding.iter().sum::<u64>());
        assert!(outstanding.iter().all(|window| *window >= SMALLEST_WINDOW));
    }

    #[test]
    fn a_window_is_opened_again_when_a_quarter_of_it_was_used() {
        let mut credit = InputCredit::default();
        assert_eq!(credit.raise(0, 1), LARGEST_WINDOW);
        credit.release(1000);
        assert_eq!(credit.raise(LARGEST_WINDOW - 1000, 1), 0);
        credit.release(LARGEST_WINDOW / 4 - 1000);
        assert_eq!(credit.raise(LARGEST_WINDOW / 4 * 3, 1), LARGEST_WINDOW / 4);
    }
}
