//! One short function per action. Each may be interrupted anywhere: the next pass observes what it left, and the plan
//! continues from there.

mod answer_requests;
mod extract_rootfs;
pub(super) mod fetch_head;
mod lease_actions;
mod restore;
mod rootfs_fetcher;
pub(super) mod staging;
mod take_checkpoint;
mod take_snapshot;
mod upkeep;

use std::future::Future;

use baton_protocol::reason::Reason;

use super::{
    desired::Drain,
    plan::{Action, Desired, Observed, Rejection},
    worker::Worker,
};
use crate::{
    runtime,
    storage::{
        lease::{self, Lapse},
        records,
    },
};

const DELETED: &str = "The sandbox was deleted.";
const STATE_LOST: &str = "The sandbox ended without a checkpoint; its state is lost.";

/// Why an action failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The state has changed: observe again immediately.
    Stale,
    /// A retry may succeed.
    Transient(String),
    /// As in `LifecycleEvent`: the local disk is full.
    NoSpace(String),
    /// It cannot succeed until the spec changes or a session attaches.
    Refused { reason: Reason, message: String },
}

impl From<lease::Error> for Failure {
    fn from(error: lease::Error) -> Self {
        match error {
            lease::Error::Changed | lease::Error::Missing | lease::Error::Unusable(_) => Self::Stale,
            error @ (lease::Error::Sealed | lease::Error::Unencoded(_) | lease::Error::Store(_)) => {
                Self::Transient(error.to_string())
            }
        }
    }
}

impl From<Lapse> for Failure {
    fn from(_: Lapse) -> Self {
        Self::Stale
    }
}

impl From<records::Error> for Failure {
    fn from(error: records::Error) -> Self {
        Self::Transient(error.to_string())
    }
}

impl From<runtime::Error> for Failure {
    fn from(error: runtime::Error) -> Self {
        match error {
            runtime::Error::NotIn(_) => Self::Stale,
            runtime::Error::Refused { reason, message } => Self::Refused { reason, message },
            error @ runtime::Error::NoSpace { .. } => Self::NoSpace(error.to_string()),
            error @ (runtime::Error::Failed { .. } | runtime::Error::TimedOut { .. }) => {
                Self::Transient(error.to_string())
            }
        }
    }
}

pub(super) type ActionResult = Result<(), Failure>;

impl Worker {
    pub(super) async fn act(&mut self, action: Action, desired: Desired, seen: &Observed) -> ActionResult {
        // The files of a head keep downloading while its other requirements are fetched.
        if !action.is_upkeep() && !matches!(action, Action::Restore | Action::Extract) {
            self.start.abandon_fetch().await;
        }
        let traced = self.begin_action(action);
        let done = self.perform(action, desired, seen).await;
        self.end_action(&traced, &done);
        done
    }

    async fn perform(&mut self, action: Action, desired: Desired, seen: &Observed) -> ActionResult {
        match action {
            Action::Acquire => self.acquire(desired).await,
            Action::Wait => self.wait().await,
            Action::Withdraw => Ok(self.lease.handle_mut()?.withdraw().await?),
            Action::Decline => self.decline().await,
            Action::Renew => self.renew().await,
            Action::Create => self.create().await,
            Action::Refuse(rejection) => Err(self.refuse(rejection)),
            Action::Fence => Ok(self.context.lifecycle.fence(&self.id).await?),
            Action::Resume => self.resume().await,
            Action::Remove => self.remove(seen).await,
            Action::Release => self.release(seen).await,
            Action::Purge => self.purge().await,
            Action::Restore => self.restore().await,
            Action::Checkpoint => self.checkpoint().await,
            Action::Save => self.checkpoint_live().await,
            Action::Snapshot => self.snapshot().await,
            Action::Extract => self.extract().await,
            Action::Probe => self.probe(),
            Action::Expire => self.expire().await,
            Action::SetEgress => self.set_egress().await,
            Action::RecreateMetadata => self.recreate_metadata().await,
            Action::ReportInvalid => self.report_invalid().await,
            Action::ForgetAnswers => self.forget_answers().await,
            Action::CollectGarbage => self.collect_garbage().await,
            Action::Rest | Action::Finish => Ok(()),
        }
    }

    fn refuse(&self, rejection: Rejection) -> Failure {
        match rejection {
            Rejection::NoLock => no_lock(self.lease.unusable()),
            Rejection::StateLost => refusal(Reason::Lost, STATE_LOST),
            Rejection::Deleted => refusal(Reason::Deleted, DELETED),
            Rejection::InUse => refusal(Reason::InUse, "Another client is attached to the sandbox."),
            Rejection::Superseded => refusal(Reason::Superseded, "A later attach on another instance took precedence."),
            Rejection::RunningElsewhere => refusal(
                Reason::RunningElsewhere,
                "The sandbox runs on another instance, and handoff is not enabled for it.",
            ),
            Rejection::HandoffTimeout => {
                refusal(Reason::HandoffTimeout, "The instance that runs the sandbox did not release it in time.")
            }
        }
    }

    /// Runs work that needs the lease while renewing it, and sends every new deadline to the guard. Drops the work
    /// when the drain time is up: the sandbox must be released by then.
    async fn under_lease<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let (context, id) = (self.context.clone(), self.id.clone());
        let lease = self.lease.handle_mut()?;
        let mut deadlines = lease.deadline();
        deadlines.mark_unchanged();
        let forward = async {
            while deadlines.changed().await.is_ok() {
                let deadline = *deadlines.borrow_and_update();
                if let Some(deadline) = deadline
                    && let Err(error) = context.lifecycle.extend(&id, deadline).await
                {
                    tracing::debug!(sandbox = %id, %error, "the guard has no such container yet");
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            done = lease.renew_while(work) => Ok(done?),
            () = forward => Err(Failure::Stale),
            _ = context.drain.until(|drain| *drain == Drain::Over) => Err(Failure::Stale),
        }
    }
}

fn refusal(reason: Reason, message: &str) -> Failure {
    Failure::Refused { reason, message: message.to_owned() }
}

/// The lock is missing or unusable, for this reason.
fn no_lock(reason: Reason) -> Failure {
    let message = if reason == Reason::Unsigned {
        "The sandbox's lock is not signed with a key of this server; an operator must look at it."
    } else if reason == Reason::InvalidLock {
        "The sandbox's lock cannot be read; an operator must repair it."
    } else {
        "The sandbox's lock is missing; an operator must repair it."
    };
    refusal(reason, message)
}

/// A failed start is not retried until a session attaches.
fn start_failed(reason: Reason) -> impl Fn(Failure) -> Failure {
    move |failure| match failure {
        Failure::Transient(message) => Failure::Refused { reason, message },
        Failure::NoSpace(message) => Failure::Refused { reason: Reason::NoSpace, message },
        failure @ (Failure::Stale | Failure::Refused { .. }) => failure,
    }
}
