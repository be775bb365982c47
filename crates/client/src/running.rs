//! A running command: its output, its input, its end.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use baton_protocol::{event::StdStream, id::ExecId, request::Request};
use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;

use crate::{
    Error,
    client_exec::{ClientExec, ExecStage, Outcome},
    connection::ConnectionCommand,
    stream::Chunk,
};

/// The maximum number of characters of stderr in an error.
const MAX_STDERR_IN_ERROR: usize = 1000;

/// A running command. Dropping it leaves the command running and discards its output.
#[derive(Debug)]
pub struct Running {
    control: Control,
    stdout: Option<OutputStream>,
    stderr: Option<OutputStream>,
}

/// Everything a command wrote, and how it ended.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// Everything written to stdout, except for lost bytes.
    pub stdout: Vec<u8>,
    /// Everything written to stderr, except for lost bytes. Empty on a terminal.
    pub stderr: Vec<u8>,
    /// How the command ended.
    pub outcome: Outcome,
    /// How many bytes were lost and are missing here.
    pub lost: u64,
}

/// How it ended, and what it wrote.
impl fmt::Display for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.outcome)?;
        for (name, bytes) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !bytes.is_empty() {
                write!(f, "\n{name}:\n{}", String::from_utf8_lossy(bytes).trim_end_matches('\n'))?;
            }
        }
        if self.lost > 0 { write!(f, "\n{} bytes were lost", self.lost) } else { Ok(()) }
    }
}

impl Collected {
    /// Returns [`Error::Failed`] unless the command ended with exit code 0.
    pub fn check(self) -> Result<Self, Error> {
        let how = match &self.outcome {
            Outcome { exit_code: Some(0), .. } => return Ok(self),
            Outcome { timed_out: true, .. } => "a timeout".to_owned(),
            Outcome { exit_code: Some(code), .. } => format!("exit code {code}"),
            Outcome { signal: Some(signal), .. } => format!("signal {signal}"),
            Outcome { error, .. } => error.clone().unwrap_or_else(|| "an unknown status".to_owned()),
        };
        // The last lines most likely explain how it ended.
        let said = String::from_utf8_lossy(&self.stderr);
        let from = said.char_indices().rev().nth(MAX_STDERR_IN_ERROR).map_or(0, |(at, _)| at);
        let said = said[from..].trim();
        Err(Error::Failed { how, said: if said.is_empty() { String::new() } else { format!(": {said}") } })
    }
}

impl Running {
    pub(crate) fn new(exec: Arc<ClientExec>, commands: mpsc::Sender<ConnectionCommand>) -> Self {
        Self {
            stdout: Some(OutputStream { exec: exec.clone(), output: StdStream::Stdout }),
            stderr: Some(OutputStream { exec: exec.clone(), output: StdStream::Stderr }),
            control: Control { exec, commands },
        }
    }

    /// The exec id, which outlives the connection and can be attached to again.
    pub fn id(&self) -> &ExecId {
        &self.control.exec.id
    }

    /// The next piece of output, in order of arrival; `None` when no more will follow.
    /// Skips a stream that was taken.
    pub async fn next(&mut self) -> Option<(StdStream, Chunk)> {
        let outputs: Vec<StdStream> =
            [&self.stdout, &self.stderr].into_iter().flatten().map(|stream| stream.output).collect();
        poll_fn(|context| self.control.exec.poll_any(&outputs, context)).await
    }

    /// Takes stdout as a separate stream. Read it or drop it: while unread, it blocks the command.
    pub fn take_stdout(&mut self) -> Option<OutputStream> {
        self.stdout.take()
    }

    /// Takes stderr as a separate stream. Read it or drop it: while unread, it blocks the command.
    pub fn take_stderr(&mut self) -> Option<OutputStream> {
        self.stderr.take()
    }

    /// Waits for the command to end. Output that was neither read nor taken is discarded.
    /// Non-zero exit codes are outcomes, not errors. May be called again.
    pub async fn wait(&mut self) -> Result<Outcome, Error> {
        (self.stdout, self.stderr) = (None, None);
        self.control.ended().await
    }

