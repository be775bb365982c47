//! `baton edit`: changes the spec of a sandbox, checked before it is written, by compare-and-set.

use std::{collections::BTreeSet, fmt::Write as _, process::ExitCode, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use baton_protocol::{
    id::SandboxId,
    metadata::{Phase, Status},
};
use serde_json::{Map, Value};

use super::{
    screen,
    storage_admin::{self, StorageAdmin, Verdict, Waiting},
};
use crate::{
    config::process_environment,
    storage::{
        records::parse,
        store::{Precondition, Version},
    },
};

/// Change the metadata of a sandbox: in $EDITOR, or one field at a time with --set.
///
/// What is written is checked first, and only written over what was shown: somebody else's change in between is
/// never lost. Then it says what became of it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton edit ID\n  baton edit ID --set desired_state=running --set placement=null\n  \
    baton edit ID --set labels.team=blue --set ttl=86400\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// Set a field and open no editor; the value is JSON, or else text. May be given more than once.
    #[arg(long, value_name = "FIELD=VALUE", value_parser = setting)]
    pub set: Vec<(String, Value)>,
    #[command(flatten)]
    pub waiting: Waiting,
}

/// The fields that only the lease holder writes.
const HOLDERS: [&str; 3] = ["status", "latest_sandbox_checkpoint", "last_checkpointed"];
/// The holder reads the metadata every five seconds.
const SEEN_WITHIN: Duration = Duration::from_secs(15);

fn setting(text: &str) -> std::result::Result<(String, Value), &'static str> {
    let (name, value) = text.split_once('=').ok_or("a field is set as FIELD=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move { edit(&admin, &args).await })
}

pub async fn edit(admin: &StorageAdmin, args: &Args) -> Result<Verdict> {
    let id = &args.id;
    let (before, version) = read(admin, id).await?;
    let shown = spec_of(&before);
    let after = if args.set.is_empty() {
        match in_editor(id, &shown).await? {
            Some(after) => after,
            None => return Ok(Verdict::Done("nothing was changed".to_owned())),
        }
    } else {
        set(shown.clone(), &args.set)?
    };
    let changes = changes(&shown, &after);
    if changes.is_empty() {
        return Ok(Verdict::Done("nothing was changed".to_owned()));
    }
    let after = told_by_nobody(&shown, after);
    write(admin, id, &before, version, &shown, &after).await?;
    for change in &changes {
        admin.tell(change);
    }
    if args.waiting.no_wait {
        return Ok(Verdict::Done(format!("{id} is changed")));
    }
    let status = before.get("status").cloned().and_then(|status| serde_json::from_value(status).ok());
    outcome(admin, id, &status.unwrap_or_default(), args.waiting).await
}

async fn read(admin: &StorageAdmin, id: &SandboxId) -> Result<(Map<String, Value>, Version)> {
    let (bytes, version) =
        admin.records.raw(id).await?.with_context(|| format!("{id} has no metadata: `baton repair {id}`"))?;
    let record = serde_json::from_slice(&bytes).with_context(|| {
        format!("the metadata of {id} is not a JSON object; put a good copy over it, or delete it and use `baton repair {id}`")
    })?;
    Ok((record, version))
}

