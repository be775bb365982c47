//! Spec writes, and polling for answers to one-shot requests, without blocking the session loop.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    event::{Copied, Event, Status, Update},
    id::{CheckpointId, Nonce, SandboxId},
    metadata::{self, Answer, DesiredState, Metadata, Spec},
};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};

use super::Session;
use crate::{
    api::{
        Api,
        close_code::{Close, SessionEnd},
        intent, public_message,
        status_machine::Unanswered,
        token,
    },
    clock::Moment,
    metrics::ActionOutcome,
    storage::records,
    traces::{Asked, Traceparent},
};

/// Interval between polls for an answer that another instance gave, so that no event announces it: short at first,
/// then longer.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(50);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// EditPurpose a spec write was for.
#[derive(Clone, Debug)]
pub enum EditPurpose {
    Kill,
    Checkpoint,
    /// Running again, after a checkpoint that failed.
    Revert,
    Handoff,
    /// Running here, after the sandbox left before the session was open.
    Attach,
    AddRequest(Nonce),
    RemoveRequest,
    /// The new idle timeout in seconds.
    IdleTimeout(Option<u64>),
}

/// The result of a store call.
pub enum StoreResult {
    Edited(EditPurpose, Result<Option<Box<Spec>>, records::Error>),
    Read(Result<Option<Box<Metadata>>, records::Error>),
    Copied(Result<Vec<Copied>, records::Error>),
}

#[derive(Debug)]
struct OneShotRequest {
    request: metadata::SpecRequest,
    /// How many copies to make of the requested checkpoint.
    copies: Option<u32>,
    deadline: Moment,
}

/// Store calls in progress, and one-shot requests of this session that are not answered yet.
#[derive(Default)]
pub struct SpecEdits {
    calls: FuturesUnordered<BoxFuture<'static, StoreResult>>,
    unanswered: BTreeMap<Nonce, OneShotRequest>,
    poll_at: Option<Moment>,
    poll_interval: Duration,
}

impl SpecEdits {
    /// The next result of a store call. Waits forever if there is none. Cancel safe.
    pub async fn next_result(&mut self) -> StoreResult {
        match self.calls.next().await {
            Some(result) => result,
            None => std::future::pending().await,
        }
    }

    /// Waits for the store calls in progress.
    pub async fn complete(self) {
        self.calls.for_each(|_| async {}).await;
    }

    pub fn poll_at(&self) -> Option<Moment> {
        self.poll_at
    }

    /// Polls at once if this session waits for an answer: one was just given.
    pub fn poll_now(&mut self, now: Moment) {
        if !self.unanswered.is_empty() {
            self.poll_at = Some(now);
        }
    }

    /// The client request behind a write, if there is one.
    fn traced_request(&self, purpose: &EditPurpose) -> Option<Asked> {
        match purpose {
            EditPurpose::Kill => Some(Asked::Kill),
            EditPurpose::Checkpoint => Some(Asked::Checkpoint),
            EditPurpose::Handoff => Some(Asked::Handoff),
            EditPurpose::Attach => Some(Asked::Attach),
            EditPurpose::AddRequest(nonce) => self.unanswered.get(nonce).map(OneShotRequest::traced_request),
            EditPurpose::Revert | EditPurpose::RemoveRequest | EditPurpose::IdleTimeout(_) => None,
        }
    }

    /// Which kinds of requests are not answered yet.
    pub fn unanswered(&self) -> Unanswered {
        let mut unanswered = Unanswered::default();
        for one_shot in self.unanswered.values() {
            match one_shot.request {
                metadata::SpecRequest::Snapshot { .. } => unanswered.snapshot = true,
                metadata::SpecRequest::Checkpoint {} => unanswered.checkpoint = true,
            }
        }
        unanswered
    }
}

impl Session {
    /// Writes the spec outside the loop; the result wakes the loop.
    pub(super) fn edit(&mut self, purpose: EditPurpose, change: impl Fn(&mut Spec) -> bool + Send + Sync + 'static) {
        let (api, id) = (self.api.clone(), self.sandbox.id.clone());
        let kind = self.spec_edits.traced_request(&purpose);
        let request = kind.map(|kind| api.settings.traces.asked(kind, self.client.traceparent()));
        self.spec_edits.calls.push(Box::pin(async move {
            let edited = match request {
                Some(mut request) => {
                    let edited = api.records.edit_for_request(&id, request.traceparent(), &change).await;
                    request.end(if edited.is_ok() { ActionOutcome::Done } else { ActionOutcome::Failed });
                    edited
                }
                None => api.records.edit(&id, &change).await,
            };
            if matches!(purpose, EditPurpose::Attach) && edited.is_ok() {
                api.bus.placed(&id);
            } else {
                api.bus.wake(&id);
            }
            StoreResult::Edited(purpose, edited.map(|spec| spec.map(Box::new)))
        }));
    }