    /// Reads all output and waits for the command to end.
    pub async fn collect(mut self) -> Result<Collected, Error> {
        let mut collected = Collected::default();
        while let Some((output, chunk)) = self.next().await {
            let bytes = match output {
                StdStream::Stdout => &mut collected.stdout,
                StdStream::Stderr => &mut collected.stderr,
            };
            match chunk {
                Chunk::Data(data) => bytes.extend_from_slice(&data),
                Chunk::Gap { from, to } => collected.lost = collected.lost.saturating_add(to.saturating_sub(from)),
                // After a gap the position in the buffer is unknown, so everything is kept.
                Chunk::Rewound { to } if collected.lost == 0 => bytes.truncate(to as usize),
                Chunk::Rewound { .. } => {}
            }
        }
        collected.outcome = self.wait().await?;
        Ok(collected)
    }

    /// A separate handle for input and signals, to use while the output is being read.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// See [`Control::write_stdin`].
    pub async fn write_stdin(&self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        self.control.write_stdin(bytes).await
    }

    /// See [`Control::close_stdin`].
    pub fn close_stdin(&self) {
        self.control.close_stdin();
    }

    /// See [`Control::signal`].
    pub async fn signal(&self, name: &str) -> Result<(), Error> {
        self.control.signal(name).await
    }

    /// See [`Control::kill`].
    pub async fn kill(&self) -> Result<(), Error> {
        self.control.kill().await
    }

    /// See [`Control::resize`].
    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), Error> {
        self.control.resize(cols, rows).await
    }
}

/// Input and signals of a command.
#[derive(Clone, Debug)]
pub struct Control {
    exec: Arc<ClientExec>,
    commands: mpsc::Sender<ConnectionCommand>,
}

impl Control {
    /// Waits while 1 MiB is unacknowledged. Each byte arrives exactly once, also across a reconnect.
    /// The command must have been started with [`stdin`](crate::Exec::stdin).
    pub async fn write_stdin(&self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        self.exec.write_stdin(bytes.into()).await
    }

    /// The command reads the end after everything written before.
    pub fn close_stdin(&self) {
        self.exec.close_stdin();
    }

    /// Sends a signal such as `"INT"`, at most once: a lost connection may lose it.
    pub async fn signal(&self, name: &str) -> Result<(), Error> {
        self.send_request(Request::Signal { exec_id: self.exec.id.clone(), signal: name.to_owned() }).await
    }

    /// Kills the whole process tree. Sent again after a reconnect while the command runs.
    pub async fn kill(&self) -> Result<(), Error> {
        self.exec.want_kill();
        self.send_request(Request::KillProcess { exec_id: Some(self.exec.id.clone()) }).await
    }

    /// Sets the new size of its terminal.
    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), Error> {
        self.send_request(Request::Resize { exec_id: self.exec.id.clone(), cols: cols.max(1), rows: rows.max(1) }).await
    }

    /// Cancels file work whose result is no longer needed, if the connection accepts the request at once.
    pub(crate) fn give_up(&self) {
        let signal = Request::Signal { exec_id: self.exec.id.clone(), signal: "TERM".to_owned() };
        // Without a connection, the work ends with the next session or with the sandbox.
        let _ = self.commands.try_send(ConnectionCommand::Tell(signal));
    }

    /// Sends a request about the command, unless it has ended.
    async fn send_request(&self, request: Request) -> Result<(), Error> {
        if let ExecStage::Ended(end) = &*self.exec.stage.borrow() {
            return end.clone().map(|_| ());
        }
        let sent = self.commands.send(ConnectionCommand::Tell(request)).await;
        sent.map_err(|_| Error::Ended("its sandbox was dropped".into()))
    }

    async fn ended(&self) -> Result<Outcome, Error> {
        let mut stage = self.exec.stage.subscribe();
        match stage.wait_for(|stage| matches!(stage, ExecStage::Ended(_))).await.as_deref() {
            Ok(ExecStage::Ended(end)) => end.clone(),
            Ok(ExecStage::Asked | ExecStage::Started) | Err(_) => Err(Error::Ended("its sandbox was dropped".into())),
        }
    }
}

/// One stream of a command's output. Dropping it discards the rest and does not block the command.
#[derive(Debug)]
pub struct OutputStream {
    exec: Arc<ClientExec>,
    output: StdStream,
}

impl OutputStream {
    /// The next piece, in order; `None` when no more will follow.
    pub async fn next(&mut self) -> Option<Chunk> {
        poll_fn(|context| self.exec.poll_one(self.output, context)).await
    }
}

impl Stream for OutputStream {
    type Item = Chunk;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        self.exec.poll_one(self.output, context)
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        self.exec.discard(self.output);
    }
}
