//! Spec writes, and polling for answers to one-shot requests, without blocking the session loop.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    event::{Copied, Event, Status, Update},
    id::{CheckpointId, Nonce, SandboxId},
    metadata::{self, Answer, DesiredState, Metadata, Spec},
};

use super::{End, Session};
use crate::{
    api::{Api, close_code::Close, intent, public_message, status_machine::Wished, token},
    clock::Moment,
    metrics::Outcome,
    storage::records,
    traces::{Asked, Traceparent},
};

/// Poll interval for an answer that another instance gave, so that no event announces it: short at first, then longer.
const SOON: Duration = Duration::from_millis(50);
const RARELY: Duration = Duration::from_secs(1);
/// How long to wait for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(15 * 60);

/// What a spec write was for.
#[derive(Clone, Debug)]
pub enum What {
    Kill,
    Checkpoint,
    /// After a checkpoint that failed.
    TakeBack,
    Handoff,
    AskAgain,
    Wish(Nonce),
    Settle,
}

/// The result of a store call.
pub enum Done {
    Edited(What, Result<Option<Box<Spec>>, records::Error>),
    Looked(Result<Option<Box<Metadata>>, records::Error>),
    Copied(Result<Vec<Copied>, records::Error>),
}

#[derive(Debug)]
struct SpecEdit {
    wish: metadata::Request,
    /// How many copies to make of the requested checkpoint.
    copies: Option<u32>,
    until: Moment,
}

/// One-shot requests of this session that are not answered yet.
#[derive(Debug, Default)]
pub struct SpecEdits {
    open: BTreeMap<Nonce, SpecEdit>,
    look_at: Option<Moment>,
    pause: Duration,
}

impl SpecEdits {
    pub fn look_at(&self) -> Option<Moment> {
        self.look_at
    }

    /// Polls at once if this session waits for an answer: one was just given.
    pub fn look_now(&mut self, now: Moment) {
        if !self.open.is_empty() {
            self.look_at = Some(now);
        }
    }

    /// The client request behind a write, if there is one.
    fn asked(&self, what: &What) -> Option<Asked> {
        match what {
            What::Kill => Some(Asked::Kill),
            What::Checkpoint => Some(Asked::Checkpoint),
            What::Handoff => Some(Asked::Handoff),
            What::AskAgain => Some(Asked::Attach),
            What::Wish(nonce) => self.open.get(nonce).map(SpecEdit::asked),
            What::TakeBack | What::Settle => None,
        }
    }

    pub fn wished(&self) -> Wished {
        let mut wished = Wished::default();
        for wish in self.open.values() {
            match wish.wish {
                metadata::Request::Snapshot { .. } => wished.snapshot = true,
                metadata::Request::Checkpoint {} => wished.checkpoint = true,
            }
        }
        wished
    }
}

impl Session {
    /// Writes the spec outside the loop; the result wakes the loop.
    pub(super) fn edit(&mut self, what: What, change: impl Fn(&mut Spec) -> bool + Send + Sync + 'static) {
        let (api, id) = (self.api.clone(), self.id.clone());
        let asked = self.spec_edits.asked(&what);
        let request = asked.map(|asked| api.settings.traces.asked(asked, self.request.traceparent()));
        self.work.push(Box::pin(async move {
            let edited = match request {
                Some(mut request) => {
                    let edited = api.records.wish(&id, request.traceparent(), &change).await;
                    request.end(if edited.is_ok() { Outcome::Done } else { Outcome::Failed });
                    edited
                }
                None => api.records.edit(&id, &change).await,
            };
            api.bus.wake(&id);
            Done::Edited(what, edited.map(|spec| spec.map(Box::new)))
        }));
    }

    /// Makes a one-shot request, which is answered.
    pub(super) fn wish(&mut self, wish: metadata::Request) {
        self.wish_for(wish, None);
    }

    /// Requests a checkpoint after which the sandbox keeps running, and then this many sandboxes from it.
    pub(super) fn wish_for_copies(&mut self, count: u32) {
        self.wish_for(metadata::Request::Checkpoint {}, Some(count));
    }

    fn wish_for(&mut self, wish: metadata::Request, copies: Option<u32>) {
        let nonce = self.api.clock.nonce();
        let until = self.api.clock.now() + ANSWER_WITHIN;
        self.spec_edits.open.insert(nonce.clone(), SpecEdit { wish: wish.clone(), copies, until });
        let asked = nonce.clone();
        self.edit(What::Wish(nonce), move |spec| intent::wish(spec, &asked, &wish));
    }

    pub(super) fn done(&mut self, done: Done) -> Option<End> {
        match done {
            Done::Edited(what, Ok(spec)) => self.edited(what, spec),
            Done::Edited(what, Err(error)) => {
                tracing::warn!(%error, ?what, "the spec could not be written");
                self.not_edited(&what, &public_message(&error))
            }
            Done::Looked(looked) => {
                self.looked(looked);
                None
            }
            Done::Copied(Ok(sandboxes)) => {
                self.writer.send(&Event::Forked { sandboxes });
                None
            }
            Done::Copied(Err(error)) => {
                tracing::warn!(%error, "a sandbox could not be copied");
                self.writer.say_all(&Event::refusal(Status::Error, &public_message(&error)));
                None
            }
        }
    }

