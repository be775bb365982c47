//! Sandboxes as rows of a table or objects of JSON, for `list` and `watch`.

use std::time::Duration;

use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::{DesiredState, Metadata, Phase},
    printable::printable,
    reason::Reason,
};
use futures::{Stream, StreamExt, stream};
use serde_json::{Value, json};

use super::storage_admin::StorageAdmin;
use crate::storage::{
    records::{Error, Result, SandboxObjects},
    unresponsive::{self, Unresponsive},
};

/// How many objects are read concurrently.
const CONCURRENT_READS: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub id: SandboxId,
    pub found: Option<Metadata>,
    /// What is wrong with the sandbox, as far as its objects show.
    pub reason: String,
    pub message: String,
    /// The lock exists, but the metadata does not.
    pub is_orphan: bool,
    /// Its holder is unresponsive: the phase that it last reported may be outdated.
    pub unresponsive: Option<Unresponsive>,
}

/// The phase to show: the one that the holder reported, or that it is unresponsive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownPhase {
    Reported(Phase),
    Unresponsive,
}

impl ShownPhase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Reported(phase) => phase_name(phase),
            Self::Unresponsive => unresponsive::PHASE,
        }
    }
}

/// Which rows to show.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Filter {
    /// Only sandboxes with this label; repeatable
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    /// Only sandboxes in this phase
    #[arg(long, value_name = "PHASE", value_parser = parse_phase)]
    pub phase: Option<ShownPhase>,
    /// Only orphans: locks without metadata, and metadata without a lock
    #[arg(long)]
    pub orphans: bool,
}

fn parse_label(text: &str) -> std::result::Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn parse_phase(text: &str) -> std::result::Result<ShownPhase, &'static str> {
    let text = text.to_lowercase();
    if text == unresponsive::PHASE {
        return Ok(ShownPhase::Unresponsive);
    }
    serde_json::from_value(Value::String(text))
        .map(ShownPhase::Reported)
        .map_err(|_| "the phases are pending, running, checkpointed, failed and unresponsive")
}

impl Filter {
    pub fn matches(&self, row: &Row) -> bool {
        if self.orphans {
            return row.is_orphan || row.reason == Reason::LockMissing.name();
        }
        let found = row.found.as_ref();
        let labelled =
            |(name, value): &(String, String)| found.is_some_and(|found| found.spec.labels.get(name) == Some(value));
        !row.is_orphan && self.labels.iter().all(labelled) && self.phase.is_none_or(|phase| row.phase() == Some(phase))
    }
}

/// Every sandbox that matches the filter, in order, as they are read.
pub async fn rows<'a>(storage: &'a StorageAdmin, filter: &'a Filter) -> Result<impl Stream<Item = Row> + 'a> {
    let listed = storage.records.survey().await?;
    let reads = listed.into_iter().map(move |(id, objects)| row(storage, id, objects));
    Ok(stream::iter(reads)
        .buffered(CONCURRENT_READS)
        .filter_map(move |row| std::future::ready(row.filter(|row| filter.matches(row)))))
}

/// Returns `None` if the sandbox is gone or only its tombstone is left.
pub async fn row(storage: &StorageAdmin, id: SandboxId, objects: SandboxObjects) -> Option<Row> {
    let mut row =
        Row { id, found: None, reason: String::new(), message: String::new(), is_orphan: false, unresponsive: None };
    if objects.metadata.is_none() {
        match storage.lock(&row.id).await {
            Ok(lock) if lock.as_ref().is_none_or(|lock| lock.purged) => return None,
            Ok(_) => {}
            Err(error) => row.message = error.to_string(),
        }
        row.is_orphan = true;
        return Some(row);
    }
    match find(storage, &row.id).await {
        Ok(found) => {
            let found = found?;
            (row.reason, row.message) = (found.status.reason.clone(), found.status.message.clone());
            row.unresponsive = storage.records.unresponsive(&found, objects.lock_written).await;
            row.found = Some(found);
        }
        Err(error) => {
            row.reason = error.reason().map(String::from).unwrap_or_default();
            row.message = error.to_string();
            if matches!(error, Error::TokenMissing) {
                row.found = storage.records.draft(&row.id).await.ok().flatten().map(|(draft, _)| draft.metadata);
            }
        }
    }
    if let Some(silent) = &row.unresponsive {
        (row.reason, row.message) = (Reason::Unresponsive.into(), silent.summary());
    }
    if objects.lock.is_none() {
        row.reason = Reason::LockMissing.into();
        row.message = Reason::LockMissing.cause().to_owned();
    }
    Some(row)
}

