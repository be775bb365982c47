//! `lock.json` in a few bytes, and the real rules seen through it: each is asked once for each of its inputs.

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
    time::Duration,
};

use baton::{
    clock::Moment,
    config::LeaseTimes,
    storage::lease::lease_rules::{self, HeldLease, Identity, LeaseState, LeaseWatch, ReleaseOutcome},
};
use baton_protocol::{
    id::{CheckpointId, InstanceId, Nonce, SandboxId},
    lock::{Claim, Head, Lease, Lock, Waiter},
};

/// A lock with numbers for names; 0 is nobody and nothing. `renew` and `beat` are left out: no rule looks at them
/// beside the nonces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Small {
    pub epoch: u8,
    pub owner: u8,
    pub op: u8,
    pub waiter: u8,
    pub waiter_op: u8,
    /// The waiter asks, and does not preempt; and it was told that the sandbox is in use.
    pub asks: bool,
    pub declined: bool,
    pub head: u8,
    pub prev_head: u8,
    pub ran: bool,
    pub behind: bool,
    pub purging: bool,
    pub purged: bool,
}

/// One write, as `storage/lease.rs` makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Write {
    Acquire { me: u8, op: u8, runs: bool },
    Renew { op: u8 },
    Commit { op: u8, head: u8 },
    Release { head: u8, behind: bool },
    Purging { op: u8 },
    Bury,
    Wait { me: u8, op: u8, asks: bool },
    Withdraw { me: u8 },
    Decline { op: u8 },
}

/// The lease's times, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticks {
    pub hold: u8,
    pub takeover: u8,
    pub waiter: u8,
}

/// All on which it depends how an instance stands to a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockView {
    pub lock: Small,
    pub me: u8,
    pub predecessor: u8,
    /// Epoch, ticks left, whether a release was sent.
    pub held: Option<(u8, u8, bool)>,
    pub lease_for: u8,
    pub waiter_for: u8,
    pub ticks: Ticks,
}

const NOW: u64 = 1_000;
/// Names nobody in the model has.
const STRANGER: u8 = 250;

thread_local! {
    static WRITES: Memory<(Small, Write), Small> = RefCell::default();
    static STANDS: Memory<LockView, (LeaseState, Option<Claim>)> = RefCell::default();
    static PROOFS: Memory<Question, Option<(u8, u8)>> = RefCell::default();
    static ENDS: Memory<(Small, u8, u8), ReleaseOutcome> = RefCell::default();
}

type Memory<K, V> = RefCell<HashMap<K, V, BuildHasherDefault<Quick>>>;
type Question = (Small, Option<(u8, u8, bool)>, Vec<(u8, u8)>, u8);

/// Small keys, asked for very often.
#[derive(Default)]
pub struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u8(*byte);
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn remembered<K: Hash + Eq + Clone, V: Copy>(map: &Memory<K, V>, question: K, answer: impl FnOnce(&K) -> V) -> V {
    if let Some(known) = map.borrow().get(&question) {
        return *known;
    }
    let found = answer(&question);
    map.borrow_mut().insert(question, found);
    found
}

/// What a write makes of a lock.
pub fn written(lock: Small, write: Write) -> Small {
    WRITES.with(|map| {
        remembered(map, (lock, write), |(lock, write)| {
            let (lock, times) = (lock.whole(), LeaseTimes::DEFAULT);
            let next = match *write {
                Write::Acquire { me, op, runs } => lease_rules::acquired(&lock, &instance(me), nonce(op), &times, runs),
                Write::Renew { op } => lease_rules::renewed(&lock, nonce(op)),
                Write::Commit { op, head } => lease_rules::committed(&lock, nonce(op), checkpoint(head)),
                Write::Release { head, behind } => {
                    lease_rules::released(&lock, (head > 0).then(|| checkpoint(head)), behind)
                }
                Write::Purging { op } => lease_rules::purging(&lock, nonce(op)),
                // When it was buried decides nothing here.
                Write::Bury => lease_rules::tombstone(&lock, String::new()),
                Write::Wait { me, op, asks } => {
                    lease_rules::waited(&lock, &instance(me), claim(asks), nonce(op), &times)
                }
                Write::Withdraw { me } => lease_rules::withdrawn(&lock, &instance(me)),
                Write::Decline { op } => lease_rules::declined(&lock, nonce(op)),
            };
            Small::of(&next)
        })
    })
}

