//! File work that runs in the sandbox: its bytes, its messages, its outcome.

use baton_protocol::event::StdStream;
use bytes::Bytes;

use super::Transfer;
use crate::{Chunk, Control, Error, Outcome, Running};

/// The maximum number of bytes of its messages to keep.
const MOST_SAID: usize = 256 << 10;

/// File work in progress. Dropping it before its end cancels it.
#[derive(Debug)]
pub(super) struct Working {
    running: Running,
    said: Vec<u8>,
    how: Transfer,
    is_read: bool,
    is_over: bool,
}

impl Working {
    pub(super) fn new(running: Running, how: Transfer) -> Self {
        Self { running, said: Vec::new(), how, is_read: false, is_over: false }
    }

    pub(super) fn control(&self) -> Control {
        self.running.control()
    }

    /// Whether all its bytes were read.
    pub(super) fn is_read_to_end(&self) -> bool {
        self.is_read
    }

    /// Its next bytes; `None` when no more will follow, possibly because the work failed.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        while let Some((output, chunk)) = self.running.next().await {
            match (output, chunk) {
                (StdStream::Stdout, Chunk::Data(bytes)) => return Ok(Some(bytes)),
                (StdStream::Stderr, Chunk::Data(bytes)) => {
                    let room = MOST_SAID.saturating_sub(self.said.len());
                    self.said.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                (StdStream::Stdout, Chunk::Gap { .. }) => return Err(lost("bytes of it were not kept on the way")),
                (StdStream::Stderr, Chunk::Gap { .. }) => {}
                (_, Chunk::Rewound { .. }) => return Err(lost("the sandbox was rolled back to an older checkpoint")),
            }
        }
        self.is_read = true;
        Ok(None)
    }

    /// Waits for its end. The outer error belongs to the session, the inner one to the work.
    pub(super) async fn finish(&mut self) -> Result<Result<(), Error>, Error> {
        while self.next().await?.is_some() {}
        let outcome = self.running.wait().await?;
        self.is_over = true;
        Ok(self.check(&outcome))
    }

    fn check(&self, outcome: &Outcome) -> Result<(), Error> {
        if outcome.is_success() {
            return Ok(());
        }
        if outcome.timed_out {
            return Err(fault("ETIMEDOUT", "its time was up"));
        }
        let said = String::from_utf8_lossy(&self.said);
        let mut lines = said.lines();
        let Some(first) = lines.next() else {
            return Err(fault("EIO", outcome.error.as_deref().unwrap_or("it was ended in the sandbox")));
        };
        let (code, message) = first.split_once(": ").unwrap_or(("EIO", first));
        let more = match lines.count() {
            0 => String::new(),
            count => format!(" (and {count} more)"),
        };
        said.lines().for_each(|line| self.how.left_out(line));
        Err(fault(code, &format!("{message}{more}")))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        if !self.is_over {
            self.control().give_up();
        }
    }
}

fn fault(code: &str, message: &str) -> Error {
    Error::File { code: code.to_owned(), message: message.to_owned() }
}

fn lost(why: &str) -> Error {
    fault("EIO", &format!("{why}: begin again"))
}
