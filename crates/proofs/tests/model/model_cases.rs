//! Drawn cases for what is decided and merged without anybody watching: wish and plan, and the two pens of a record.

use std::{sync::Arc, time::Duration};

use baton::{
    clock::SharedClock,
    config::LeaseTimes,
    reconciler::{
        desired::{Drain, Inputs, desired},
        plan::{Action, AttachState, Desired, LockState, Observed, Rejection, Saved, Upkeep, plan},
        precedence::Verdict,
    },
    runtime::Container,
    storage::{
        layout::Object,
        lease::lease_rules::InitialLease,
        memory::Memory,
        records::{self, Durable, Records},
        store::{PollResult, Precondition, Store},
    },
};
use baton_protocol::{
    id::SandboxId,
    metadata::{Committed, DesiredState, Metadata, Phase, SandboxStatus, Spec},
};
use baton_testkit::TestClock;
use serde_json::Value;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end
    }

    fn falls(&mut self) -> bool {
        self.below(2) == 1
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

fn cases() -> u64 {
    if std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof") { 1_000_000 } else { 50_000 }
}

const SPECS: [DesiredState; 4] =
    [DesiredState::Running, DesiredState::Checkpointed, DesiredState::HandedOff, DesiredState::Deleted];

fn draw(dice: &mut Rng) -> (Inputs, Observed) {
    let standing = dice.pick(&LockState::ALL);
    let saved = dice.pick(&Saved::ALL);
    let (persistent, refused, waiting) = (dice.falls(), dice.falls(), dice.falls());
    let wish = Inputs {
        spec: dice.pick(&SPECS),
        purging: dice.below(4) == 0,
        held: matches!(standing, LockState::Ours | LockState::Late),
        verdict: dice.pick(&Verdict::ALL),
        movable: dice.falls(),
        persistent,
        drain: dice.pick(&[Drain::No, Drain::Draining, Drain::Over]),
        yields: dice.falls(),
        idle: dice.falls(),
        checkpoint_when_idle: dice.falls(),
        placed_here: dice.falls(),
        asked_here: dice.falls(),
        saved,
        refused,
    };
    let observed = Observed {
        lock: standing,
        container: dice.pick(&Container::ALL),
        saved,
        checkpointable: persistent,
        may_wait: wish.movable && dice.falls(),
        checkpoint_requested: dice.falls(),
        snapshot_requested: dice.falls(),
        rootfs_missing: dice.falls(),
        registered: waiting || dice.falls(),
        waiting,
        declines: wish.movable && wish.verdict == Verdict::Decline,
        refused,
        attachment: if wish.asked_here { dice.pick(&AttachState::ALL) } else { AttachState::None },
        due: dice.falls().then(|| dice.pick(&Upkeep::ALL)),
        deferred: None,
    };
    (wish, observed)
}

mod proof {
    use super::*;

    #[test]
    fn whatever_is_desired_and_observed_nothing_is_done_without_permission_or_reason() {
        let mut dice = Rng(7);
        for case in 0..cases() {
            let (wish, seen) = draw(&mut dice);
            let (wanted, _) = desired(&wish);
            let ours = seen.lock == LockState::Ours;
            let unsure = matches!(seen.lock, LockState::Unknown | LockState::Missing | LockState::Late);
            let deleted = wish.spec == DesiredState::Deleted || wish.purging;
            let holds = match plan(wanted, &seen) {
                Action::Create | Action::Restore => ours && wanted == Desired::Running && wish.drain == Drain::No,
                Action::Resume | Action::Save | Action::Checkpoint | Action::Snapshot | Action::Release => ours,
                Action::Purge => ours && (deleted || saved_nothing(&wish)),
                Action::Remove => !unsure,
                Action::Acquire => seen.lock == LockState::Free && (deleted || wish.asked_here),
                Action::Wait => wish.movable && wish.asked_here && wish.placed_here && !seen.refused,
                Action::Renew => matches!(seen.lock, LockState::Ours | LockState::Late),
                Action::Fence => unsure,
                Action::Refuse(Rejection::NoLock | Rejection::StateLost) => !seen.refused && wanted == Desired::Running,
                Action::Refuse(_) => !seen.refused && wish.asked_here && !ours && !unsure,
                Action::Probe
                | Action::Expire
                | Action::RecreateMetadata
                | Action::ReportInvalid
                | Action::SetEgress
                | Action::ForgetAnswers
                | Action::CollectGarbage => ours && !deleted,
                Action::Finish => !ours && seen.container == Container::Absent,
                Action::Withdraw => seen.registered,
                Action::Decline => ours && seen.declines && wanted == Desired::Running,
                Action::Extract | Action::Rest => true,
            };
            assert!(holds, "case {case}: {wish:?} {seen:?} -> {:?}", plan(wanted, &seen));
        }
    }

    /// Each case is one edit of the spec, one report of the status or one operator with an editor.
    #[test]
    fn no_pen_writes_over_what_another_wrote() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(merge());
    }
}

