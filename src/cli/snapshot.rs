//! `baton snapshot`: makes snapshots of running sandboxes through a server, and manages those in the store.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context, bail};
use baton_protocol::{
    id::{SnapshotName, Tenant},
    manifest::SnapshotKind,
    snapshot_key::SnapshotKey,
};
use serde_json::Value;

use super::{
    context::CommandContext,
    flags,
    global_options::{ContextOption, OutputFormat},
    sandbox_client::{SandboxOptions, VerbOutput},
    screen, serve,
};
use crate::{
    clock::SharedClock,
    config::{
        LeaseTimes,
        variables::{FILESYSTEM_SNAPSHOT_BUCKET, FILESYSTEM_SNAPSHOT_MOUNT_PATH},
    },
    storage::{
        memory::Memory,
        signature::Seals,
        snapshot_users,
        snapshots::{ListedSnapshot, NamedSnapshot, Snapshots},
        store,
        stores::Stores,
    },
};

/// The end of the help of every verb that works on the store.
const STORAGE_HELP: &str =
    "The storage is configured by the variables or the options of `baton serve`, or by a context.";

#[derive(Debug, clap::Subcommand)]
pub enum SnapshotVerb {
    Create(SnapshotCreateArgs),
    List(SnapshotListArgs),
    Delete(SnapshotDeleteArgs),
    Import(SnapshotImportArgs),
    Export(SnapshotExportArgs),
}

/// Save the file system of a running sandbox as a snapshot
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton snapshot create numpy 0b9f\n  baton snapshot create --full everything 0b9f")]
pub struct SnapshotCreateArgs {
    /// Snapshot name
    pub name: SnapshotName,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
    /// Save all files, not only those that differ from the base
    #[arg(long)]
    pub full: bool,
    #[command(flatten)]
    pub options: SandboxOptions,
}

/// List snapshots
///
/// Prints the name, the size, the kind and the tenant of each snapshot.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton snapshot list\n  \
                  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot list --tenant team-a\n\n{STORAGE_HELP}"))]
pub struct SnapshotListArgs {
    /// Only snapshots of this tenant
    #[arg(long)]
    pub tenant: Option<Tenant>,
    #[command(flatten)]
    pub context: ContextOption,
    #[command(flatten)]
    pub flags: flags::HiddenFlags,
}

/// Delete a snapshot
///
/// A snapshot that a sandbox was created from is not deleted.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot delete numpy\n\n{STORAGE_HELP}"))]
pub struct SnapshotDeleteArgs {
    /// Snapshot name
    pub name: SnapshotName,
    #[command(flatten)]
    pub owner: SnapshotOwner,
    #[command(flatten)]
    pub context: ContextOption,
    #[command(flatten)]
    pub flags: flags::HiddenFlags,
}

/// Import an archive as a snapshot
///
/// The archive (`.tar`, `.tar.gz`, `.tar.zst`) must be complete, such as `docker export` writes.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  docker export C >numpy.tar && baton snapshot import numpy.tar\n\n{STORAGE_HELP}"))]
pub struct SnapshotImportArgs {
    /// Archive
    pub file: PathBuf,
    /// Snapshot name [default: that of the file]
    #[arg(long)]
    pub name: Option<SnapshotName>,
    #[command(flatten)]
    pub owner: SnapshotOwner,
    #[command(flatten)]
    pub context: ContextOption,
    #[command(flatten)]
    pub flags: flags::HiddenFlags,
}

/// Write the archive of a snapshot to a file
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Example:\n  FILESYSTEM_SNAPSHOT_BUCKET=b baton snapshot export numpy --to numpy.tar\n\n{STORAGE_HELP}"))]
pub struct SnapshotExportArgs {
    /// Snapshot name
    pub name: SnapshotName,
    /// Target file [default: the name with the ending of the archive, in the current directory]
    #[arg(long)]
    pub to: Option<PathBuf>,
    #[command(flatten)]
    pub owner: SnapshotOwner,
    #[command(flatten)]
    pub context: ContextOption,
    #[command(flatten)]
    pub flags: flags::HiddenFlags,
}

/// The tenant whose snapshot a name refers to.
#[derive(Debug, clap::Args)]
pub struct SnapshotOwner {
    /// Tenant that the snapshot belongs to [default: none, the snapshot is public]
    #[arg(long)]
    pub tenant: Option<Tenant>,
}

impl SnapshotOwner {
    fn key(&self, name: &SnapshotName) -> SnapshotKey {
        SnapshotKey::new(self.tenant.as_ref(), name)
    }
}

pub async fn snapshot(verb: SnapshotVerb, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let storage = |option: &ContextOption, flags: &flags::HiddenFlags| SnapshotStorage::open(option, flags, context);
    match verb {
        SnapshotVerb::Create(args) => return create(args, context).await,
        SnapshotVerb::List(args) => storage(&args.context, &args.flags)?.list(args.tenant.as_ref()).await,
        SnapshotVerb::Delete(args) => storage(&args.context, &args.flags)?.delete(&args.owner.key(&args.name)).await,
        SnapshotVerb::Import(args) => storage(&args.context, &args.flags)?.import(&args).await,
        SnapshotVerb::Export(args) => storage(&args.context, &args.flags)?.export(&args).await,
    }?;
    Ok(ExitCode::SUCCESS)
}

