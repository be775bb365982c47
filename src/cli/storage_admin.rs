//! Works on the server's storage, configured by the same variables, without a server.
//! It writes to a lock as an instance would, by the rules of the lease.

use std::{future::Future, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::SandboxId,
    lock::Lock,
    metadata::{DesiredState, Metadata, Spec},
    reason::Reason,
};

use super::{check::storage_settings, screen, serve};
use crate::{
    clock::{SharedClock, SystemClock},
    config::{self, Config},
    storage::{
        checkpoints::Checkpoints,
        gc::Upkeep,
        lease::{
            self, LeaseHandle,
            rules::{Identity, LeaseState, Times},
        },
        lock_object::Unusable,
        memory::Memory,
        records::{Place, Records},
        signature::Seals,
        stores::Stores,
    },
};

#[derive(Clone, Debug)]
pub struct StorageAdmin {
    pub clock: SharedClock,
    /// The identity under which it acquires a lease, if it must.
    pub who: Identity,
    pub records: Records,
    pub upkeep: Upkeep,
    pub times: Times,
    /// Suppresses progress messages on standard error.
    pub is_quiet: bool,
}

/// How long a command waits for what it asked for.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Waiting {
    /// Ask, and do not wait for the outcome.
    #[arg(long)]
    pub no_wait: bool,
    /// Give up waiting after this time; what was asked for stays asked for.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// The result of a command, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Exit code 0: the command succeeded.
    Done(String),
    /// Exit code 3: the command cannot succeed until something changes.
    Refused(String),
    /// Exit code 4: the outcome was not reached in time.
    Late(String),
}

impl Verdict {
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
}

/// The end of every verb's help.
pub const CODES: &str = "Storage is found by the same variables as the server's (`baton config`).\n\
    Exit codes: 0 done, 1 an error, 2 a wrong command line, 3 refused with a reason, 4 not in time.";

/// The state of a sandbox that no instance runs any more, or why one still does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rest {
    Free,
    /// Its holder is unresponsive.
    Dead,
    Purged,
    /// Its holder states why it does not release the sandbox.
    Refused(String),
    Late,
}

/// The polling interval while a command waits.
pub const LOOK: Duration = Duration::from_millis(500);

impl StorageAdmin {
    /// Configured by the environment variables.
    pub fn open() -> Result<Self> {
        let config = Config::from_env(config::process_environment)?;
        let clock: SharedClock = Arc::new(SystemClock);
        let seals = Seals::of_command(config.hmac_keys.clone());
        let stores = Stores::open(&storage_settings(&config), &clock).sealed_by(seals);
        let times = serve::times(&config);
        let checkpoints = stores.of_checkpoints();
        let memory = Arc::new(Memory::new(clock.clone()));
        let records = serve::records(stores, memory, &clock, times);
        if !records.can_checkpoint() {
            bail!(
                "no storage is configured: set SANDBOX_METADATA_BUCKET and SANDBOX_CHECKPOINT_BUCKET, or CHECKPOINT_AND_RESTORE_PATH"
            );
        }
        Ok(Self::new(clock, records, checkpoints, times, config.keep_checkpoints as usize))
    }

    pub fn new(
        clock: SharedClock,
        records: Records,
        checkpoints: Option<Checkpoints>,
        times: Times,
        keep: usize,
    ) -> Self {
        let who = Identity { me: clock.instance_id(), predecessor: None };
        let upkeep = Upkeep { records: records.clone(), checkpoints, clock: clock.clone(), keep };
        Self { clock, who, records, upkeep, times, is_quiet: false }
    }

    pub fn tell(&self, text: &str) {
        if !self.is_quiet {
            screen::say(format_args!("{text}"));
        }
    }

    pub fn lock_file(&self, id: &SandboxId) -> Result<LeaseHandle> {
        Ok(self.records.lock_file(id, Place::Durable, &self.who)?)
    }

    pub async fn lock(&self, id: &SandboxId) -> Result<Option<Lock>> {
        Ok(self.usable_lock(id).await??)
    }

