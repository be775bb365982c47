//! The lock protocol, checked in every order of events: the real rules, `desired` and `plan` of a few instances
//! over one register, with writes that arrive late, processes that die and clocks that stand still.
//!
//! Time goes in ticks: *hold* is two, *takeover* three, *waiter* four. All clocks go at one rate; the simulation
//! has those that do not.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::wildcard_enum_match_arm)]

mod judge;
mod lock_model;
mod model_cases;
mod model_mistakes;
mod model_state;
mod protocol;
mod same;
mod steps;

use std::{collections::BTreeMap, thread, time::Instant};

use model_mistakes::ModelMistake;
use model_state::ModelBounds;
use protocol::Protocol;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

const NONE: ModelBounds = ModelBounds::NONE;

/// What was looked at, and what was found wrong or proved impossible.
struct Found {
    unique: usize,
    wrong: Vec<String>,
    /// What must be possible, and whether it was.
    seen: Vec<(&'static str, bool)>,
}

fn check(bounds: ModelBounds, mistake: Option<ModelMistake>) -> Found {
    let (began, model) = (Instant::now(), Protocol { bounds, mistake });
    let properties = model.properties();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (mut wrong, mut seen) = (Vec::new(), Vec::new());
    for property in properties {
        let discovery = checker.discovery(property.name);
        match (property.expectation, discovery) {
            (Expectation::Always, Some(path)) => {
                let steps: Vec<_> = path.into_actions().iter().map(|act| format!("{act:?}")).collect();
                wrong.push(format!("{} after {} steps: {}", property.name, steps.len(), steps.join(", ")));
            }
            (Expectation::Sometimes, found) => seen.push((property.name, found.is_some())),
            (Expectation::Always | Expectation::Eventually, _) => {}
        }
    }
    let unique = checker.unique_state_count();
    println!(
        "    {unique} states, {} steps deep, {:.1} s{}",
        checker.max_depth(),
        began.elapsed().as_secs_f64(),
        wrong.first().map(|wrong| format!(": {wrong}")).unwrap_or_default()
    );
    Found { unique, wrong, seen }
}

/// Everything that an instance can meet, one thing at a time.
fn rounds() -> Vec<(&'static str, ModelBounds)> {
    let short = ModelBounds { epochs: 2, checkpoints: 0, ..NONE };
    vec![
        ("nothing goes wrong", ModelBounds { checkpoints: 1, ..short.clone() }),
        ("a change of mind", ModelBounds { wishes: 1, ..short.clone() }),
        ("a lost answer", ModelBounds { lost: 1, ..short.clone() }),
        (
            "a lost answer to a checkpoint",
            ModelBounds {
                lost: 1,
                saves: true,
                aborts: true,
                wishes: 1,
                checkpoints: 2,
                epochs: 1,
                instances: 1,
                ..NONE
            },
        ),
        ("a death", ModelBounds { kills: 1, checkpoints: 1, ..short.clone() }),
        ("a restart", ModelBounds { kills: 1, restarts: 1, ..short.clone() }),
        ("a freeze", ModelBounds { freezes: 1, ..short.clone() }),
        ("a suspend", ModelBounds { suspends: 1, ..short.clone() }),
        ("a hang", ModelBounds { hangs: 1, ..short.clone() }),
        ("an end by itself", ModelBounds { ends: 1, checkpoints: 1, ..short.clone() }),
        ("a deletion", ModelBounds { wishes: 1, may_delete: true, kills: 1, ..short.clone() }),
        ("a client that is alive", ModelBounds { asks: true, checkpoints: 1, ..short.clone() }),
        ("a client that is alive, and a lost answer", ModelBounds { asks: true, lost: 1, ..short.clone() }),
        ("a lock that is gone", ModelBounds { lock_gone: true, checkpoints: 1, ..short }),
    ]
}

/// Several things at a time, and longer.
fn long_rounds() -> Vec<(&'static str, ModelBounds)> {
    let short = ModelBounds { aborts: true, saves: true, checkpoints: 1, epochs: 2, ..NONE };
    vec![
        ("longer, nothing goes wrong", ModelBounds { aborts: true, ..NONE }),
        ("longer, a lost answer", ModelBounds { lost: 1, checkpoints: 1, ..NONE }),
        ("two lost answers", ModelBounds { lost: 2, epochs: 2, checkpoints: 1, ..NONE }),
        ("a lost answer, a death and a restart", ModelBounds { lost: 1, kills: 1, restarts: 1, ..short.clone() }),
        ("a lost answer and a freeze", ModelBounds { lost: 1, freezes: 1, ..short.clone() }),
        ("a lost answer and a suspend", ModelBounds { lost: 1, suspends: 1, epochs: 2, checkpoints: 0, ..NONE }),
    ]
}

/// More than a machine with two cores and 24 GiB gets through in an hour: only by name, with `ROUND`.
fn vast_rounds() -> Vec<(&'static str, ModelBounds)> {
    let short = ModelBounds { aborts: true, saves: true, checkpoints: 1, epochs: 2, ..NONE };
    let ticks = lock_model::Ticks { hold: 1, takeover: 2, waiter: 2 };
    let three = ModelBounds { instances: 3, ticks, checkpoints: 1, epochs: 2, ..NONE };
    vec![
        ("vast: a lost answer and a suspend, with checkpoints", ModelBounds { lost: 1, suspends: 1, ..short.clone() }),
        (
            "vast: a deletion, a lost answer and a death",
            ModelBounds { lost: 1, kills: 1, wishes: 1, may_delete: true, ..short },
        ),
        ("vast: three instances and a death", ModelBounds { kills: 1, ..three.clone() }),
        ("vast: three instances and a lost answer", ModelBounds { lost: 1, ..three }),
    ]
}

/// The bounds in which a mistake shows.
fn bounds_for(mistake: ModelMistake) -> ModelBounds {
    match mistake {
        ModelMistake::RunsAfterRelease | ModelMistake::DeadlineFromAnswer => ModelBounds { lost: 1, ..NONE },
        ModelMistake::GuardHangsToo => ModelBounds { hangs: 1, ..NONE },
        ModelMistake::ContainersSurvive => ModelBounds { kills: 1, ..NONE },
        ModelMistake::RestartBeforeWipe | ModelMistake::RestartPastWaiter => {
            ModelBounds { kills: 1, restarts: 1, ..NONE }
        }
        ModelMistake::NoWaiterPriority => ModelBounds { instances: 3, checkpoints: 1, ..NONE },
        ModelMistake::PurgeIsOpen | ModelMistake::ErasesUnmarked => {
            ModelBounds { wishes: 1, may_delete: true, kills: 1, checkpoints: 1, ..NONE }
        }
        ModelMistake::MissingIsFree => ModelBounds { lock_gone: true, ..NONE },
        ModelMistake::NeverLooks => ModelBounds { saves: true, ..NONE },
        ModelMistake::BeginsInDoubt => ModelBounds { lost: 1, saves: true, ..NONE },
        ModelMistake::ForgetsWork => ModelBounds { ends: 1, ..NONE },
        ModelMistake::TakeoverBelowHold
        | ModelMistake::NoFence
        | ModelMistake::CachedHead
        | ModelMistake::OneNonce
        | ModelMistake::SameEpoch
        | ModelMistake::NoConditions
        | ModelMistake::CommitElsewhere
        | ModelMistake::LookProves => NONE,
    }
}

mod proof {
    use super::*;