async fn create(args: SnapshotCreateArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let client = context.sandbox(&args.options)?;
    client
        .request(&args.sandbox, OutputFormat::Table, async |sandbox, _| {
            sandbox.snapshot_with(&args.name, args.full).await?;
            Ok(VerbOutput { text: String::new(), json: Value::Null })
        })
        .await
}

fn line(listed: &ListedSnapshot) -> String {
    let kind = match (listed.has_manifest, listed.is_unfinished) {
        (true, _) => "snapshot",
        (false, true) => "unfinished",
        (false, false) => "archive",
    };
    let SnapshotKey { tenant, name } = &listed.snapshot;
    let tenant = tenant.as_ref().map_or("-", Tenant::as_str);
    format!("{:40} {:>14} {kind:10} {tenant}\n", name.as_str(), listed.size)
}

/// The snapshot's name, for messages.
fn describe(snapshot: &SnapshotKey) -> String {
    let name = format!("named {}", snapshot.name);
    snapshot.tenant.as_ref().map_or(name.clone(), |tenant| format!("{name} of the tenant {tenant}"))
}

/// The stored snapshots.
struct SnapshotStorage {
    snapshots: Snapshots,
    stores: Stores,
    clock: SharedClock,
    max_archive_size: u64,
}

impl SnapshotStorage {
    /// Configured as for `baton serve`.
    fn open(option: &ContextOption, flags: &flags::HiddenFlags, context: &CommandContext) -> anyhow::Result<Self> {
        let (config, clock) = (context.storage_config(option, &flags.0.0)?, context.clock.clone());
        let stores = Stores::open(&config.storage, &clock).sealed_by(Seals::new(config.hmac_keys.clone()));
        let Some(snapshots) = stores.of_snapshots() else {
            bail!(
                "no storage for snapshots is configured: set {FILESYSTEM_SNAPSHOT_BUCKET} or {FILESYSTEM_SNAPSHOT_MOUNT_PATH}, or use a context that has a storage"
            );
        };
        Ok(Self { snapshots, stores, clock, max_archive_size: config.archive_size })
    }

    async fn list(self, tenant: Option<&Tenant>) -> anyhow::Result<()> {
        let listed = self.snapshots.list(tenant).await.context("the snapshots cannot be listed")?;
        screen::print(&listed.iter().map(line).collect::<String>())
    }

    async fn delete(self, snapshot: &SnapshotKey) -> anyhow::Result<()> {
        if let Some(checkpoints) = self.stores.of_checkpoints() {
            let records = serve::records(
                self.stores.clone(),
                Arc::new(Memory::new(self.clock.clone())),
                &self.clock,
                LeaseTimes::DEFAULT,
            );
            if records.can_checkpoint() {
                let users = snapshot_users::users_of(&records, &checkpoints, snapshot).await;
                let users = users.context("the snapshot is not deleted, because its users cannot be determined")?;
                for (id, why) in &users.unreadable {
                    screen::report(format_args!("baton: {id} cannot be read, and was not asked: {why}"));
                }
                if let Some(user) = users.first {
                    bail!(
                        "{} is not deleted: {user} was created from it and needs it to start on another instance",
                        snapshot.name
                    );
                }
            }
        }
        if self.snapshots.find(snapshot).await? == NamedSnapshot::Nothing {
            bail!("there is no snapshot {}", describe(snapshot));
        }
        Ok(self.snapshots.erase(snapshot).await?)
    }

    async fn import(self, args: &SnapshotImportArgs) -> anyhow::Result<()> {
        let file = args.file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let end = [".tar.gz", ".tar.zst", ".tar"].into_iter().find(|end| file.ends_with(end));
        let Some(end) = end else { bail!("{file} is not a .tar, .tar.gz or .tar.zst file") };
        let name = match &args.name {
            Some(name) => name.clone(),
            None => file.trim_end_matches(end).parse().context("choose a name with --name")?,
        };
        let snapshot = args.owner.key(&name);
        match self.snapshots.import(&snapshot, &args.file, end).await {
            Err(store::Error::Conflict(_)) => bail!("a snapshot {} exists already", describe(&snapshot)),
            imported => imported.with_context(|| format!("{} cannot be imported", args.file.display()))?,
        };
        screen::print(&format!("{name}\n"))
    }

    async fn export(self, args: &SnapshotExportArgs) -> anyhow::Result<()> {
        let snapshot = args.owner.key(&args.name);
        let path = match self.snapshots.find(&snapshot).await? {
            NamedSnapshot::Ours(manifest) => {
                if manifest.kind == SnapshotKind::Layer {
                    // If it were imported elsewhere, sandboxes would start from almost nothing.
                    screen::report(format_args!(
                        "baton: {} contains only the differences from its base; `baton snapshot create --full` saves all files",
                        args.name
                    ));
                }
                self.snapshots.archive(&snapshot, &manifest).path
            }
            NamedSnapshot::Foreign { path } => path,
            NamedSnapshot::Nothing | NamedSnapshot::Unfinished => {
                bail!("there is no finished snapshot {}", describe(&snapshot))
            }
        };
        let plain = || PathBuf::from(format!("{}{}", args.name, path.end()));
        let to = args.to.clone().unwrap_or_else(plain);
        if to.exists() {
            bail!("{} exists already", to.display());
        }
        self.snapshots.fetch(&path, &to, self.max_archive_size, &|_| {}).await?;
        screen::print(&format!("{}\n", to.display()))
    }
}