/// How an instance stands to a lock, and what another claims that it sees wait for it.
pub fn lease_state(view: LockView) -> (LeaseState, Option<Claim>) {
    STANDS.with(|map| {
        remembered(map, view, |view| {
            let times = view.ticks.times();
            let lock = view.lock.whole_under(&times);
            let sight = sight(&lock, view.lease_for, view.waiter_for);
            let who = Identity {
                me: instance(view.me),
                predecessor: (view.predecessor > 0).then(|| instance(view.predecessor)),
            };
            let held = view.held.map(|held| whole_held(held, NOW));
            let stand = lease_rules::lease_state(&lock, &who, held.as_ref(), &sight, &times, moment(NOW));
            (stand, sight.waiter(&lock, &who.me).map(|waiter| waiter.claim))
        })
    })
}

/// What a lock that was read proves: the epoch held, and for how many ticks yet. `attempts` are nonces with
/// the ticks since each was sent.
pub fn proven(lock: Small, held: Option<(u8, u8, bool)>, attempts: &[(u8, u8)], hold: u8) -> Option<(u8, u8)> {
    // Without an attempt there is nothing to prove.
    if attempts.is_empty() {
        return None;
    }
    PROOFS.with(|map| {
        remembered(map, (lock, held, attempts.to_vec(), hold), |(lock, held, attempts, hold)| {
            let attempts: Vec<_> =
                attempts.iter().map(|(op, age)| (nonce(*op), moment(NOW - u64::from(*age)))).collect();
            let held = held.map(|held| whole_held(held, NOW));
            let (proven, _) = lease_rules::proven(held.as_ref(), &attempts, &lock.whole(), seconds(*hold))?;
            let left = (proven.deadline - moment(NOW)).as_secs();
            Some((proven.epoch as u8, left as u8))
        })
    })
}

/// Whether lease and head are this instance's to write.
pub fn is_ours(lock: Small, held: Option<(u8, u8, bool)>, me: u8) -> bool {
    lease_rules::is_ours(&lock.whole(), held.map(|held| whole_held(held, NOW)).as_ref(), &instance(me))
}

/// What a lock says of a release or burial that was sent.
pub fn release_outcome(lock: Small, epoch: u8, me: u8) -> ReleaseOutcome {
    ENDS.with(|map| {
        remembered(map, (lock, epoch, me), |(lock, epoch, me)| {
            lease_rules::release_outcome(&lock.whole(), &whole_held((*epoch, 0, true), NOW), &instance(*me))
        })
    })
}

/// For how long lease and waiter have been seen, after another look at the lock: as [`LeaseWatch::saw`] counts.
pub fn seen(last: Option<(Small, u8)>, lock: Small, (lease_for, waiter_for): (u8, u8)) -> (u8, u8) {
    let Some((before, passed)) = last else { return (0, 0) };
    let lease = |lock: Small| (lock.owner > 0).then_some((lock.epoch, lock.op));
    let waiter = |lock: Small| (lock.waiter, lock.waiter_op);
    (
        if lease(lock) == lease(before) { lease_for + passed } else { 0 },
        if waiter(lock) == waiter(before) { waiter_for + passed } else { 0 },
    )
}

/// A sight that has seen this lease and this waiter for so long, by looking as often as it takes.
fn sight(lock: &Lock, lease_for: u8, waiter_for: u8) -> LeaseWatch {
    let mut sight = LeaseWatch::default();
    let mut before = lock.clone();
    if lease_for > waiter_for {
        before.waiter = Some(Waiter {
            instance: instance(STRANGER),
            op: nonce(STRANGER),
            beat: 0,
            ttl_ms: 0,
            claim: Claim::Ask,
            declined: false,
        });
    } else {
        before.lease = Some(lease(STRANGER, STRANGER, &LeaseTimes::DEFAULT));
    }
    let ago = |ticks: u8| moment(NOW - u64::from(ticks));
    if lease_for != waiter_for {
        sight.saw(&before, ago(lease_for.max(waiter_for)));
    }
    sight.saw(lock, ago(lease_for.min(waiter_for)));
    sight.saw(lock, ago(0));
    sight
}

impl Ticks {
    fn times(self) -> LeaseTimes {
        LeaseTimes {
            hold: seconds(self.hold),
            takeover: seconds(self.takeover),
            waiter: seconds(self.waiter),
            ..LeaseTimes::DEFAULT
        }
    }
}

impl Small {
    fn whole(self) -> Lock {
        self.whole_under(&LeaseTimes::DEFAULT)
    }

    fn whole_under(self, times: &LeaseTimes) -> Lock {
        let waiter = || Waiter {
            instance: instance(self.waiter),
            op: nonce(self.waiter_op),
            beat: 0,
            ttl_ms: times.waiter.as_millis() as u64,
            claim: claim(self.asks),
            declined: self.declined,
        };
        let mut lock = Lock::new(sandbox());
        lock.epoch = self.epoch.into();
        lock.lease = (self.owner > 0).then(|| lease(self.owner, self.op, times));
        lock.waiter = (self.waiter > 0).then(waiter);
        lock.head = (self.head > 0).then(|| checkpoint(self.head));
        lock.prev_head = (self.prev_head > 0).then(|| checkpoint(self.prev_head));
        (lock.ran, lock.behind, lock.purging, lock.purged) = (self.ran, self.behind, self.purging, self.purged);
        lock
    }

