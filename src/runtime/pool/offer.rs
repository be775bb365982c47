//! What a start gets of the pool, and what the pool hears of it.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{Pool, State, Warm, pool_rules::fits};
use crate::{
    metrics::Missed,
    runtime::{Start, containers::lock},
};

/// How long a create waits for one that is being made, and for the answer of one that is ready. A start from nothing
/// takes a fraction of it.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// After a sandbox has started its client has the machine for itself.
const QUIET: Duration = Duration::from_millis(100);

/// The place of one sandbox, as long as anything of it is here.
#[derive(Debug)]
pub struct PoolSlot(Arc<Pool>);

/// As long as it lives, nothing is made beside it.
#[derive(Debug)]
pub struct Starting(Arc<Pool>);

/// What there is for a start.
#[derive(Debug)]
pub enum WarmOffer {
    Nothing,
    Ready(Box<Warm>),
    Coming(oneshot::Receiver<Warm>),
}

impl Pool {
    /// A sandbox starts here. One step, so that what it is offered is not removed to make room for it.
    pub fn enter(self: &Arc<Self>, first_start: Option<&Start>) -> (PoolSlot, Starting, WarmOffer) {
        let mut state = lock(&self.state);
        state.here += 1;
        state.starting += 1;
        let offer = match first_start {
            Some(start) if self.wanted > 0 => self.offer(&mut state, start),
            Some(_) | None => WarmOffer::Nothing,
        };
        drop(state);
        self.stirred.notify_one();
        (PoolSlot(self.clone()), Starting(self.clone()), offer)
    }

    fn offer(&self, state: &mut State, start: &Start) -> WarmOffer {
        if !fits(start, &self.usual) {
            self.metrics.warm_missed(Missed::Unfit);
            return WarmOffer::Nothing;
        }
        let sound = state.ready.iter().position(|warm| !warm.begun.channel.is_broken());
        if let Some(warm) = sound.and_then(|at| state.ready.remove(at)) {
            self.show(state);
            return WarmOffer::Ready(Box::new(warm));
        }
        if state.is_making && state.waiter.as_ref().is_none_or(oneshot::Sender::is_closed) {
            let (given, coming) = oneshot::channel();
            state.waiter = Some(given);
            return WarmOffer::Coming(coming);
        }
        self.metrics.warm_missed(Missed::Empty);
        WarmOffer::Nothing
    }

    /// One that was offered became a sandbox's, or failed it.
    pub fn served(&self, well: bool) {
        if well {
            self.metrics.warm_taken();
        } else {
            self.metrics.warm_missed(Missed::Broken);
        }
    }
}

impl WarmOffer {
    /// The container, for as long as it is worth waiting for.
    pub async fn warm(self, pool: &Pool) -> Option<Warm> {
        let warm = match self {
            Self::Nothing => return None,
            Self::Ready(warm) => return Some(*warm),
            Self::Coming(mut coming) => match pool.clock.timeout(PATIENCE, &mut coming).await {
                Ok(made) => made.ok(),
                Err(_) => {
                    // What was sent in this very moment is ours; what comes later goes to the pool.
                    coming.close();
                    coming.try_recv().ok()
                }
            },
        };
        if warm.is_none() {
            pool.metrics.warm_missed(Missed::Empty);
        }
        warm
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        lock(&self.0.state).here -= 1;
        self.0.stirred.notify_one();
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.starting -= 1;
        state.quiet_at = self.0.clock.now() + QUIET;
        drop(state);
        self.0.stirred.notify_one();
    }
}
