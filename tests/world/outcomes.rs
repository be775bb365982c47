//! Every edit of `desired_state` and `placement`, on a sandbox that is held, free, or whose holder died:
//! one outcome each. The table in `docs/operate.md` is written from here.

use std::{fmt::Write as _, fs, path::Path};

use baton::runtime::Container;
use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::{Phase, SpecRequest},
};
use serde_json::json;

use crate::instances::{Instance, World, persistent};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Held,
    Free,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    /// Left as it is: where it runs, or ran last.
    Same,
    /// Another instance, which lives and has room.
    Another,
    /// An instance that is not there any more.
    Gone,
    Null,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It runs on where it is.
    RunsOn,
    /// It is started from its last checkpoint.
    Starts,
    /// It runs on the instance that was named, by way of a checkpoint if it ran.
    Moves,
    /// It runs on, and its status says that the instance that was named has not asked for it.
    Pends,
    /// It is checkpointed and let go.
    Released,
    /// Its status is corrected and its lease freed.
    Corrected,
    /// It is erased; a tombstone is left.
    Erased,
    /// Nothing changes until somebody asks for it.
    Rests,
}

const OWNERS: [Owner; 3] = [Owner::Held, Owner::Free, Owner::Dead];
const STATES: [&str; 4] = ["running", "checkpointed", "handed_off", "deleted"];
const PLACEMENTS: [Placement; 4] = [Placement::Same, Placement::Another, Placement::Gone, Placement::Null];

/// The table: what an operator may rely on.
fn expected(owner: Owner, state: &str, placement: Placement) -> Outcome {
    match (owner, state, placement) {
        (_, "deleted", _) => Outcome::Erased,
        (_, "running" | "handed_off", Placement::Another) => Outcome::Moves,
        (Owner::Held, "running", Placement::Gone) => Outcome::Pends,
        (Owner::Held, "running", _) => Outcome::RunsOn,
        (Owner::Held, _, _) => Outcome::Released,
        (Owner::Free | Owner::Dead, "running", Placement::Null) => Outcome::Starts,
        (Owner::Free | Owner::Dead, "running", _) | (Owner::Free, _, _) => Outcome::Rests,
        (Owner::Dead, _, _) => Outcome::Corrected,
    }
}

