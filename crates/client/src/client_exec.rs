//! One command, shared between the connection and its handles.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use baton_protocol::{
    event::{ExecView, StdStream, Update},
    id::ExecId,
    request::{self, Offsets},
};
use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, watch};

use crate::{
    Error,
    stdin_buffer::{PART, StdinBuffer, StdinConflict, StdinPart, WINDOW},
    stream::{Chunk, Hole, OutputBuffer},
};

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The code it exited with; `None` if a signal killed it or it was lost.
    pub exit_code: Option<i32>,
    /// The number of the signal that killed it.
    pub signal: Option<i32>,
    /// It was killed at its own timeout.
    pub timed_out: bool,
    /// How long it ran, excluding time in which the sandbox was stopped.
    pub duration: Option<Duration>,
    /// The sandbox went back to an older checkpoint while the command ran, so that part of it ran twice.
    pub rolled_back: bool,
    /// Why the command was lost; neither `exit_code` nor `signal` is known then.
    pub error: Option<String>,
}

impl Outcome {
    /// Whether it exited with code 0.
    pub fn is_success(&self) -> bool {
        self.exit_code == Some(0)
    }

    pub(crate) fn of(update: &Update) -> Self {
        Self {
            exit_code: update.exit_code,
            signal: update.signal,
            timed_out: update.timed_out,
            duration: update.duration_ms.map(Duration::from_millis),
            rolled_back: false,
            error: None,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { error: Some(error), .. } => write!(f, "lost: {error}")?,
            Self { timed_out: true, .. } => f.write_str("timed out")?,
            Self { exit_code: Some(code), .. } => write!(f, "exit code {code}")?,
            Self { signal: Some(signal), .. } => write!(f, "signal {signal}")?,
            Self { .. } => f.write_str("unknown end")?,
        }
        if self.rolled_back { f.write_str(", rolled back") } else { Ok(()) }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum ExecStage {
    /// Requested; the server may not know it yet.
    Asked,
    Started,
    Ended(Result<Outcome, Error>),
}

#[derive(Debug, Default)]
struct Streams {
    stdout: OutputBuffer,
    stderr: OutputBuffer,
    stdin: StdinBuffer,
    /// Counts the items of both streams, so that they can be read in the order of arrival.
    order: u64,
    kill_wanted: bool,
    rolled_back: bool,
}

impl Streams {
    fn pipe(&mut self, output: StdStream) -> &mut OutputBuffer {
        match output {
            StdStream::Stdout => &mut self.stdout,
            StdStream::Stderr => &mut self.stderr,
        }
    }

    fn is_ack_due(&self) -> bool {
        self.stdout.is_ack_due() || self.stderr.is_ack_due()
    }
}

#[derive(Debug)]
pub(crate) struct ClientExec {
    pub(crate) id: ExecId,
    /// `None` for a command that another client started.
    pub(crate) request: Option<request::ExecRequest>,
    /// Its output stays buffered for the next client.
    pub(crate) is_peek: bool,
    pub(crate) stage: watch::Sender<ExecStage>,
    streams: Mutex<Streams>,
    /// Free space for stdin in bytes; closed when stdin is no longer read.
    room: Semaphore,
    /// Wakes the connection.
    look: Arc<Notify>,
}

impl ClientExec {
    pub(crate) fn new(id: ExecId, request: Option<request::ExecRequest>, from: Offsets, look: Arc<Notify>) -> Self {
        let stage = if request.is_some() { ExecStage::Asked } else { ExecStage::Started };
        let streams = Streams {
            stdout: OutputBuffer::starting_at(from.stdout),
            stderr: OutputBuffer::starting_at(from.stderr),
            ..Streams::default()
        };
        Self {
            id,
            request,
            is_peek: false,
            stage: watch::Sender::new(stage),
            streams: Mutex::new(streams),
            room: Semaphore::new(WINDOW),
            look,
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Used by the handles.

    pub(crate) fn poll_one(&self, output: StdStream, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        self.poll_pipe(self.streams().pipe(output), context)
    }

    /// Returns the item that arrived first in any of the streams in `outputs`.
    pub(crate) fn poll_any(
        &self,
        outputs: &[StdStream],
        context: &mut Context<'_>,
    ) -> Poll<Option<(StdStream, Chunk)>> {
        let mut streams = self.streams();
        let first = outputs
            .iter()
            .filter_map(|output| Some((streams.pipe(*output).order()?, *output)))
            .min_by_key(|(order, _)| *order);
        if let Some((_, output)) = first {
            return self.poll_pipe(streams.pipe(output), context).map(|chunk| chunk.map(|chunk| (output, chunk)));
        }
        let mut over = true;
        for output in outputs {
            over &= streams.pipe(*output).poll_next(context).is_ready();
        }
        if over { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Reads one item; wakes the connection if an acknowledgement is due or if it was waiting for free space.
    fn poll_pipe(&self, pipe: &mut OutputBuffer, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        let was_flooded = pipe.is_flooded();
        let polled = pipe.poll_next(context);
        if pipe.is_ack_due() || (was_flooded && !pipe.is_flooded()) {
            self.look.notify_one();
        }
        polled
    }

    pub(crate) fn discard(&self, output: StdStream) {
        self.streams().pipe(output).discard();
        self.look.notify_one();
    }

    /// Waits for free space. The bytes are kept until the command has accepted them.
    pub(crate) async fn write_stdin(&self, mut bytes: Bytes) -> Result<(), Error> {
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(PART));
            let permits = self.room.acquire_many(part.len() as u32).await.map_err(|_| self.no_reader())?;
            let mut streams = self.streams();
            if streams.stdin.is_closed() {
                return Err(Error::Ended("its stdin was closed".into()));
            }
            permits.forget();
            streams.stdin.write(part);
            drop(streams);
            self.look.notify_one();
        }
        Ok(())
    }

    fn no_reader(&self) -> Error {
        match &*self.stage.borrow() {
            ExecStage::Ended(Err(error)) => error.clone(),
            ExecStage::Ended(Ok(_)) => Error::Ended("the command is over".into()),
            ExecStage::Asked | ExecStage::Started => Error::Ended("the command reads no more".into()),
        }
    }

    pub(crate) fn close_stdin(&self) {
        self.streams().stdin.close();
        self.look.notify_one();
    }

    pub(crate) fn want_kill(&self) {
        self.streams().kill_wanted = true;
    }

    // Used by the connection.

    /// Returns whether an acknowledgement is due and whether the socket must wait for the reader.
    pub(crate) fn push(&self, output: StdStream, offset: u64, bytes: Bytes) -> Result<Pushed, Hole> {
        let mut streams = self.streams();
        let order = streams.next_order();
        let pipe = streams.pipe(output);
        pipe.push(offset, bytes, order)?;
        Ok(Pushed { ack: pipe.is_ack_due(), flooded: pipe.is_flooded() })
    }

    pub(crate) fn gap(&self, output: StdStream, to: u64) {
        let mut streams = self.streams();
        let order = streams.next_order();
        streams.pipe(output).gap(to, order);
    }

    pub(crate) fn rewind(&self, output: StdStream, to: u64) {
        let mut streams = self.streams();
        let order = streams.next_order();
        streams.pipe(output).rewind(to, order);
    }

    pub(crate) fn is_flooded(&self) -> bool {
        let streams = self.streams();
        streams.stdout.is_flooded() || streams.stderr.is_flooded()
    }

    pub(crate) fn take_ack(&self) -> Option<Offsets> {
        let mut streams = self.streams();
        streams.is_ack_due().then(|| Offsets { stdout: streams.stdout.ack(), stderr: streams.stderr.ack() })
    }

    pub(crate) fn received(&self) -> Offsets {
        let streams = self.streams();
        Offsets { stdout: streams.stdout.received(), stderr: streams.stderr.received() }
    }

    pub(crate) fn next_stdin(&self) -> Option<StdinPart> {
        self.streams().stdin.next()
    }

    /// Input continues on a new connection; without a view, the server does not tell what the command has accepted.
    pub(crate) fn resume_stdin(&self, view: Option<&ExecView>) -> Result<(), StdinConflict> {
        let stdin = &mut self.streams().stdin;
        let freed = match view {
            Some(view) => stdin.resume(view.stdin, view.stdin_crc32)?,
            None => stdin.resume(stdin.acked(), None)?,
        };
        self.room.add_permits(freed);
        Ok(())
    }

    pub(crate) fn stdin_ack(&self, offset: u64) {
        let freed = self.streams().stdin.ack(offset);
        self.room.add_permits(freed);
    }

    pub(crate) fn has_stdin_under_way(&self) -> bool {
        self.streams().stdin.is_under_way()
    }

    /// The command's stdin is no longer read.
    pub(crate) fn stdin_over(&self) {
        self.room.close();
    }

    /// Resumes on a new connection. Returns the offsets to send and whether the command must be killed again.
    pub(crate) fn resume(&self) -> (Offsets, bool) {
        let mut streams = self.streams();
        (Offsets { stdout: streams.stdout.named(), stderr: streams.stderr.named() }, streams.kill_wanted)
    }

    pub(crate) fn is_asked(&self) -> bool {
        matches!(*self.stage.borrow(), ExecStage::Asked)
    }

    pub(crate) fn started(&self) {
        self.stage.send_if_modified(|stage| {
            let asked = matches!(stage, ExecStage::Asked);
            if asked {
                *stage = ExecStage::Started;
            }
            asked
        });
    }

    /// The sandbox went back to an older checkpoint.
    pub(crate) fn rolled_back(&self) {
        self.streams().rolled_back = true;
    }

    /// Only the first end counts.
    pub(crate) fn ended(&self, end: Result<Outcome, Error>) {
        let rolled_back = self.streams().rolled_back;
        let end = end.map(|outcome| Outcome { rolled_back, ..outcome });
        self.stage.send_if_modified(|stage| {
            let open = !matches!(stage, ExecStage::Ended(_));
            if open {
                *stage = ExecStage::Ended(end);
            }
            open
        });
        self.room.close();
        let mut streams = self.streams();
        streams.stdout.end();
        streams.stderr.end();
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pushed {
    pub(crate) ack: bool,
    pub(crate) flooded: bool,
}

impl Streams {
    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }
}
