//! Names and sentences of the trace, and what a commit must look like.

use std::fmt::Write;

use baton::{
    bus::{LifecycleEvent, StartKind},
    storage::layout::{self, Image, Object},
};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::{Head, Lock},
    manifest, versioned,
};

use crate::sim_bucket::Bucket;

/// [I1, I2] What is wrong with a commit.
pub fn committed(old: &Lock, new: &Lock, who: &str, bucket: &Bucket) -> Option<String> {
    let Some(head) = &new.head else { return Some("I1: the head was dropped".to_owned()) };
    if old.lease.as_ref().is_none_or(|lease| lease.owner.as_str() != who) || head.epoch != old.epoch {
        return Some(format!("I2: {} was committed without the lease", head.checkpoint_id));
    }
    if head.seq != old.head.as_ref().map_or(0, |head| head.seq) + 1 || new.prev_head != old.head {
        return Some(format!("I1: {} does not follow its predecessor", head.checkpoint_id));
    }
    stored(head, old.head.as_ref().map(|head| &head.checkpoint_id), bucket)
}

fn stored(head: &Head, parent: Option<&CheckpointId>, bucket: &Bucket) -> Option<String> {
    let id = &head.checkpoint_id;
    let bytes = bucket.get(&Object::CheckpointManifest(id).key());
    let Some(manifest) = bytes.and_then(|bytes| versioned::parse::<manifest::CheckpointManifest>(&bytes).ok()) else {
        return Some(format!("I1: {id} was committed and has no manifest"));
    };
    if manifest.parent.as_ref() != parent {
        return Some(format!("I1: {id} has another parent than the head before it"));
    }
    let missing = Image::ALL.into_iter().find(|image| bucket.get(&Object::Image(id, *image).key()).is_none());
    missing.map(|image| format!("I1: {id} was committed without {}", image.file_name()))
}

pub fn lock_of(key: &str) -> Option<SandboxId> {
    layout::sandbox_of(key).filter(|_| key.ends_with("/lock.json"))
}

pub fn sandbox_of_checkpoint(key: &str) -> Option<SandboxId> {
    let id = layout::checkpoint_of(key)?;
    SandboxId::parse(id.as_str().get(..44)?).ok()
}

pub fn last(key: &str) -> &str {
    key.rsplit_once("/sandbox-").map_or(key, |(_, rest)| rest)
}

pub fn short(id: &SandboxId) -> String {
    id.as_str().chars().skip(8).take(4).collect()
}

pub fn brief(passing: &LifecycleEvent) -> String {
    match passing {
        LifecycleEvent::Failed { reason, message } => format!("Failed {reason}: {message}"),
        LifecycleEvent::Left { why, checkpoint_id } => format!("Left {why:?}, checkpoint {}", checkpoint_id.is_some()),
        LifecycleEvent::CheckpointFailed { why, reason, message } => {
            format!("CheckpointFailed {why:?} {reason}: {message}")
        }
        LifecycleEvent::Running { boot: StartKind::Restored { rolled_back, .. } } => {
            format!("Running, rolled back {rolled_back}")
        }
        other @ (LifecycleEvent::Running { .. }
        | LifecycleEvent::Acquiring
        | LifecycleEvent::Acquired
        | LifecycleEvent::ReleaseRequested { .. }
        | LifecycleEvent::Probe { .. }
        | LifecycleEvent::Checkpointing { .. }
        | LifecycleEvent::Fenced { .. }
        | LifecycleEvent::Unfenced
        | LifecycleEvent::LeaseLost { .. }
        | LifecycleEvent::EgressDenied { .. }
        | LifecycleEvent::Answered
        | LifecycleEvent::Progress { .. }) => format!("{other:?}"),
    }
}

/// A lock in a few words. `name` says who is who.
pub fn picture(lock: &Lock, name: impl Fn(&str) -> String) -> String {
    let mut text = format!("epoch {}", lock.epoch);
    match &lock.lease {
        Some(lease) => {
            let _ = write!(text, " held by {} renew {}", name(lease.owner.as_str()), lease.renew);
        }
        None => text.push_str(" free"),
    }
    if let Some(waiter) = &lock.waiter {
        let _ = write!(text, ", {} waits ({})", name(waiter.instance.as_str()), waiter.beat);
    }
    if let Some(head) = &lock.head {
        let _ = write!(text, ", head {}", head.seq);
    }
    for (so, word) in [(lock.purging, ", purging"), (lock.purged, ", purged")] {
        if so {
            text.push_str(word);
        }
    }
    text
}
