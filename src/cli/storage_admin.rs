//! Works on the server's storage, configured by the same variables, without a server.
//! It writes to a lock as an instance would, by the rules of the lease.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use baton_protocol::{
    id::SandboxId,
    lock::Lock,
    metadata::{DesiredState, Metadata, Spec},
    reason::Reason,
};

use super::{global_options::OutputFormat, sandbox_name::SandboxName, screen, serve, time_value::parse_time};
use crate::{
    clock::SharedClock,
    config::{
        Config, LeaseTimes,
        variables::{CHECKPOINT_AND_RESTORE_PATH, SANDBOX_CHECKPOINT_BUCKET, SANDBOX_METADATA_BUCKET},
    },
    storage::{
        checkpoints::Checkpoints,
        garbage_collector::GarbageCollector,
        lease::{
            self, LeaseHandle,
            lease_rules::{Identity, LeaseState},
        },
        lock_object::Unusable,
        memory::Memory,
        records::{Records, StoreKind},
        signature::Seals,
        stores::Stores,
    },
};

#[derive(Clone, Debug)]
pub struct StorageAdmin {
    pub clock: SharedClock,
    /// The identity under which a command acquires a lease, if it must.
    pub identity: Identity,
    pub records: Records,
    pub upkeep: GarbageCollector,
    pub times: LeaseTimes,
    /// Suppresses progress messages on standard error.
    pub is_quiet: bool,
}

/// How long a command waits for the outcome.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct WaitArgs {
    /// Return without waiting for the outcome
    #[arg(long)]
    pub no_wait: bool,
    /// Stop waiting after this time, as in `30s`; the request stays
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_time)]
    pub timeout: Duration,
}

/// The result of a command on the storage, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminResult {
    /// Exit code 0: the command succeeded.
    Done(String),
    /// Exit code 3: the command cannot succeed until something changes.
    Refused(String),
    /// Exit code 4: the outcome was not reached in time.
    Late(String),
}

impl AdminResult {
    pub fn exit(&self) -> u8 {
        match self {
            Self::Done(_) => 0,
            Self::Refused(_) => 3,
            Self::Late(_) => 4,
        }
    }

    pub fn line(&self) -> &str {
        match self {
            Self::Done(line) | Self::Refused(line) | Self::Late(line) => line,
        }
    }

    /// Prints the line and returns the exit code.
    pub fn report(&self) -> Result<ExitCode> {
        screen::print(&format!("{}\n", self.line()))?;
        Ok(ExitCode::from(self.exit()))
    }
}

/// The end of the help of every verb that works on the storage.
pub const EXIT_CODES_HELP: &str = "The storage is configured by the variables of the server (see `baton config`), or by a context.\n\
    Exit codes: 0 done, 1 error, 2 wrong command line, 3 refused with a reason, 4 timed out.";

/// Whether an instance still runs a sandbox, after waiting for its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    Released,
    /// Its holder is unresponsive.
    HolderDead,
    Purged,
    /// Its holder states why it does not release the sandbox.
    Refused(String),
    TimedOut,
}

/// The polling interval while a command waits.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);

impl StorageAdmin {
    /// Fails if no storage is configured.
    pub fn open(config: &Config, clock: &SharedClock) -> Result<Self> {
        let seals = Seals::of_command(config.hmac_keys.clone());
        let stores = Stores::open(&config.storage, clock).sealed_by(seals);
        let times = config.lease;
        let checkpoints = stores.of_checkpoints();
        let memory = Arc::new(Memory::new(clock.clone()));
        let records = serve::records(stores, memory, clock, times);
        if !records.can_checkpoint() {
            bail!(
                "no storage is configured: set {SANDBOX_METADATA_BUCKET} and {SANDBOX_CHECKPOINT_BUCKET}, or {CHECKPOINT_AND_RESTORE_PATH}, or use a context that has a storage (`baton context`)"
            );
        }
        Ok(Self::new(clock.clone(), records, checkpoints, times, config.keep_checkpoints as usize))
    }

    pub fn new(
        clock: SharedClock,
        records: Records,
        checkpoints: Option<Checkpoints>,
        times: LeaseTimes,
        keep: usize,
    ) -> Self {
        let identity = Identity { me: clock.instance_id(), predecessor: None };
        let upkeep = GarbageCollector { records: records.clone(), checkpoints, clock: clock.clone(), keep };
        Self { clock, identity, records, upkeep, times, is_quiet: false }
    }

    /// Writes a progress message to standard error.
    pub fn notify(&self, text: &str) {
        if !self.is_quiet {
            screen::report(format_args!("{text}"));
        }
    }

    /// Says that a verb prints one line on the storage, whatever the format.
    pub fn warn_of_output(&self, verb: &str, format: OutputFormat) {
        if format != OutputFormat::Table {
            self.notify(&format!("baton: --output has no effect: on the storage, `{verb}` prints one line"));
        }
    }

    pub fn checkpoints(&self) -> Result<&Checkpoints> {
        self.upkeep.checkpoints.as_ref().context("no storage for checkpoints is configured")
    }

    pub fn lease_handle(&self, id: &SandboxId) -> Result<LeaseHandle> {
        Ok(self.records.lock_file(id, StoreKind::Durable, &self.identity)?)
    }

    pub async fn lock(&self, id: &SandboxId) -> Result<Option<Lock>> {
        self.usable_lock(id).await?.map_err(|unusable| anyhow!("{}", describe_unusable(id, &unusable)))
    }

