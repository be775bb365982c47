//! Which tenant each sandbox on this instance belongs to, so that no tenant exceeds its quota.
//!
//! A sandbox counts from its admission until it has left or is to be deleted: its client may start another one as soon
//! as it is told. Sandboxes that came without a session (placed by an operator, or held by the reconciler while the API
//! restarted) are looked up when a tenant is next counted.

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::{
    id::{SandboxId, Tenant},
    metadata::DesiredState,
};
use parking_lot::Mutex;

use super::Api;
use crate::{bus::Bus, config::Quota};

#[derive(Debug)]
pub struct Occupancy {
    bus: Arc<Bus>,
    owners: Mutex<BTreeMap<SandboxId, Owner>>,
}

#[derive(Debug)]
struct Owner {
    tenant: Option<Tenant>,
    /// Sessions being admitted that the bus does not know of yet.
    admissions: u32,
}

impl Occupancy {
    pub fn new(bus: Arc<Bus>) -> Arc<Self> {
        Arc::new(Self { bus, owners: Mutex::default() })
    }

    /// Counts a sandbox of this tenant while the guard lives or the sandbox is here; fails if the quota is used up. A
    /// sandbox that is here already is always admitted.
    fn admit(self: &Arc<Self>, id: &SandboxId, tenant: &Tenant, quota: &Quota) -> Result<OccupancyGuard, String> {
        let mut owners = self.owners.lock();
        owners.retain(|id, owner| owner.admissions > 0 || self.bus.is_here(id));
        let is_counted = owners.contains_key(id) || self.bus.is_here(id);
        if !is_counted {
            quota.allow_sandbox(owners.values().filter(|owner| owner.tenant.as_ref() == Some(tenant)).count())?;
        }
        let owner = owners.entry(id.clone()).or_insert(Owner { tenant: None, admissions: 0 });
        owner.tenant = Some(tenant.clone());
        owner.admissions += 1;
        Ok(OccupancyGuard { occupancy: self.clone(), id: id.clone() })
    }

    /// Sets the tenant that a known sandbox counts for from now on; with `None` it counts for no tenant.
    pub fn note(&self, id: &SandboxId, tenant: Option<&Tenant>) {
        if let Some(owner) = self.owners.lock().get_mut(id) {
            owner.tenant = tenant.cloned();
        }
    }

    /// Sandboxes on this instance whose tenant is not known yet.
    fn unknown(&self) -> Vec<SandboxId> {
        let owners = self.owners.lock();
        self.bus.local_sandboxes().into_iter().filter(|id| !owners.contains_key(id)).collect()
    }

    fn learn(&self, id: SandboxId, tenant: Option<Tenant>) {
        self.owners.lock().entry(id).or_insert(Owner { tenant, admissions: 0 });
    }
}

/// Counts a sandbox while it is being admitted.
#[derive(Debug)]
pub struct OccupancyGuard {
    occupancy: Arc<Occupancy>,
    id: SandboxId,
}

impl Drop for OccupancyGuard {
    fn drop(&mut self) {
        let mut owners = self.occupancy.owners.lock();
        let Some(owner) = owners.get_mut(&self.id) else { return };
        owner.admissions -= 1;
        if owner.admissions == 0 && !self.occupancy.bus.is_here(&self.id) {
            owners.remove(&self.id);
        }
    }
}

impl Api {
    /// Counts a sandbox that is about to come to this instance for its tenant; the error names the quota that is used
    /// up. A sandbox without a tenant is not counted.
    pub(super) async fn count(
        &self,
        id: &SandboxId,
        tenant: Option<&Tenant>,
    ) -> Result<Option<OccupancyGuard>, String> {
        let Some(tenant) = tenant else { return Ok(None) };
        let quota = self.settings.quotas.of(Some(tenant));
        if quota.sandboxes.is_some() {
            for id in self.occupancy.unknown() {
                // A sandbox that cannot be read is looked up again next time.
                if let Ok(found) = self.records.find(&id).await {
                    let kept = found.filter(|found| found.spec.desired_state != DesiredState::Deleted);
                    self.occupancy.learn(id, kept.and_then(|found| found.spec.tenant));
                }
            }
        }
        self.occupancy.admit(id, tenant, &quota).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{SharedClock, SystemClock};

    fn fixture() -> (SharedClock, Arc<Bus>, Arc<Occupancy>, [Tenant; 2]) {
        let clock: SharedClock = Arc::new(SystemClock);
        let bus = Bus::new(clock.clone());
        let occupancy = Occupancy::new(bus.clone());
        (clock, bus, occupancy, ["team-a", "team-b"].map(|name| name.parse().expect("a tenant")))
    }

    const ONE: Quota = Quota { sandboxes: Some(1), snapshots: None, idle: None };

    #[test]
    fn a_place_counts_while_somebody_comes_and_while_the_sandbox_is_here() {
        let (clock, bus, occupancy, [a, b]) = fixture();
        let (first, second) = (clock.sandbox_id(), clock.sandbox_id());
        let coming = occupancy.admit(&first, &a, &ONE).expect("the first");
        assert!(occupancy.admit(&second, &a, &ONE).is_err(), "it counts before it is on the board");
        assert!(occupancy.admit(&second, &b, &ONE).is_ok(), "others are others");
        assert!(occupancy.admit(&first, &a, &ONE).is_ok(), "a second session is no second sandbox");
        bus.set_held(&first, true);
        drop(coming);
        assert!(occupancy.admit(&second, &a, &ONE).is_err(), "its session has left, and it is here");
        assert!(occupancy.admit(&first, &a, &ONE).is_ok(), "what is here has its place");
        occupancy.note(&first, None);
        assert!(occupancy.admit(&second, &a, &ONE).is_ok(), "what is to be deleted counts no more");
        occupancy.note(&first, Some(&a));
        assert!(occupancy.admit(&second, &a, &ONE).is_err(), "it came back");
        bus.set_held(&first, false);
        assert!(occupancy.admit(&second, &a, &ONE).is_ok(), "it has left");
        assert!(occupancy.owners.lock().is_empty(), "nothing is remembered of what is not here");
    }

    #[test]
    fn what_came_without_a_session_is_asked_for_and_counts_for_whom_it_belongs_to() {
        let (clock, bus, occupancy, [a, b]) = fixture();
        let (held, new) = (clock.sandbox_id(), clock.sandbox_id());
        bus.set_held(&held, true);
        assert_eq!(occupancy.unknown(), std::slice::from_ref(&held));
        occupancy.learn(held.clone(), Some(a.clone()));
        assert!(occupancy.unknown().is_empty());
        assert!(occupancy.admit(&new, &a, &ONE).is_err());
        assert!(occupancy.admit(&new, &b, &ONE).is_ok());
        occupancy.learn(held, Some(b.clone()));
        assert!(occupancy.admit(&new, &b, &ONE).is_ok(), "what is known is not learned again");
    }
}
