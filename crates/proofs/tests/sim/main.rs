//! The real reconciler, lease, planner and rules on simulated machines, under every fault: one seed, one run.
//!
//! `SEED=n` replays one seed and prints its history; `SEEDS=n` says how many are run.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod ephemeral;
mod kinds;
mod life;
mod machine_clock;
mod operator;
mod oracle;
mod plain_client;
mod rng;
mod runtime;
mod sim_bucket;
mod sim_client;
mod sim_faults;
mod sim_fork;
mod sim_mistakes;
mod sim_process;
mod sim_session;
mod sim_socket;
mod sim_world;
mod time;
mod words;

use std::{
    cell::RefCell,
    iter, panic,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use self::sim_faults::FaultSchedule;
use kinds::Tally;
use oracle::RunVerdict;
use rustix::time::{ClockId, clock_gettime};
use sim_mistakes::{MISTAKES, SimMistake};

/// So many seeds unless more are asked for; `make test` runs 2,000, `make proof` 20,000, both optimised.
const QUICK: u64 = 200;
/// From so many seeds on every kind of fault must have struck.
const MEETS_ALL: u64 = 200;
/// A long run says now and then how far it is.
const TELLS_EVERY: u64 = 2_500;
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
fn run(seed: u64, mistake: Option<SimMistake>) -> (RunVerdict, Arc<FaultSchedule>) {
    PANICKED.take();
    let (mut verdict, faults) = sim_world::run(seed, mistake);
    if let Some(panicked) = PANICKED.take() {
        verdict.wrong.get_or_insert(panicked);
    }
    (verdict, faults)
}

fn note_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICKED.set(Some(info.to_string()));
        before(info);
    }));
}

fn tell(seed: u64, faults: &FaultSchedule, verdict: &RunVerdict, lines: usize) -> String {
    let from = verdict.trace.len().saturating_sub(lines);
    let history = verdict.trace[from..].join("\n");
    let wrong = verdict.wrong.as_deref().unwrap_or("nothing is wrong");
    format!("{history}\nseed {seed}, faults {:?}\n{wrong}\nreplay it with SEED={seed}", faults.kinds)
}

/// What this thread has computed so far.
fn computed() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What many seeds came to.
#[derive(Default)]
struct Sum {
    seeds: u64,
    computed: f64,
    most_calls: u64,
    commits: u64,
    epochs: u64,
    successions: u64,
    tally: Tally,
    failed: Vec<String>,
}

impl Sum {
    fn add(&mut self, verdict: &RunVerdict, faults: &FaultSchedule, computed: f64) {
        self.seeds += 1;
        self.computed += computed;
        self.most_calls = self.most_calls.max(verdict.most_calls);
        self.commits += verdict.commits;
        self.epochs += verdict.epochs;
        self.successions += verdict.successions;
        self.tally.merge(&faults.tally);
    }

    fn tell(&self, of: u64, took: u64) {
        println!("{} of {of} seeds after {took} s, {} failed", self.seeds, self.failed.len());
    }

    fn print(&self, took: f64) {
        let Self { seeds, epochs, commits, successions, most_calls, .. } = self;
        let count = *seeds as f64;
        println!(
            "{seeds} seeds in {took:.1} s, {:.0} a minute, {:.0} simulated minutes a second; a seed costs {:.1} ms of \
             one core; {epochs} epochs, {commits} commits, {successions} deaths with a waiter; at most {most_calls} \
             calls a minute",
            count / took * 60.0,
            count * 10.0 / took,
            self.computed * 1000.0 / count
        );
        let struck: Vec<_> = self.tally.counts().iter().map(|(kind, times)| format!("{kind:?} {times}")).collect();
        println!("faults that struck: {}", struck.join(", "));
    }
}

mod proof {
    use super::*;

    #[test]
    fn whatever_happens_the_promises_hold_and_what_is_wanted_becomes_so() {
        note_panics();
        if let Some(seed) = number("SEED") {
            let (verdict, faults) = run(seed, None);
            println!("{}", tell(seed, &faults, &verdict, usize::MAX));
            assert!(verdict.wrong.is_none());
            return;
        }
        let first = number("FIRST_SEED").unwrap_or(0);
        let end = first + number("SEEDS").unwrap_or(QUICK);
        let (next, sum, began) = (AtomicU64::new(first), Mutex::new(Sum::default()), Instant::now());
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= end || sum.lock().unwrap().failed.len() >= 3 {
                            return;
                        }
                        let before = computed();
                        let (verdict, faults) = run(seed, None);
                        sum.lock().unwrap().add(&verdict, &faults, computed() - before);
                        if verdict.wrong.is_some() {
                            sum.lock().unwrap().failed.push(tell(seed, &faults, &verdict, SHOWN));
                        } else if seed % 100 == 0 && run(seed, None).0.hash != verdict.hash {
                            sum.lock().unwrap().failed.push(format!("seed {seed} does not replay"));
                        }
                        if (seed - first + 1).is_multiple_of(TELLS_EVERY) && seed + 1 < end {
                            sum.lock().unwrap().tell(end - first, began.elapsed().as_secs());
                        }
                    }
                });
            }
        });
        let sum = sum.into_inner().unwrap();
        sum.print(began.elapsed().as_secs_f64());
        assert!(sum.failed.is_empty(), "{}", sum.failed.join("\n\n"));
        let never: Vec<_> = sum.tally.counts().into_iter().filter(|(_, times)| *times == 0).collect();
        assert!(never.is_empty() || sum.seeds < MEETS_ALL, "faults that never struck: {never:?}");
    }

    #[test]
    fn every_mistake_is_found() {
        note_panics();
        let next = AtomicU64::new(0);
        let missed: Mutex<Vec<SimMistake>> = Mutex::default();
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some(&(mistake, hint)) = MISTAKES.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                        // What goes wrong without the mistake as well does not count.
                        let found = iter::once(hint).chain(0..FOUND_WITHIN).find_map(|seed| {
                            let wrong = run(seed, Some(mistake)).0.wrong.filter(|wrong| mistake.shows_in(wrong))?;
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
