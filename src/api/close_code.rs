//! Why the server ends a session, as the close code says it.

/// The codes of `protocol.md` §4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// What was asked for is done, or the sandbox ended.
    Normal,
    /// What came was no WebSocket frame.
    Protocol,
    /// Too many messages that were none.
    BadData,
    TooBig,
    /// Somebody else is attached, or there is no such sandbox.
    Unavailable,
    /// This instance lets go: come back, to it or to another one.
    Restart,
    /// A refusal that trying again does not change.
    Fatal,
}

impl Close {
    pub fn code(self) -> u16 {
        match self {
            Self::Normal => 1000,
            Self::Protocol => 1002,
            Self::BadData => 1007,
            Self::TooBig => 1009,
            Self::Unavailable => 1011,
            Self::Restart => 1012,
            Self::Fatal => 4000,
        }
    }
}
