//! The limit of open files and sockets of this process. Most shells set it to a thousand and allow far more.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const WANTED_FILES: u64 = 65_536;
const MAX_CONNECTIONS: u64 = 4_096;

/// Raises the limit to the maximum allowed.
pub fn raise() {
    let now = getrlimit(Resource::Nofile);
    let wanted = now.maximum.map_or(WANTED_FILES, |maximum| maximum.min(WANTED_FILES));
    if now.current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: now.maximum })
    {
        tracing::warn!(%error, current = now.current, wanted, "the limit of open files could not be raised");
    }
}

/// How many connections fit.
pub fn connections() -> usize {
    share(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

/// Half is reserved for sandboxes and storage, which must keep working when all connections are in use.
fn share(limit: u64) -> usize {
    (limit / 2).min(MAX_CONNECTIONS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_half_of_what_there_is() {
        assert_eq!([16, 1_024, 65_536, u64::MAX].map(share), [8, 512, 4_096, 4_096]);
    }
}