fn spec_of(record: &Map<String, Value>) -> Map<String, Value> {
    record.iter().filter(|(key, _)| !HOLDERS.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn set(mut spec: Map<String, Value>, settings: &[(String, Value)]) -> Result<Map<String, Value>> {
    for (name, value) in settings {
        let mut at = &mut spec;
        let mut parts = name.split('.').peekable();
        while let Some(part) = parts.next() {
            if HOLDERS.contains(&part) && parts.peek().is_none() {
                bail!("`{part}` is the holder's to write");
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
fn told_by_nobody(before: &Map<String, Value>, mut after: Map<String, Value>) -> Map<String, Value> {
    const TRACE: &str = "traceparent";
    let is_wish = ["desired_state", "placement", "requests"].iter().any(|key| before.get(*key) != after.get(*key));
    if is_wish && before.get(TRACE) == after.get(TRACE) {
        after.remove(TRACE);
    }
    after
}

/// Returns `None` if nothing was changed.
async fn in_editor(id: &SandboxId, shown: &Map<String, Value>) -> Result<Option<Map<String, Value>>> {
    let editor =
        process_environment("VISUAL").or_else(|| process_environment("EDITOR")).unwrap_or_else(|| "vi".to_owned());
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
            bail!("the editor ended with an error: nothing was changed");
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
                screen::say(format_args!(
                    "{error:#}\nPress Enter to edit it again, Ctrl-C to leave everything as it was."
                ));
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
    admin: &StorageAdmin,
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
            record.iter().filter(|(key, _)| HOLDERS.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())),
        );
        let text = format!("{:#}", Value::Object(next));
        check(id, &text).map_err(|error| anyhow!("not written: {error:#}"))?;
        if admin.records.put_raw(id, text.into(), Precondition::Is(version)).await? {
            return Ok(());
        }
        (record, version) = read(admin, id).await?;
        if spec_of(&record) != *shown {
            bail!("somebody else changed {id} meanwhile: nothing was written; look again");
        }
    }
    bail!("{id} is being written all the time: nothing was changed");
}

fn changes(before: &Map<String, Value>, after: &Map<String, Value>) -> Vec<String> {
    let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let shown = |value: Option<&Value>| value.map_or("(nothing)".to_owned(), ToString::to_string);
    let changed = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    changed.map(|key| format!("{key}: {} → {}", shown(before.get(key)), shown(after.get(key)))).collect()
}

/// Reports the outcome, as far as it shows soon.
async fn outcome(admin: &StorageAdmin, id: &SandboxId, before: &Status, waiting: Waiting) -> Result<Verdict> {
    let seen = |status: &Status| (status.observed_spec_sha256.clone(), status.phase, status.reason.clone());
    let before = seen(before);
    let end = admin.clock.now() + waiting.timeout.min(SEEN_WITHIN);
    loop {
        let lock = admin.lock(id).await?;
        let found = match admin.records.find(id).await {
            Ok(found) => found,
            Err(error) if error.reason().is_some() => return Ok(Verdict::Refused(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let Some(found) = found else { return Ok(Verdict::Done(format!("{id} is deleted"))) };
        let mut line = format!("{id} is {}", super::rows::phase_name(found.status.phase));
        if !found.status.reason.is_empty() {
            let _ = write!(line, ", {}: {}", found.status.reason, found.status.message);
        }
        let Some(lock) = lock else {
            return Ok(Verdict::Refused(storage_admin::reason(baton_protocol::reason::Reason::LockMissing)));
        };
        // The status is updated a moment after the release.
        if lock.lease.is_none() && (found.status.phase != Phase::Running || admin.clock.now() >= end) {
            return Ok(Verdict::Done(format!(
                "{line}; nobody holds it, and the next sweep of an instance sees the change"
            )));
        }
        if lock.lease.is_some() && seen(&found.status) != before {
            let refused = !found.status.reason.is_empty();
            return Ok(if refused { Verdict::Refused(line) } else { Verdict::Done(line) });
        }
        if admin.clock.now() >= end {
            return Ok(Verdict::Done(format!("{line}; its holder has not said more yet")));
        }
        admin.clock.sleep(Duration::from_millis(250)).await;
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
            let settings: Vec<_> = texts.iter().map(|text| setting(text).unwrap()).collect();
            set(record.clone(), &settings)
        };
        let after = set(&["labels.team=blue", "ttl=60", "placement=null", "desired_state=checkpointed"]).unwrap();
        let expected = json!({"labels": {"a": "b", "team": "blue"}, "ttl": 60, "placement": null, "desired_state": "checkpointed"});
        assert_eq!(Value::Object(after), expected);
        assert!(set(&["status={}"]).is_err());
        assert!(set(&["ttl.x=1"]).is_err());
        assert!(setting("ttl").is_err());
    }

    #[test]
    fn a_wish_of_an_operator_has_no_older_trace() {
        let map = |value: Value| value.as_object().unwrap().clone();
        let before = map(json!({"desired_state": "running", "traceparent": "x", "ttl": 1}));
        let wished = map(json!({"desired_state": "deleted", "traceparent": "x", "ttl": 1}));
        assert_eq!(told_by_nobody(&before, wished), map(json!({"desired_state": "deleted", "ttl": 1})));
        let touched = map(json!({"desired_state": "running", "traceparent": "x", "ttl": 2}));
        assert_eq!(told_by_nobody(&before, touched.clone()), touched);
    }

    #[test]
    fn what_changed_is_said_field_by_field() {
        let (a, b) = (json!({"x": 1, "y": 2}), json!({"x": 1, "y": 3, "z": null}));
        let said = changes(a.as_object().unwrap(), b.as_object().unwrap());
        assert_eq!(said, ["y: 2 → 3", "z: (nothing) → null"]);
    }
}
