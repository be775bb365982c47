//! The API on one side of a socket and everything else on the other, as `baton api` and `baton reconciler`
//! have it. With `BATON_TEST_SHAPE=halves` every world is made so.

use std::{sync::Arc, time::Duration};

use baton::{
    bus::Bus,
    clock::SharedClock,
    config::LeaseTimes,
    ipc::{self, IpcClient, IpcHello, IpcServer},
    runtime::{Lifecycle, StartSpec},
    storage::store::Store,
};
use baton_protocol::id::{InstanceId, SandboxId};
use baton_testkit::{FakeContainers, FakePorts};
use tokio::sync::watch;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::scripted_agent::Containers;

pub fn are_wanted() -> bool {
    std::env::var("BATON_TEST_SHAPE").is_ok_and(|shape| shape == "halves")
}

/// From now on a container runs, as a runtime would tell it: those of this double speak of commands alone.
pub async fn begin(lives: &FakeContainers, clock: &SharedClock, id: &SandboxId) {
    let start = StartSpec {
        marker: [0; 16],
        env: [].into(),
        cwd: None,
        limits: Default::default(),
        rootfs: None,
        runsc: None,
        layout: Default::default(),
        egress: Default::default(),
        forked_from: None,
        deadline: clock.now() + Duration::from_secs(1 << 30),
    };
    lives.create(id, &start).await.unwrap();
}

/// The reconciler's end of the socket, for as long as this lives.
pub struct Joined {
    pub front: IpcClient,
    _stop: DropGuard,
    _directory: tempfile::TempDir,
}

pub async fn join(
    clock: &SharedClock,
    instance: &InstanceId,
    bus: &Arc<Bus>,
    (containers, lives, ports): (&Arc<Containers>, &Arc<FakeContainers>, &Arc<FakePorts>),
    memory: &Arc<dyn Store>,
    leaving: &watch::Receiver<bool>,
) -> Joined {
    let directory = tempfile::Builder::new().prefix("bw").tempdir().unwrap();
    let user = nix::unistd::geteuid().as_raw();
    let listener = ipc::listen(directory.path(), user).unwrap();
    let back = IpcServer {
        hello: IpcHello::new(instance.clone(), "none".to_owned(), Err("none".to_owned()), LeaseTimes::DEFAULT),
        clock: clock.clone(),
        bus: bus.clone(),
        execs: containers.clone(),
        lifecycle: lives.clone(),
        memory: memory.clone(),
        ports: ports.clone(),
        leaving: leaving.clone(),
        api_user: user,
    };
    let stop = CancellationToken::new();
    tokio::spawn(back.serve(listener, stop.clone()));
    let front = ipc::connect(directory.path(), clock, &TaskTracker::new()).await.unwrap();
    Joined { front, _stop: stop.drop_guard(), _directory: directory }
}
