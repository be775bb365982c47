//! `baton edit`: changes the spec of a sandbox, checked before it is written, by compare-and-set.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use baton_protocol::id::SandboxId;
use serde_json::{Map, Value};

use super::{
    context::CommandContext,
    edit_fields::{HOLDER_FIELDS, changed_fields, check_fields, set_fields, spec_of},
    edit_outcome::{Expected, wait_for_outcome},
    global_options::ContextOption,
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
/// and a concurrent change is never overwritten. The command then waits until the change has taken effect. Fields that
/// are not an operator's, and fields that do not exist, are refused without --force.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton edit 0b9f\n  baton edit 0b9f --set desired_state=running --set placement=null\n  \
    baton edit 0b9f --set labels.team=blue --set ttl=86400\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct EditArgs {
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
    /// Set a field without opening an editor; the value is JSON, otherwise text; repeatable
    #[arg(long, value_name = "FIELD=VALUE", value_parser = parse_setting)]
    pub set: Vec<(String, Value)>,
    /// Also change fields that are not an operator's, and store fields that do not exist
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    pub context: ContextOption,
}

fn parse_setting(text: &str) -> std::result::Result<(String, Value), &'static str> {
    let (name, value) = text.split_once('=').ok_or("write it as FIELD=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

pub async fn edit(args: EditArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage(&args.context)?;
    let id = storage.sandbox_id(&args.sandbox).await?;
    let editor = context.variable("VISUAL").or_else(|| context.variable("EDITOR")).unwrap_or_else(|| "vi".to_owned());
    edit_metadata(&storage, &id, &args, &editor).await?.report()
}

/// Without fields to set, the metadata is edited in `editor`.
pub async fn edit_metadata(
    storage: &StorageAdmin,
    id: &SandboxId,
    args: &EditArgs,
    editor: &str,
) -> Result<AdminResult> {
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
    check_fields(&shown, &after, args.force)?;
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
    let spec_in = |record: &Map<String, Value>| parse(id, Value::Object(record.clone()).to_string().as_bytes());
    // What could not be parsed before is mended now.
    let before = spec_in(&before).ok().map(|found| found.spec);
    let expected = Expected::of(before.as_ref(), &spec_in(&after)?.spec);
    wait_for_outcome(storage, id, &expected, args.wait.timeout).await
}

async fn read(storage: &StorageAdmin, id: &SandboxId) -> Result<(Map<String, Value>, Version)> {
    let Some((bytes, version)) = storage.records.raw(id).await? else {
        if storage.lock(id).await?.is_none() {
            bail!("{id} does not exist");
        }
        bail!("{id} has no metadata: `baton repair {id}` writes it again");
    };
    let record = serde_json::from_slice(&bytes)
        .map_err(|error| anyhow!("{}", storage_admin::describe_unreadable(id, &error.to_string())))?;
    Ok((record, version))
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
                screen::report(format_args!("{error:#}\nPress Enter to edit again, or Ctrl-C to discard the changes."));
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
    let shown = |value: Option<&Value>| value.map_or("(nothing)".to_owned(), ToString::to_string);
    let changed = changed_fields(before, after).into_iter();
    changed.map(|key| format!("{key}: {} → {}", shown(before.get(key)), shown(after.get(key)))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_setting_has_a_name_and_a_value_that_is_json_or_text() {
        assert_eq!(parse_setting("ttl=60"), Ok(("ttl".to_owned(), json!(60))));
        assert_eq!(parse_setting("placement=null"), Ok(("placement".to_owned(), Value::Null)));
        assert_eq!(parse_setting("labels.team=blue"), Ok(("labels.team".to_owned(), json!("blue"))));
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