    /// Makes a one-shot request, which is answered.
    pub(super) fn request(&mut self, request: metadata::SpecRequest) {
        self.add_request(request, None);
    }

    /// Requests a checkpoint after which the sandbox keeps running, and then this many sandboxes from it.
    pub(super) fn request_copies(&mut self, count: u32) {
        self.add_request(metadata::SpecRequest::Checkpoint {}, Some(count));
    }

    fn add_request(&mut self, request: metadata::SpecRequest, copies: Option<u32>) {
        let nonce = self.api.clock.nonce();
        let deadline = self.api.clock.now() + ANSWER_TIMEOUT;
        let one_shot = OneShotRequest { request: request.clone(), copies, deadline };
        self.spec_edits.unanswered.insert(nonce.clone(), one_shot);
        let purpose = EditPurpose::AddRequest(nonce.clone());
        self.edit(purpose, move |spec| intent::add_request(spec, &nonce, &request));
    }

    pub(super) fn handle_store_result(&mut self, result: StoreResult) -> Option<SessionEnd> {
        match result {
            StoreResult::Edited(purpose, Ok(spec)) => self.handle_edited(purpose, spec),
            StoreResult::Edited(purpose, Err(error)) => {
                tracing::warn!(%error, ?purpose, "the spec could not be written");
                self.handle_edit_failed(&purpose, &public_message(&error))
            }
            StoreResult::Read(read) => {
                self.handle_answers(read);
                None
            }
            StoreResult::Copied(Ok(sandboxes)) => {
                self.client.send(&Event::Forked { sandboxes });
                None
            }
            StoreResult::Copied(Err(error)) => {
                tracing::warn!(%error, "a sandbox could not be forked");
                self.client.send_all(&Event::refusal(Status::Error, &public_message(&error)));
                None
            }
        }
    }

    fn handle_edited(&mut self, purpose: EditPurpose, spec: Option<Box<Spec>>) -> Option<SessionEnd> {
        if let Some(spec) = spec {
            self.sandbox.spec = *spec;
        } else if matches!(purpose, EditPurpose::Attach) {
            self.sandbox.spec.desired_state = DesiredState::Deleted;
        }
        match purpose {
            EditPurpose::Revert => Some(SessionEnd::Close(Close::Fatal)),
            EditPurpose::Attach if self.sandbox.spec.desired_state == DesiredState::Deleted => {
                self.client.send(&Event::status(Status::NotFound));
                Some(SessionEnd::Close(Close::Unavailable))
            }
            EditPurpose::AddRequest(_) => {
                self.spec_edits.poll_interval = MIN_POLL_INTERVAL;
                self.spec_edits.poll_at = Some(self.api.clock.now() + MIN_POLL_INTERVAL);
                None
            }
            EditPurpose::IdleTimeout(idle_timeout) => {
                // The time counts from now on.
                self.api.bus.touch(&self.sandbox.id);
                self.client.send(&Event::IdleTimeout { idle_timeout });
                None
            }
            EditPurpose::Kill
            | EditPurpose::Checkpoint
            | EditPurpose::Handoff
            | EditPurpose::Attach
            | EditPurpose::RemoveRequest => None,
        }
    }

    fn handle_edit_failed(&mut self, purpose: &EditPurpose, message: &str) -> Option<SessionEnd> {
        let (status, end) = match purpose {
            EditPurpose::Kill => {
                self.status_machine.requested = None;
                (Status::KillError, None)
            }
            EditPurpose::Checkpoint => (Status::CheckpointError, Some(SessionEnd::Close(Close::Fatal))),
            // The client knows that its checkpoint failed; the reconciler will retry.
            EditPurpose::Revert => return Some(SessionEnd::Close(Close::Fatal)),
            EditPurpose::Attach => (Status::RestoreError, Some(SessionEnd::Close(Close::Fatal))),
            EditPurpose::Handoff | EditPurpose::IdleTimeout(_) => (Status::Error, None),
            EditPurpose::AddRequest(nonce) => {
                let one_shot = self.spec_edits.unanswered.remove(nonce)?;
                (one_shot.failure(), None)
            }
            EditPurpose::RemoveRequest => return None,
        };
        self.client.send_all(&Event::refusal(status, message));
        end
    }

    pub(super) fn poll_answers_if_due(&mut self) {
        let now = self.api.clock.now();
        if self.spec_edits.poll_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let (api, id) = (self.api.clone(), self.sandbox.id.clone());
        self.spec_edits.calls.push(Box::pin(async move {
            StoreResult::Read(api.records.find(&id).await.map(|found| found.map(Box::new)))
        }));
    }

