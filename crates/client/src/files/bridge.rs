//! A bounded channel between a thread that blocks on disks and the connection, which must not block.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use baton_files::{CHUNK, Fault};
use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

/// The capacity of the channel, in pieces.
const PIECES: usize = 4;
const GIVEN_UP: &str = "The transfer was given up";

/// The end is explicit: a channel that closes without it belongs to a side that failed.
#[derive(Debug)]
pub(super) enum BridgePart {
    Data(Bytes),
    End,
}

pub(super) fn to_wire() -> (BridgeWriter, mpsc::Receiver<BridgePart>) {
    let (parts, receiver) = mpsc::channel(PIECES);
    (BridgeWriter { parts, buffer: Vec::with_capacity(CHUNK) }, receiver)
}

pub(super) fn from_wire() -> (mpsc::Sender<BridgePart>, BridgeReader) {
    let (sender, parts) = mpsc::channel(PIECES);
    (sender, BridgeReader { parts, rest: Bytes::new(), is_over: false })
}

/// Collects small writes into pieces.
#[derive(Debug)]
pub(super) struct BridgeWriter {
    parts: mpsc::Sender<BridgePart>,
    buffer: Vec<u8>,
}

impl BridgeWriter {
    fn pass_on(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        self.parts.blocking_send(BridgePart::Data(piece.into())).map_err(|_| io::Error::other(GIVEN_UP))
    }

    /// Flushes and signals the end of the data.
    pub(super) fn end(mut self) {
        if self.buffer.is_empty() || self.pass_on().is_ok() {
            // If the receiver is gone, the end no longer matters.
            let _ = self.parts.blocking_send(BridgePart::End);
        }
    }
}

impl Write for BridgeWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..count]);
        if self.buffer.len() == CHUNK {
            self.pass_on()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct BridgeReader {
    parts: mpsc::Receiver<BridgePart>,
    rest: Bytes,
    is_over: bool,
}

impl Read for BridgeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && !self.is_over {
            match self.parts.blocking_recv() {
                Some(BridgePart::Data(bytes)) => self.rest = bytes,
                Some(BridgePart::End) => self.is_over = true,
                None => return Err(io::Error::other(GIVEN_UP)),
            }
        }
        let count = buffer.len().min(self.rest.len());
        self.rest.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

/// The whole file.
pub(super) fn copy(path: &Path, to: &mut BridgeWriter) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether the fault only says that the other side stopped reading.
pub(super) fn is_gone(fault: &Fault) -> bool {
    fault.text.starts_with(GIVEN_UP)
}
