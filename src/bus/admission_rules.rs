//! Who is admitted when an instance is full, and which sandboxes are evicted for that. Pure.

use baton_protocol::id::SandboxId;
use serde::{Deserialize, Serialize};

use crate::clock::Moment;

/// Whether a held sandbox can be evicted, as reported by the reconciler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evictability {
    /// It keeps its slot.
    #[default]
    Stays,
    /// It can be released without loss, unless a session is attached.
    Spare {
        /// When it was last used.
        since: Moment,
    },
    /// It is about to be released.
    Leaves,
}

/// An occupied slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct OccupiedSlot<'a> {
    pub(super) id: &'a SandboxId,
    /// Always `Stays` while a session is attached.
    pub(super) evictability: Evictability,
    /// Its eviction is requested already.
    pub(super) wanted: bool,
}

/// A waiter for a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Applicant<'a> {
    pub(super) id: &'a SandboxId,
    /// Total number of slots.
    pub(super) most: usize,
}

/// The outcome for a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// There is a free slot.
    Enter,
    /// A slot is expected to become free.
    Wait,
    /// No slot can become free.
    None,
}

/// Returns the outcome for each applicant, in order of arrival, and the sandboxes to evict: no more than needed,
/// least recently used first. Sandboxes whose eviction is requested already come before those, since they may have
/// begun to leave. An applicant for a sandbox that has a slot, or that another applicant waits for, needs no further
/// slot.
pub(super) fn share<'a>(
    places: &[OccupiedSlot<'a>],
    newcomers: &[Applicant<'_>],
) -> (Vec<Admission>, Vec<&'a SandboxId>) {
    let (mut hopes, mut ahead, mut short) = (Vec::<Admission>::new(), 0, 0);
    for (number, applicant) in newcomers.iter().enumerate() {
        if let Some(same) = newcomers[..number].iter().position(|other| other.id == applicant.id) {
            hopes.push(hopes[same]);
            continue;
        }
        if places.iter().any(|place| place.id == applicant.id) {
            hopes.push(Admission::Enter);
            continue;
        }
        let stay = places.iter().filter(|place| place.evictability == Evictability::Stays).count();
        let leave = places.iter().filter(|place| place.evictability == Evictability::Leaves).count();
        let admission = if places.len() + ahead < applicant.most {
            Admission::Enter
        } else if stay + ahead < applicant.most {
            Admission::Wait
        } else {
            Admission::None
        };
        if admission != Admission::None {
            ahead += 1;
            short = short.max((places.len() + ahead).saturating_sub(applicant.most + leave));
        }
        hopes.push(admission);
    }
    let is_newcomer = |id: &SandboxId| newcomers.iter().any(|applicant| applicant.id == id);
    let spare = places.iter().filter(|place| !is_newcomer(place.id)).filter_map(|place| match place.evictability {
        Evictability::Spare { since } => Some((!place.wanted, since, place.id)),
        Evictability::Stays | Evictability::Leaves => None,
    });
    let mut spare: Vec<_> = spare.collect();
    spare.sort_unstable();
    (hopes, spare.into_iter().take(short).map(|(_, _, id)| id).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn id(number: usize) -> SandboxId {
        SandboxId::from_uuid(&format!("00000000-0000-4000-8000-{number:012}")).expect("an id")
    }

    fn spare(seconds: u64) -> Evictability {
        Evictability::Spare { since: Moment(Duration::from_secs(seconds)) }
    }

    /// Every combination of up to four occupied slots, with eviction requested or not, and up to three applicants.
    fn all(mut judge: impl FnMut(&[OccupiedSlot<'_>], &[Applicant<'_>], usize)) {
        let ids: Vec<_> = (0..7).map(id).collect();
        // Two of them were last used at the same time.
        let states = [Evictability::Stays, Evictability::Leaves, spare(1), spare(1), spare(2)];
        for count in 0..=4u32 {
            for number in 0..(2 * states.len()).pow(count) {
                let places: Vec<_> = (0..count)
                    .map(|at| {
                        let state = number / (2 * states.len()).pow(at) % (2 * states.len());
                        let id = &ids[at as usize];
                        OccupiedSlot { id, evictability: states[state / 2], wanted: state % 2 == 1 }
                    })
                    .collect();
                for waiting in 0..=3 {
                    for most in 1..=4 {
                        let newcomers: Vec<_> = ids[4..4 + waiting].iter().map(|id| Applicant { id, most }).collect();
                        judge(&places, &newcomers, most);
                    }
                }
            }
        }
    }

    #[test]
    fn all_that_wait_are_admitted_after_the_evictions_and_none_is_evicted_needlessly() {
        all(|places, newcomers, most| {
            let (hopes, wanted) = share(places, newcomers);
            let leaves = places.iter().filter(|place| place.evictability == Evictability::Leaves).count();
            let hopeful = hopes.iter().filter(|admission| **admission != Admission::None).count();
            let left = places.len() - leaves - wanted.len();
            assert!(hopeful == 0 || left + hopeful <= most, "{places:?} {newcomers:?}: {hopes:?} {wanted:?}");
            assert!(wanted.is_empty() || left + hopeful == most, "{places:?} {newcomers:?}: {hopes:?} {wanted:?}");
        });
    }

    #[test]
    fn none_is_rejected_that_could_be_admitted_and_the_first_comes_first() {
        all(|places, newcomers, most| {
            let (hopes, _) = share(places, newcomers);
            let stays = places.iter().filter(|place| place.evictability == Evictability::Stays).count();
            for (ahead, admission) in hopes.iter().enumerate() {
                let expected = if places.len() + ahead < most {
                    Admission::Enter
                } else if stays + ahead < most {
                    Admission::Wait
                } else {
                    Admission::None
                };
                assert_eq!(*admission, expected, "{places:?} {newcomers:?}");
            }
        });
    }

    #[test]
    fn what_is_wanted_is_spare_and_was_unused_for_longer_than_what_is_not() {
        all(|places, newcomers, _| {
            let (_, wanted) = share(places, newcomers);
            for one in places.iter().filter(|place| wanted.contains(&place.id)) {
                let Evictability::Spare { since } = one.evictability else { panic!("{one:?} is wanted") };
                for other in places.iter().filter(|place| !wanted.contains(&place.id)) {
                    let Evictability::Spare { since: then } = other.evictability else { continue };
                    // An eviction that was requested first is not withdrawn in favour of another.
                    assert!(one.wanted >= other.wanted, "{places:?}: {wanted:?}");
                    assert!((one.wanted && !other.wanted) || since <= then, "{places:?}: {wanted:?}");
                }
            }
        });
    }

    #[test]
    fn a_newcomer_whose_sandbox_is_here_takes_no_place_besides() {
        let ids = [id(0), id(1)];
        let places = [
            OccupiedSlot { id: &ids[0], evictability: spare(1), wanted: true },
            OccupiedSlot { id: &ids[1], evictability: Evictability::Stays, wanted: false },
        ];
        let newcomers = [Applicant { id: &ids[0], most: 2 }];
        assert_eq!(share(&places, &newcomers), (vec![Admission::Enter], vec![]));
        // Not even if there are more sandboxes than slots.
        let newcomers = [Applicant { id: &ids[0], most: 1 }];
        assert_eq!(share(&places, &newcomers), (vec![Admission::Enter], vec![]));
        // Nor when others wait for its slot.
        let newcomers = [Applicant { id: &id(5), most: 2 }, Applicant { id: &ids[0], most: 2 }];
        assert_eq!(share(&places, &newcomers).0, [Admission::Wait, Admission::Enter]);
    }

    #[test]
    fn two_newcomers_for_one_sandbox_need_one_place() {
        let places = [OccupiedSlot { id: &id(0), evictability: spare(1), wanted: false }];
        let newcomers = [Applicant { id: &id(5), most: 1 }, Applicant { id: &id(5), most: 1 }];
        assert_eq!(share(&places, &newcomers), (vec![Admission::Wait, Admission::Wait], vec![&id(0)]));
    }
}
