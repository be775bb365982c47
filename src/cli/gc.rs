//! `baton gc`: one sweep, now, without a server.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;

use super::storage_admin::{self, StorageAdmin, Verdict};
use crate::{
    bus::Bus,
    reconciler::sweep::{
        Sweep, SweepContext,
        sweep_rules::{ABANDONED, SweepTask, TOMBSTONE},
    },
    storage::gc::Error,
};

/// Do what the sweep of a server does, once: finish deletions, erase checkpoints that nothing needs, forget old
/// tombstones, correct statuses. Nothing that anybody holds is touched, and nothing is started.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton gc --dry-run\n  baton gc\n  baton gc --dead --tombstones-after 1h\n\n{}", storage_admin::CODES))]
pub struct Args {
    /// Only say what would be done.
    #[arg(long)]
    pub dry_run: bool,
    /// Forget tombstones of sandboxes that were deleted so long ago.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub tombstones_after: Option<Duration>,
    /// Also see to sandboxes whose holder died: leases are watched for the takeover time first.
    #[arg(long)]
    pub dead: bool,
    /// Also erase locks that have no metadata and never ran. Make sure that no create is under way.
    #[arg(long)]
    pub abandoned: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move { gc(&admin, &args).await })
}

pub async fn gc(admin: &StorageAdmin, args: &Args) -> Result<Verdict> {
    let ground = SweepContext {
        who: admin.who.clone(),
        clock: admin.clock.clone(),
        records: admin.records.clone(),
        bus: Bus::new(admin.clock.clone()),
        upkeep: admin.upkeep.clone(),
        retention: None,
        // Nothing is started here.
        room: 0,
        abandoned_after: if args.abandoned { Duration::ZERO } else { ABANDONED },
        tombstones_for: args.tombstones_after.unwrap_or(TOMBSTONE),
    };
    let mut sweep = Sweep::new(ground.clone());
    let mut assignments = sweep.pass().await?;
    if args.dead {
        admin.tell(&format!("watching leases for {}", humantime::format_duration(admin.times.takeover)));
        admin.clock.sleep(admin.times.takeover + Duration::from_secs(1)).await;
        assignments.extend(sweep.pass().await?);
    }
    let (mut done, mut failed) = (0_usize, 0_usize);
    for assignment in assignments {
        let (id, errand) = (assignment.id.clone(), assignment.errand);
        if args.dry_run {
            admin.tell(&format!("{id}: would {}", words(errand)));
            done += 1;
            continue;
        }
        match assignment.fulfil(&ground).await {
            Ok(true) => {
                admin.tell(&format!("{id}: {}", words(errand)));
                done += 1;
            }
            Ok(false) | Err(Error::Taken) => {}
            Err(error) => {
                admin.tell(&format!("{id}: could not {}: {error}", words(errand)));
                failed += 1;
            }
        }
    }
    let line = match (args.dry_run, done) {
        (true, _) => format!("{done} to see to"),
        (false, 0) if failed == 0 => "nothing to do".to_owned(),
        (false, _) => format!("{done} seen to, {failed} left for the next time"),
    };
    Ok(if failed == 0 { Verdict::Done(line) } else { Verdict::Late(line) })
}

fn words(errand: SweepTask) -> &'static str {
    match errand {
        SweepTask::Rest => "rest",
        SweepTask::Purge => "erase it",
        SweepTask::Expire => "erase it, its ttl is over",
        SweepTask::Take => "start it",
        SweepTask::Correct => "correct its status",
        SweepTask::Tidy => "erase checkpoints that nothing needs",
        SweepTask::Sweep => "erase what is left of it",
        SweepTask::Forget => "forget its tombstone",
    }
}