    fn handle_answers(&mut self, read: Result<Option<Box<Metadata>>, records::Error>) {
        let now = self.api.clock.now();
        let mut answers = read.ok().flatten().map(|found| found.status.answers).unwrap_or_default();
        let unanswered = std::mem::take(&mut self.spec_edits.unanswered);
        for (nonce, one_shot) in unanswered {
            let event = match answers.remove(&nonce) {
                None if now < one_shot.deadline => {
                    self.spec_edits.unanswered.insert(nonce, one_shot);
                    continue;
                }
                None => one_shot.refusal("The request was not answered in time."),
                Some(Answer::Error { message, .. }) => one_shot.refusal(&message),
                Some(Answer::Ok(metadata::CompletedRequest { checkpoint_id: Some(checkpoint_id), .. }))
                    if one_shot.copies.is_some() =>
                {
                    self.copy(checkpoint_id, one_shot.copies.unwrap_or(0));
                    vec![]
                }
                Some(Answer::Ok(done)) => {
                    let update = match one_shot.request {
                        metadata::SpecRequest::Snapshot { name, .. } => Update {
                            snapshot: Some(name),
                            paused_ms: done.paused_ms,
                            ..Update::new(Status::FilesystemSnapshotCreated)
                        },
                        metadata::SpecRequest::Checkpoint {} => Update {
                            checkpoint_id: done.checkpoint_id,
                            paused_ms: done.paused_ms,
                            ..Update::new(Status::Checkpointed)
                        },
                    };
                    vec![Event::StatusUpdate(update)]
                }
            };
            self.client.send_all(&event);
            self.edit(EditPurpose::RemoveRequest, move |spec| intent::remove_request(spec, &nonce));
        }
        if !self.spec_edits.unanswered.is_empty() {
            let interval = (self.spec_edits.poll_interval * 2).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL);
            self.spec_edits.poll_interval = interval;
            self.spec_edits.poll_at = Some(now + interval);
        }
    }
}

impl Api {
    /// Deletes a sandbox that no client can attach to. If the write fails, the reconciler still ends a sandbox that no
    /// session ever attached to.
    pub(in crate::api) async fn delete_unattended(&self, id: &SandboxId, parent: Option<Traceparent>) {
        if let Err(error) = self.delete(id, parent).await {
            tracing::warn!(%error, "cannot delete a sandbox that has no client");
        }
    }

    /// Sets `deleted` in the spec of a sandbox, wherever it is.
    pub(in crate::api) async fn delete(&self, id: &SandboxId, parent: Option<Traceparent>) -> records::Result<()> {
        self.occupancy.note(id, None);
        let mut request = self.settings.traces.asked(Asked::Kill, parent);
        let delete = |spec: &mut Spec| intent::desire(spec, DesiredState::Deleted);
        let deleted = self.records.edit_for_request(id, request.traceparent(), &delete).await;
        request.end(if deleted.is_ok() { ActionOutcome::Done } else { ActionOutcome::Failed });
        self.bus.wake(id);
        deleted.map(drop)
    }
}

impl OneShotRequest {
    fn traced_request(&self) -> Asked {
        match self.request {
            metadata::SpecRequest::Snapshot { .. } => Asked::Snapshot,
            metadata::SpecRequest::Checkpoint {} if self.copies.is_some() => Asked::Fork,
            metadata::SpecRequest::Checkpoint {} => Asked::Checkpoint,
        }
    }

    /// The events for a request that failed. A fork says so itself, since its checkpoint is not what was asked for.
    fn refusal(&self, message: &str) -> Vec<Event> {
        let of_fork = self.copies.map(|_| format!("No fork was made, because its checkpoint failed: {message}"));
        Event::refusal(self.failure(), of_fork.as_deref().unwrap_or(message)).to_vec()
    }

    fn failure(&self) -> Status {
        match self.request {
            metadata::SpecRequest::Snapshot { .. } => Status::FilesystemSnapshotError,
            metadata::SpecRequest::Checkpoint {} if self.copies.is_some() => Status::Error,
            metadata::SpecRequest::Checkpoint {} => Status::CheckpointError,
        }
    }
}

impl Session {
    /// Makes the copies outside the loop.
    fn copy(&mut self, checkpoint_id: CheckpointId, count: u32) {
        let (api, source) = (self.api.clone(), self.sandbox.spec.clone());
        let context = self.client.traceparent();
        self.spec_edits.calls.push(Box::pin(async move {
            let mut made = Vec::new();
            for _ in 0..count {
                let token = token::fresh(&*api.clock);
                let id = api.clock.sandbox_id();
                let digest = token::sha256(&token.0);
                let spec = intent::copy(&source, &checkpoint_id, id.clone(), digest, api.clock.timestamp());
                if let Err(error) = api.records.fork(&checkpoint_id, &spec).await {
                    // No client will ever learn of the copies already made.
                    for copied in &made {
                        let Copied { sandbox_id, .. } = copied;
                        api.delete_unattended(sandbox_id, context).await;
                    }
                    return StoreResult::Copied(Err(error));
                }
                made.push(Copied { sandbox_id: id, sandbox_token: token });
            }
            StoreResult::Copied(Ok(made))
        }));
    }
}