/// Only an end with nothing stored, or one that nobody else could ever take, purges what nobody deleted.
fn saved_nothing(wish: &Inputs) -> bool {
    wish.saved != Saved::Checkpoint && (wish.idle || !wish.persistent)
}

async fn merge() {
    let clock: SharedClock = Arc::new(TestClock::new(3));
    let store: Arc<dyn Store> = Arc::new(Memory::new(clock.clone()));
    let durable = Durable { locks: store.clone(), metadata: store.clone(), lock_bucket: None };
    let records =
        Records::new(clock.clone(), Arc::new(Memory::new(clock.clone())), Some(durable), true, LeaseTimes::DEFAULT);
    let mut dice = Rng(11);
    let mut made = None;
    for case in 0..cases() {
        // Now and then another sandbox, so that records stay small.
        let (id, mut expected): (SandboxId, Metadata) = match made.take().filter(|_| case % 64 > 0) {
            Some(made) => made,
            None => create(&records, &clock).await,
        };
        match dice.below(3) {
            0 => {
                let (state, label) = (dice.pick(&SPECS), dice.below(5).to_string());
                let change = |spec: &mut Spec| {
                    spec.desired_state = state;
                    spec.labels.insert(label.clone(), case.to_string());
                    true
                };
                records.edit(&id, &change).await.unwrap();
                change(&mut expected.spec);
            }
            1 => {
                let (epoch, phase) = (dice.below(6), dice.pick(&[Phase::Running, Phase::Checkpointed, Phase::Failed]));
                let change = |status: &mut SandboxStatus, _: &mut Committed| {
                    (status.phase, status.message) = (phase, case.to_string());
                };
                records.report(&id, epoch, &change).await.unwrap();
                // Never over the report of a later holder.
                if epoch >= expected.status.epoch {
                    (expected.status.phase, expected.status.message, expected.status.epoch) =
                        (phase, case.to_string(), epoch);
                }
            }
            _ => {
                let key = format!("x{}", dice.below(3));
                expected.spec.unknown.insert(key, Value::from(case));
                let bytes = serde_json::to_vec(&expected).unwrap();
                store.put(&Object::Metadata(&id).key(), bytes.into(), Precondition::Any).await.unwrap();
            }
        }
        let PollResult::Changed(bytes, _) = store.get_if_changed(&Object::Metadata(&id).key(), None).await.unwrap()
        else {
            panic!("case {case}: it is gone")
        };
        let mut found = records::parse(&id, &bytes).unwrap();
        found.status.updated.clone_from(&expected.status.updated);
        assert_eq!(found, expected, "case {case}");
        made = Some((id, found));
        clock.sleep(Duration::from_millis(1)).await;
    }
}

async fn create(records: &Records, clock: &SharedClock) -> (SandboxId, Metadata) {
    let id = clock.sandbox_id();
    let me = clock.instance_id();
    let mut spec = Spec::new(id.clone(), String::new(), clock.timestamp(), me.clone());
    spec.enable_sandbox_checkpoint = true;
    let lease = InitialLease { op: clock.nonce(), sent: clock.now() };
    records.create(&spec, &me, &lease).await.unwrap();
    let record = records.find(&id).await.unwrap().unwrap();
    (id, record)
}
