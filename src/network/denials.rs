//! Announces refused connections, so that clients hear of them.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::id::SandboxId;
use tokio::sync::mpsc;

use crate::clock::{Moment, SharedClock};

/// How many wait to be announced; further ones are only logged and counted.
const WAITING: usize = 64;
/// How many of one sandbox are announced within this time.
const MOST: u32 = 8;
const WITHIN: Duration = Duration::from_secs(1);

/// A name or a connection that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedConnection {
    pub sandbox: SandboxId,
    /// A name or an address.
    pub host: String,
    /// `None`: the name was only asked for.
    pub port: Option<u16>,
    pub why: &'static str,
}

/// Where refused connections are announced.
#[derive(Clone, Debug)]
pub struct Denials(mpsc::Sender<DeniedConnection>);

/// Those that are worth an event: a few per second and sandbox.
#[derive(Debug)]
pub struct DeniedConnections {
    clock: SharedClock,
    received: mpsc::Receiver<DeniedConnection>,
    /// By sandbox: since when it is counted, and how many there were.
    recent: BTreeMap<SandboxId, (Moment, u32)>,
}

impl Denials {
    pub fn new(clock: SharedClock) -> (Self, DeniedConnections) {
        let (sender, received) = mpsc::channel(WAITING);
        (Self(sender), DeniedConnections { clock, received, recent: BTreeMap::new() })
    }

    /// Never waits: an announcement that does not fit is dropped.
    pub fn post(&self, denied: DeniedConnection) {
        let _ = self.0.try_send(denied);
    }
}

impl DeniedConnections {
    /// The next one to announce. Waits forever when nothing can be refused any more.
    pub async fn next(&mut self) -> DeniedConnection {
        loop {
            let Some(denied) = self.received.recv().await else { return std::future::pending().await };
            if self.is_worth_an_event(&denied.sandbox) {
                return denied;
            }
        }
    }

    fn is_worth_an_event(&mut self, sandbox: &SandboxId) -> bool {
        let now = self.clock.now();
        self.recent.retain(|_, (since, _)| now - *since < WITHIN);
        let (_, count) = self.recent.entry(sandbox.clone()).or_insert((now, 0));
        *count += 1;
        *count <= MOST
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn a_flood_of_one_sandbox_is_cut_and_another_is_heard() {
        let clock: SharedClock = Arc::new(SystemClock);
        let [one, other] = [clock.sandbox_id(), clock.sandbox_id()];
        let (denials, mut denied) = Denials::new(clock);
        let post = |sandbox: &SandboxId| {
            denials.post(DeniedConnection {
                sandbox: sandbox.clone(),
                host: "a.example".into(),
                port: None,
                why: "policy",
            });
        };
        (0..20).for_each(|_| post(&one));
        post(&other);
        let heard: Vec<_> = std::iter::from_fn(|| denied.next().now_or_never()).map(|denied| denied.sandbox).collect();
        assert_eq!(heard.iter().filter(|sandbox| **sandbox == one).count(), MOST as usize);
        assert_eq!(heard.last(), Some(&other));
    }
}
