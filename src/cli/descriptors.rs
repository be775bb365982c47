//! How many files and sockets this process may have open. Most shells give it a thousand and allow far more.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const WANTED: u64 = 65_536;
const MOST_CONNECTIONS: u64 = 4_096;

/// Raises the limit as far as it may be. What it is now.
pub fn raise() -> u64 {
    let now = getrlimit(Resource::Nofile);
    let wanted = now.maximum.map_or(WANTED, |most| most.min(WANTED));
    let Some(current) = now.current.filter(|current| *current < wanted) else {
        return now.current.unwrap_or(u64::MAX);
    };
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: now.maximum }) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, current, wanted, "the limit of open files cannot be raised");
            current
        }
    }
}

/// How many connections fit: half is for sandboxes and storage, which must go on when all are taken.
pub fn connections(limit: u64) -> usize {
    (limit / 2).min(MOST_CONNECTIONS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_half_of_what_there_is() {
        assert_eq!([16, 1_024, 65_536, u64::MAX].map(connections), [8, 512, 4_096, 4_096]);
    }
}
