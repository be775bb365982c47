//! `baton handoff`: has the instance that runs a sandbox release it, for the next attach or for a named
//! instance, through a server or through the storage.

use std::{collections::BTreeSet, process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Metadata, Phase, Spec},
    reason::Reason,
};
use futures::{StreamExt, stream};
use serde_json::json;

use super::{
    backend::ServerOrStorage,
    checkpoint::release,
    context::CommandContext,
    global_options::OutputOption,
    sandbox_client::{SandboxClient, SandboxOptions, VerbOutput},
    storage_admin::{self, AdminResult, POLL_INTERVAL, StorageAdmin, WaitArgs},
};

/// How many sandboxes are read concurrently to find the instances they name.
const CONCURRENT_READS: usize = 32;

/// Move a sandbox off its instance
///
/// Commands keep running in the sandbox. The instance that the next client attaches to takes the sandbox, or the
/// instance that --to names.
///
/// If the storage is configured, this command works on the storage and prints one line in any output format. With
/// --url, or without storage, it asks the server, and always waits for the answer. With a context that names both, it
/// asks the server if the sandbox's token is saved here and --to is not given.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton handoff 0b9f\n  baton handoff --no-wait 0b9f\n  baton handoff 0b9f --to inst-5f3a\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct HandoffArgs {
    /// Instance that takes the sandbox, or the beginning of its id; storage only
    #[arg(long, value_name = "INSTANCE")]
    pub to: Option<String>,
    /// Allow an instance that no stored sandbox has been on; --to must be its whole id
    #[arg(long, requires = "to")]
    pub force: bool,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
}

pub async fn handoff(args: HandoffArgs, context: &CommandContext) -> Result<ExitCode> {
    let client = context.sandbox(&args.options)?;
    let backend = context.backend(&args.options.server, Some(&args.sandbox))?;
    let backend = match args.to {
        Some(_) => backend.preferring_storage(),
        None => backend.preferring_server(&client, &args.sandbox)?,
    };
    match backend {
        ServerOrStorage::Server => handoff_by_server(&args, &client).await,
        ServerOrStorage::Storage(storage) => {
            storage.warn_of_output("baton handoff", args.output.format);
            let id = storage.sandbox_id(&args.sandbox).await?;
            let verdict = match &args.to {
                None => release(&storage, &id, DesiredState::HandedOff, args.wait).await?,
                Some(to) => move_to(&storage, &id, to, args.force, args.wait).await?,
            };
            verdict.report()
        }
    }
}

async fn handoff_by_server(args: &HandoffArgs, client: &SandboxClient) -> Result<ExitCode> {
    if args.to.is_some() {
        bail!(
            "--to needs the storage: set its variables (see `baton config`) or use a context that has one, and omit --url"
        );
    }
    client
        .request(&args.sandbox, args.output.format, async |sandbox, _| {
            let before = sandbox.instance();
            sandbox.handoff().await?;
            let after = sandbox.instance();
            let text = after.as_ref().map_or_else(String::new, |after| format!("{after}\n"));
            Ok(VerbOutput { text, json: json!({"sandbox_id": sandbox.id(), "from": before, "to": after}) })
        })
        .await
}

/// Orders a sandbox to an instance, and waits until it runs there or it is clear why not.
pub async fn move_to(
    storage: &StorageAdmin,
    id: &SandboxId,
    to: &str,
    force: bool,
    wait: WaitArgs,
) -> Result<AdminResult> {
    let target = match choose(&known_instances(storage).await?, to, force) {
        Ok(target) => target,
        Err(why) => return Ok(AdminResult::Refused(why)),
    };
    if let Some(OrderProgress::Arrived) = storage.lock(id).await?.map(|lock| progress_of(&lock, None, &target)) {
        return Ok(AdminResult::Done(format!("{id} is on {target} already")));
    }
    let written = storage.records.edit_for_request(id, None, &|spec| order(spec, &target)).await?;
    let spec = written.with_context(|| format!("{id} does not exist"))?;
    if spec.desired_state == DesiredState::Deleted {
        return Ok(AdminResult::Refused(format!("{id} is being deleted")));
    }
    if wait.no_wait {
        return Ok(AdminResult::Done(format!("{id} was ordered to {target}")));
    }
    wait_until_there(storage, id, &target, wait.timeout).await
}

