//! The guard process by itself, over processes that are no containers.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use baton::guard::{
    guard_wire::{GuardOutcome, GuardReport, Order},
    process_handle::ProcessHandle,
};

use crate::fixture::clock;

/// Far more than it ever takes: what a guard that has lost its voice costs.
const GUARD_TIMEOUT: Duration = Duration::from_secs(30);

/// A guard, and a process that stands for a sentry.
struct Scene {
    guard: Child,
    orders: Option<ChildStdin>,
    reports: mpsc::Receiver<String>,
    sentry: Child,
    process: ProcessHandle,
    state: tempfile::NamedTempFile,
}

impl Scene {
    fn new() -> Self {
        let mut guard = Command::new(env!("CARGO_BIN_EXE_baton"))
            .arg("guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let sentry = Command::new("sleep").arg("600").spawn().unwrap();
        let process = ProcessHandle::open(i32::try_from(sentry.id()).unwrap()).unwrap();
        let (orders, lines) = (guard.stdin.take(), BufReader::new(guard.stdout.take().unwrap()).lines());
        let (said, reports) = mpsc::channel();
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| said.send(line)));
        Self { guard, orders, reports, sentry, process, state: tempfile::NamedTempFile::new().unwrap() }
    }

    fn show_sentry(&self) {
        let text = format!(r#"{{"goferPid":0,"sandbox":{{"pid":{}}}}}"#, self.sentry.id());
        std::fs::write(self.state.path(), text).unwrap();
    }

    fn tell(&mut self, order: Order) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    fn arm(&mut self, deadline: Duration) {
        let confirm = Duration::from_secs(2);
        self.tell(Order::Arm {
            container: "c".to_owned(),
            deadline,
            confirm,
            state_file: self.state.path().to_owned(),
        });
        self.hear(GuardOutcome::Armed);
    }

    fn synced(&mut self) {
        self.tell(Order::Synced { container: "c".to_owned() });
    }

    fn hear(&mut self, what: GuardOutcome) {
        let line = self.reports.recv_timeout(GUARD_TIMEOUT).unwrap();
        assert_eq!(line.parse(), Ok(GuardReport { what, container: "c".to_owned() }));
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.sentry.kill();
        let _ = self.sentry.wait();
        let _ = self.guard.wait();
    }
}

fn soon() -> Duration {
    (clock().now() + Duration::from_millis(100)).0
}

fn later() -> Duration {
    (clock().now() + Duration::from_secs(600)).0
}

#[test]
fn at_the_deadline_it_stops_what_is_worth_keeping() {
    let mut scene = Scene::new();
    scene.arm(later());
    scene.show_sentry();
    scene.synced();
    scene.tell(Order::Extend { container: "c".to_owned(), deadline: soon() });
    scene.hear(GuardOutcome::Fenced);
    assert!(scene.process.is_stopped() && !scene.process.has_ended());
    scene.tell(Order::Resume { container: "c".to_owned(), deadline: Duration::ZERO });
    scene.hear(GuardOutcome::Fenced);
    assert!(scene.process.is_stopped());
    scene.tell(Order::Resume { container: "c".to_owned(), deadline: later() });
    scene.hear(GuardOutcome::Resumed);
    while scene.process.is_stopped() {
        thread::yield_now();
    }
    scene.tell(Order::Disarm { container: "c".to_owned() });
    scene.hear(GuardOutcome::Disarmed);
}

#[test]
fn at_the_deadline_it_kills_what_has_not_answered_yet() {
    let mut scene = Scene::new();
    scene.show_sentry();
    scene.arm(soon());
    scene.hear(GuardOutcome::Killed);
    scene.sentry.wait().unwrap();
}

#[test]
fn one_that_was_nobodys_has_a_deadline_from_the_moment_it_is_taken() {
    let mut scene = Scene::new();
    scene.show_sentry();
    scene.arm(later());
    scene.tell(Order::Take { container: "c".to_owned(), deadline: soon() });
    scene.hear(GuardOutcome::Taken);
    scene.hear(GuardOutcome::Killed);
    scene.sentry.wait().unwrap();
}

#[test]
fn one_that_shows_itself_after_its_deadline_is_met_at_once() {
    let mut scene = Scene::new();
    scene.arm(Duration::ZERO);
    scene.show_sentry();
    scene.hear(GuardOutcome::Killed);
    scene.sentry.wait().unwrap();
}

#[test]
fn a_fence_needs_no_deadline() {
    let mut scene = Scene::new();
    scene.show_sentry();
    scene.arm(later());
    scene.synced();
    scene.tell(Order::Fence { container: "c".to_owned() });
    scene.hear(GuardOutcome::Fenced);
    assert!(scene.process.is_stopped());
}

#[test]
fn when_the_server_is_gone_so_is_everything_it_ran() {
    let mut scene = Scene::new();
    scene.show_sentry();
    scene.arm(later());
    scene.synced();
    scene.tell(Order::Fence { container: "c".to_owned() });
    scene.hear(GuardOutcome::Fenced);
    drop(scene.orders.take());
    assert!(scene.guard.wait().unwrap().success());
    scene.sentry.wait().unwrap();
}

#[test]
fn one_that_was_just_starting_when_the_server_died_dies_too() {
    let mut scene = Scene::new();
    scene.arm(later());
    drop(scene.orders.take());
    scene.show_sentry();
    scene.guard.wait().unwrap();
    scene.sentry.wait().unwrap();
}

#[test]
fn nonsense_does_not_stop_it() {
    let mut scene = Scene::new();
    writeln!(scene.orders.as_mut().unwrap(), "sing\n\narm\nfence nobody\nresume nobody 1").unwrap();
    scene.show_sentry();
    scene.arm(soon());
    scene.hear(GuardOutcome::Killed);
}
