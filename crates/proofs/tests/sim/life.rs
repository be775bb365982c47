//! The life of one process: what strikes it, and when it ends. It can be made to end at an await of its own,
//! at a call or at the answer to one.

use std::sync::{Arc, Mutex};

use tokio_util::sync::CancellationToken;

use crate::{kinds::ScenarioKind, machine_clock::Machine, oracle::Oracle, rng::Rng, sim_faults::FaultSchedule};

#[derive(Debug)]
pub struct Life {
    pub at: usize,
    pub machine: Arc<Machine>,
    pub faults: Arc<FaultSchedule>,
    pub oracle: Arc<Oracle>,
    /// The process is dead: nothing is sent and nothing is done any more.
    pub gone: CancellationToken,
    left: Mutex<Option<u64>>,
}

impl Life {
    pub fn new(at: usize, machine: Arc<Machine>, faults: Arc<FaultSchedule>, oracle: Arc<Oracle>) -> Arc<Self> {
        Arc::new(Self { at, machine, faults, oracle, gone: CancellationToken::new(), left: Mutex::new(None) })
    }

    /// Whether a fault of this kind strikes now.
    pub fn strikes(&self, kind: ScenarioKind, rng: &Rng) -> bool {
        let strikes = self.faults.strikes(kind, self.at, rng);
        if strikes {
            self.oracle.disturbed(self.at);
        }
        strikes
    }

    /// It dies after so many steps.
    pub fn doom(&self, steps: u64) {
        *self.left.lock().unwrap() = Some(steps);
    }

    pub fn spare(&self) {
        *self.left.lock().unwrap() = None;
    }

    /// One step of the process, when it can go on. Once it is dead, `die` is called and this never ends.
    pub async fn step(&self, die: impl FnOnce()) {
        self.machine.process_moves().await;
        if self.is_over() {
            die();
            std::future::pending::<()>().await;
        }
    }

    fn is_over(&self) -> bool {
        let mut left = self.left.lock().unwrap();
        if self.gone.is_cancelled() {
            return true;
        }
        match &mut *left {
            None => false,
            Some(0) => {
                self.faults.tally.count(ScenarioKind::Doom);
                self.gone.cancel();
                self.oracle.ends(self.at);
                true
            }
            Some(steps) => {
                *steps -= 1;
                false
            }
        }
    }
}
