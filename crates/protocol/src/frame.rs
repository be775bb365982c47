//! Frames between the server and the agent: bytes in, frames out, and nothing else.
//!
//! Checkpoints contain this format, so it outlives every other one. Types
//! are only ever added; a newer server works with the agent of an older checkpoint.
//!
//! ```text
//!  0        4   5   6   7   8        12         20         28     32
//!  ┌────────┬───┬───┬───┬───┬────────┬──────────┬──────────┬──────┬─────────┐
//!  │ length │ver│typ│str│ 0 │  exec  │  offset  │ sequence │ crc  │ payload │
//!  └────────┴───┴───┴───┴───┴────────┴──────────┴──────────┴──────┴─────────┘
//!   length = of the payload; little endian; crc = CRC32C of all but itself
//! ```

/// The version that this code supports and writes.
pub const VERSION: u8 = 1;
/// The length of the header in bytes.
pub const HEADER: usize = 32;
/// The maximum payload of a frame.
pub const MAX_PAYLOAD: usize = 1 << 20;
/// From this size on it pays to read a payload directly into its final buffer.
const LONG_PAYLOAD: usize = 32 << 10;
/// Terminates any partial frame on its way to the agent: chosen once per sandbox, never inside a payload.
pub type Marker = [u8; 16];

/// The type of a frame. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    // To the agent.
    /// Gives the agent its identity ([`crate::agent::Assign`]). Sent once, before anything else.
    Assign = 1,
    /// Starts a command ([`crate::agent::AgentExec`]); `sequence` is the request's number.
    Exec = 2,
    /// Bytes for a command's stdin, starting at `offset`.
    Stdin = 3,
    /// The command's stdin ends at `offset`.
    StdinEof = 4,
    /// The client has received everything below `offset` of `stream`; on stream `Exit`, the exit status.
    Ack = 5,
    /// The agent may send `stream` up to `offset`.
    Credit = 6,
    /// Requests `stream` again from `offset`; the data frames that follow carry `sequence`.
    Replay = 7,
    /// Delivers the signal whose number is `offset`; stream `Tree` means the whole process tree.
    Signal = 8,
    /// The new window size: columns in the low half of `offset`, rows in the high half.
    Resize = 9,
    /// A client is attached: a full ring blocks its command.
    Attached = 10,
    /// No client is attached any more: a full ring drops its oldest bytes instead.
    Detached = 11,
    /// Resynchronizes after a restore ([`crate::agent::Resync`]).
    Resync = 12,
    /// Answered by `Execs`.
    List = 13,
    /// The sandbox was restored on another instance ([`crate::agent::Restored`]).
    Restored = 14,
    /// The sandbox is a copy of another one ([`crate::agent::Restored`]).
    Forked = 15,
    /// Answered by `Pong` with the same sequence.
    Ping = 16,
    /// The sandbox exceeds a limit: end the largest consumer ([`crate::agent::Relieve`]).
    Relieve = 17,
    /// Whether programs may reach out ([`crate::agent::NetworkAccess`]). Without it the sandbox has only its loopback.
    Network = 18,
    /// The answer to the `Resolve` of the query `exec` ([`crate::agent::NameResolution`]).
    Resolved = 19,
    /// Opens the connection `exec` to port `offset` inside the sandbox. Such numbers have their highest bit set.
    Connect = 20,
    /// The connection `exec`, which a program opened, is established; the agent may send it up to `offset`.
    Connected = 21,
    /// Bytes for the sandbox's end of the connection `exec`, starting at `offset`.
    ConnectionInput = 22,
    /// No more bytes come for the sandbox's end of the connection; `offset` is their number.
    ConnectionInputEof = 23,
    /// The agent may send the connection's bytes up to `offset`.
    ConnectionCredit = 24,
    /// The connection is over: the agent resets its end at once and answers nothing.
    ConnectionReset = 25,
    /// Answered by `Ports`.
    ListPorts = 26,

    // From the agent.
    /// The agent is up ([`crate::agent::Hello`]).
    Hello = 64,
    /// The command runs; `offset` is its process id, `sequence` the request's number.
    Started = 65,
    /// Bytes of `stream`, starting at `offset`; `sequence` is that of the last `Replay`.
    Data = 66,
    /// `stream` ends at `offset`.
    Eof = 67,
    /// The command ended or never started ([`crate::agent::Exit`]).
    Exit = 68,
    /// The first frame after a resync ([`crate::agent::AgentState`]).
    ResyncAck = 69,
    /// The answer to `Ping`, with the same sequence.
    Pong = 70,
    /// A line for the log, as text.
    Log = 71,
    /// Everything below `offset` of the command's stdin was accepted; stream `Exit`: stdin is no longer read.
    StdinAck = 72,
    /// The answer to `List` ([`crate::agent::AgentState`]).
    Execs = 73,
    /// A program asks for the name in the payload; `exec` is the number of the query. Answered by `Resolved`.
    Resolve = 74,
    /// A program opened the connection `exec` ([`crate::agent::Dial`]); the server may send it up to `offset`.
    Dial = 75,
    /// The connection `exec` to a port inside is established; the server may send it up to `offset`.
    Accepted = 76,
    /// Bytes that a program wrote to the connection `exec`, starting at `offset`.
    ConnectionOutput = 77,
    /// The program writes no more bytes to the connection; `offset` is their number.
    ConnectionOutputEof = 78,
    /// The server may send the connection's bytes up to `offset`.
    ConnectionInputCredit = 79,
    /// The connection is over: its program reset it, or nothing listens on the port. The server answers nothing.
    ConnectionClosed = 80,
    /// The answer to `ListPorts`, with the same sequence ([`crate::agent::ListeningPorts`]).
    Ports = 81,
}

