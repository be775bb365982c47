//! What the pool offers a start, and what a start reports to the pool.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{Pool, State, WarmContainer, pool_rules::fits};
use crate::{metrics::Missed, runtime::StartSpec};

/// Timeout for a container being made, and for the answer of a ready one. A start without the pool takes a
/// fraction of it.
pub const OFFER_TIMEOUT: Duration = Duration::from_secs(1);
/// After a sandbox has started, its client gets the machine to itself for this long.
const QUIET_AFTER_START: Duration = Duration::from_millis(100);

/// The slot of one sandbox, held as long as anything of it is here.
#[derive(Debug)]
pub struct PoolSlot(Arc<Pool>);

/// While this exists, the pool makes no containers.
#[derive(Debug)]
pub struct Starting(Arc<Pool>);

/// The pool's offer to a start.
#[derive(Debug)]
pub enum WarmOffer {
    Nothing,
    Ready(Box<WarmContainer>),
    Coming(oneshot::Receiver<WarmContainer>),
}

impl Pool {
    /// Registers a starting sandbox. Offers a container in the same step, so that it is not removed to free the
    /// slot.
    pub fn enter(self: &Arc<Self>, first_start: Option<&StartSpec>) -> (PoolSlot, Starting, WarmOffer) {
        let mut state = self.state.lock();
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

    fn offer(&self, state: &mut State, start: &StartSpec) -> WarmOffer {
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

    /// Records whether an offered container was assigned or failed.
    pub fn served(&self, well: bool) {
        if well {
            self.metrics.warm_taken();
        } else {
            self.metrics.warm_missed(Missed::Broken);
        }
    }
}

impl WarmOffer {
    /// The container, if it arrives in time.
    pub async fn warm(self, pool: &Pool) -> Option<WarmContainer> {
        let warm = match self {
            Self::Nothing => return None,
            Self::Ready(warm) => return Some(*warm),
            Self::Coming(mut coming) => match pool.clock.timeout(OFFER_TIMEOUT, &mut coming).await {
                Ok(made) => made.ok(),
                Err(_) => {
                    // A container sent at this very moment is ours; a later one goes to the pool.
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
        self.0.state.lock().here -= 1;
        self.0.stirred.notify_one();
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.starting -= 1;
        state.quiet_at = self.0.clock.now() + QUIET_AFTER_START;
        drop(state);
        self.0.stirred.notify_one();
    }
}
