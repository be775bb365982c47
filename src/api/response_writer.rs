//! The caller of `POST /execute` as the client of a session: the output of its only command is the body of the response,
//! and the first event about the command decides the status code.

use std::{
    collections::VecDeque,
    task::{Context, Poll},
};

use axum::http::StatusCode;
use baton_protocol::{
    event::{Event, Status, StdStream, Update},
    id::ExecId,
    request::Refusal,
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::PollSender;

use super::{
    client_connection::{ClientConnection, ClientEvent, EventSink},
    close_code::SessionEnd,
    dialect::Dialect,
    execute_result::{CollectedOutput, ResponseForm},
    inbound::Reservation,
    session::AdmissionRejection,
    stream_cursor::{Mark, StreamCursor},
};
use crate::{
    clock::Moment,
    metrics::ActionOutcome,
    traces::{self, Traceparent},
};

/// How many chunks of the body may wait for the caller to read them.
const BODY_CHUNKS: usize = 4;

/// A status code other than 200, and the text of the response.
pub type HttpRefusal = (StatusCode, String);

/// What the handler of the request waits for: whether the command started, and then its output.
pub struct PendingResponse {
    pub started: oneshot::Receiver<Result<(), HttpRefusal>>,
    pub body: mpsc::Receiver<Bytes>,
}

pub struct ResponseWriter {
    /// Taken when the status code is decided.
    started: Option<oneshot::Sender<Result<(), HttpRefusal>>>,
    body: PollSender<Bytes>,
    /// Resolves when the caller has disconnected.
    disconnected: BoxFuture<'static, ()>,
    queue: VecDeque<Bytes>,
    /// The output, if the response is one JSON object.
    collected: Option<CollectedOutput>,
    /// Whether output was queued that no marks cover yet.
    is_unconfirmed: bool,
    /// Confirmed as soon as the queue is empty.
    marks: Option<Vec<Mark>>,
    last_ping: u64,
    /// Whether the command has ended or failed: the session ends once the queue is empty.
    is_complete: bool,
    /// Memory that holds the code, until the sandbox is admitted.
    memory: Option<Reservation>,
    /// Open until the command has ended.
    request: traces::Span,
}

impl ResponseWriter {
    pub fn new(memory: Reservation, request: traces::Span, form: ResponseForm) -> (Self, PendingResponse) {
        let (started, start) = oneshot::channel();
        let (sender, body) = mpsc::channel(BODY_CHUNKS);
        let watched = sender.clone();
        let writer = Self {
            started: Some(started),
            body: PollSender::new(sender),
            disconnected: Box::pin(async move { watched.closed().await }),
            queue: VecDeque::new(),
            collected: (form == ResponseForm::Json).then(CollectedOutput::default),
            is_unconfirmed: false,
            marks: None,
            last_ping: 0,
            is_complete: false,
            memory: Some(memory),
            request,
        };
        (writer, PendingResponse { started: start, body })
    }

    /// Responds with an error, if the response has not started, and ends the session.
    fn fail(&mut self, status: StatusCode, text: &str) {
        self.respond(Err((status, text.to_owned())));
        self.is_complete = true;
    }

    fn respond(&mut self, response: Result<(), HttpRefusal>) {
        if let Some(started) = self.started.take() {
            // The caller may have disconnected.
            let _ = started.send(response);
        }
    }
}

impl EventSink for ResponseWriter {
    fn dialect(&self) -> Dialect {
        Dialect::Documents
    }

    fn send_about(&mut self, event: &Event, _details: bool) {
        let Event::StatusUpdate(update) = event else { return };
        let Update { status, message, .. } = update;
        let text = message.as_deref().unwrap_or_default();
        if *status == Status::ExecutionRunning {
            // The status code of a JSON object is decided when it is complete.
            if self.collected.is_none() {
                self.respond(Ok(()));
            }
        } else if *status == Status::ExecutionDone {
            if let Some(collected) = &self.collected {
                self.queue.push_back(collected.to_json(update));
                self.respond(Ok(()));
            }
            self.request.end(ActionOutcome::Done);
            self.is_complete = true;
        } else if *status == Status::ExecutionError {
            self.fail(StatusCode::INTERNAL_SERVER_ERROR, text);
        } else if matches!(status, Status::CreationError | Status::RestoreError) {
            self.fail(StatusCode::SERVICE_UNAVAILABLE, text);
        }
    }

    fn refuse_about(&mut self, refusal: &Refusal, _exec_id: Option<ExecId>) {
        let is_of_command = refusal.status == Status::ExecutionError;
        let status = if is_of_command { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::SERVICE_UNAVAILABLE };
        self.fail(status, &refusal.message);
    }

    fn output(&mut self, _exec: u32, output: StdStream, _offset: u64, bytes: Vec<u8>, _cursor: &mut StreamCursor) {
        match &mut self.collected {
            Some(collected) => collected.add(output, &bytes),
            None => self.queue.push_back(bytes.into()),
        }
        self.is_unconfirmed = true;
    }

    fn end_output(&mut self, _exec: u32, _output: StdStream, _cursor: &mut StreamCursor) {}

    /// The response needs no ping: what was passed to the body is confirmed.
    fn ping(&mut self, marks: Vec<Mark>, _proves_life: bool) -> u64 {
        self.is_unconfirmed = false;
        self.marks = Some(marks);
        self.last_ping += 1;
        self.last_ping
    }
}

impl ClientConnection for ResponseWriter {
    fn poll_event(&mut self, context: &mut Context<'_>, _is_listening: bool) -> Poll<ClientEvent> {
        if self.disconnected.poll_unpin(context).is_ready() {
            self.request.end(ActionOutcome::Done);
            return Poll::Ready(ClientEvent::Gone);
        }
        let mut has_written = false;
        while !self.queue.is_empty() {
            match self.body.poll_reserve(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(ClientEvent::Gone),
                Poll::Pending if has_written => return Poll::Ready(ClientEvent::Wrote),
                Poll::Pending => return Poll::Pending,
            }
            if let Some(chunk) = self.queue.pop_front() {
                has_written |= self.body.send_item(chunk).is_ok();
            }
        }
        if has_written {
            return Poll::Ready(ClientEvent::Wrote);
        }
        if let Some(marks) = self.marks.take() {
            return Poll::Ready(ClientEvent::Pong(marks));
        }
        if self.is_complete { Poll::Ready(ClientEvent::Gone) } else { Poll::Pending }
    }

    fn has_room(&self) -> bool {
        self.queue.is_empty()
    }

    fn is_paused(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn excuse_silence(&mut self) {}

    fn is_ping_due(&self) -> bool {
        self.is_unconfirmed && self.queue.is_empty()
    }

    fn ping_due(&mut self, marks: Vec<Mark>) {
        self.ping(marks, false);
    }

    fn answered_ping(&self) -> u64 {
        self.last_ping - u64::from(self.marks.is_some())
    }

    fn wake_at(&self) -> Option<Moment> {
        None
    }

    fn flush_due(&mut self) {}

    /// From here on the code no longer counts against the memory of all clients.
    fn admitted(&mut self) {
        self.memory = None;
    }

    fn opened(&mut self) {}

    fn traceparent(&self) -> Option<Traceparent> {
        self.request.traceparent()
    }

    fn is_one_shot(&self) -> bool {
        true
    }

    fn reject(&mut self, _status: Status, rejection: &AdmissionRejection) {
        let status = match rejection {
            AdmissionRejection::Quota(_) => StatusCode::TOO_MANY_REQUESTS,
            AdmissionRejection::Full
            | AdmissionRejection::Draining
            | AdmissionRejection::Failed(_)
            | AdmissionRejection::Ended(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        self.fail(status, rejection.message());
    }

    /// Ends the body. A caller that got no response is told that its sandbox has ended.
    fn end(mut self: Box<Self>, _end: SessionEnd) -> BoxFuture<'static, ()> {
        if !self.is_complete {
            self.fail(StatusCode::SERVICE_UNAVAILABLE, "The sandbox has ended.");
        }
        Box::pin(std::future::ready(()))
    }
}
