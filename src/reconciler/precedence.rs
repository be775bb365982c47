//! Which attach wins: the one table behind "Two clients" in `docs/protocol.md`. From the waiter elsewhere and the
//! client attached here, it decides what happens to the sandbox. Pure.

use std::time::Duration;

use baton_protocol::lock::Claim;

use crate::bus::ALIVE_WITHIN;

/// The client attached on the holding instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttachedClient {
    /// No client is attached.
    Absent,
    /// It was probed, and the timeout has not passed yet.
    Probed,
    Alive,
    /// It was probed, and did not answer in time.
    Silent,
}

impl AttachedClient {
    pub const ALL: [Self; 4] = [Self::Absent, Self::Probed, Self::Alive, Self::Silent];

    /// `since`: time since the probe. A late answer counts as long as nothing was done about the silence.
    pub fn decide(is_attached: bool, has_answered: bool, since: Duration) -> Self {
        match (is_attached, has_answered) {
            (false, _) => Self::Absent,
            (true, true) => Self::Alive,
            (true, false) if since < ALIVE_WITHIN => Self::Probed,
            (true, false) => Self::Silent,
        }
    }
}

/// What the holder does about a waiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Nothing yet.
    #[default]
    Keep,
    /// The sandbox stays; the waiter is told that it is in use.
    Decline,
    /// The waiter gets it; the client here loses it to another client.
    Yield,
    /// The waiter gets it by an operator's order; the client here may follow.
    Relocate,
}

impl Verdict {
    pub const ALL: [Self; 4] = [Self::Keep, Self::Decline, Self::Yield, Self::Relocate];
}

/// `waiter`: the claim of a fresh waiter; `None` if there is none.
pub fn verdict(waiter: Option<Claim>, client: AttachedClient) -> Verdict {
    match (waiter, client) {
        (None, _) | (Some(Claim::Ask), AttachedClient::Probed) => Verdict::Keep,
        (Some(Claim::Ask), AttachedClient::Alive) => Verdict::Decline,
        (Some(Claim::Ask), AttachedClient::Absent | AttachedClient::Silent) | (Some(Claim::Preempt), _) => {
            Verdict::Yield
        }
        (Some(Claim::Order), _) => Verdict::Relocate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_one_that_is_documented() {
        use {AttachedClient as C, Verdict as V};
        let row = |waiter| [C::Absent, C::Probed, C::Alive, C::Silent].map(|client| verdict(waiter, client));
        assert_eq!(row(None), [V::Keep; 4]);
        assert_eq!(row(Some(Claim::Ask)), [V::Yield, V::Keep, V::Decline, V::Yield]);
        assert_eq!(row(Some(Claim::Preempt)), [V::Yield; 4]);
        assert_eq!(row(Some(Claim::Order)), [V::Relocate; 4]);
    }

    #[test]
    fn a_client_has_one_second_and_is_believed_whenever_it_answers() {
        let millis = Duration::from_millis;
        for since in [millis(0), millis(999), millis(1_000), millis(9_000)] {
            assert_eq!(AttachedClient::decide(false, false, since), AttachedClient::Absent);
            assert_eq!(AttachedClient::decide(true, true, since), AttachedClient::Alive);
        }
        assert_eq!(AttachedClient::decide(true, false, millis(999)), AttachedClient::Probed);
        assert_eq!(AttachedClient::decide(true, false, millis(1_000)), AttachedClient::Silent);
    }
}