    /// Like [`lock`](Self::lock), for a command that can report more about an unusable lock.
    pub async fn usable_lock(&self, id: &SandboxId) -> Result<Result<Option<Lock>, Unusable>> {
        let mut file = self.lock_file(id)?;
        match file.read().await {
            Ok(()) => Ok(Ok(file.lock().cloned())),
            Err(lease::Error::Missing) => Ok(Ok(None)),
            Err(lease::Error::Unusable(unusable)) => Ok(Err(unusable)),
            Err(error) => Err(error.into()),
        }
    }

    /// The metadata; the error states what is wrong with it, or that it does not exist.
    pub async fn find(&self, id: &SandboxId) -> Result<Metadata> {
        self.records.find(id).await?.with_context(|| format!("{id} does not exist"))
    }

    /// Writes the desired state. A sandbox that is being deleted stays so.
    pub async fn want(&self, id: &SandboxId, state: DesiredState) -> Result<Spec> {
        let change = |spec: &mut Spec| {
            let is_news = spec.desired_state != state && spec.desired_state != DesiredState::Deleted;
            if is_news {
                spec.desired_state = state;
            }
            is_news
        };
        let spec = self.records.wish(id, None, &change).await?.with_context(|| format!("{id} does not exist"))?;
        if spec.desired_state != state {
            bail!("{id} is being deleted");
        }
        Ok(spec)
    }

    /// Waits until no instance runs the sandbox, and reports the holder now and then.
    pub async fn until_free(&self, id: &SandboxId, file: &mut LeaseHandle, within: Duration) -> Result<Rest> {
        let end = self.clock.now() + within;
        let mut said = String::new();
        loop {
            match file.read().await {
                Ok(()) => {}
                // Transient errors of the store are retried.
                Err(lease::Error::Store(error)) if error.is_passing() => {}
                Err(error) => match error.reason() {
                    Some(why) => return Ok(Rest::Refused(reason(why))),
                    None => return Err(error.into()),
                },
            }
            let leased = file.lock().and_then(|lock| lock.lease.clone());
            match (file.stand(), leased) {
                (Some(LeaseState::Purged), _) => return Ok(Rest::Purged),
                (Some(LeaseState::Free), None) => return Ok(Rest::Free),
                (Some(LeaseState::Free), Some(_)) => return Ok(Rest::Dead),
                (Some(LeaseState::Theirs | LeaseState::Ours | LeaseState::Late) | None, leased) => {
                    let status = self.records.find(id).await.ok().flatten().map(|found| found.status);
                    let status = status.unwrap_or_default();
                    let trouble = Reason::find(&status.reason);
                    if let Some(Reason::NotCheckpointable | Reason::InvalidSpec | Reason::OtherStore) = trouble {
                        return Ok(Rest::Refused(format!("{}: {}", status.reason, status.message)));
                    }
                    let who = leased.map_or("somebody who waits".to_owned(), |lease| lease.owner.to_string());
                    let why = if status.reason.is_empty() { String::new() } else { format!(" ({})", status.reason) };
                    let line = format!("waiting for {who}{why}");
                    if line != said {
                        self.tell(&line);
                        said = line;
                    }
                }
            }
            if self.clock.now() >= end {
                return Ok(Rest::Late);
            }
            self.clock.sleep(LOOK).await;
        }
    }
}

/// A reason as commands print it.
pub fn reason(reason: Reason) -> String {
    format!("{reason}: `baton explain {reason}` says what to do")
}

/// Runs a command on the storage and reports its result.
pub fn run<F: Future<Output = Result<Verdict>>>(work: impl FnOnce(StorageAdmin) -> F) -> Result<ExitCode> {
    let verdict = block_on(work)?;
    screen::print(&format!("{}\n", verdict.line()))?;
    Ok(ExitCode::from(verdict.exit()))
}

/// Runs a command on the storage that prints its own output.
pub fn block_on<T, F: Future<Output = Result<T>>>(work: impl FnOnce(StorageAdmin) -> F) -> Result<T> {
    rustls::crypto::ring::default_provider().install_default().ok();
    let runtime = tokio::runtime::Runtime::new()?;
    let done = runtime.block_on(async { work(StorageAdmin::open()?).await });
    // A store that hangs must not delay the exit.
    runtime.shutdown_background();
    done
}
