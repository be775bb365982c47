//! `baton edit`: changes the spec of a sandbox, checked before it is written, by compare-and-set.

use std::{collections::BTreeSet, fmt::Write as _, process::ExitCode, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use baton_protocol::{
    id::SandboxId,
    metadata::{Phase, SandboxStatus},
};
use serde_json::{Map, Value};

use super::{
    context::CommandContext,
    screen,
    storage_admin::{self, AdminResult, StorageAdmin, WaitArgs},
};
use crate::storage::{
    records::parse,
    store::{Precondition, Version},
};

/// Change the metadata of a sandbox
///
/// Opens the metadata in $EDITOR, or sets single fields with --set. The new metadata is checked before it is written,
/// and a concurrent change is never overwritten. The command then reports the outcome.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton edit ID\n  baton edit ID --set desired_state=running --set placement=null\n  \
    baton edit ID --set labels.team=blue --set ttl=86400\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct EditArgs {
    /// Sandbox id
    pub id: SandboxId,
    /// Set a field without opening an editor; the value is JSON, otherwise text; repeatable
    #[arg(long, value_name = "FIELD=VALUE", value_parser = parse_setting)]
    pub set: Vec<(String, Value)>,
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// The fields that only the lease holder writes.
const HOLDER_FIELDS: [&str; 3] = ["status", "latest_sandbox_checkpoint", "last_checkpointed"];
/// The holder reads the metadata every five seconds, and reports the outcome soon after.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(15);

fn parse_setting(text: &str) -> std::result::Result<(String, Value), &'static str> {
    let (name, value) = text.split_once('=').ok_or("write it as FIELD=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

pub async fn edit(args: EditArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage()?;
    let editor = context.variable("VISUAL").or_else(|| context.variable("EDITOR")).unwrap_or_else(|| "vi".to_owned());
    edit_metadata(&storage, &args, &editor).await?.report()
}

/// Without fields to set, the metadata is edited in `editor`.
pub async fn edit_metadata(storage: &StorageAdmin, args: &EditArgs, editor: &str) -> Result<AdminResult> {
    let id = &args.id;
    let (before, version) = read(storage, id).await?;
    let shown = spec_of(&before);
    let after = if args.set.is_empty() {
        match open_editor(editor, id, &shown).await? {
            Some(after) => after,
            None => return Ok(AdminResult::Done("nothing was changed".to_owned())),
        }
    } else {
        set_fields(shown.clone(), &args.set)?
    };
    let changes = changes(&shown, &after);
    if changes.is_empty() {
        return Ok(AdminResult::Done("nothing was changed".to_owned()));
    }
    let after = without_old_trace(&shown, after);
    write(storage, id, &before, version, &shown, &after).await?;
    for change in &changes {
        storage.notify(change);
    }
    if args.wait.no_wait {
        return Ok(AdminResult::Done(format!("{id} is changed")));
    }
    let status = before.get("status").cloned().and_then(|status| serde_json::from_value(status).ok());
    wait_for_outcome(storage, id, &status.unwrap_or_default(), args.wait.timeout).await
}

async fn read(storage: &StorageAdmin, id: &SandboxId) -> Result<(Map<String, Value>, Version)> {
    let (bytes, version) =
        storage.records.raw(id).await?.with_context(|| format!("{id} has no metadata: `baton repair {id}`"))?;
    let record = serde_json::from_slice(&bytes).with_context(|| {
        format!("the metadata of {id} is not a JSON object: replace it with a good copy, or delete it and use `baton repair {id}`")
    })?;
    Ok((record, version))
}

fn spec_of(record: &Map<String, Value>) -> Map<String, Value> {
    record
        .iter()
        .filter(|(key, _)| !HOLDER_FIELDS.contains(&key.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}

fn set_fields(mut spec: Map<String, Value>, settings: &[(String, Value)]) -> Result<Map<String, Value>> {
    for (name, value) in settings {
        let mut at = &mut spec;
        let mut parts = name.split('.').peekable();
        while let Some(part) = parts.next() {
            if HOLDER_FIELDS.contains(&part) && parts.peek().is_none() {
                bail!("only the holder writes `{part}`");
            }
            if parts.peek().is_none() {
                at.insert(part.to_owned(), value.clone());
                break;
            }
            let below = at.entry(part).or_insert_with(|| Value::Object(Map::new()));
            at = below.as_object_mut().with_context(|| format!("`{part}` has no fields"))?;
        }
    }
    Ok(spec)
}

/// Removes the trace of an earlier request: an operator's change is not part of it.
fn without_old_trace(before: &Map<String, Value>, mut after: Map<String, Value>) -> Map<String, Value> {
    const TRACE: &str = "traceparent";
    let is_request = ["desired_state", "placement", "requests"].iter().any(|key| before.get(*key) != after.get(*key));
    if is_request && before.get(TRACE) == after.get(TRACE) {
        after.remove(TRACE);
    }
    after
}

/// Returns `None` if nothing was changed.
async fn open_editor(editor: &str, id: &SandboxId, shown: &Map<String, Value>) -> Result<Option<Map<String, Value>>> {
    let file = tempfile::Builder::new().prefix("baton-").suffix(".json").tempfile()?;
    let text = format!("{:#}\n", Value::Object(shown.clone()));
    tokio::fs::write(file.path(), &text).await?;
    loop {
        let status = tokio::process::Command::new("sh")
            .args(["-c", &format!("{editor} \"$1\""), "sh"])
            .arg(file.path())
            .status()
            .await
            .with_context(|| format!("the editor `{editor}` does not start: set EDITOR"))?;
        if !status.success() {
            bail!("the editor failed: nothing was changed");
        }
        let edited = tokio::fs::read_to_string(file.path()).await?;
        if edited == text {
            return Ok(None);
        }
        match check(id, &edited) {
            Ok(spec) => return Ok(Some(spec)),
            // Without a terminal the mistake cannot be corrected.
            Err(error) if !std::io::IsTerminal::is_terminal(&std::io::stdin()) => return Err(error),
            Err(error) => {
                screen::say(format_args!("{error:#}\nPress Enter to edit again, or Ctrl-C to discard the changes."));
                let read = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
                if read.await?? == 0 {
                    return Err(error);
                }
            }
        }
    }
}

fn check(id: &SandboxId, text: &str) -> Result<Map<String, Value>> {
    parse(id, text.as_bytes())?;
    let record: Map<String, Value> = serde_json::from_str(text)?;
    Ok(spec_of(&record))
}

/// Writes the edited spec over the one that was shown. If only the holder's fields changed since, they are kept.
async fn write(
    storage: &StorageAdmin,
    id: &SandboxId,
    before: &Map<String, Value>,
    version: Version,
    shown: &Map<String, Value>,
    after: &Map<String, Value>,
) -> Result<()> {
    let (mut record, mut version) = (before.clone(), version);
    for _ in 0..10 {
        let mut next = after.clone();
        next.extend(
            record.iter().filter(|(key, _)| HOLDER_FIELDS.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())),
        );
        let text = format!("{:#}", Value::Object(next));
        check(id, &text).map_err(|error| anyhow!("the metadata was not written: {error:#}"))?;
        if storage.records.put_raw(id, text.into(), Precondition::Is(version)).await? {
            return Ok(());
        }
        (record, version) = read(storage, id).await?;
        if spec_of(&record) != *shown {
            bail!("{id} was changed in the meantime: nothing was written; try again");
        }
    }
    bail!("{id} changes too often: nothing was written");
}

fn changes(before: &Map<String, Value>, after: &Map<String, Value>) -> Vec<String> {
    let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let shown = |value: Option<&Value>| value.map_or("(nothing)".to_owned(), ToString::to_string);
    let changed = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    changed.map(|key| format!("{key}: {} → {}", shown(before.get(key)), shown(after.get(key)))).collect()
}

/// Reports the outcome, as far as it shows soon.
async fn wait_for_outcome(
    storage: &StorageAdmin,
    id: &SandboxId,
    before: &SandboxStatus,
    timeout: Duration,
) -> Result<AdminResult> {
    let seen = |status: &SandboxStatus| (status.observed_spec_sha256.clone(), status.phase, status.reason.clone());
    let before = seen(before);
    let end = storage.clock.now() + timeout.min(OUTCOME_TIMEOUT);
    loop {
        let lock = storage.lock(id).await?;
        let found = match storage.records.find(id).await {
            Ok(found) => found,
            Err(error) if error.reason().is_some() => return Ok(AdminResult::Refused(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let Some(found) = found else { return Ok(AdminResult::Done(format!("{id} is deleted"))) };
        let mut line = format!("{id} is {}", super::rows::phase_name(found.status.phase));
        if !found.status.reason.is_empty() {
            let _ = write!(line, ", {}: {}", found.status.reason, found.status.message);
        }
        let Some(lock) = lock else {
            return Ok(AdminResult::Refused(storage_admin::describe_reason(
                baton_protocol::reason::Reason::LockMissing,
            )));
        };
        // The status is updated a moment after the release.
        if lock.lease.is_none() && (found.status.phase != Phase::Running || storage.clock.now() >= end) {
            return Ok(AdminResult::Done(format!(
                "{line}; no instance holds it, and the next sweep of an instance picks up the change"
            )));
        }
        if lock.lease.is_some() && seen(&found.status) != before {
            let refused = !found.status.reason.is_empty();
            return Ok(if refused { AdminResult::Refused(line) } else { AdminResult::Done(line) });
        }
        if storage.clock.now() >= end {
            return Ok(AdminResult::Done(format!("{line}; its holder has not reported more yet")));
        }
        storage.clock.sleep(Duration::from_millis(250)).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_set_by_their_path_and_the_holders_are_refused() {
        let record = json!({"labels": {"a": "b"}, "ttl": null}).as_object().unwrap().clone();
        let set = |texts: &[&str]| {
            let settings: Vec<_> = texts.iter().map(|text| parse_setting(text).unwrap()).collect();
            set_fields(record.clone(), &settings)
        };
        let after = set(&["labels.team=blue", "ttl=60", "placement=null", "desired_state=checkpointed"]).unwrap();
        let expected = json!({"labels": {"a": "b", "team": "blue"}, "ttl": 60, "placement": null, "desired_state": "checkpointed"});
        assert_eq!(Value::Object(after), expected);
        assert!(set(&["status={}"]).is_err());
        assert!(set(&["ttl.x=1"]).is_err());
        assert!(parse_setting("ttl").is_err());
    }

    #[test]
    fn a_request_of_an_operator_has_no_older_trace() {
        let map = |value: Value| value.as_object().unwrap().clone();
        let before = map(json!({"desired_state": "running", "traceparent": "x", "ttl": 1}));
        let requested = map(json!({"desired_state": "deleted", "traceparent": "x", "ttl": 1}));
        assert_eq!(without_old_trace(&before, requested), map(json!({"desired_state": "deleted", "ttl": 1})));
        let touched = map(json!({"desired_state": "running", "traceparent": "x", "ttl": 2}));
        assert_eq!(without_old_trace(&before, touched.clone()), touched);
    }

    #[test]
    fn what_changed_is_said_field_by_field() {
        let (a, b) = (json!({"x": 1, "y": 2}), json!({"x": 1, "y": 3, "z": null}));
        let said = changes(a.as_object().unwrap(), b.as_object().unwrap());
        assert_eq!(said, ["y: 2 → 3", "z: (nothing) → null"]);
    }
}
