//! What sessions are told.

use std::time::Duration;

use baton::bus::{LifecycleEvent, StartKind};
use baton_protocol::id::SandboxId;

use super::{Oracle, letter};
use crate::words::{brief, short};

impl Oracle {
    /// The machine stood still, or lost its guard, within the last `span`.
    pub fn is_shaken(&self, at: usize, span: Duration) -> bool {
        self.told.lock().unwrap().shaken.get(&at).is_some_and(|at| at.elapsed() < span)
    }

    /// What a session was told.
    pub fn heard(&self, at: usize, name: &str, id: &SandboxId, passing: &LifecycleEvent) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        told.note(now, &format!("{} {} tells {}", letter(at), short(id), brief(passing)));
        let history = told.histories.get(id).expect("it is expected");
        let owns = history.lock.as_ref().and_then(|lock| lock.lease.as_ref()).is_some_and(|l| l.owner.as_str() == name);
        let complaint = match passing {
            LifecycleEvent::Left { checkpoint_id: Some(checkpoint), .. } if !history.chain.contains(checkpoint) => {
                Some(format!("I1: {checkpoint} was told and never committed"))
            }
            LifecycleEvent::Running { boot: StartKind::Fresh } if history.ran_before || !history.chain.is_empty() => {
                Some(format!("{} started over although it had run", short(id)))
            }
            LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, rolled_back, .. } } if owns => {
                if history.chain.last() != Some(checkpoint_id) {
                    Some(format!("I1: {} was restored from {checkpoint_id}, which is not its head", short(id)))
                } else if history.behind && !rolled_back {
                    Some(format!("{} went back in time and nobody was told", short(id)))
                } else {
                    None
                }
            }
            LifecycleEvent::Left { .. }
            | LifecycleEvent::Running { .. }
            | LifecycleEvent::Acquiring
            | LifecycleEvent::Acquired
            | LifecycleEvent::Failed { .. }
            | LifecycleEvent::ReleaseRequested { .. }
            | LifecycleEvent::Probe { .. }
            | LifecycleEvent::Checkpointing { .. }
            | LifecycleEvent::CheckpointFailed { .. }
            | LifecycleEvent::Fenced { .. }
            | LifecycleEvent::Unfenced
            | LifecycleEvent::LeaseLost { .. }
            | LifecycleEvent::EgressDenied { .. }
            | LifecycleEvent::Answered
            | LifecycleEvent::Progress { .. } => None,
        };
        if let Some(complaint) = complaint {
            told.wrong(now, &complaint);
        }
    }
}
