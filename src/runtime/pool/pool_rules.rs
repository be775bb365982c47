//! Decides which starts a warm container fits, and when one is made or removed. Pure.

use std::time::Duration;

use baton_protocol::{id::Sha256Name, limits::Limits};

use crate::{
    clock::Moment,
    runtime::{Layout, StartSpec},
};

/// The parameters a warm container was made with.
#[derive(Clone, Debug)]
pub struct WarmSpec {
    pub rootfs_digest: Sha256Name,
    pub runsc_sha256: Sha256Name,
    pub limits: Limits,
}

/// Whether the start requests only what a started container can still be given. The other limits are sent in a
/// frame.
pub fn fits(start: &StartSpec, usual: &WarmSpec) -> bool {
    let is_usual = |asked: &Option<Sha256Name>, usual: &Sha256Name| asked.as_ref().is_none_or(|asked| asked == usual);
    let at_birth = |limits: &Limits| (limits.disk, limits.memory, limits.cpus);
    is_usual(&start.rootfs, &usual.rootfs_digest)
        && is_usual(&start.runsc, &usual.runsc_sha256)
        && start.layout == Layout::default()
        && start.forked_from.is_none()
        && at_birth(&start.limits) == at_birth(&usual.limits)
}

/// The state of the pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolState {
    /// How many the operator wants.
    pub wanted: usize,
    /// The maximum number of sandboxes, and how many are here.
    pub room: usize,
    pub here: usize,
    pub ready: usize,
    /// Sandboxes that are starting.
    pub starting: usize,
    /// Something is left of a container that ended.
    pub has_remains: bool,
    /// No sandbox has started recently.
    pub is_quiet: bool,
    /// No failure is recent enough to back off.
    pub is_calm: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolAction {
    /// Delete what is left of a container that ended.
    Clear,
    Remove,
    Make,
    /// Act as soon as it is quiet and calm.
    Later,
    /// Wait until something changes.
    Rest,
}

pub fn next_action(now: &PoolState) -> PoolAction {
    let most = now.wanted.min(now.room.saturating_sub(now.here));
    if now.ready > most {
        return PoolAction::Remove;
    }
    let lacks = now.ready < most;
    match now {
        _ if !lacks && !now.has_remains => PoolAction::Rest,
        PoolState { is_calm: false, .. } => PoolAction::Later,
        PoolState { has_remains: true, .. } => PoolAction::Clear,
        PoolState { starting: 1.., .. } => PoolAction::Rest,
        PoolState { is_quiet: false, .. } => PoolAction::Later,
        _ => PoolAction::Make,
    }
}

const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Longer than the longest back-off plus the attempt after it: a failure after this is a new one.
const BACKOFF_RESET: Duration = Duration::from_secs(120);

/// Exponential back-off after failures.
#[derive(Debug, Default)]
pub struct Backoff {
    times: u32,
    last: Option<Moment>,
}

impl Backoff {
    /// Records a failure; returns whether it is the first of a series.
    pub fn note(&mut self, now: Moment) -> bool {
        if self.last.is_none_or(|last| now - last > BACKOFF_RESET) {
            self.times = 0;
        }
        (self.times, self.last) = (self.times.saturating_add(1), Some(now));
        self.times == 1
    }

