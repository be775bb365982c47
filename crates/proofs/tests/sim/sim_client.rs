//! Clients: they come from all sides, ask for things, drop off, and at the end each wants an answer.

use std::{sync::Arc, time::Duration};

use baton::{
    bus::LifecycleEvent,
    storage::{layout::Object, records},
};
use baton_protocol::{
    id::SandboxId,
    lock::Claim,
    metadata::{Claimed, DesiredState, PlainWords, Spec},
};

use crate::{
    ephemeral, plain_client,
    rng::Rng,
    sim_faults::MACHINES,
    sim_process::SimProcess,
    sim_session::{self, OutputReader},
    sim_world::World,
    time::{Instant, sleep, timeout},
    words::short,
};

/// How long after the last fault everything must be as it is wanted.
const SETTLES_WITHIN: Duration = Duration::from_secs(120);

/// What is deleted and has a waiter that is gone is watched for a minute by somebody's sweep before it is purged.
const WATCHED_FOR: Duration = Duration::from_secs(60);

/// How long the last client reads; a session may have to make way first.
const READS_FOR: Duration = Duration::from_secs(15);

/// Then it goes on reading, and a plain newcomer comes elsewhere a little later.
const NEWCOMER_AFTER: Duration = Duration::from_secs(5);
const NEWCOMER_FOR: Duration = Duration::from_secs(25);

/// And what has its place may have a command that runs.
const MAKES_ROOM: Duration = Duration::from_secs(30);

/// What an attach came to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    Running,
    Failed(String),
    Left,
    LeaseLost,
    NotFound,
    Unwritten(String),
    /// The instance died, or the client had enough.
    None,
}

impl Answer {
    /// It was just about to go, or was asked for last in the name of a client that has gone: who wants it comes back.
    fn is_passing(&self) -> bool {
        match self {
            Self::Left | Self::LeaseLost => true,
            Self::Failed(reason) => reason == "Superseded",
            Self::Running | Self::NotFound | Self::Unwritten(_) | Self::None => false,
        }
    }
}

/// Comes and goes until it is ended.
pub async fn live(world: Arc<World>, id: SandboxId, name: String, rng: Rng) {
    let mut reader = OutputReader::new(name);
    loop {
        sleep(rng.seconds(0, 45)).await;
        world.keep_copy(&id);
        if let Some(process) = world.process(rng.below(MACHINES as u64) as usize) {
            let stay = Instant::now() + rng.seconds(1, 150);
            sim_session::visit(&world, &process, &id, &rng, &mut reader, stay).await;
        }
    }
}

/// Comes for a short while, to see whether anybody is there.
pub async fn attach_briefly(world: Arc<World>, id: SandboxId, at: usize, wait: Duration, stay: Duration) {
    sleep(wait).await;
    if let Some(process) = world.process(at) {
        world.shared.oracle.note(format!("somebody knocks at {at} for {}", short(&id)));
        sim_session::attach_briefly(&process, &id, Instant::now() + stay).await;
    }
}

async fn begin(process: &SimProcess, id: &SandboxId) -> Result<(), Answer> {
    let me = process.tools.who.me.clone();
    let change = |spec: &mut Spec| {
        let claim = Some(Claimed { instance: me.clone(), kind: Claim::Preempt });
        let is_running = spec.desired_state == DesiredState::Running;
        if (is_running && spec.placement.as_ref() == Some(&me) && spec.claim == claim)
            || spec.desired_state == DesiredState::Deleted
        {
            return false;
        }
        (spec.desired_state, spec.placement, spec.claim) = (DesiredState::Running, Some(me.clone()), claim);
        true
    };
    match process.tools.records.edit(id, &change).await {
        Ok(Some(spec)) if spec.desired_state != DesiredState::Deleted => {
            process.tools.bus.placed(id);
            Ok(())
        }
        Ok(_) => Err(Answer::NotFound),
        Err(error) => Err(Answer::Unwritten(error.to_string())),
    }
}

fn answer(passing: &LifecycleEvent) -> Option<Answer> {
    match passing {
        LifecycleEvent::Running { .. } => Some(Answer::Running),
        LifecycleEvent::Failed { reason, .. } => Some(Answer::Failed(reason.to_string())),
        LifecycleEvent::Left { .. } => Some(Answer::Left),
        LifecycleEvent::LeaseLost { .. } => Some(Answer::LeaseLost),
        LifecycleEvent::Acquiring
        | LifecycleEvent::Acquired
        | LifecycleEvent::ReleaseRequested { .. }
        | LifecycleEvent::Probe { .. }
        | LifecycleEvent::Checkpointing { .. }
        | LifecycleEvent::CheckpointFailed { .. }
        | LifecycleEvent::Fenced { .. }
        | LifecycleEvent::Unfenced
        | LifecycleEvent::EgressDenied { .. }
        | LifecycleEvent::Answered
        | LifecycleEvent::Progress { .. } => None,
    }
}

