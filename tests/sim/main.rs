//! The real reconciler, lease, planner and rules on simulated machines, under every fault: one seed, one run.
//!
//! `SEED=n` replays one seed and prints its story; `SEEDS=n` says how many are run.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod bucket;
mod client;
mod clock;
mod dice;
mod mistakes;
mod oracle;
mod process;
mod runtime;
mod session;
mod socket;
mod weather;
mod words;
mod world;

use std::{
    cell::RefCell,
    iter, panic,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use mistakes::{MISTAKES, Mistake};
use oracle::Verdict;
use weather::Kind;

/// So many seeds unless more are asked for; `make test` runs 2,000, `make proof` 20,000, both optimised.
const QUICK: u64 = 200;
/// How many seeds a mistake may hide from.
const FOUND_WITHIN: u64 = 2_000;
const SHOWN: usize = 400;

thread_local! {
    static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs a seed; a panic inside the product counts as wrong.
fn run(seed: u64, mistake: Option<Mistake>) -> (Verdict, Vec<Kind>) {
    PANICKED.take();
    let (mut verdict, kinds) = world::run(seed, mistake);
    if let Some(panicked) = PANICKED.take() {
        verdict.wrong.get_or_insert(panicked);
    }
    (verdict, kinds)
}

fn note_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICKED.set(Some(info.to_string()));
        before(info);
    }));
}

fn tell(seed: u64, kinds: &[Kind], verdict: &Verdict, lines: usize) -> String {
    let from = verdict.trace.len().saturating_sub(lines);
    let story = verdict.trace[from..].join("\n");
    let wrong = verdict.wrong.as_deref().unwrap_or("nothing is wrong");
    format!("{story}\nseed {seed}, faults {kinds:?}\n{wrong}\nreplay it with SEED={seed}")
}

mod proof {
    use super::*;

    #[test]
    fn whatever_happens_the_promises_hold_and_what_is_wanted_becomes_so() {
        note_panics();
        if let Some(seed) = number("SEED") {
            let (verdict, kinds) = run(seed, None);
            println!("{}", tell(seed, &kinds, &verdict, usize::MAX));
            assert!(verdict.wrong.is_none());
            return;
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let end = first + number("SEEDS").unwrap_or(QUICK);
        let (next, most_calls, commits, epochs) =
            (AtomicU64::new(first), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let failed: Mutex<Vec<String>> = Mutex::default();
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= end || failed.lock().unwrap().len() >= 3 {
                            return;
                        }
                        let (verdict, kinds) = run(seed, None);
                        most_calls.fetch_max(verdict.most_calls, Ordering::Relaxed);
                        commits.fetch_add(verdict.commits, Ordering::Relaxed);
                        epochs.fetch_add(verdict.epochs, Ordering::Relaxed);
                        if verdict.wrong.is_some() {
                            failed.lock().unwrap().push(tell(seed, &kinds, &verdict, SHOWN));
                        } else if seed % 100 == 0 && run(seed, None).0.hash != verdict.hash {
                            failed.lock().unwrap().push(format!("seed {seed} does not replay"));
                        }
                    }
                });
            }
        });
        let (took, seeds) = (began.elapsed().as_secs_f64(), next.into_inner().min(end) - first);
        println!(
            "{seeds} seeds in {took:.1} s, {:.0} a minute, {:.0} simulated minutes a second; {} epochs, {} commits; \
             at most {} calls a minute",
            seeds as f64 / took * 60.0,
            seeds as f64 * 10.0 / took,
            epochs.into_inner(),
            commits.into_inner(),
            most_calls.into_inner()
        );
        let failed = failed.into_inner().unwrap();
        assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    }

    #[test]
    fn every_mistake_is_found() {
        note_panics();
        let next = AtomicU64::new(0);
        let missed: Mutex<Vec<Mistake>> = Mutex::default();
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some(&(mistake, hint)) = MISTAKES.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                        // What goes wrong without the mistake as well does not count.
                        let found = iter::once(hint).chain(0..FOUND_WITHIN).find_map(|seed| {
                            let wrong = run(seed, Some(mistake)).0.wrong?;
                            run(seed, None).0.wrong.is_none().then_some((seed, wrong))
                        });
                        match found {
                            Some((seed, wrong)) => println!("{mistake:?}: seed {seed}: {wrong}"),
                            None => missed.lock().unwrap().push(mistake),
                        }
                    }
                });
            }
        });
        let missed = missed.into_inner().unwrap();
        assert!(missed.is_empty(), "{missed:?}");
    }
}