/// Retries transient errors, so that one slow response does not spoil a long listing.
async fn find(storage: &StorageAdmin, id: &SandboxId) -> Result<Option<Metadata>> {
    let mut attempts = 0;
    loop {
        match storage.records.find(id).await {
            Err(Error::Store(error)) if error.is_passing() && attempts < 3 => {
                attempts += 1;
                storage.clock.sleep(storage.clock.jittered(Duration::from_secs(1))).await;
            }
            found => return found,
        }
    }
}

pub const HEADER: &str = "SANDBOX                                       PHASE         WANTED        AGE   INSTANCE       REASON             LABELS";

/// The columns of [`HEADER`], and what follows them.
#[derive(Clone, Debug)]
pub struct Cells<'a> {
    pub id: &'a str,
    pub phase: &'a str,
    pub wanted: &'a str,
    pub age: String,
    pub instance: &'a str,
    pub reason: &'a str,
    pub labels: String,
    /// More about it, if there is more to say.
    pub summary: &'a str,
}

impl Cells<'_> {
    pub fn line(&self) -> String {
        let Self { id, phase, wanted, age, instance, reason, labels, summary } = self;
        let instance = instance.get(..13).unwrap_or(instance);
        let gap = if summary.is_empty() { "" } else { "  " };
        let line =
            format!("{id:44}  {phase:12}  {wanted:12}  {age:>4}  {instance:13}  {reason:17}  {labels}{gap}{summary}");
        // Labels may contain anything, but a row must be one line.
        printable(line.trim_end())
    }
}

impl Row {
    /// Returns `None` if the phase is unknown.
    pub fn phase(&self) -> Option<ShownPhase> {
        let reported = self.found.as_ref().map(|found| ShownPhase::Reported(found.status.phase));
        if self.unresponsive.is_some() { Some(ShownPhase::Unresponsive) } else { reported }
    }

    pub fn line(&self, now: std::time::SystemTime) -> String {
        let found = self.found.as_ref();
        let created = found.and_then(|found| humantime::parse_rfc3339_weak(&found.spec.created_timestamp).ok());
        let instance = found.and_then(|found| found.status.instance.as_ref());
        let labels = found.map(|found| &found.spec.labels).into_iter().flatten();
        let labels: Vec<_> = labels.map(|(name, value)| format!("{name}={value}")).collect();
        let cells = Cells {
            id: self.id.as_str(),
            phase: self.phase().map_or(if self.is_orphan { "orphan" } else { "-" }, ShownPhase::name),
            wanted: found.map_or("-", |found| state_name(found.spec.desired_state)),
            age: created.and_then(|created| now.duration_since(created).ok()).map_or("-".to_owned(), age),
            instance: instance.map_or("-", InstanceId::as_str),
            reason: if self.reason.is_empty() { "-" } else { &self.reason },
            labels: labels.join(","),
            summary: &self.unresponsive.as_ref().map_or(String::new(), Unresponsive::summary),
        };
        cells.line()
    }

    pub fn json(&self) -> Value {
        let found = self.found.as_ref();
        json!({
            "sandbox_id": self.id,
            "phase": self.phase().map(ShownPhase::name),
            "desired_state": found.map(|found| found.spec.desired_state),
            "placement": found.and_then(|found| found.spec.placement.as_ref()),
            "instance": found.and_then(|found| found.status.instance.as_ref()),
            "reason": self.reason,
            "message": self.message,
            "unresponsive": self.unresponsive.as_ref().map(Unresponsive::json),
            "orphan": self.is_orphan,
            "labels": found.map(|found| &found.spec.labels),
            "created": found.map(|found| &found.spec.created_timestamp),
            "latest_checkpoint": found.and_then(|found| found.latest_sandbox_checkpoint.as_ref()).map(|latest| &latest.path),
            "last_checkpointed": found.and_then(|found| found.last_checkpointed.as_ref()),
        })
    }
}

pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Pending => "pending",
        Phase::Running => "running",
        Phase::Checkpointed => "checkpointed",
        Phase::Failed => "failed",
    }
}

pub fn state_name(state: DesiredState) -> &'static str {
    match state {
        DesiredState::Running => "running",
        DesiredState::Checkpointed => "checkpointed",
        DesiredState::HandedOff => "handed_off",
        DesiredState::Deleted => "deleted",
    }
}

/// Formats in the largest whole unit.
pub fn age(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        86_400.. => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_short() {
        let shown = [3, 61, 7200, 200_000].map(|seconds| age(Duration::from_secs(seconds)));
        assert_eq!(shown, ["3s", "1m", "2h", "2d"]);
    }

    #[test]
    fn filters_are_read_or_refused() {
        assert_eq!(parse_label("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(parse_label("a").is_err());
        assert_eq!(parse_phase("Running"), Ok(ShownPhase::Reported(Phase::Running)));
        assert_eq!(parse_phase("Unresponsive"), Ok(ShownPhase::Unresponsive));
        assert!(parse_phase("dancing").is_err());
    }
}
