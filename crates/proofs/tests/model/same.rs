//! Which states are one: those that differ in nothing that can ever matter.

use std::hash::{Hash, Hasher};

use baton::runtime::Container;

use crate::{
    lock_model::{Quick, Small, Ticks, Write},
    model_state::{Instance, Late, ModelState},
};

impl ModelState {
    /// States that differ in the names and the order of instances alone are one: all follow the same rules.
    pub fn line_up(&mut self) {
        let Self { lock, late, instances, .. } = self;
        instances.sort_by_cached_key(|instance| shape(instance, lock.as_ref(), late));
        let mut names = vec![0];
        names.extend(self.instances.iter().map(|instance| instance.name));
        let dead = self.instances.iter().map(|instance| instance.predecessor);
        let late = self.late.iter().map(|late| late.who);
        for name in dead.chain(self.locks().flat_map(|lock| [lock.owner, lock.waiter])).chain(late) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        self.names = names.len() as u8 - 1;
        let rank = |name: &mut u8| *name = names.iter().position(|known| known == name).map_or(0, |at| at as u8);
        let rename = |lock: &mut Small| {
            rank(&mut lock.owner);
            rank(&mut lock.waiter);
        };
        self.lock.iter_mut().for_each(rename);
        for instance in &mut self.instances {
            rank(&mut instance.name);
            rank(&mut instance.predecessor);
            instance.known.iter_mut().for_each(rename);
        }
        for late in &mut self.late {
            rank(&mut late.who);
            rename(&mut late.lock);
            if let Write::Acquire { me, .. } | Write::Wait { me, .. } | Write::Withdraw { me } = &mut late.write {
                rank(me);
            }
        }
    }

    /// States that differ in names of nonces alone are one; what can never matter again is forgotten.
    pub fn settle(&mut self, ticks: Ticks) {
        let open: Vec<u8> =
            self.lock.iter().map(|lock| lock.op).chain(self.late.iter().map(|late| late.lock.op)).collect();
        for instance in &mut self.instances {
            instance.attempts.retain(|(op, _)| open.contains(op));
            if instance.held == 0 && instance.attempts.is_empty() {
                (instance.before_ran, instance.before_behind) = (false, false);
            }
            if instance.held == 0 && instance.container == Container::Absent {
                (instance.left, instance.ran) = (0, false);
                // [I3'] What it may still find that it had acquired, it acquired before its clock stood.
                instance.excused &= !instance.attempts.is_empty();
            }
            let Some(known) = instance.known else {
                (instance.lease_for, instance.waiter_for, instance.since_look) = (0, 0, 0);
                continue;
            };
            let watches = known.owner > 0 && known.owner != instance.name;
            instance.lease_for = if watches { instance.lease_for.min(ticks.takeover) } else { 0 };
            let waits = known.waiter > 0 && known.waiter != instance.name;
            instance.waiter_for = if waits { instance.waiter_for.min(ticks.waiter) } else { 0 };
            let most = ticks.takeover.max(ticks.waiter);
            instance.since_look = if watches || waits { instance.since_look.min(most) } else { 0 };
        }
        self.late.sort_unstable();
        let mut ops = vec![0];
        let mut waiter_ops = vec![0];
        for (op, waiter_op) in self.locks().map(|lock| (lock.op, lock.waiter_op)).collect::<Vec<_>>() {
            if !ops.contains(&op) {
                ops.push(op);
            }
            if !waiter_ops.contains(&waiter_op) {
                waiter_ops.push(waiter_op);
            }
        }
        let rank = |of: &[u8], op: u8| of.iter().position(|known| *known == op).map_or(0, |at| at as u8);
        let rename = |lock: &mut Small| {
            lock.op = rank(&ops, lock.op);
            lock.waiter_op = rank(&waiter_ops, lock.waiter_op);
        };
        // What the head replaces was judged when it did.
        if let Some(lock) = &mut self.lock {
            rename(lock);
            lock.prev_head = 0;
        }
        for instance in &mut self.instances {
            if let Some(known) = &mut instance.known {
                rename(known);
                known.prev_head = 0;
            }
            for (op, _) in &mut instance.attempts {
                *op = rank(&ops, *op);
            }
        }
        for late in &mut self.late {
            rename(&mut late.lock);
            // Its own nonce has done its work: the lock that it makes carries it.
            late.write = match late.write {
                Write::Acquire { me, runs, .. } => Write::Acquire { me, op: 0, runs },
                Write::Renew { .. } => Write::Renew { op: 0 },
                Write::Commit { head, .. } => Write::Commit { op: 0, head },
                Write::Purging { .. } => Write::Purging { op: 0 },
                Write::Wait { me, asks, .. } => Write::Wait { me, op: 0, asks },
                Write::Decline { .. } => Write::Decline { op: 0 },
                same @ (Write::Release { .. } | Write::Bury | Write::Withdraw { .. }) => same,
            };
        }
        if self.lock.is_none_or(|lock| lock.waiter == 0) {
            self.waiter_age = 0;
        }
    }
}

/// What an instance is, whatever it is called. Two that look the same by chance only keep their order.
fn shape(instance: &Instance, lock: Option<&Small>, late: &[Late]) -> u64 {
    let who = |name: u8| match name {
        0 => 0,
        name if name == instance.name => 1,
        _ => 2,
    };
    let small = |lock: &Small| Small { owner: who(lock.owner), waiter: who(lock.waiter), op: 0, waiter_op: 0, ..*lock };
    let unnamed = Instance {
        name: 0,
        predecessor: who(instance.predecessor),
        known: instance.known.as_ref().map(small),
        attempts: instance.attempts.iter().map(|(_, age)| (0, *age)).collect(),
        ..instance.clone()
    };
    let sent = late.iter().filter(|late| late.who == instance.name).count();
    let mut hasher = Quick::default();
    (unnamed, lock.map(small), sent).hash(&mut hasher);
    hasher.finish()
}