    fn of(lock: &Lock) -> Self {
        let head = |head: &Option<Head>| head.as_ref().map_or(0, |head| head.seq as u8);
        let (lease, waiter) = (lock.lease.as_ref(), lock.waiter.as_ref());
        Self {
            epoch: lock.epoch as u8,
            owner: lease.map_or(0, |lease| number(lease.owner.as_str())),
            op: lease.map_or(0, |lease| number(lease.op.as_str())),
            waiter: waiter.map_or(0, |waiter| number(waiter.instance.as_str())),
            waiter_op: waiter.map_or(0, |waiter| number(waiter.op.as_str())),
            asks: waiter.is_some_and(|waiter| waiter.claim == Claim::Ask),
            declined: waiter.is_some_and(|waiter| waiter.declined),
            head: head(&lock.head),
            prev_head: head(&lock.prev_head),
            ran: lock.ran,
            behind: lock.behind,
            purging: lock.purging,
            purged: lock.purged,
        }
    }
}

fn claim(asks: bool) -> Claim {
    if asks { Claim::Ask } else { Claim::Preempt }
}

fn sandbox() -> SandboxId {
    SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap()
}

fn instance(n: u8) -> InstanceId {
    InstanceId::from_bits([n; 16])
}

fn nonce(n: u8) -> Nonce {
    Nonce::from_bits([n; 16])
}

/// Every name ends in its number.
fn number(name: &str) -> u8 {
    u8::from_str_radix(&name[name.len() - 2..], 16).unwrap()
}

fn checkpoint(n: u8) -> Head {
    let checkpoint_id = CheckpointId::new(&sandbox(), 1, n.into(), &nonce(n));
    Head {
        seq: n.into(),
        epoch: 1,
        checkpoint_id,
        bucket: None,
        manifest_sha256: baton_protocol::id::Sha256Name::from_bits([0; 32]),
    }
}

fn lease(owner: u8, op: u8, times: &LeaseTimes) -> Lease {
    let millis = |span: Duration| span.as_millis() as u64;
    Lease {
        owner: instance(owner),
        renew: 0,
        op: nonce(op),
        hold_ms: millis(times.hold),
        takeover_ms: millis(times.takeover),
    }
}

fn whole_held((epoch, left, released): (u8, u8, bool), now: u64) -> HeldLease {
    HeldLease { epoch: epoch.into(), deadline: moment(now + u64::from(left)), released }
}

fn seconds(ticks: u8) -> Duration {
    Duration::from_secs(ticks.into())
}

fn moment(second: u64) -> Moment {
    Moment(Duration::from_secs(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_lock_is_the_whole_lock() {
        let small = Small {
            epoch: 3,
            owner: 1,
            op: 2,
            waiter: 4,
            waiter_op: 5,
            asks: true,
            declined: true,
            head: 2,
            prev_head: 1,
            ran: true,
            behind: true,
            purging: true,
            purged: false,
        };
        assert_eq!(Small::of(&small.whole()), small);
        assert_eq!(Small::of(&Small::default().whole()), Small::default());
    }

    /// The model counts by itself for how long a sight has seen what it sees.
    #[test]
    fn a_sight_made_by_looking_says_what_the_real_one_says() {
        let ticks = Ticks { hold: 2, takeover: 3, waiter: 4 };
        let (times, me) = (ticks.times(), instance(1));
        let mut word = 1u64;
        let mut below = |end: u64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (word >> 33) % end
        };
        for _ in 0..2_000 {
            let (mut real, mut now) = (LeaseWatch::default(), NOW);
            let (mut last, mut counts) = (None::<(Small, u64)>, (0, 0));
            for _ in 0..12 {
                now += below(4);
                let (op, waiter_op) = (1 + below(2) as u8, 1 + below(2) as u8);
                let small = Small { epoch: 1, owner: 2, op, waiter: 3, waiter_op, ..Small::default() };
                let lock = small.whole_under(&times);
                real.saw(&lock, moment(now));
                counts = seen(last.map(|(lock, at)| (lock, (now - at) as u8)), small, counts);
                last = Some((small, now));
                let again = sight(&lock, counts.0, counts.1);
                assert_eq!(real.is_abandoned(&lock, &times), again.is_abandoned(&lock, &times));
                assert_eq!(real.waiter(&lock, &me), again.waiter(&lock, &me));
            }
        }
    }
}
