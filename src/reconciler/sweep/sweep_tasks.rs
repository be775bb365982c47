//! Sweep tasks: each performs what the sweep found necessary for one sandbox, as its holder or not at all.

use std::{sync::Arc, time::Duration};

use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Claim,
    metadata::{Claimed, DesiredState, Spec},
};

use super::{
    Assignment, SweepContext, since_1970,
    sweep_rules::{self, Placement, SweepTask},
};
use crate::{
    reconciler::{ReconcilerContext, worker::Worker, workers::Wakeup},
    storage::{
        garbage_collector::{self, Error},
        records,
    },
};

/// A task that takes longer is cancelled; the next sweep continues it.
const TASK_TIMEOUT: Duration = Duration::from_secs(10 * 60);

impl Assignment {
    /// Runs the task in place of the sandbox's worker.
    pub(in crate::reconciler) async fn run(self, context: Arc<ReconcilerContext>, wakeup: Arc<Wakeup>) {
        let sweep_context = context.sweep_context();
        let (id, task) = (self.id.clone(), self.task);
        if task == SweepTask::Take {
            let Some(attach_guard) = context.bus.admit(&id, sweep_context.room) else { return };
            let taken = claim(&sweep_context, &id).await;
            let Assignment { lock, permit, .. } = self;
            drop(permit);
            match taken {
                Ok(true) => Worker::taken(id, context, wakeup, lock, attach_guard).run().await,
                Ok(false) => {}
                Err(error) => tracing::warn!(sandbox = %id, %error, "the sweep could not start the sandbox"),
            }
            return;
        }
        match sweep_context.clock.clone().timeout(TASK_TIMEOUT, self.fulfil(&sweep_context)).await {
            Ok(Ok(true)) => tracing::info!(sandbox = %id, ?task, "sweep task done"),
            Ok(Ok(false) | Err(Error::Taken)) => {
                tracing::debug!(sandbox = %id, ?task, "sweep task had nothing to do")
            }
            Ok(Err(error)) => {
                tracing::warn!(sandbox = %id, ?task, %error, "sweep task failed; retrying at the next sweep")
            }
            Err(elapsed) => {
                tracing::warn!(sandbox = %id, ?task, %elapsed, "sweep task failed; retrying at the next sweep")
            }
        }
    }

    /// Performs a task that needs no container. Returns false if there was nothing to do.
    pub async fn fulfil(mut self, sweep_context: &SweepContext) -> garbage_collector::Result<bool> {
        let (id, lock, upkeep) = (&self.id, &mut self.lock, &sweep_context.upkeep);
        match self.task {
            SweepTask::Rest | SweepTask::Take => return Ok(false),
            SweepTask::Purge => upkeep.purge(id, lock).await?,
            SweepTask::Expire => {
                if !expire(sweep_context, id).await? {
                    return Ok(false);
                }
                upkeep.purge(id, lock).await?;
            }
            SweepTask::Correct => {
                upkeep.correct(id, lock).await?;
            }
            SweepTask::Tidy => {
                upkeep.tidy_free(lock).await?;
            }
            SweepTask::Sweep => {
                upkeep.erase_checkpoints(id).await?;
                if let Some(version) = &self.objects.metadata {
                    sweep_context.records.erase_metadata(id, version).await?;
                }
            }
            SweepTask::Forget => {
                if let Some(version) = &self.objects.lock {
                    sweep_context.records.forget(id, version).await?;
                }
            }
        }
        Ok(true)
    }
}

/// Sets `deleted` in the spec, as an operator would, if the sandbox is still overdue.
async fn expire(sweep_context: &SweepContext, id: &SandboxId) -> records::Result<bool> {
    let Some(found) = sweep_context.records.find(id).await? else { return Ok(false) };
    let due = sweep_rules::expires_at(&found.spec, &found.status, sweep_context.retention);
    if due.is_none_or(|due| due > since_1970(&sweep_context.clock)) {
        return Ok(false);
    }
    let seen = found.spec;
    let change = |spec: &mut Spec| {
        let same = *spec == seen;
        if same {
            spec.desired_state = DesiredState::Deleted;
        }
        same
    };
    let edited = sweep_context.records.edit_for_request(id, None, &change).await?;
    Ok(edited.is_some_and(|spec| spec.desired_state == DesiredState::Deleted))
}

/// Claims a sandbox that may run anywhere, or that an operator ordered here. Returns whether the spec changed.
fn accept(spec: &mut Spec, me: &InstanceId) -> bool {
    let kind = match (Placement::of(spec, me), spec.desired_state) {
        (Placement::Anywhere, DesiredState::Running) => Claim::Ask,
        (Placement::Ordered, DesiredState::Running | DesiredState::HandedOff) => Claim::Order,
        _ => return false,
    };
    spec.desired_state = DesiredState::Running;
    spec.placement = Some(me.clone());
    spec.claim = Some(Claimed { instance: me.clone(), kind });
    true
}

/// Places the sandbox here, as an operator would, unless another instance was faster.
async fn claim(sweep_context: &SweepContext, id: &SandboxId) -> records::Result<bool> {
    let me = &sweep_context.who.me;
    let change = |spec: &mut Spec| accept(spec, me);
    let edited = sweep_context.records.edit_for_request(id, None, &change).await?;
    Ok(edited.is_some_and(|spec| spec.desired_state == DesiredState::Running && spec.placement.as_ref() == Some(me)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_accepted_names_this_instance_and_how_it_came_to_it() {
        let [me, other] = [1, 2].map(|n| InstanceId::from_bits([n; 16]));
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let spec = |state, placement: Option<&InstanceId>, claimed: &InstanceId| {
            let mut spec = Spec::new(id.clone(), String::new(), String::new(), claimed.clone());
            (spec.desired_state, spec.placement) = (state, placement.cloned());
            spec
        };
        use DesiredState as D;
        for (state, placement, claimed, kind) in [
            (D::Running, None, &other, Some(Claim::Ask)),
            (D::HandedOff, None, &other, None),
            (D::Running, Some(&me), &other, Some(Claim::Order)),
            (D::HandedOff, Some(&me), &other, Some(Claim::Order)),
            (D::Checkpointed, Some(&me), &other, None),
            (D::Deleted, Some(&me), &other, None),
            (D::Running, Some(&me), &me, None),
            (D::Running, Some(&other), &me, None),
        ] {
            let before = spec(state, placement, claimed);
            let mut after = before.clone();
            assert_eq!(accept(&mut after, &me), kind.is_some(), "{before:?}");
            let Some(kind) = kind else {
                assert_eq!(after, before);
                continue;
            };
            let claim = Some(Claimed { instance: me.clone(), kind });
            assert_eq!((after.desired_state, &after.placement, &after.claim), (D::Running, &Some(me.clone()), &claim));
        }
    }
}
