//! `baton snapshot`: makes snapshots of running sandboxes through a server, and manages those in the store.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context, bail};
use baton_protocol::{
    id::{SnapshotName, Tenant},
    manifest::SnapshotKind,
    snapshot_key::SnapshotKey,
};

use super::{
    check::storage_settings,
    flags, screen, serve,
    server_args::{SandboxArgs, explain},
    stdio_bridge::Signals,
};
use crate::{
    clock::{SharedClock, SystemClock},
    config::{self, Config},
    storage::{
        lease::rules::Times,
        memory::Memory,
        signature::Seals,
        snapshot_users,
        snapshots::{Found, Listed, Snapshots},
        store,
        stores::Stores,
    },
};

#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    /// Keep the file system of a running sandbox under a name.
    Create(Create),
    /// The snapshots there are: name, size, what it is, and the tenant it belongs to.
    #[command(after_help = "Examples:\n  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot list\n  \
                      FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot list --tenant team-a")]
    List(List),
    /// Delete a snapshot. One that a sandbox stands on stays.
    #[command(after_help = "Example:\n  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot delete numpy")]
    Delete(Named),
    /// Put a complete archive (`.tar`, `.tar.gz`, `.tar.zst`) under a name, such as `docker export` writes.
    #[command(after_help = "Example:\n  docker export C >numpy.tar && baton snapshot import numpy.tar")]
    Import(Import),
    /// Write the archive of a snapshot to a file.
    #[command(after_help = "Example:\n  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot export numpy --to numpy.tar")]
    Export(Export),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton snapshot create numpy 0b9f\n  baton snapshot create --full everything 0b9f")]
pub struct Create {
    pub name: SnapshotName,
    /// Its id, or the beginning of it if its token is kept here.
    pub sandbox: String,
    /// Everything, not only what changed on the base.
    #[arg(long)]
    pub full: bool,
    #[command(flatten)]
    pub link: SandboxArgs,
}

/// Storage is where `baton serve` would look for it.
#[derive(Debug, clap::Args)]
pub struct At {
    #[command(flatten)]
    pub flags: flags::Given,
}

/// Whose snapshot a name means.
#[derive(Debug, clap::Args)]
pub struct Owner {
    /// The tenant it belongs to; without one, it is public.
    #[arg(long)]
    pub tenant: Option<Tenant>,
}

impl Owner {
    fn key(&self, name: &SnapshotName) -> SnapshotKey {
        SnapshotKey::new(self.tenant.as_ref(), name)
    }
}

#[derive(Debug, clap::Args)]
pub struct List {
    /// Those of this tenant alone.
    #[arg(long)]
    pub tenant: Option<Tenant>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Debug, clap::Args)]
pub struct Named {
    pub name: SnapshotName,
    #[command(flatten)]
    pub owner: Owner,
    #[command(flatten)]
    pub at: At,
}

#[derive(Debug, clap::Args)]
pub struct Import {
    pub file: PathBuf,
    /// Its name; without one, that of the file.
    #[arg(long)]
    pub name: Option<SnapshotName>,
    #[command(flatten)]
    pub owner: Owner,
    #[command(flatten)]
    pub at: At,
}

#[derive(Debug, clap::Args)]
pub struct Export {
    pub name: SnapshotName,
    /// Where to; without it, the name and `.tar` here.
    #[arg(long)]
    pub to: Option<PathBuf>,
    #[command(flatten)]
    pub owner: Owner,
    #[command(flatten)]
    pub at: At,
}

pub fn main(verb: Verb) -> anyhow::Result<ExitCode> {
    rustls::crypto::ring::default_provider().install_default().ok();
    tokio::runtime::Runtime::new()?.block_on(run(verb))
}

async fn create(args: &Create) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let url = args.link.find(&args.sandbox)?.url;
    let making = async {
        let sandbox = args.link.attach_to_ask(&args.sandbox).await?;
        let made = sandbox.snapshot_with(&args.name, args.full).await;
        sandbox.close().await;
        made.map_err(|error| explain(error, &url))
    };
    tokio::select! {
        made = making => made.map(|()| ExitCode::SUCCESS),
        code = signals.end() => Ok(ExitCode::from(code)),
    }
}

async fn run(verb: Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Create(args) => return create(&args).await,
        Verb::List(args) => {
            let listed = Store::open(&args.at)?.snapshots.list(args.tenant.as_ref()).await;
            let listed = listed.context("the snapshots cannot be listed")?;
            screen::print(&listed.iter().map(line).collect::<String>())
        }
        Verb::Delete(args) => Store::open(&args.at)?.delete(&args.owner.key(&args.name)).await,
        Verb::Import(args) => Store::open(&args.at)?.import(&args).await,
        Verb::Export(args) => Store::open(&args.at)?.export(&args).await,
    }?;
    Ok(ExitCode::SUCCESS)
}

