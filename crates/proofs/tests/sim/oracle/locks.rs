//! The lock: what each write may make of it.

use std::{collections::BTreeSet, time::Duration};

use baton::runtime::Container;
use baton_protocol::{
    id::SandboxId,
    lock::{Lock, Waiter},
};

use super::{Oracle, StatusHistory};
use crate::{sim_bucket::Bucket, time::Instant, words::committed};

/// A waiter's entry counts as fresh for this long on the fastest clock.
const FRESH: Duration = Duration::from_secs(48);

/// A lock without metadata that never ran counts as abandoned after ten minutes: so long on the fastest clock.
const ABANDONED: Duration = Duration::from_secs(500);

fn owner(lock: &Lock) -> Option<String> {
    lock.lease.as_ref().map(|lease| lease.owner.as_str().to_owned())
}

impl Oracle {
    /// What is wrong with a write of a lock.
    pub(super) fn judge(
        &self,
        told: &mut StatusHistory,
        id: &SandboxId,
        new: &Lock,
        who: &str,
        bucket: &Bucket,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let now = Instant::now();
        let running: BTreeSet<String> = told
            .places
            .values()
            .filter(|place| !place.machine.is_still() && !place.machine.is_excused())
            .filter(|place| place.seen.get(id).is_some_and(|seen| seen.borrow().container == Container::Running))
            .map(|place| place.name.clone())
            .collect();
        let source = new.forked_from.as_ref().and_then(|checkpoint| told.histories.get(&checkpoint.sandbox()));
        let is_true = source.is_some_and(|source| new.forked_from.as_ref().is_some_and(|id| source.chain.contains(id)));
        let history = told.histories.get_mut(id).expect("it is expected");
        let Some(old) = history.lock.replace(new.clone()) else {
            if history.lock_gone {
                wrong.push("[14] a lock that was gone was made anew".to_owned());
            }
            if let Some(head) = &new.head {
                history.chain.push(head.checkpoint_id.clone());
                if !is_true || new.forked_from.as_ref() != Some(&head.checkpoint_id) {
                    wrong.push(format!("I1: a copy of {}, which was never committed", head.checkpoint_id));
                }
            }
            // A create makes it held by its own instance, a fork free.
            let first = owner(new).map_or(0, |_| 1);
            if new.epoch != first || owner(new).is_some_and(|owner| owner != who) || (first == 1) == new.head.is_some()
            {
                wrong.push("[9] a first lock that neither a create nor a fork makes".to_owned());
            }
            if first == 1 {
                told.epochs += 1;
                history.owners.insert(first, who.to_owned());
            }
            return wrong;
        };
        if new.epoch < old.epoch || new.epoch > old.epoch + 1 {
            wrong.push(format!("I1: the epoch went from {} to {}", old.epoch, new.epoch));
        } else if new.epoch == old.epoch + 1 {
            told.epochs += 1;
            history.owners.insert(new.epoch, who.to_owned());
            (history.behind, history.ran_before) = (history.ran_on && !history.chain.is_empty(), history.ever_ran);
            history.gone_back |= history.ran_on;
            if owner(new).as_deref() != Some(who) || new.head != old.head || old.purged {
                wrong.push("[9] an acquisition that is none".to_owned());
            }
            let fresh = history.waiter_since.is_some_and(|since| now - since < FRESH);
            let waits = |waiter: &Waiter| waiter.instance.as_str() != who && !waiter.declined;
            if old.waiter.as_ref().is_some_and(waits) && fresh {
                wrong.push("I4: acquired past a fresh waiter".to_owned());
            }
        } else if owner(new).is_some() && owner(new) != owner(&old) {
            wrong.push("I2: another owner in the same epoch".to_owned());
        } else if new.lease != old.lease && owner(&old).as_deref() != Some(who) {
            wrong.push("[2] somebody wrote another's lease".to_owned());
        }
        if let Some(former) = owner(&old).filter(|former| owner(new).as_ref() != Some(former))
            && running.contains(&former)
        {
            wrong.push(format!("[4] {} lost or freed the lease and still executes", &former[..9]));
        }
        if new.head != old.head && !new.purged {
            told.commits += 1;
            wrong.extend(committed(&old, new, who, bucket));
            if let Some(head) = &new.head {
                history.chain.push(head.checkpoint_id.clone());
                // What keeps the lease runs on.
                history.ran_on = new.lease.is_some();
            }
        }
        if (new.purging || new.purged) && !old.purging && !old.purged {
            history.may_be_purged |= history.ends_idle && old.head.is_none();
            // What is left of a create that was given up.
            let unnamed = history.unnamed_since.is_some_and(|since| now - since >= ABANDONED);
            history.may_be_purged |= unnamed && !history.ever_ran && old.head.is_none();
            if !history.may_be_purged {
                wrong.push("I6: a purge began, and nobody wanted it".to_owned());
            }
        }
        let beat = |lock: &Lock| lock.waiter.as_ref().map(|waiter| (waiter.op.clone(), waiter.beat));
        if beat(new) != beat(&old) {
            history.waiter_since = new.waiter.as_ref().map(|_| now);
        }
        told.succeeded(&old, new);
        wrong
    }
}