/// A sandbox with a committed checkpoint that runs on the first of two instances.
async fn stage(world: &World) -> (Instance, Instance, SandboxId) {
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one
        .create(|spec| {
            persistent(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    let (id, nonce) = (visit.id.clone(), world.clock.nonce());
    one.edit(&id, |spec| drop(spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {}))).await;
    while !one.metadata(&id).await.unwrap().status.answers.contains_key(&nonce) {
        world.after(1).await;
    }
    one.edit(&id, |spec| drop(spec.requests.remove(&nonce))).await;
    world.after(10).await;
    (one, two, id)
}

async fn outcome(owner: Owner, state: &str, placement: Placement) -> Outcome {
    let world = World::new().sweeping();
    let (mut one, two, id) = stage(&world).await;
    let stranger = InstanceId::from_bits([9; 16]);
    let (here, there) = (one.tools.who.me.clone(), two.tools.who.me.clone());
    match owner {
        Owner::Held => {}
        Owner::Free => {
            world.edit(&id, |record| record["desired_state"] = json!("checkpointed")).await;
            while world.lock(&id).await.unwrap().lease.is_some() {
                world.after(1).await;
            }
            world.after(200).await;
        }
        Owner::Dead => one = one.die().await,
    }
    let before = world.lock(&id).await.unwrap();
    world
        .edit(&id, |record| {
            record["desired_state"] = json!(state);
            record["placement"] = match placement {
                Placement::Same => json!(here),
                Placement::Another => json!(there),
                Placement::Gone => json!(stranger),
                Placement::Null => json!(null),
            };
        })
        .await;
    world.after(if owner == Owner::Held && placement != Placement::Another { 6 } else { 250 }).await;
    let lock = world.lock(&id).await.unwrap();
    let status = two.metadata(&id).await.map(|found| found.status);
    let alive = if owner == Owner::Dead { vec![&two] } else { vec![&one, &two] };
    let running: Vec<_> = alive.into_iter().filter(|at| at.container(&id) == Container::Running).collect();
    let stored = world.keys().await.iter().any(|key| key.starts_with("sandbox_checkpoints/"));
    let outcome = if lock.purged {
        assert!(status.is_none() && !stored && running.is_empty());
        Outcome::Erased
    } else if let [at] = running[..] {
        let status = status.unwrap();
        assert_eq!((status.phase, status.instance.as_ref()), (Phase::Running, Some(&at.tools.who.me)));
        let is_named = placement == Placement::Another && at.tools.who.me == there;
        match (lock.epoch == before.epoch, status.reason.as_str()) {
            (true, "PlacementPending") => Outcome::Pends,
            (true, reason) => {
                assert_eq!(reason, "");
                Outcome::RunsOn
            }
            (false, _) if is_named => {
                assert_ne!((owner == Owner::Held, &lock.head), (true, &before.head), "nothing was committed");
                Outcome::Moves
            }
            (false, _) => Outcome::Starts,
        }
    } else if lock.epoch == before.epoch && lock.lease.is_none() && before.lease.is_some() {
        assert_eq!((status.unwrap().phase, lock.behind), (Phase::Checkpointed, false));
        assert_ne!(lock.head, before.head, "nothing was committed");
        Outcome::Released
    } else if lock.lease.is_none() && before.lease.is_some() {
        assert_eq!((status.unwrap().phase, lock.behind, &lock.head), (Phase::Checkpointed, true, &before.head));
        Outcome::Corrected
    } else {
        assert_eq!(lock, before);
        Outcome::Rests
    };
    one.stop().await;
    two.stop().await;
    outcome
}

#[tokio::test(start_paused = true)]
async fn every_edit_has_the_one_outcome_that_is_documented() {
    for owner in OWNERS {
        for state in STATES {
            for placement in PLACEMENTS {
                let came = outcome(owner, state, placement).await;
                assert_eq!(came, expected(owner, state, placement), "{owner:?} {state} {placement:?}");
            }
        }
    }
}

fn words(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::RunsOn => "keeps running where it is",
        Outcome::Starts => "is started from its last checkpoint by the first instance with a free slot",
        Outcome::Moves => "runs there, within two sweeps",
        Outcome::Pends => "keeps running where it is; its status says `PlacementPending`",
        Outcome::Released => "is checkpointed and released",
        Outcome::Corrected => "its status is corrected and its lease freed; the last checkpoint is kept",
        Outcome::Erased => "is erased; a tombstone remains",
        Outcome::Rests => "rests until a client attaches",
    }
}

fn table() -> String {
    let mut page = String::from(
        "| | `desired_state` | `placement` unchanged | another instance | a dead instance | `null` |\n|---|---|---|---|---|---|\n",
    );
    for owner in OWNERS {
        for state in STATES {
            let who = match owner {
                Owner::Held => "held",
                Owner::Free => "free",
                Owner::Dead => "holder died",
            };
            let cells = PLACEMENTS.map(|placement| words(expected(owner, state, placement)));
            let _ = writeln!(page, "| {who} | `{state}` | {} |", cells.join(" | "));
        }
    }
    page
}

#[test]
fn the_page_of_operators_has_the_table_of_outcomes() {
    const BEGIN: &str = "<!-- outcomes: written by `make docs` -->\n";
    const END: &str = "<!-- end of outcomes -->\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operate.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the table has a place");
    let (_, after) = rest.split_once(END).expect("the table has an end");
    let written = format!("{before}{BEGIN}{}{END}{after}", table());
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        fs::write(&path, &written).unwrap();
    }
    assert!(fs::read_to_string(&path).unwrap() == written, "docs/operate.md is not what happens: run `make docs`");
}