impl FrameKind {
    /// Every kind, in order of its number.
    pub const ALL: [FrameKind; 44] = [
        FrameKind::Assign,
        FrameKind::Exec,
        FrameKind::Stdin,
        FrameKind::StdinEof,
        FrameKind::Ack,
        FrameKind::Credit,
        FrameKind::Replay,
        FrameKind::Signal,
        FrameKind::Resize,
        FrameKind::Attached,
        FrameKind::Detached,
        FrameKind::Resync,
        FrameKind::List,
        FrameKind::Restored,
        FrameKind::Forked,
        FrameKind::Ping,
        FrameKind::Relieve,
        FrameKind::Network,
        FrameKind::Resolved,
        FrameKind::Connect,
        FrameKind::Connected,
        FrameKind::ConnectionInput,
        FrameKind::ConnectionInputEof,
        FrameKind::ConnectionCredit,
        FrameKind::ConnectionReset,
        FrameKind::ListPorts,
        FrameKind::Hello,
        FrameKind::Started,
        FrameKind::Data,
        FrameKind::Eof,
        FrameKind::Exit,
        FrameKind::ResyncAck,
        FrameKind::Pong,
        FrameKind::Log,
        FrameKind::StdinAck,
        FrameKind::Execs,
        FrameKind::Resolve,
        FrameKind::Dial,
        FrameKind::Accepted,
        FrameKind::ConnectionOutput,
        FrameKind::ConnectionOutputEof,
        FrameKind::ConnectionInputCredit,
        FrameKind::ConnectionClosed,
        FrameKind::Ports,
    ];

    /// Returns `None` for a number that this version does not know.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether the agent sends frames of this kind, rather than receives them.
    pub fn is_from_agent(self) -> bool {
        self as u8 >= 64
    }

    /// Whether frames of this kind belong to the network of the sandbox, rather than to its commands.
    pub fn is_of_network(self) -> bool {
        (18..=26).contains(&(self as u8)) || (74..=81).contains(&(self as u8))
    }
}

/// Which of a command's streams a frame refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Stream {
    /// Also used where a frame refers to no stream.
    Stdin = 0,
    /// Standard output, and everything a command on a terminal writes.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
    /// The exit status, in `Ack`.
    Exit = 3,
    /// The command and all its descendants, in `Signal`.
    Tree = 4,
}

impl Stream {
    /// Every stream, in order of its number.
    pub const ALL: [Stream; 5] = [Stream::Stdin, Stream::Stdout, Stream::Stderr, Stream::Exit, Stream::Tree];

