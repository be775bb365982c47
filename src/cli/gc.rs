//! `baton gc`: one sweep, now, without a server.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;

use super::{
    context::CommandContext,
    global_options::ContextOption,
    storage_admin::{self, AdminResult, StorageAdmin},
    time_value::parse_time,
};
use crate::{
    bus::Bus,
    reconciler::sweep::{
        Sweep, SweepContext,
        sweep_rules::{ABANDONED, SweepTask, TOMBSTONE},
    },
    storage::garbage_collector::Error,
};

/// Sweep the storage once
///
/// Does what a server does regularly: finishes deletions, erases unreferenced checkpoints, removes old tombstones and
/// corrects statuses. Sandboxes that an instance holds are not touched, and no sandbox is started.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = format!("Examples:\n  baton gc --dry-run\n  baton gc\n  baton gc --dead --tombstones-after 1h\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct GcArgs {
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Remove the tombstones of sandboxes that were deleted longer ago than this
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub tombstones_after: Option<Duration>,
    /// Include sandboxes whose holder is dead; this first watches their leases for the takeover time
    #[arg(long)]
    pub dead: bool,
    /// Erase locks without metadata that never ran; make sure that no sandbox is being created
    #[arg(long)]
    pub abandoned: bool,
    #[command(flatten)]
    pub context: ContextOption,
}

pub async fn gc(args: GcArgs, context: &CommandContext) -> Result<ExitCode> {
    sweep_once(&context.storage(&args.context)?, &args).await?.report()
}

pub async fn sweep_once(storage: &StorageAdmin, args: &GcArgs) -> Result<AdminResult> {
    let sweep_context = SweepContext {
        who: storage.identity.clone(),
        clock: storage.clock.clone(),
        records: storage.records.clone(),
        bus: Bus::new(storage.clock.clone()),
        upkeep: storage.upkeep.clone(),
        retention: None,
        // Nothing is started here.
        room: 0,
        abandoned_after: if args.abandoned { Duration::ZERO } else { ABANDONED },
        tombstones_for: args.tombstones_after.unwrap_or(TOMBSTONE),
    };
    let mut sweep = Sweep::new(sweep_context.clone());
    let mut assignments = sweep.pass().await?;
    if args.dead {
        storage.notify(&format!("watching leases for {}", humantime::format_duration(storage.times.takeover)));
        storage.clock.sleep(storage.times.takeover + Duration::from_secs(1)).await;
        assignments.extend(sweep.pass().await?);
    }
    let (mut done, mut failed) = (0_usize, 0_usize);
    for assignment in assignments {
        let (id, task) = (assignment.id.clone(), describe_task(assignment.task));
        if args.dry_run {
            storage.notify(&format!("{id}: would {task}"));
            done += 1;
            continue;
        }
        match assignment.fulfil(&sweep_context).await {
            Ok(true) => {
                storage.notify(&format!("{id}: {task}"));
                done += 1;
            }
            Ok(false) | Err(Error::Taken) => {}
            Err(error) => {
                storage.notify(&format!("{id}: could not {task}: {error}"));
                failed += 1;
            }
        }
    }
    let line = match (args.dry_run, done) {
        (true, _) => format!("tasks to do: {done}"),
        (false, 0) if failed == 0 => "nothing to do".to_owned(),
        (false, _) => format!("tasks done: {done}, failed: {failed}"),
    };
    Ok(if failed == 0 { AdminResult::Done(line) } else { AdminResult::Late(line) })
}

fn describe_task(task: SweepTask) -> &'static str {
    match task {
        SweepTask::Rest => "rest",
        SweepTask::Purge => "erase it",
        SweepTask::Expire => "erase it, because its ttl is over",
        SweepTask::Take => "start it",
        SweepTask::Correct => "correct its status",
        SweepTask::Tidy => "erase unreferenced checkpoints",
        SweepTask::Sweep => "erase what is left of it",
        SweepTask::Forget => "remove its tombstone",
    }
}
