//! SIGTERM and SIGINT of a server: the first one drains it, the second one ends it at once.

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::task::TaskTracker;

/// Counts the signals. Created before the server reports that it serves, so that no signal is lost in between.
#[derive(Clone, Debug)]
pub(super) struct Termination(watch::Receiver<u32>);

impl Termination {
    pub fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be received");
        let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        let (count, received) = watch::channel(0);
        // The task ends with the runtime.
        TaskTracker::new().spawn(async move {
            loop {
                tokio::select! {
                    Some(()) = terminate.recv() => {}
                    Some(()) = interrupt.recv() => {}
                    else => break,
                }
                count.send_modify(|count| *count += 1);
            }
        });
        Ok(Self(received))
    }

    /// Waits for the first signal. Returns at once if it was received before.
    pub async fn first(&self) {
        self.at_least(1).await;
    }

    /// Waits for the second signal, which ends the server at once.
    pub async fn second(&self) {
        self.at_least(2).await;
    }

    async fn at_least(&self, count: u32) {
        let mut received = self.0.clone();
        if received.wait_for(|received| *received >= count).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