    /// Returns `None` for a number that this version does not know.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|stream| *stream as u8 == number)
    }
}

/// One frame. Which fields have a meaning depends on `kind`; the others are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Defines the meaning of the other fields.
    pub kind: FrameKind,
    /// The stream that the frame refers to.
    pub stream: Stream,
    /// The number of the command or, in frames of the network, of the connection or query; 0 if the frame refers to none.
    pub exec: u32,
    /// Mostly an offset in `stream`; [`FrameKind`] lists the exceptions.
    pub offset: u64,
    /// The number of a request, or of the `Replay` that the data answers.
    pub sequence: u64,
    /// Bytes of a stream, or JSON; at most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
}

/// Why bytes are not a frame. After one of these errors, the next frame boundary is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The header announces more than [`MAX_PAYLOAD`] bytes.
    #[error("a frame announces {0} bytes; the maximum is {MAX_PAYLOAD}")]
    TooLong(u32),
    /// The checksum does not match: bytes were lost or damaged.
    #[error("a frame's checksum does not match")]
    Checksum,
}

impl Frame {
    /// A frame with every other field 0 and no payload.
    pub fn new(kind: FrameKind) -> Self {
        Self { kind, stream: Stream::Stdin, exec: 0, offset: 0, sequence: 0, payload: Vec::new() }
    }

    /// Sets the number of the command.
    pub fn exec(mut self, exec: u32) -> Self {
        self.exec = exec;
        self
    }

    /// Sets the stream.
    pub fn stream(mut self, stream: Stream) -> Self {
        self.stream = stream;
        self
    }

    /// Sets the offset.
    pub fn offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// Sets the sequence number.
    pub fn sequence(mut self, sequence: u64) -> Self {
        self.sequence = sequence;
        self
    }

    /// Sets the payload.
    pub fn payload(mut self, payload: impl Into<Vec<u8>>) -> Self {
        self.payload = payload.into();
        self
    }

    /// Appends the frame's bytes.
    ///
    /// # Panics
    /// If the payload is longer than [`MAX_PAYLOAD`]: only the caller can split it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode(out, self.kind, self.stream, self.exec, self.offset, self.sequence, &[&self.payload]);
    }
}

/// Appends a frame whose payload consists of several slices (a ring wraps around).
pub fn encode(
    out: &mut Vec<u8>,
    kind: FrameKind,
    stream: Stream,
    exec: u32,
    offset: u64,
    sequence: u64,
    payload: &[&[u8]],
) {
    let header = header(kind, stream, exec, offset, sequence, payload);
    out.reserve(HEADER + payload.iter().map(|piece| piece.len()).sum::<usize>());
    out.extend_from_slice(&header);
    for piece in payload {
        out.extend_from_slice(piece);
    }
}

/// The header for `payload`, for callers that write the payload from its own buffer.
///
/// # Panics
/// If the payload is longer than [`MAX_PAYLOAD`].
pub fn header(
    kind: FrameKind,
    stream: Stream,
    exec: u32,
    offset: u64,
    sequence: u64,
    payload: &[&[u8]],
) -> [u8; HEADER] {
    let length: usize = payload.iter().map(|piece| piece.len()).sum();
    assert!(length <= MAX_PAYLOAD, "a frame of {length} bytes");
    let mut header = [0; HEADER];
    header[0..4].copy_from_slice(&(length as u32).to_le_bytes());
    header[4..7].copy_from_slice(&[VERSION, kind as u8, stream as u8]);
    header[8..12].copy_from_slice(&exec.to_le_bytes());
    header[12..20].copy_from_slice(&offset.to_le_bytes());
    header[20..28].copy_from_slice(&sequence.to_le_bytes());
    let crc = payload.iter().fold(crc32c::crc32c(&header[..28]), |crc, piece| crc32c::crc32c_append(crc, piece));
    header[28..32].copy_from_slice(&crc.to_le_bytes());
    header
}

