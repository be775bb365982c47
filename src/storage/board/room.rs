//! Room for one more sandbox. Whoever finds none waits in a queue; for those who may hope the places of
//! sandboxes are *wanted* that nobody uses, and the reconciler lets these go.
//!
//! ```text
//!   newcomer ──▶ queue ──wanted──▶ (reconciler) checkpoints, lets go ──▶ a place ──▶ newcomer
//!                  └─ nobody could make room, or not in time: refused
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use baton_protocol::id::SandboxId;
use tokio::sync::Notify;

use super::{
    Attached, Board, Line, Told, lock,
    rules::{Hope, Newcomer, Taken, Tenure, share},
};

/// How long a newcomer waits for room.
pub const ROOM_WITHIN: Duration = Duration::from_secs(30);

/// Who waits for a place, in the order of their coming, and whose places are wanted.
#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    waiting: BTreeMap<u64, Waiter>,
    wanted: BTreeSet<SandboxId>,
}

#[derive(Debug)]
struct Waiter {
    id: SandboxId,
    most: usize,
    hope: Hope,
    /// Of its own, so that those who wait are woken in their order.
    bell: Arc<Notify>,
}

impl Line {
    pub(super) fn is_here(&self) -> bool {
        self.sessions > 0 || self.held
    }

    fn tenure(&self) -> Tenure {
        match self.tenure {
            _ if self.sessions > 0 => Tenure::Stays,
            // A session that left was the last use, if this board knows of any.
            Tenure::Spare { since } if self.asked > 0 => Tenure::Spare { since: since.max(self.active_at) },
            tenure @ (Tenure::Spare { .. } | Tenure::Stays | Tenure::Leaves) => tenure,
        }
    }
}

impl Board {
    /// As [`attach`](Self::attach), unless `most` others are already here or on their way. What is here has its
    /// place, whoever waits for one.
    pub fn admit(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<Attached> {
        let mut lines = lock(&self.lines);
        let is_here = lines.get(id).is_some_and(Line::is_here);
        let taken = || lines.values().filter(|line| line.is_here()).count() + lock(&self.queue).waiting.len();
        (is_here || taken() < most).then(|| self.attach_to(&mut lines, id))
    }

    /// As [`admit`](Self::admit), and without room waits until others have made some. `None` when nobody
    /// here can, or not in time. Whoever drops it wants no room any more.
    pub async fn make_room(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<Attached> {
        let waiting = Waiting::new(self, id, most);
        self.clock.timeout(ROOM_WITHIN, waiting.enter()).await.ok().flatten()
    }

    /// The reconciler says how a place stands that it holds.
    pub fn set_tenure(&self, id: &SandboxId, tenure: Tenure) {
        let mut lines = lock(&self.lines);
        let Some(line) = lines.get_mut(id).filter(|line| line.held) else { return };
        if std::mem::replace(&mut line.tenure, tenure) != tenure {
            self.holds.send_modify(|count| *count += 1);
            self.settle(&lines);
        }
    }

    /// What is held now, and how each place stands.
    pub fn held_places(&self) -> BTreeMap<SandboxId, Tenure> {
        let lines = lock(&self.lines);
        lines.iter().filter(|(_, line)| line.held).map(|(id, line)| (id.clone(), line.tenure)).collect()
    }

    /// Somebody waits for the place of this sandbox.
    pub fn is_wanted(&self, id: &SandboxId) -> bool {
        lock(&self.queue).wanted.contains(id)
    }

    /// The API's own board says that somebody waits for this place, until the value is dropped.
    pub fn want(self: &Arc<Self>, id: &SandboxId) -> Wanted {
        lock(&self.queue).wanted.insert(id.clone());
        self.nudge(id);
        Wanted { board: self.clone(), id: id.clone() }
    }

    /// Something changed that those who wait may depend on.
    pub(super) fn settle(&self, lines: &BTreeMap<SandboxId, Line>) {
        let mut queue = lock(&self.queue);
        if !queue.waiting.is_empty() {
            self.share_out(lines, &mut queue);
        }
    }

    /// Says anew whose places are wanted, and wakes whoever has his answer.
    fn share_out(&self, lines: &BTreeMap<SandboxId, Line>, queue: &mut Queue) {
        let places: Vec<_> = lines
            .iter()
            .filter(|(_, line)| line.is_here())
            .map(|(id, line)| Taken { id, tenure: line.tenure(), wanted: queue.wanted.contains(id) })
            .collect();
        let newcomers: Vec<_> =
            queue.waiting.values().map(|waiter| Newcomer { id: &waiter.id, most: waiter.most }).collect();
        let (hopes, wanted) = share(&places, &newcomers);
        let wanted: BTreeSet<_> = wanted.into_iter().cloned().collect();
        for (waiter, hope) in queue.waiting.values_mut().zip(hopes) {
            waiter.hope = hope;
            if hope != Hope::Wait {
                waiter.bell.notify_one();
            }
        }
        let before = std::mem::replace(&mut queue.wanted, wanted);
        for id in before.symmetric_difference(&queue.wanted) {
            let is_wanted = queue.wanted.contains(id);
            match &self.teller {
                Some(_) => self.tell(|| if is_wanted { Told::Wanted(id.clone()) } else { Told::Unwanted(id.clone()) }),
                None => self.nudge(id),
            }
        }
    }
}

/// A place in the queue.
#[derive(Debug)]
struct Waiting {
    board: Arc<Board>,
    ticket: u64,
    bell: Arc<Notify>,
}

impl Waiting {
    fn new(board: &Arc<Board>, id: &SandboxId, most: usize) -> Self {
        let bell = Arc::new(Notify::new());
        let lines = lock(&board.lines);
        let mut queue = lock(&board.queue);
        queue.next += 1;
        let ticket = queue.next;
        queue.waiting.insert(ticket, Waiter { id: id.clone(), most, hope: Hope::Wait, bell: bell.clone() });
        board.share_out(&lines, &mut queue);
        drop((queue, lines));
        Self { board: board.clone(), ticket, bell }
    }

    /// The place, or `None` when there is none to be had.
    async fn enter(self) -> Option<Attached> {
        loop {
            self.bell.notified().await;
            let mut lines = lock(&self.board.lines);
            let mut queue = lock(&self.board.queue);
            match queue.waiting.get(&self.ticket)?.hope {
                Hope::Wait => {}
                Hope::None => return None,
                Hope::Enter => {
                    let waiter = queue.waiting.remove(&self.ticket)?;
                    drop(queue);
                    return Some(self.board.attach_to(&mut lines, &waiter.id));
                }
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let lines = lock(&self.board.lines);
        let mut queue = lock(&self.board.queue);
        queue.waiting.remove(&self.ticket);
        self.board.share_out(&lines, &mut queue);
    }
}

/// Somebody waits for a place, as the other half has said.
#[derive(Debug)]
pub struct Wanted {
    board: Arc<Board>,
    id: SandboxId,
}

impl Drop for Wanted {
    fn drop(&mut self) {
        lock(&self.board.queue).wanted.remove(&self.id);
        self.board.nudge(&self.id);
    }
}