/// One last client per sandbox, and then everything must be as it is wanted.
pub async fn ask_at_the_end(world: &Arc<World>) {
    let end = Instant::now() + SETTLES_WITHIN;
    let anywhere = || world.rng.below(MACHINES as u64) as usize;
    let stored = world.stored();
    let asking = stored.iter().enumerate().map(|(number, id)| {
        // Where there is room for one each of them has an instance to itself.
        let at = if world.shared.room.is_some() { number % MACHINES } else { anywhere() };
        let process = world.process(at).expect("all are up");
        ask_one(world.clone(), process, id.clone(), end)
    });
    let asking = asking.collect::<Vec<_>>();
    let fleeting = world.shared.fleeting.iter();
    let fleeting = fleeting.map(|id| ephemeral::ask_at_the_end(world.clone(), id.clone(), anywhere()));
    let fleeting = fleeting.collect::<Vec<_>>();
    futures::future::join(futures::future::join_all(asking), futures::future::join_all(fleeting)).await;
}

async fn ask_one(world: Arc<World>, process: Arc<SimProcess>, id: SandboxId, end: Instant) {
    let oracle = &world.shared.oracle;
    let bus = &process.tools.bus;
    let lock = oracle.lock(&id);
    let found = world.shared.bucket.get(&Object::Metadata(&id).key());
    let was_gone_before = found.is_none();
    let spec = found.and_then(|bytes| records::parse(&id, &bytes).ok()).map(|metadata| metadata.spec);
    let movable = spec.as_ref().is_some_and(|spec| spec.enable_sandbox_handoff);
    // With little room the newcomer might find none.
    let is_of_the_documents =
        world.shared.room.is_none() && movable && spec.is_some_and(|spec| spec.plain_words() == PlainWords::Documents);
    let (attached, mut follower) = (bus.attach(&id), bus.follow(&id));
    let got = timeout(end - Instant::now(), async {
        if let Err(refusal) = begin(&process, &id).await {
            return refusal;
        }
        loop {
            // Here already: the session talks to it without being told.
            if oracle.running(&id) == [process.at] {
                return Answer::Running;
            }
            let Some(posted) = timeout(Duration::from_millis(500), follower.next()).await else { continue };
            let passing = posted.passing;
            oracle.heard(process.at, process.name(), &id, &passing);
            match answer(&passing) {
                Some(answer) if answer.is_passing() => {
                    if let Err(refusal) = begin(&process, &id).await {
                        return refusal;
                    }
                }
                Some(answer) => return answer,
                None => {}
            }
        }
    });
    let got = got.await.unwrap_or(Answer::None);
    oracle.note(format!("the last client got {got:?}"));
    // A holder makes it anew, and the sandbox runs on where it is: perhaps while the answer is under way.
    let was_gone = was_gone_before || world.shared.bucket.get(&Object::Metadata(&id).key()).is_none();
    if got == Answer::NotFound {
        drop(attached);
        for at in 0..MACHINES {
            if let Some(process) = world.process(at) {
                process.tools.bus.wake(&id);
            }
        }
    }
    let mut reader = OutputReader::new("last".to_owned());
    if got == Answer::Running {
        let reads_for = if world.shared.room.is_some() { MAKES_ROOM + READS_FOR } else { READS_FOR };
        let stay = Instant::now() + (end - Instant::now()).min(reads_for);
        sim_session::read(&world, &process, &id, &mut reader, stay).await;
        // A waiter that has died counts for a minute (I4): whoever had to make way for it has nothing to keep.
        let is_settled =
            oracle.running(&id) == [process.at] && oracle.lock(&id).is_some_and(|lock| lock.waiter.is_none());
        if reader.bytes() > 0 && is_of_the_documents && is_settled && end - Instant::now() > NEWCOMER_FOR {
            let other = world.process((process.at + 1) % MACHINES).expect("all are up");
            let stay = Instant::now() + NEWCOMER_FOR;
            futures::join!(
                sim_session::read(&world, &process, &id, &mut reader, stay),
                plain_client::is_declined(&world, &other, &id, NEWCOMER_AFTER)
            );
        }
    }
    while Instant::now() < end {
        bus.touch(&id);
        sleep((end - Instant::now()).min(Duration::from_secs(5))).await;
    }
    while got == Answer::NotFound && world.is_to_be_purged(&id) && Instant::now() < end + WATCHED_FOR {
        sleep(Duration::from_secs(1)).await;
    }
    let running = oracle.running(&id);
    if got == Answer::Running {
        world.shared.oracle.note(format!("the last reader has {} bytes", reader.bytes()));
        if reader.bytes() == 0 {
            oracle.wrong("two minutes after the last fault a client reads nothing");
        }
    }
    let expected = match (&got, &lock) {
        (Answer::Running, _) => running == [process.at],
        (Answer::Failed(reason), Some(_)) if reason == "RunningElsewhere" => !movable && running.len() <= 1,
        (Answer::Failed(reason), Some(lock)) if reason == "Lost" => lock.head.is_none() && running.is_empty(),
        (Answer::Failed(reason), Some(lock)) if lock.purged || lock.purging => {
            reason == "Deleted" && running.is_empty()
        }
        (Answer::Failed(reason), None) => reason == "LockMissing" && running.is_empty(),
        (Answer::NotFound, _) => {
            let purged = oracle.lock(&id).is_some_and(|lock| lock.purged);
            let gone = was_gone || world.shared.bucket.get(&Object::Metadata(&id).key()).is_none();
            // Without its lock it cannot be purged, and without metadata it runs on where it is.
            lock.is_none() || if purged { running.is_empty() } else { gone }
        }
        (Answer::Failed(_) | Answer::Left | Answer::LeaseLost | Answer::Unwritten(_) | Answer::None, _) => false,
    };
    if !expected {
        oracle.wrong(format!("two minutes after the last fault: {got:?}, it executes on {running:?}"));
    }
}
