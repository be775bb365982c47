//! How a session ends, and the close code that tells the client why.

/// The codes of `protocol.md` §4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The request is done, or the sandbox ended.
    Normal,
    /// The client sent something that is not a WebSocket frame.
    Protocol,
    /// Too many messages could not be parsed.
    BadData,
    TooBig,
    /// Another client is attached, or the sandbox does not exist.
    Unavailable,
    /// This instance releases the sandbox: reconnect, to it or to another one.
    Restart,
    /// A refusal that a retry does not change.
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

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    Close(Close),
    /// The client closed the connection or is unreachable, or it needs nothing more.
    Gone,
}