    #[test]
    fn in_every_order_of_events_the_promises_hold() {
        let only = std::env::var("ROUND").unwrap_or_default();
        let mut rounds = rounds();
        if !only.is_empty() || std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof") {
            rounds.extend(long_rounds());
        }
        if only.starts_with("vast") {
            rounds.extend(vast_rounds());
        }
        let (began, mut unique, mut seen) = (Instant::now(), 0, BTreeMap::new());
        for (name, bounds) in rounds.into_iter().filter(|(name, _)| name.contains(&only)) {
            println!("{name}");
            let found = check(bounds, None);
            assert!(found.wrong.is_empty(), "{name}: {}", found.wrong.join("\n"));
            for (possible, so) in found.seen {
                *seen.entry(possible).or_insert(false) |= so;
            }
            unique += found.unique;
        }
        let never: Vec<_> = seen.iter().filter(|(_, so)| !**so).collect();
        assert!(never.is_empty() || !only.is_empty(), "never seen: {never:?}");
        println!("{unique} states in {:.1} s", began.elapsed().as_secs_f64());
    }

    #[test]
    fn every_mistake_in_the_protocol_is_found() {
        let missed: Vec<_> = ModelMistake::ALL
            .into_iter()
            .filter(|mistake| {
                println!("{mistake:?}");
                check(bounds_for(*mistake), Some(*mistake)).wrong.is_empty()
            })
            .collect();
        assert!(missed.is_empty(), "{missed:?}");
    }
}