fn line(listed: &Listed) -> String {
    let what = match (listed.has_manifest, listed.is_unfinished) {
        (true, _) => "snapshot",
        (false, true) => "unfinished",
        (false, false) => "archive",
    };
    let SnapshotKey { tenant, name } = &listed.snapshot;
    let tenant = tenant.as_ref().map_or("-", Tenant::as_str);
    format!("{:40} {:>14} {what:10} {tenant}\n", name.as_str(), listed.size)
}

/// The snapshot's name, for people.
fn shown(snapshot: &SnapshotKey) -> String {
    let name = format!("named {}", snapshot.name);
    snapshot.tenant.as_ref().map_or(name.clone(), |tenant| format!("{name} of the tenant {tenant}"))
}

struct Store {
    snapshots: Snapshots,
    stores: Stores,
    clock: SharedClock,
    most: u64,
}

impl Store {
    fn open(at: &At) -> anyhow::Result<Self> {
        let config = Config::read(&at.flags.0, config::process_environment)?;
        let clock: SharedClock = Arc::new(SystemClock);
        let stores = Stores::open(&storage_settings(&config), &clock).sealed_by(Seals::new(config.hmac_keys.clone()));
        let Some(snapshots) = stores.of_snapshots() else {
            bail!(
                "no place for snapshots is configured: set FILESYSTEM_SNAPSHOT_BUCKET or FILESYSTEM_SNAPSHOT_MOUNT_PATH"
            );
        };
        Ok(Self { snapshots, stores, clock, most: config.archive_size })
    }

    async fn delete(self, snapshot: &SnapshotKey) -> anyhow::Result<()> {
        if let Some(checkpoints) = self.stores.of_checkpoints() {
            let records = serve::records(
                self.stores.clone(),
                Arc::new(Memory::new(self.clock.clone())),
                &self.clock,
                Times::DEFAULT,
            );
            if records.can_checkpoint() {
                let user = snapshot_users::user_of(&records, &checkpoints, snapshot).await;
                if let Some(user) = user.context("who uses the snapshot cannot be found out, so it stays")? {
                    bail!("{} stays: {user} was made from it and needs it to start elsewhere", snapshot.name);
                }
            }
        }
        if self.snapshots.find(snapshot).await? == Found::Nothing {
            bail!("there is no snapshot {}", shown(snapshot));
        }
        Ok(self.snapshots.erase(snapshot).await?)
    }

    async fn import(self, args: &Import) -> anyhow::Result<()> {
        let file = args.file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let end = [".tar.gz", ".tar.zst", ".tar"].into_iter().find(|end| file.ends_with(end));
        let Some(end) = end else { bail!("{file} is none of .tar, .tar.gz and .tar.zst") };
        let name = match &args.name {
            Some(name) => name.clone(),
            None => file.trim_end_matches(end).parse().context("give it a name with --name")?,
        };
        let snapshot = args.owner.key(&name);
        match self.snapshots.import(&snapshot, &args.file, end).await {
            Err(store::Error::Conflict(_)) => bail!("a snapshot {} exists already", shown(&snapshot)),
            imported => imported.with_context(|| format!("{} cannot be imported", args.file.display()))?,
        };
        screen::print(&format!("{name}\n"))
    }

    async fn export(self, args: &Export) -> anyhow::Result<()> {
        let snapshot = args.owner.key(&args.name);
        let path = match self.snapshots.find(&snapshot).await? {
            Found::Ours(manifest) => {
                if manifest.kind == SnapshotKind::Layer {
                    // If it were imported elsewhere, sandboxes would start from almost nothing.
                    screen::say(format_args!(
                        "baton: {} holds only what changed on its base; `create --full` keeps all",
                        args.name
                    ));
                }
                self.snapshots.archive(&snapshot, &manifest).path
            }
            Found::Foreign { path } => path,
            Found::Nothing | Found::Unfinished => bail!("there is no finished snapshot {}", shown(&snapshot)),
        };
        let plain = || PathBuf::from(format!("{}{}", args.name, path.end()));
        let to = args.to.clone().unwrap_or_else(plain);
        if to.exists() {
            bail!("{} exists already", to.display());
        }
        self.snapshots.fetch(&path, &to, self.most, &|_| {}).await?;
        screen::print(&format!("{}\n", to.display()))
    }
}
