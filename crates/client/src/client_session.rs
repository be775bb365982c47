//! One connection, from its handshake to its end: routes events to commands and callers.

mod session_execs;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use baton_protocol::{
    binary::{self, BinaryChunk},
    event::{Event, PROTOCOL, Status, StdStream, Update},
    frame::Stream,
    id::ExecId,
    request::{Data, Request, StdinRequest},
};
use bytes::Bytes;

use crate::{
    Error, RollBack,
    client_clock::{self, Instant},
    client_exec::ClientExec,
    client_socket::{ClientSocket, ClientSocketEvent},
    client_state::SandboxRef,
    connection::{ConnectionCommand, ConnectionContext, SentMark},
    retry_policy::{ConnectionSummary, RetryPolicy},
    stdin_buffer::StdinPart,
};

/// The timeout for the server to close after its last event.
const LAST_WORDS: Duration = Duration::from_secs(2);

pub(crate) struct Session<'a> {
    link: &'a mut ConnectionContext,
    wire: ClientSocket,
    said: ConnectionSummary,
    /// RUNNING was received: requests may be sent.
    is_running: bool,
    by_number: HashMap<u32, Arc<ClientExec>>,
    numbers: HashMap<ExecId, u32>,
    /// Commands requested in this session and not answered yet, in order.
    asked: VecDeque<ExecId>,
    /// The text of a refusal without an exec id.
    unclear: Option<String>,
    /// The command whose reader must catch up before the socket is read again.
    flooded: Option<Arc<ClientExec>>,
    give_up: Option<Instant>,
    silent_at: Instant,
    leave_at: Option<Instant>,
}

enum End {
    Verdict(RetryPolicy),
    Closed(Option<u16>),
    Broken(String),
    Left,
}

impl<'a> Session<'a> {
    pub(crate) fn new(link: &'a mut ConnectionContext, wire: ClientSocket, give_up: Option<Instant>) -> Self {
        let silent_at = client_clock::now() + link.options.silence;
        Self {
            link,
            wire,
            said: ConnectionSummary::default(),
            is_running: false,
            by_number: HashMap::new(),
            numbers: HashMap::new(),
            asked: VecDeque::new(),
            unclear: None,
            flooded: None,
            give_up,
            silent_at,
            leave_at: None,
        }
    }

    pub(crate) async fn run(mut self) -> RetryPolicy {
        match self.converse().await {
            End::Verdict(verdict) => {
                self.wire.close().await;
                verdict
            }
            End::Left => {
                self.wire.close().await;
                RetryPolicy::Fatal(Error::Ended("it was closed".into()))
            }
            End::Closed(code) => {
                self.wire.answer_close().await;
                self.said.verdict(code.or(Some(1005)), "")
            }
            End::Broken(cause) => self.said.verdict(None, &cause),
        }
    }

    async fn converse(&mut self) -> End {
        loop {
            if self.flooded.as_ref().is_some_and(|exec| !exec.is_flooded()) {
                self.flooded = None;
            }
            let listen = self.flooded.is_none();
            if !listen {
                self.silent_at = client_clock::now() + self.link.options.silence;
            }
            let look = self.link.look.clone();
            let deadline = self.deadline();
            tokio::select! {
                turn = self.wire.turn(listen) => {
                    if !matches!(turn, ClientSocketEvent::Wrote) {
                        self.silent_at = client_clock::now() + self.link.options.silence;
                    }
                    match turn {
                        ClientSocketEvent::Wrote => self.feed(),
                        ClientSocketEvent::Alive => {}
                        ClientSocketEvent::Text(text) => {
                            if let Some(verdict) = self.event(&text) {
                                return End::Verdict(verdict);
                            }
                        }
                        ClientSocketEvent::Binary(bytes) => {
                            if let Err(error) = self.output(bytes) {
                                return End::Verdict(RetryPolicy::Fatal(error));
                            }
                        }
                        ClientSocketEvent::Closed(code) => return End::Closed(code),
                        ClientSocketEvent::Broken(cause) => return End::Broken(cause),
                    }
                }
                command = self.link.commands.recv(), if self.is_running && self.wire.has_room() => match command {
                    Some(ConnectionCommand::Close) | None => return End::Left,
                    Some(command) => self.command(command),
                },
                () = look.notified() => self.feed(),
                () = client_clock::sleep_until(deadline) => return End::Broken("the server fell silent".into()),
            }
        }
    }

    fn deadline(&self) -> Instant {
        let give_up = self.give_up.filter(|_| !self.is_running);
        [self.leave_at, give_up].into_iter().flatten().fold(self.silent_at, Instant::min)
    }

    fn command(&mut self, command: ConnectionCommand) {
        match command {
            ConnectionCommand::Exec(exec) => self.exec(exec),
            ConnectionCommand::Ask { request, sent } => {
                let mirror = self.link.mirror.borrow();
                let _ = sent.send(SentMark { heard: mirror.heard(), session: mirror.sessions });
                drop(mirror);
                self.wire.send_request(&request);
            }
            ConnectionCommand::Tell(request) => self.wire.send_request(&request),
            ConnectionCommand::Close => {}
        }
    }

