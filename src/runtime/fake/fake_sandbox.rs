//! The task of one simulated sandbox: its machine, its guard and its link.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use baton_protocol::frame::Frame;
use tokio::sync::{mpsc, oneshot, watch};

use super::machine::Machine;
use crate::{
    clock::{Moment, SharedClock},
    runtime::{Container, Error, Result, Seen, channel::is_allowed},
};

pub type Orders = mpsc::UnboundedSender<Order>;
type Answer<T> = oneshot::Sender<Result<T>>;

#[derive(Debug)]
pub enum Order {
    /// Checks that it is alive.
    Look(Answer<()>),
    Pause(Answer<()>),
    Resume(Answer<()>),
    Save(Answer<Vec<u8>>),
    Extend(Moment, Answer<()>),
    Fence(Answer<()>),
    Link(mpsc::Receiver<Frame>, mpsc::Sender<Frame>),
    End,
}

#[derive(Debug)]
pub struct FakeSandbox {
    machine: Machine,
    clock: SharedClock,
    seen: Arc<watch::Sender<Seen>>,
    /// How far the machine has run.
    ran_until: Moment,
    deadline: Moment,
    paused: bool,
    fenced: bool,
    frames: Option<mpsc::Receiver<Frame>>,
    output: Option<mpsc::Sender<Frame>>,
    /// Frames on their way to the link.
    outbox: VecDeque<Frame>,
    detach_at: Option<Moment>,
    detach_grace: Duration,
}

impl FakeSandbox {
    pub fn new(
        machine: Machine,
        deadline: Moment,
        clock: SharedClock,
        seen: Arc<watch::Sender<Seen>>,
        detach_grace: Duration,
    ) -> Self {
        let now = clock.now();
        Self {
            machine,
            clock,
            seen,
            ran_until: now,
            deadline,
            paused: false,
            fenced: false,
            frames: None,
            output: None,
            outbox: VecDeque::new(),
            detach_at: Some(now + detach_grace),
            detach_grace,
        }
    }

    pub async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        while self.step(&mut orders).await {}
        self.show(Container::Stopped);
    }

    fn is_running(&self) -> bool {
        !self.paused && !self.fenced
    }

    fn show(&self, container: Container) {
        let running_execs = if container == Container::Stopped { 0 } else { self.machine.running() };
        let seen = Seen { container, running_execs };
        self.seen.send_if_modified(|shown| std::mem::replace(shown, seen) != seen);
    }

    /// Runs until the next event; returns `false` if that was the end.
    async fn step(&mut self, orders: &mut mpsc::UnboundedReceiver<Order>) -> bool {
        let now = self.clock.now();
        if self.is_running() {
            self.machine.run(now - self.ran_until);
        }
        self.ran_until = now;
        if self.is_running() && self.outbox.is_empty() {
            self.outbox.extend(self.machine.emit());
        }
        if self.output.as_ref().is_none_or(mpsc::Sender::is_closed) {
            self.outbox.clear();
        }
        self.show(match (self.fenced, self.paused) {
            (true, _) => Container::Fenced,
            (false, true) => Container::Paused,
            (false, false) => Container::Running,
        });
        let running = self.is_running();
        let next = self.machine.rests_for().filter(|_| running).map(|span| now + span);
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                Some(Order::End) | None => return false,
                Some(order) => self.obey(order),
            },
            () = self.clock.sleep_until(self.deadline), if !self.fenced => self.fenced = true,
            () = at(&self.clock, self.detach_at), if running => {
                self.detach_at = None;
                self.machine.set_attached(false);
            }
            Some(room) = room(self.output.clone()), if !self.outbox.is_empty() => {
                if let Some(frame) = self.outbox.pop_front() {
                    room.send(frame);
                }
            }
            frame = take(&mut self.frames), if running => match frame {
                Some(frame) if is_allowed(&frame) => self.machine.take(frame),
                Some(_) => {}
                None => {
                    self.frames = None;
                    self.detach_at = Some(now + self.detach_grace);
                }
            },
            () = at(&self.clock, next) => {}
        }
        true
    }

    fn obey(&mut self, order: Order) {
        let now = self.clock.now();
        match order {
            Order::Look(answer) => answered(answer, Ok(())),
            Order::Pause(answer) => {
                let can = if self.fenced { Err(Error::NotIn("running")) } else { Ok(()) };
                self.paused |= can.is_ok();
                self.tell(answer, can);
            }
            Order::Resume(answer) => {
                if self.fenced && self.deadline <= now {
                    return self.tell(answer, Err(Error::NotIn("allowed to run")));
                }
                (self.fenced, self.paused) = (false, false);
                self.tell(answer, Ok(()));
            }
            Order::Save(answer) => {
                let saved = match (self.paused, self.fenced) {
                    (true, false) => {
                        serde_json::to_vec(&self.machine).map_err(|error| super::failed("checkpoint", error))
                    }
                    (false, _) | (true, true) => Err(Error::NotIn("paused")),
                };
                answered(answer, saved);
            }
            Order::Extend(deadline, answer) => {
                self.deadline = deadline;
                answered(answer, Ok(()));
            }
            Order::Fence(answer) => {
                self.fenced = true;
                self.tell(answer, Ok(()));
            }
            Order::Link(frames, output) => {
                (self.frames, self.output, self.detach_at) = (Some(frames), Some(output), None);
                self.outbox.clear();
                self.machine.set_attached(true);
            }
            // Handled earlier.
            Order::End => {}
        }
    }

    /// An action is done once its effect is visible to all watchers.
    fn tell(&mut self, answer: Answer<()>, result: Result<()>) {
        self.show(match (self.fenced, self.paused) {
            (true, _) => Container::Fenced,
            (false, true) => Container::Paused,
            (false, false) => Container::Running,
        });
        answered(answer, result);
    }
}

fn answered<T>(answer: Answer<T>, result: Result<T>) {
    // The caller may be gone.
    let _ = answer.send(result);
}

async fn room(output: Option<mpsc::Sender<Frame>>) -> Option<mpsc::OwnedPermit<Frame>> {
    output?.reserve_owned().await.ok()
}

async fn take(frames: &mut Option<mpsc::Receiver<Frame>>) -> Option<Frame> {
    match frames {
        Some(frames) => frames.recv().await,
        None => std::future::pending().await,
    }
}

async fn at(clock: &SharedClock, moment: Option<Moment>) {
    match moment {
        Some(moment) => clock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