/// Writes the order to the spec; returns whether anything changed.
fn order(spec: &mut Spec, target: &InstanceId) -> bool {
    let is_ordered = spec.desired_state == DesiredState::Running && spec.open_order() == Some(target);
    if is_ordered || spec.desired_state == DesiredState::Deleted {
        return false;
    }
    spec.desired_state = DesiredState::Running;
    spec.placement = Some(target.clone());
    // The instance's earlier claim is not this order.
    spec.claim = None;
    true
}

/// The progress of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OrderProgress {
    Arrived,
    /// The sandbox will not arrive until something changes.
    Refused(String),
    /// What the order waits for.
    Waiting(String),
}

async fn wait_until_there(
    storage: &StorageAdmin,
    id: &SandboxId,
    target: &InstanceId,
    timeout: Duration,
) -> Result<AdminResult> {
    let end = storage.clock.now() + timeout;
    let mut reported = String::new();
    loop {
        let Some(lock) = storage.lock(id).await? else {
            return Ok(AdminResult::Refused(storage_admin::describe_reason(id, Reason::LockMissing)));
        };
        let found = storage.find(id).await?;
        match progress_of(&lock, Some(&found), target) {
            OrderProgress::Arrived => return Ok(AdminResult::Done(format!("{id} runs on {target}"))),
            OrderProgress::Refused(why) => {
                return Ok(AdminResult::Refused(format!("{id} does not run on {target}: {why}")));
            }
            OrderProgress::Waiting(line) if line != reported => {
                storage.notify(&line);
                reported = line;
            }
            OrderProgress::Waiting(_) => {}
        }
        if storage.clock.now() >= end {
            return Ok(AdminResult::Late(format!("{id} does not run on {target} yet: {reported}")));
        }
        storage.clock.sleep(POLL_INTERVAL).await;
    }
}

/// Without metadata, reports only whether the sandbox has arrived.
fn progress_of(lock: &Lock, found: Option<&Metadata>, target: &InstanceId) -> OrderProgress {
    let holder = lock.lease.as_ref().map(|lease| &lease.owner);
    let is_there = holder == Some(target);
    let Some(Metadata { spec, status, .. }) = found else {
        return if is_there { OrderProgress::Arrived } else { OrderProgress::Waiting(String::new()) };
    };
    let why = format!("{}: {}", status.reason, status.message);
    let is_final = matches!(
        Reason::find(&status.reason),
        Some(Reason::NotCheckpointable | Reason::InvalidSpec | Reason::OtherStore | Reason::LockMissing)
    );
    match &spec.placement {
        _ if lock.purged || spec.desired_state == DesiredState::Deleted => {
            OrderProgress::Refused("it was deleted".to_owned())
        }
        _ if is_there && status.phase == Phase::Running && status.instance.as_ref() == Some(target) => {
            OrderProgress::Arrived
        }
        Some(other) if other != target => OrderProgress::Refused(format!("it was requested on {other} meanwhile")),
        None => OrderProgress::Refused("its placement was changed meanwhile".to_owned()),
        _ if is_final => OrderProgress::Refused(why),
        // The instance had it and could not start it.
        _ if holder.is_none() && spec.open_order().is_none() && status.phase == Phase::Failed => {
            OrderProgress::Refused(why)
        }
        _ if is_there => OrderProgress::Waiting(format!("{target} starts it")),
        _ => {
            let from = holder.map_or_else(String::new, |holder| format!(" from {holder}"));
            let why = if status.reason.is_empty() { String::new() } else { format!(" ({})", status.reason) };
            OrderProgress::Waiting(format!("waiting for {target} to take it{from}{why}"))
        }
    }
}

