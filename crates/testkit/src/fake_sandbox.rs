//! The task of one simulated sandbox: its machine, its guard and its link to the API.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use baton::{
    clock::{Moment, SharedClock},
    runtime::{Container, ContainerView, Error, Result, is_allowed},
};
use baton_protocol::frame::Frame;
use tokio::sync::{mpsc, oneshot, watch};

use super::{fake_containers::failed, fake_machine::FakeMachine};

pub type CommandSender = mpsc::UnboundedSender<SandboxCommand>;
type Reply<T> = oneshot::Sender<Result<T>>;

/// A message to the task of a sandbox.
#[derive(Debug)]
pub enum SandboxCommand {
    /// Checks that the task is alive.
    Ping(Reply<()>),
    Pause(Reply<()>),
    Resume(Reply<()>),
    Save(Reply<Vec<u8>>),
    Extend(Moment, Reply<()>),
    Fence(Reply<()>),
    Link(mpsc::Receiver<Frame>, mpsc::Sender<Frame>),
    End,
}

#[derive(Debug)]
pub struct FakeSandbox {
    machine: FakeMachine,
    clock: SharedClock,
    seen: Arc<watch::Sender<ContainerView>>,
    /// The moment up to which the machine has run.
    ran_until: Moment,
    deadline: Moment,
    paused: bool,
    fenced: bool,
    frames: Option<mpsc::Receiver<Frame>>,
    output: Option<mpsc::Sender<Frame>>,
    /// Frames that wait for capacity of the link.
    outbox: VecDeque<Frame>,
    detach_at: Option<Moment>,
    detach_grace: Duration,
}

impl FakeSandbox {
    pub fn new(
        machine: FakeMachine,
        deadline: Moment,
        clock: SharedClock,
        seen: Arc<watch::Sender<ContainerView>>,
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

    pub async fn run(mut self, mut commands: mpsc::UnboundedReceiver<SandboxCommand>) {
        while self.step(&mut commands).await {}
        self.publish(Container::Stopped);
    }

    fn is_running(&self) -> bool {
        !self.paused && !self.fenced
    }

    fn container(&self) -> Container {
        match (self.fenced, self.paused) {
            (true, _) => Container::Fenced,
            (false, true) => Container::Paused,
            (false, false) => Container::Running,
        }
    }

    fn publish(&self, container: Container) {
        let running_execs = if container == Container::Stopped { 0 } else { self.machine.running_execs() };
        let seen = ContainerView { container, running_execs };
        self.seen.send_if_modified(|current| std::mem::replace(current, seen) != seen);
    }

    /// Runs until the next event; returns `false` if that was the end.
    async fn step(&mut self, commands: &mut mpsc::UnboundedReceiver<SandboxCommand>) -> bool {
        let now = self.clock.now();
        if self.is_running() {
            self.machine.run(now - self.ran_until);
        }
        self.ran_until = now;
        if self.is_running() && self.outbox.is_empty() {
            self.outbox.extend(self.machine.take_frames());
        }
        if self.output.as_ref().is_none_or(mpsc::Sender::is_closed) {
            self.outbox.clear();
        }
        self.publish(self.container());
        let running = self.is_running();
        let next = self.machine.time_to_next_event().filter(|_| running).map(|span| now + span);
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(SandboxCommand::End) | None => return false,
                Some(command) => self.handle(command),
            },
            () = self.clock.sleep_until(self.deadline), if !self.fenced => self.fenced = true,
            () = sleep_until(&self.clock, self.detach_at), if running => {
                self.detach_at = None;
                self.machine.set_attached(false);
            }
            Some(permit) = reserve(self.output.clone()), if !self.outbox.is_empty() => {
                if let Some(frame) = self.outbox.pop_front() {
                    permit.send(frame);
                }
            }
            frame = next_frame(&mut self.frames), if running => match frame {
                Some(frame) if is_allowed(&frame) => self.machine.handle_frame(frame),
                Some(_) => {}
                None => {
                    self.frames = None;
                    self.detach_at = Some(now + self.detach_grace);
                }
            },
            () = sleep_until(&self.clock, next) => {}
        }
        true
    }

    fn handle(&mut self, command: SandboxCommand) {
        let now = self.clock.now();
        match command {
            SandboxCommand::Ping(reply) => send(reply, Ok(())),
            SandboxCommand::Pause(reply) => {
                let allowed = if self.fenced { Err(Error::NotIn("running")) } else { Ok(()) };
                self.paused |= allowed.is_ok();
                self.publish_and_reply(reply, allowed);
            }
            SandboxCommand::Resume(reply) => {
                if self.fenced && self.deadline <= now {
                    return self.publish_and_reply(reply, Err(Error::NotIn("allowed to run")));
                }
                (self.fenced, self.paused) = (false, false);
                self.publish_and_reply(reply, Ok(()));
            }
            SandboxCommand::Save(reply) => {
                let saved = match (self.paused, self.fenced) {
                    (true, false) => serde_json::to_vec(&self.machine).map_err(|error| failed("checkpoint", error)),
                    (false, _) | (true, true) => Err(Error::NotIn("paused")),
                };
                send(reply, saved);
            }
            SandboxCommand::Extend(deadline, reply) => {
                self.deadline = deadline;
                send(reply, Ok(()));
            }
            SandboxCommand::Fence(reply) => {
                self.fenced = true;
                self.publish_and_reply(reply, Ok(()));
            }
            SandboxCommand::Link(frames, output) => {
                (self.frames, self.output, self.detach_at) = (Some(frames), Some(output), None);
                self.outbox.clear();
                self.machine.set_attached(true);
            }
            // Handled earlier.
            SandboxCommand::End => {}
        }
    }

    /// Watchers see the effect of an action before its caller sees the result.
    fn publish_and_reply(&mut self, reply: Reply<()>, result: Result<()>) {
        self.publish(self.container());
        send(reply, result);
    }
}

fn send<T>(reply: Reply<T>, result: Result<T>) {
    // The caller may be gone.
    let _ = reply.send(result);
}

async fn reserve(output: Option<mpsc::Sender<Frame>>) -> Option<mpsc::OwnedPermit<Frame>> {
    output?.reserve_owned().await.ok()
}

async fn next_frame(frames: &mut Option<mpsc::Receiver<Frame>>) -> Option<Frame> {
    match frames {
        Some(frames) => frames.recv().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(clock: &SharedClock, moment: Option<Moment>) {
    match moment {
        Some(moment) => clock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
