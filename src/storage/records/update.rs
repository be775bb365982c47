//! Updates of a sandbox's metadata: the API and operators write the spec, the lease holder writes the status.

use baton_protocol::{
    id::SandboxId,
    metadata::{Committed, Metadata, SandboxStatus, Spec},
    trace::Traceparent,
};

use super::{MetadataPoll, Records, Result, WRITE_ATTEMPTS, metadata_key};
use crate::storage::store::{self, Precondition, Priority};

impl Records {
    /// Changes the spec, for the API and operators. `change` is applied again after a concurrent write and returns
    /// false if there is nothing to write. `None`: no such sandbox.
    pub async fn edit(
        &self,
        id: &SandboxId,
        change: &(dyn Fn(&mut Spec) -> bool + Send + Sync),
    ) -> Result<Option<Spec>> {
        self.rewrite(id, &|record| change(&mut record.spec)).await.map(|record| record.map(|record| record.spec))
    }

    /// Like [`edit`](Self::edit), on behalf of a request: a spec that changes names that request if it is traced. An
    /// earlier cause is removed, since it belongs to another request.
    pub async fn edit_for_request(
        &self,
        id: &SandboxId,
        cause: Option<Traceparent>,
        change: &(dyn Fn(&mut Spec) -> bool + Send + Sync),
    ) -> Result<Option<Spec>> {
        self.edit(id, &|spec| because_of(cause, spec, change)).await
    }

    /// Changes the status, for the lease holder; never overwrites that of a later epoch.
    pub async fn report(
        &self,
        id: &SandboxId,
        epoch: u64,
        change: &(dyn Fn(&mut SandboxStatus, &mut Committed) + Send + Sync),
    ) -> Result<()> {
        let updated = self.clock.timestamp();
        self.rewrite(id, &|record| {
            if record.status.epoch > epoch {
                return false;
            }
            let shown = (record.latest_sandbox_checkpoint.take(), record.last_checkpointed.take());
            let before = (record.status.clone(), Committed { latest: shown.0, at: shown.1 });
            let mut committed = before.1.clone();
            change(&mut record.status, &mut committed);
            record.status.epoch = epoch;
            let changed = (&before.0, &before.1) != (&record.status, &committed);
            if changed {
                record.status.updated.clone_from(&updated);
            }
            (record.latest_sandbox_checkpoint, record.last_checkpointed) = (committed.latest, committed.at);
            changed
        })
        .await
        .map(drop)
    }

    async fn rewrite(
        &self,
        id: &SandboxId,
        change: &(dyn Fn(&mut Metadata) -> bool + Send + Sync),
    ) -> Result<Option<Metadata>> {
        let key = metadata_key(id);
        let mut last = None;
        // The cached record saves a read: if it is outdated, the write is refused.
        let mut recent = self.recent.get(id).map(Box::new);
        for _ in 0..WRITE_ATTEMPTS {
            let was_recent = recent.is_some();
            let mut found = match recent.take() {
                Some(found) => found,
                None => match self.read_if_changed(id, None).await? {
                    Some(MetadataPoll::Found(found)) => found,
                    Some(MetadataPoll::Unchanged) | None => return Ok(None),
                },
            };
            if !change(&mut found.metadata) {
                if was_recent {
                    continue;
                }
                return Ok(Some(found.metadata));
            }
            let (_, store) = self.stores(found.place)?;
            match self.put(store, &key, &found.metadata, Precondition::Is(found.version.clone()), Priority::View).await
            {
                Ok(version) => {
                    found.version = version;
                    self.recent.note(id, &found);
                    return Ok(Some(found.metadata));
                }
                // Read again; if the write was applied after all, `change` finds nothing left to write.
                Err(error) if matches!(error, store::Error::Conflict(_)) || error.is_passing() => {
                    if error.is_passing() {
                        self.clock.sleep(self.clock.jittered(self.times.retry)).await;
                    }
                    last = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(last.unwrap_or(store::Error::Conflict(key)).into())
    }
}

fn because_of(cause: Option<Traceparent>, spec: &mut Spec, change: impl FnOnce(&mut Spec) -> bool) -> bool {
    let is_news = change(spec);
    if is_news {
        spec.traceparent = cause;
    }
    is_news
}

#[cfg(test)]
mod tests {
    use baton_protocol::{id::InstanceId, metadata::DesiredState};

    use super::*;

    #[test]
    fn only_what_is_written_names_its_request_and_no_older_one_stays() {
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let mut spec = Spec::new(id, String::new(), String::new(), InstanceId::from_bits([1; 16]));
        let desire =
            |state: DesiredState| move |spec: &mut Spec| std::mem::replace(&mut spec.desired_state, state) != state;
        let cause = Traceparent::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        assert!(cause.is_some());
        assert!(!because_of(cause, &mut spec, desire(DesiredState::Running)));
        assert_eq!(spec.traceparent, None);
        assert!(because_of(cause, &mut spec, desire(DesiredState::Checkpointed)));
        assert_eq!(spec.traceparent, cause);
        assert!(because_of(None, &mut spec, desire(DesiredState::Running)));
        assert_eq!(spec.traceparent, None);
    }
}