/// Splits a byte stream into frames. Feed bytes with [`push`](Self::push), take frames with
/// [`next_frame`](Self::next_frame).
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Appends bytes that were read; complete frames can then be taken.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 && (self.start == self.buffer.len() || self.start >= 4 * MAX_PAYLOAD) {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame; `None` until more bytes arrive. Frames of an unknown kind or stream
    /// are skipped. On an error nothing is consumed: the boundary is unknown.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Broken> {
        self.next_frame_within(usize::MAX)
    }

    /// Like [`next_frame`](Self::next_frame), but only for frames that end within the first `limit` pending bytes.
    pub fn next_frame_within(&mut self, limit: usize) -> Result<Option<Frame>, Broken> {
        let last = self.start.saturating_add(limit).min(self.buffer.len());
        loop {
            let bytes = &self.buffer[self.start..last];
            let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
            let length = word(header, 0);
            if length as usize > MAX_PAYLOAD {
                return Err(Broken::TooLong(length));
            }
            let end = HEADER + length as usize;
            let Some(payload) = bytes.get(HEADER..end) else { return Ok(None) };
            check(header, payload)?;
            let frame = frame(header, || payload.to_vec());
            self.start += end;
            if frame.is_some() {
                return Ok(frame);
            }
        }
    }

    /// Takes the beginning of a long data frame whose rest has not arrived, so that the caller can read the
    /// rest directly into its final buffer. Call it when there is no complete frame.
    pub fn take_long(&mut self) -> Option<Long> {
        let header = *self.pending().first_chunk::<HEADER>()?;
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let is_data = [FrameKind::Data as u8, FrameKind::ConnectionOutput as u8].contains(&header[5]);
        if !is_data || !(LONG_PAYLOAD..=MAX_PAYLOAD).contains(&length) {
            return None;
        }
        // With capacity for the header under which it is forwarded.
        let mut payload = Vec::with_capacity(length + crate::binary::HEADER);
        payload.extend_from_slice(&self.pending()[HEADER..]);
        self.start = 0;
        self.buffer.clear();
        Some(Long { header, payload, length })
    }

    /// Undoes [`take_long`](Self::take_long), including everything read since.
    pub fn put_back(&mut self, long: Long) {
        let pending = [&long.header[..], &long.payload, self.pending()].concat();
        (self.start, self.buffer) = (0, pending);
    }

    /// The bytes that were pushed and not yet taken.
    pub fn pending(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Discards the first `count` pending bytes.
    pub fn skip(&mut self, count: usize) {
        self.start = (self.start + count).min(self.buffer.len());
    }

    /// The position of `needle` in the pending bytes.
    pub fn find(&self, needle: &[u8; 16]) -> Option<usize> {
        self.pending().windows(16).position(|window| window == needle)
    }
}

/// A long frame in transit: its bytes are read directly into its payload.
#[derive(Debug)]
pub struct Long {
    header: [u8; HEADER],
    payload: Vec<u8>,
    length: usize,
}

impl Long {
    /// The number of bytes that must still be appended; no more are allowed.
    pub fn missing(&self) -> usize {
        self.length.saturating_sub(self.payload.len())
    }

    /// The payload so far; append what is [`missing`](Self::missing) to it.
    pub fn payload(&mut self) -> &mut Vec<u8> {
        &mut self.payload
    }

    /// The frame, once nothing is missing; `None` if its stream is unknown.
    pub fn finish(self) -> Result<Option<Frame>, Broken> {
        check(&self.header, &self.payload)?;
        Ok(frame(&self.header, || self.payload))
    }
}

fn word(header: &[u8; HEADER], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

fn check(header: &[u8; HEADER], payload: &[u8]) -> Result<(), Broken> {
    let is_whole = crc32c::crc32c_append(crc32c::crc32c(&header[..28]), payload) == word(header, 28);
    if is_whole { Ok(()) } else { Err(Broken::Checksum) }
}

/// Returns `None` for an unknown kind or stream.
fn frame(header: &[u8; HEADER], payload: impl FnOnce() -> Vec<u8>) -> Option<Frame> {
    let (kind, stream) = FrameKind::from_number(header[5]).zip(Stream::from_number(header[6]))?;
    let long = |at: usize| u64::from(word(header, at)) | u64::from(word(header, at + 4)) << 32;
    Some(Frame { kind, stream, exec: word(header, 8), offset: long(12), sequence: long(20), payload: payload() })
}