/// Every instance that a stored sandbox is on, waits for, or reports to be on.
async fn known_instances(storage: &StorageAdmin) -> Result<BTreeSet<InstanceId>> {
    let ids = storage.records.survey().await?.into_keys();
    let named = stream::iter(ids).map(|id| async move {
        let (lock, found) = futures::join!(storage.lock(&id), storage.records.find(&id));
        let lock = lock.ok().flatten();
        let owner = lock.as_ref().and_then(|lock| lock.lease.as_ref()).map(|lease| lease.owner.clone());
        let waiter = lock.as_ref().and_then(|lock| lock.waiter.as_ref()).map(|waiter| waiter.instance.clone());
        let running_on = found.ok().flatten().and_then(|found| found.status.instance);
        [owner, waiter, running_on]
    });
    let named: Vec<_> = named.buffer_unordered(CONCURRENT_READS).collect().await;
    Ok(named.into_iter().flatten().flatten().collect())
}

/// The one instance that matches, or why the choice is not clear.
fn choose(known: &BTreeSet<InstanceId>, text: &str, force: bool) -> Result<InstanceId, String> {
    let whole = InstanceId::parse(text).ok();
    if let Some(whole) = whole {
        return if force || known.contains(&whole) {
            Ok(whole)
        } else {
            Err(format!("no stored sandbox has been on {whole}: if the instance exists, use --force"))
        };
    }
    let begins = |id: &&InstanceId| {
        let id = id.as_str();
        id.starts_with(text) || id.strip_prefix("inst-").is_some_and(|rest| rest.starts_with(text))
    };
    let meant: Vec<_> = known.iter().filter(begins).collect();
    match meant[..] {
        [one] => Ok(one.clone()),
        [] => Err(format!("no instance that a stored sandbox has been on begins with `{}`", baton_files::plain(text))),
        _ => {
            let meant: Vec<_> = meant.iter().map(|id| id.as_str()).collect();
            Err(format!("`{text}` is ambiguous: it may be any of {}", meant.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(text: &str) -> InstanceId {
        InstanceId::parse(&format!("inst-{text:0<32}")).unwrap()
    }

    #[test]
    fn an_instance_is_meant_by_its_id_or_by_a_beginning_that_only_one_has() {
        let known: BTreeSet<_> = ["ab1", "ab2", "c"].map(instance).into();
        for text in ["inst-c", "c", instance("c").as_str()] {
            assert_eq!(choose(&known, text, false), Ok(instance("c")));
        }
        assert!(choose(&known, "ab", false).unwrap_err().contains(instance("ab2").as_str()));
        assert!(choose(&known, "inst-d", false).unwrap_err().contains("inst-d"));
        assert!(choose(&known, "d", true).is_err(), "a beginning of nothing is nobody");
        let stranger = instance("d");
        assert!(choose(&known, stranger.as_str(), false).unwrap_err().contains("--force"));
        assert_eq!(choose(&known, stranger.as_str(), true), Ok(stranger));
    }

    #[test]
    fn an_order_is_written_once_and_never_over_a_deletion() {
        let [one, two] = ["1", "2"].map(instance);
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let mut spec = Spec::new(id, String::new(), String::new(), one.clone());
        spec.desired_state = DesiredState::Checkpointed;
        assert!(order(&mut spec, &two));
        assert_eq!((spec.desired_state, spec.open_order()), (DesiredState::Running, Some(&two)));
        assert!(!order(&mut spec, &two));
        // An order counts even for the instance that a client claimed the sandbox for last.
        assert!(order(&mut spec, &one));
        assert_eq!(spec.open_order(), Some(&one));
        spec.desired_state = DesiredState::Deleted;
        assert!(!order(&mut spec, &two));
    }
}