    /// Like [`lock`](Self::lock), for a command that can report more about an unusable lock.
    pub async fn usable_lock(&self, id: &SandboxId) -> Result<Result<Option<Lock>, Unusable>> {
        let mut file = self.lease_handle(id)?;
        match file.read().await {
            Ok(()) => Ok(Ok(file.lock().cloned())),
            Err(lease::Error::Missing) => Ok(Ok(None)),
            Err(lease::Error::Unusable(unusable)) => Ok(Err(unusable)),
            Err(error) => Err(error.into()),
        }
    }

    /// The sandbox that `text` names, whole or by the beginning of its id.
    pub async fn sandbox_id(&self, text: &str) -> Result<SandboxId> {
        let name = SandboxName::parse(text)?;
        self.locate(&name).await?.with_context(|| format!("no sandbox is stored whose id begins with `{text}`"))
    }

    /// Returns `None` if no stored sandbox is meant. A whole id is not looked for.
    pub async fn locate(&self, name: &SandboxName) -> Result<Option<SandboxId>> {
        match name.whole() {
            Some(id) => Ok(Some(id)),
            None => name.choose(self.records.beginning_with(name.beginning()).await?),
        }
    }

    /// The metadata; the error states what is wrong with it, or that it does not exist.
    pub async fn find(&self, id: &SandboxId) -> Result<Metadata> {
        self.records.find(id).await?.with_context(|| format!("{id} does not exist"))
    }

    /// Writes the desired state. A sandbox that is being deleted stays so.
    pub async fn set_desired_state(&self, id: &SandboxId, state: DesiredState) -> Result<Spec> {
        let change = |spec: &mut Spec| {
            let is_change = spec.desired_state != state && spec.desired_state != DesiredState::Deleted;
            if is_change {
                spec.desired_state = state;
            }
            is_change
        };
        let spec =
            self.records.edit_for_request(id, None, &change).await?.with_context(|| format!("{id} does not exist"))?;
        if spec.desired_state != state {
            bail!("{id} is being deleted");
        }
        Ok(spec)
    }

    /// Waits until no instance runs the sandbox. Reports the holder whenever it changes.
    pub async fn wait_for_release(&self, id: &SandboxId, file: &mut LeaseHandle, timeout: Duration) -> Result<Release> {
        let end = self.clock.now() + timeout;
        let mut reported = String::new();
        loop {
            match file.read().await {
                Ok(()) => {}
                // Transient errors of the store are retried.
                Err(lease::Error::Store(error)) if error.is_passing() => {}
                Err(error) => match error.reason() {
                    Some(why) => return Ok(Release::Refused(describe_reason(id, why))),
                    None => return Err(error.into()),
                },
            }
            let leased = file.lock().and_then(|lock| lock.lease.clone());
            match (file.state(), leased) {
                (Some(LeaseState::Purged), _) => return Ok(Release::Purged),
                (Some(LeaseState::Free), None) => return Ok(Release::Released),
                (Some(LeaseState::Free), Some(_)) => return Ok(Release::HolderDead),
                (Some(LeaseState::Theirs | LeaseState::Ours | LeaseState::Late) | None, leased) => {
                    let status = self.records.find(id).await.ok().flatten().map(|found| found.status);
                    let status = status.unwrap_or_default();
                    let problem = Reason::find(&status.reason);
                    if let Some(Reason::NotCheckpointable | Reason::InvalidSpec | Reason::OtherStore) = problem {
                        return Ok(Release::Refused(format!("{}: {}", status.reason, status.message)));
                    }
                    let holder = leased.map_or("another instance".to_owned(), |lease| lease.owner.to_string());
                    let why = if status.reason.is_empty() { String::new() } else { format!(" ({})", status.reason) };
                    let line = format!("waiting for {holder}{why}");
                    if line != reported {
                        self.notify(&line);
                        reported = line;
                    }
                }
            }
            if self.clock.now() >= end {
                return Ok(Release::TimedOut);
            }
            self.clock.sleep(POLL_INTERVAL).await;
        }
    }
}

/// A reason as commands print it, with what to do about it.
pub fn describe_reason(id: &SandboxId, reason: Reason) -> String {
    format!("{reason}: {}", remedy(id, reason))
}

/// The remedy of a reason, for one sandbox.
pub fn remedy(id: &SandboxId, reason: Reason) -> String {
    reason.remedy().replace(" ID", &format!(" {id}"))
}

/// Why a lock cannot be used, and the command that helps.
pub fn describe_unusable(id: &SandboxId, unusable: &Unusable) -> String {
    format!("{}: {unusable}: {}", unusable.reason(), unusable_remedy(id, unusable))
}

/// The command that helps with an unusable lock.
pub fn unusable_remedy(id: &SandboxId, unusable: &Unusable) -> String {
    match unusable {
        Unusable::Unsigned => format!("if an instance of yours wrote it, `baton repair {id} --sign` signs it as it is"),
        Unusable::Garbled(_) | Unusable::Older => format!(
            "restore the last good lock.json if the bucket can; otherwise make sure that no instance runs the sandbox, \
             and `baton repair {id} --nobody-runs-it` replaces it"
        ),
    }
}

/// Why metadata that is no JSON object cannot be used, and the command that helps.
pub fn describe_unreadable(id: &SandboxId, why: &str) -> String {
    let reason = Reason::InvalidSpec;
    format!("{reason}: metadata.json is not a JSON object ({why}): {}", unreadable_remedy(id))
}

/// The command that helps with metadata that is no JSON object.
pub fn unreadable_remedy(id: &SandboxId) -> String {
    format!(
        "restore its last good version if the bucket can; otherwise `baton repair {id} --replace-metadata` writes it \
         again, with a new token and without labels, limits and env"
    )
}
