//! What ends a connection besides its own streams.

use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Open,
    /// The program has reset it, or nothing listens on the port.
    ClosedInside,
    /// The policy does not allow it any more.
    Revoked,
    /// The agent sent what it may not send.
    Violated,
    /// The container has ended.
    Gone,
}

/// Returns once the connection has to end, with the reason.
pub async fn decided(fate: &mut watch::Receiver<Fate>) -> Fate {
    fate.wait_for(|fate| *fate != Fate::Open).await.map_or(Fate::Gone, |fate| *fate)
}
