//! The page for operators: every command on it exists, and every field of the metadata is on it.

use baton::{cli::Cli, config};
use baton_protocol::{
    id::{CheckpointId, InstanceId, Nonce, SandboxId},
    metadata::{Metadata, SandboxStatus, Spec},
    reason::Reason,
    trace::Traceparent,
};
use clap::Parser;

use crate::repo_files::read;

fn page() -> String {
    read("docs/operate.md")
}

fn id() -> SandboxId {
    SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap()
}

#[test]
fn every_command_on_the_page_exists() {
    let checkpoint = CheckpointId::new(&id(), 1, 1, &Nonce::from_bits([1; 16]));
    let mut count = 0;
    let page = page();
    // A recipe may set variables before the command, as a shell has it.
    let is_setting = |word: &&str| word.split_once('=').is_some_and(|(name, _)| config::find(name).is_some());
    for words in page.lines().map(|line| line.split_whitespace().skip_while(is_setting).collect::<Vec<_>>()) {
        let line = words.join(" ");
        if !line.starts_with("baton ") {
            continue;
        }
        let words = words.into_iter().map(|word| match word {
            "ID" => id().to_string(),
            "CHECKPOINT" => checkpoint.to_string(),
            word => word.to_owned(),
        });
        if let Err(error) = Cli::try_parse_from(words) {
            panic!("{line}: {error}");
        }
        if let Some(reason) = line.strip_prefix("baton explain ") {
            assert!(Reason::find(reason).is_some(), "{line}");
        }
        count += 1;
    }
    assert!(count > 15, "only {count} commands were found");
}

#[test]
fn every_field_of_the_metadata_is_on_the_page() {
    let mut spec = Spec::new(id(), String::new(), String::new(), InstanceId::from_bits([1; 16]));
    spec.traceparent = Some(Traceparent { trace: [1; 16], span: [1; 8], sampled: true });
    let last_checkpointed = Some(String::new());
    let record =
        Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed, status: SandboxStatus::default() };
    let record = serde_json::to_value(&record).unwrap();
    let page = page();
    for field in record.as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{field}`")), "{field} is not explained");
    }
}
