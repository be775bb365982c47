//! Sandboxes of which nothing is stored: they live and end where they were made.

use std::time::Duration;

use baton::{runtime::Container, storage::layout};
use baton_protocol::id::SandboxId;

use super::{Oracle, StatusHistory};
use crate::{time::Instant, words::short};

/// How long after its machine stood still, or its guard died, one may stand still itself.
const EXCUSED: Duration = Duration::from_secs(90);

/// Where one was made.
#[derive(Debug)]
pub struct Home {
    at: usize,
    name: String,
    container: Container,
    /// It has ended.
    over: bool,
    /// Somebody wanted it to end, or it ended by itself.
    may_end: bool,
    /// Its machine stood still, or lost its guard.
    shaken: Option<Instant>,
}

/// What is to be expected of one at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxFate {
    /// It was never started.
    Unborn,
    /// It must run on that machine.
    Lives(usize),
    /// It may have ended.
    MayLive(usize),
    /// The instance that made it is gone.
    Gone,
}

impl Oracle {
    pub fn made(&self, id: &SandboxId, at: usize, name: &str, may_end: bool) {
        let mut told = self.told.lock().unwrap();
        let home = Home { at, name: name.to_owned(), container: Container::Absent, over: false, may_end, shaken: None };
        let now = self.start.elapsed();
        told.note(now, &format!("{} is made on {at}, and nothing of it is stored", short(id)));
        told.histories.entry(id.clone()).or_default().home = Some(home);
    }

    /// Somebody wants it to end, or ends it.
    pub fn may_end(&self, id: &SandboxId) {
        if let Some(home) = self.told.lock().unwrap().histories.get_mut(id).and_then(|history| history.home.as_mut()) {
            home.may_end = true;
        }
    }

    /// An instance is on its way out.
    pub fn drains(&self, at: usize) {
        for home in self.told.lock().unwrap().histories.values_mut().filter_map(|history| history.home.as_mut()) {
            home.may_end |= home.at == at;
        }
    }

    /// A machine stands still, or its guard has died.
    pub fn shaken(&self, at: usize) {
        let mut told = self.told.lock().unwrap();
        told.shaken.insert(at, Instant::now());
        for home in told.histories.values_mut().filter_map(|history| history.home.as_mut()) {
            if home.at == at {
                home.shaken = Some(Instant::now());
            }
        }
    }

    pub fn fate(&self, id: &SandboxId) -> SandboxFate {
        let told = self.told.lock().unwrap();
        let Some(home) = told.histories.get(id).and_then(|history| history.home.as_ref()) else {
            return SandboxFate::Unborn;
        };
        if told.places.get(&home.at).is_none_or(|place| place.name != home.name) {
            return SandboxFate::Gone;
        }
        let lives = !home.may_end && !home.over && home.container != Container::Absent;
        if lives { SandboxFate::Lives(home.at) } else { SandboxFate::MayLive(home.at) }
    }
}

impl StatusHistory {
    pub(super) fn is_fleeting(&self, key: &str) -> bool {
        let id = layout::sandbox_of(key).or_else(|| crate::words::sandbox_of_checkpoint(key));
        id.and_then(|id| self.histories.get(&id)).is_some_and(|history| history.home.is_some())
    }

    /// What is wrong with one of them as it is now, on one instance.
    pub(super) fn judge_fleeting(&mut self, id: &SandboxId, name: &str, container: Container) -> Option<String> {
        let home = self.histories.get_mut(id)?.home.as_mut()?;
        let lives = |container| matches!(container, Container::Running | Container::Paused | Container::Fenced);
        if home.name != name {
            return lives(container).then(|| format!("{} is stored nowhere and was moved", short(id)));
        }
        let before = std::mem::replace(&mut home.container, container);
        if lives(container) && home.over {
            return Some(format!("{} started over although it had ended", short(id)));
        }
        if container == Container::Fenced
            && before == Container::Running
            && !home.may_end
            && home.shaken.is_none_or(|at| at.elapsed() > EXCUSED)
        {
            return Some(format!("{} stands still, and needs nothing but its instance", short(id)));
        }
        if lives(before) && !lives(container) {
            home.over = true;
            if !home.may_end {
                return Some(format!("{} ended, and nobody wanted it to", short(id)));
            }
        }
        None
    }
}
