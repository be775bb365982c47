//! Our stdin as chunks. A thread reads it, since a read from a terminal cannot be cancelled;
//! the thread ends when the receiver is dropped.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    thread,
};

use bytes::Bytes;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, read},
    pipe::{PipeFlags, pipe_with},
};
use tokio::sync::mpsc;

const READ_SIZE: usize = 64 << 10;
/// How many chunks are read ahead of the command.
const CHUNKS_AHEAD: usize = 4;

#[derive(Debug)]
pub struct Keyboard {
    chunks: mpsc::Receiver<Bytes>,
    /// Closed when this handle is dropped, which wakes the thread.
    _alive: OwnedFd,
}

impl Keyboard {
    pub fn listen() -> io::Result<Self> {
        let (closed, alive) = pipe_with(PipeFlags::CLOEXEC)?;
        let (sender, chunks) = mpsc::channel(CHUNKS_AHEAD);
        thread::Builder::new().name("stdin".into()).spawn(move || pass_on(&io::stdin(), &closed, &sender))?;
        Ok(Self { chunks, _alive: alive })
    }

    /// Returns `None` at the end of stdin.
    pub async fn next(&mut self) -> Option<Bytes> {
        self.chunks.recv().await
    }
}

fn pass_on(stdin: &impl AsFd, closed: &OwnedFd, sender: &mpsc::Sender<Bytes>) {
    let mut buffer = vec![0; READ_SIZE];
    loop {
        let mut ready = [PollFd::new(stdin, PollFlags::IN), PollFd::new(closed, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !ready[1].revents().is_empty() {
            return;
        }
        if ready[0].revents().is_empty() {
            continue;
        }
        match read(stdin, &mut buffer) {
            // The end of input, or a closed terminal.
            Ok(0) => return,
            Ok(count) => {
                if sender.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                    return;
                }
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => return,
        }
    }
}