    fn edited(&mut self, what: What, spec: Option<Box<Spec>>) -> Option<End> {
        if let Some(spec) = spec {
            self.spec = *spec;
        } else if matches!(what, What::AskAgain) {
            self.spec.desired_state = DesiredState::Deleted;
        }
        match what {
            What::TakeBack => Some(End::Close(Close::Fatal)),
            What::AskAgain if self.spec.desired_state == DesiredState::Deleted => {
                self.writer.send(&Event::status(Status::NotFound));
                Some(End::Close(Close::Unavailable))
            }
            What::Wish(_) => {
                self.spec_edits.pause = SOON;
                self.spec_edits.look_at = Some(self.api.clock.now() + SOON);
                None
            }
            What::Kill | What::Checkpoint | What::Handoff | What::AskAgain | What::Settle => None,
        }
    }

    fn not_edited(&mut self, what: &What, message: &str) -> Option<End> {
        let (status, end) = match what {
            What::Kill => {
                self.status_machine.asked = None;
                (Status::KillError, None)
            }
            What::Checkpoint => (Status::CheckpointError, Some(End::Close(Close::Fatal))),
            // The client knows that its checkpoint failed; the reconciler will retry.
            What::TakeBack => return Some(End::Close(Close::Fatal)),
            What::AskAgain => (Status::RestoreError, Some(End::Close(Close::Fatal))),
            What::Handoff => (Status::Error, None),
            What::Wish(nonce) => {
                let wish = self.spec_edits.open.remove(nonce)?;
                (wish.failure(), None)
            }
            What::Settle => return None,
        };
        self.writer.say_all(&Event::refusal(status, message));
        end
    }

    pub(super) fn look_for_answers(&mut self) {
        let now = self.api.clock.now();
        if self.spec_edits.look_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let (api, id) = (self.api.clone(), self.id.clone());
        self.work
            .push(Box::pin(async move { Done::Looked(api.records.find(&id).await.map(|found| found.map(Box::new))) }));
    }

    fn looked(&mut self, looked: Result<Option<Box<Metadata>>, records::Error>) {
        let now = self.api.clock.now();
        let mut answers = looked.ok().flatten().map(|found| found.status.answers).unwrap_or_default();
        let open = std::mem::take(&mut self.spec_edits.open);
        for (nonce, wish) in open {
            let event = match answers.remove(&nonce) {
                None if now < wish.until => {
                    self.spec_edits.open.insert(nonce, wish);
                    continue;
                }
                None => Event::refusal(wish.failure(), "No answer came in time.").to_vec(),
                Some(Answer::Error { message, .. }) => Event::refusal(wish.failure(), &message).to_vec(),
                Some(Answer::Ok(metadata::Done { checkpoint_id: Some(checkpoint_id), .. }))
                    if wish.copies.is_some() =>
                {
                    self.copy(checkpoint_id, wish.copies.unwrap_or(0));
                    vec![]
                }
                Some(Answer::Ok(done)) => {
                    let update = match wish.wish {
                        metadata::Request::Snapshot { name, .. } => Update {
                            snapshot: Some(name),
                            paused_ms: done.paused_ms,
                            ..Update::new(Status::FilesystemSnapshotCreated)
                        },
                        metadata::Request::Checkpoint {} => Update {
                            checkpoint_id: done.checkpoint_id,
                            paused_ms: done.paused_ms,
                            ..Update::new(Status::Checkpointed)
                        },
                    };
                    vec![Event::StatusUpdate(update)]
                }
            };
            self.writer.say_all(&event);
            self.edit(What::Settle, move |spec| intent::settle(spec, &nonce));
        }
        if !self.spec_edits.open.is_empty() {
            self.spec_edits.pause = (self.spec_edits.pause * 2).clamp(SOON, RARELY);
            self.spec_edits.look_at = Some(now + self.spec_edits.pause);
        }
    }
}

impl Api {
    /// Deletes a sandbox that no client can attach to. If the write fails, the reconciler still ends a sandbox that no
    /// session ever attached to.
    pub(in crate::api) async fn delete(&self, id: &SandboxId, parent: Option<Traceparent>) {
        self.occupancy.note(id, None);
        let mut request = self.settings.traces.asked(Asked::Kill, parent);
        let wish = |spec: &mut Spec| intent::desire(spec, DesiredState::Deleted);
        match self.records.wish(id, request.traceparent(), &wish).await {
            Ok(_) => request.end(Outcome::Done),
            Err(error) => {
                request.end(Outcome::Failed);
                tracing::warn!(%error, "a sandbox that nobody has could not be deleted");
            }
        }
        self.bus.wake(id);
    }
}

impl SpecEdit {
    fn asked(&self) -> Asked {
        match self.wish {
            metadata::Request::Snapshot { .. } => Asked::Snapshot,
            metadata::Request::Checkpoint {} if self.copies.is_some() => Asked::Fork,
            metadata::Request::Checkpoint {} => Asked::Checkpoint,
        }
    }

    fn failure(&self) -> Status {
        match self.wish {
            metadata::Request::Snapshot { .. } => Status::FilesystemSnapshotError,
            metadata::Request::Checkpoint {} if self.copies.is_some() => Status::Error,
            metadata::Request::Checkpoint {} => Status::CheckpointError,
        }
    }
}

impl Session {
    /// Makes the copies outside the loop.
    fn copy(&mut self, checkpoint_id: CheckpointId, count: u32) {
        let (api, source) = (self.api.clone(), self.spec.clone());
        let context = self.request.traceparent();
        self.work.push(Box::pin(async move {
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
                        api.delete(sandbox_id, context).await;
                    }
                    return Done::Copied(Err(error));
                }
                made.push(Copied { sandbox_id: id, sandbox_token: token });
            }
            Done::Copied(Ok(made))
        }));
    }
}