    /// Sends acknowledgements and stdin that are due.
    fn feed(&mut self) {
        if !self.is_running {
            return;
        }
        for exec in self.link.execs.values() {
            if let Some(offsets) = exec.take_ack() {
                self.wire.send_request(&Request::Ack { exec_id: exec.id.clone(), offsets });
            }
            let Some(number) = self.numbers.get(&exec.id) else { continue };
            while self.wire.has_room()
                && let Some(part) = exec.next_stdin()
            {
                match part {
                    StdinPart::Data { offset, bytes } => {
                        let chunk = BinaryChunk { stream: Stream::Stdin, exec: *number, offset, payload: &bytes };
                        self.wire.send(chunk.encode());
                    }
                    StdinPart::Eof { offset } => self.wire.send_request(&Request::Stdin(StdinRequest {
                        exec_id: Some(exec.id.clone()),
                        data: Data::Text(String::new()),
                        eof: true,
                        offset: Some(offset),
                    })),
                }
            }
        }
    }

    fn output(&mut self, bytes: Bytes) -> Result<(), Error> {
        let chunk = BinaryChunk::decode(&bytes).map_err(|error| Error::Protocol(error.to_string()))?;
        let output = match chunk.stream {
            Stream::Stdout => StdStream::Stdout,
            Stream::Stderr => StdStream::Stderr,
            Stream::Stdin | Stream::Exit | Stream::Tree => return Ok(()),
        };
        let Some(exec) = self.by_number.get(&chunk.exec) else { return Ok(()) };
        let offset = chunk.offset;
        let pushed = exec
            .push(output, offset, bytes.slice(binary::HEADER..))
            .map_err(|_| Error::Protocol("bytes of the output are missing".into()))?;
        if pushed.flooded {
            self.flooded = Some(exec.clone());
        }
        if pushed.ack
            && let Some(offsets) = exec.take_ack()
        {
            self.wire.send_request(&Request::Ack { exec_id: exec.id.clone(), offsets });
        }
        Ok(())
    }

    fn event(&mut self, text: &str) -> Option<RetryPolicy> {
        // An unknown event comes from a newer server and is ignored.
        match Event::parse(text).ok()? {
            Event::StatusUpdate(update) => return self.update(update),
            Event::SandboxId { sandbox_id, sandbox_token, persistent } => self.link.mirror.send_modify(|mirror| {
                mirror.place = Some(SandboxRef { id: sandbox_id, token: sandbox_token });
                mirror.is_persistent = persistent;
            }),
            Event::Hello { protocol, instance, .. } => {
                if protocol != PROTOCOL {
                    let text = format!("the server speaks version {protocol}");
                    return Some(RetryPolicy::Fatal(Error::Protocol(text)));
                }
                self.link.mirror.send_modify(|mirror| mirror.instance = Some(instance));
            }
            Event::Error { message } => self.said.error(message),
            Event::StdinAck { exec_id, offset } => {
                if let Some(exec) = self.link.execs.get(&exec_id) {
                    exec.stdin_ack(offset);
                }
            }
            Event::OutputGap { exec_id, stream, to, .. } => {
                if let Some(exec) = self.link.execs.get(&exec_id) {
                    exec.gap(stream, to);
                }
            }
            Event::OutputRewound { exec_id, stream, to } => {
                if let Some(exec) = self.link.execs.get(&exec_id) {
                    exec.rewind(stream, to);
                }
            }
            Event::IdleTimeout { idle_timeout } => {
                self.link.mirror.send_modify(|mirror| mirror.idle_timeout_set(idle_timeout));
            }
            Event::Forked { sandboxes } => self.link.mirror.send_modify(|mirror| mirror.forked(sandboxes)),
            Event::RolledBack { checkpoint_id, age_ms } => {
                self.rolled_back(RollBack { checkpoint_id, age: Duration::from_millis(age_ms) });
            }
            Event::EgressDenied { host, port, reason } => {
                tracing::warn!(host, port, reason, "the sandbox may not reach this destination");
            }
            // In this dialect output is binary.
            Event::Stdout { .. } | Event::Stderr { .. } => {}
        }
        None
    }

    fn rolled_back(&mut self, roll_back: RollBack) {
        let RollBack { checkpoint_id, age } = &roll_back;
        tracing::warn!(checkpoint = %checkpoint_id, ?age, "the sandbox was rolled back: later work is lost");
        for exec in self.link.execs.values() {
            exec.rolled_back();
        }
        if let Some(on_roll_back) = &self.link.options.on_roll_back {
            on_roll_back(&roll_back);
        }
        self.link.mirror.send_modify(|mirror| mirror.roll_backs.push(roll_back));
    }

    fn update(&mut self, update: Update) -> Option<RetryPolicy> {
        let verdict = self.said.update(&update);
        if self.said.is_last() && self.leave_at.is_none() {
            self.leave_at = Some(client_clock::now() + LAST_WORDS);
        }
        #[expect(clippy::wildcard_enum_match_arm, reason = "the other statuses are only mirrored")]
        match update.status {
            Status::Running if !self.is_running => self.begin(update.execs.as_deref()),
            Status::ExecutionRunning => self.started(&update),
            Status::ExecutionDone => self.done(&update),
            Status::ExecutionError | Status::ExecutionUnsupportedLanguageError => self.refused(&update),
            Status::StdinError => self.stdin_refused(&update),
            _ => {}
        }
        if let Some(on_status) = &self.link.options.on_status {
            on_status(&update);
        }
        let _ = self.link.updates.send(update.clone());
        self.link.mirror.send_modify(|mirror| mirror.update(update));
        verdict
    }
}