    /// The end of the current back-off.
    pub fn until(&self) -> Option<Moment> {
        let wait = MIN_BACKOFF.saturating_mul(1 << self.times.saturating_sub(1).min(10)).min(MAX_BACKOFF);
        self.last.map(|last| last + wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_protocol::limits::Cpus;

    fn digest(byte: u8) -> Sha256Name {
        Sha256Name::from_bits([byte; 32])
    }

    fn usual() -> WarmSpec {
        let limits = Limits { disk: Some(1 << 30), memory: Some(1 << 29), cpus: Some(Cpus(1000)), ..Limits::default() };
        WarmSpec { rootfs_digest: digest(1), runsc_sha256: digest(2), limits }
    }

    fn start() -> StartSpec {
        StartSpec {
            marker: [7; 16],
            env: [("A".to_owned(), "b".to_owned())].into(),
            cwd: Some("/tmp".to_owned()),
            limits: usual().limits,
            rootfs: None,
            runsc: None,
            layout: Default::default(),
            egress: Default::default(),
            forked_from: None,
            deadline: Moment(Duration::from_secs(15)),
        }
    }

    #[test]
    fn a_start_fits_unless_it_differs_in_what_is_settled_at_birth() {
        let with = |change: fn(&mut StartSpec)| {
            let mut other = start();
            change(&mut other);
            fits(&other, &usual())
        };
        assert!(with(|_| ()));
        assert!(with(|start| start.rootfs = Some(digest(1))));
        assert!(with(|start| start.runsc = Some(digest(2))));
        assert!(with(|start| start.env.clear()));
        assert!(with(|start| start.cwd = None));
        assert!(with(|start| start.limits.pids = Some(64)), "it comes by a frame");
        assert!(with(|start| start.limits.files = Some(64)), "it comes by a frame");
        assert!(!with(|start| start.rootfs = Some(digest(3))));
        assert!(!with(|start| start.runsc = Some(digest(3))));
        assert!(!with(|start| start.forked_from = Some("checkpoint".to_owned())));
        assert!(!with(|start| start.limits.disk = Some(2 << 30)));
        assert!(!with(|start| start.limits.disk = None));
        assert!(!with(|start| start.limits.memory = Some(2 << 29)));
        assert!(!with(|start| start.limits.memory = None));
        assert!(!with(|start| start.limits.cpus = Some(Cpus(500))));
        assert!(!with(|start| start.limits.cpus = None));
    }

    fn every_standing() -> impl Iterator<Item = PoolState> {
        let flags = 0..8_u8;
        let counts = (0..4).flat_map(|wanted| {
            (1..4)
                .flat_map(move |room| (0..5).flat_map(move |here| (0..4).map(move |ready| (wanted, room, here, ready))))
        });
        counts.flat_map(move |(wanted, room, here, ready)| {
            flags.clone().flat_map(move |flags| {
                (0..2).map(move |starting| PoolState {
                    wanted,
                    room,
                    here,
                    ready,
                    starting,
                    has_remains: flags & 1 > 0,
                    is_quiet: flags & 2 > 0,
                    is_calm: flags & 4 > 0,
                })
            })
        })
    }

    #[test]
    fn there_are_never_more_than_wanted_and_than_there_is_room_for() {
        for now in every_standing() {
            let (total, due) = (now.here + now.ready, next_action(&now));
            if due == PoolAction::Make {
                assert!(now.ready < now.wanted && total < now.room, "{now:?}");
            }
            let is_over = now.ready > now.wanted || (now.ready > 0 && total > now.room);
            assert_eq!(due == PoolAction::Remove, is_over, "{now:?}");
        }
    }

    #[test]
    fn one_is_made_only_when_nobody_starts_and_all_is_well() {
        for now in every_standing() {
            let lacks = now.ready < now.wanted && now.here + now.ready < now.room;
            let may = now.starting == 0 && now.is_quiet && now.is_calm && !now.has_remains;
            assert_eq!(next_action(&now) == PoolAction::Make, lacks && may, "{now:?}");
            // A loop that sleeps until it is quiet and calm does not spin.
            assert!(next_action(&now) != PoolAction::Later || !now.is_quiet || !now.is_calm, "{now:?}");
        }
    }

    #[test]
    fn it_comes_to_rest_with_as_many_as_there_may_be() {
        for mut now in every_standing() {
            (now.starting, now.is_quiet, now.is_calm) = (0, true, true);
            for _ in 0..20 {
                match next_action(&now) {
                    PoolAction::Clear => now.has_remains = false,
                    PoolAction::Remove => now.ready -= 1,
                    PoolAction::Make => now.ready += 1,
                    PoolAction::Later => panic!("{now:?}"),
                    PoolAction::Rest => break,
                }
            }
            assert_eq!(next_action(&now), PoolAction::Rest, "{now:?}");
            assert_eq!(now.ready, now.wanted.min(now.room.saturating_sub(now.here)), "{now:?}");
        }
    }

    #[test]
    fn what_goes_wrong_again_is_no_news_and_waits_longer_but_not_for_ever() {
        let (mut trouble, mut now) = (Backoff::default(), Moment(Duration::from_secs(1_000)));
        assert_eq!(trouble.until(), None);
        assert!(trouble.note(now));
        assert_eq!(trouble.until(), Some(now + MIN_BACKOFF));
        let mut waits = Vec::new();
        for _ in 0..40 {
            now = trouble.until().unwrap() + Duration::from_secs(20);
            assert!(!trouble.note(now), "the same trouble");
            waits.push(trouble.until().unwrap() - now);
        }
        assert!(waits.is_sorted());
        assert_eq!((waits[0], waits[39]), (2 * MIN_BACKOFF, MAX_BACKOFF));
        assert!(trouble.note(now + BACKOFF_RESET + MIN_BACKOFF), "this is another one");
    }
}
