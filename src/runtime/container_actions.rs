//! The actions on one container, each from start to finish.

use std::{
    path::Path,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use baton_protocol::{limits::Limits, sandbox_network::Egress};
use futures::future::maybe_done;
use tokio::{process::Child, sync::watch};

use super::{
    Container, Error, Result, StartSpec,
    argv::RunscCommand,
    cgroup::Group,
    channel::assignment,
    container::{Live, watch_over},
    containers::{RuntimeContext, Slot},
    disk_space,
    guard_link::Fence,
    launch::{self, Begun, COMMAND_TIMEOUT, gone, no_group},
    memory_watch,
    pool::{self, Remains, WarmContainer},
    rootfs_cache, upper,
};
use crate::guard::process_handle::ProcessHandle;

const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Writing an image of many gigabytes may take this long.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(600);
const WAKE: Duration = Duration::from_secs(5);

/// Creates a container, or restores one from the checkpoint in `image`.
pub(super) async fn start(
    context: &Arc<RuntimeContext>,
    slot: &Arc<Slot>,
    start: &StartSpec,
    image: Option<&Path>,
) -> Result<()> {
    if slot.name.lock().is_some() {
        return Err(Error::NotIn("absent"));
    }
    if image.is_none() {
        // Refuse what cannot be sent to an agent before one is started or taken from the pool.
        assignment(start)?;
    }
    let binary = rootfs_cache::binary(context, start.runsc.as_ref())?;
    let root = rootfs_cache::find(context, start.rootfs.as_ref())?;
    let rootfs = root.path.clone();
    *slot.root.lock() = Some(root);
    let name = launch::new_name(context);
    if let Some(binary) = binary {
        context.runsc.choose(&name, binary);
    }
    *slot.renewed.lock() = None;
    *slot.name.lock() = Some(name.clone());
    slot.show(Container::Partial);
    let (pool_slot, _starting, offer) = context.pool.enter(image.is_none().then_some(start));
    *slot.pool_slot.lock() = Some(pool_slot);
    let begun = match offer.warm(&context.pool).await {
        Some(warm) => take_warm(context, slot, warm, start).await,
        None => None,
    };
    let begun = match begun {
        Some(begun) => Ok(begun),
        None => begin(context, slot, &name, &rootfs, start, image).await,
    };
    match begun {
        Ok((live, child)) => {
            let live = Arc::new(live);
            *slot.live.lock() = Some(live.clone());
            if let Some(deadline) = slot.renewed.lock().take() {
                live.extend(context, deadline);
            }
            context.tasks.spawn(watch_over(context.clone(), slot.clone(), live, child));
            slot.seen.subscribe().wait_for(|seen| seen.container != Container::Partial).await.map_err(|_| gone())?;
            Ok(())
        }
        Err(error) => {
            if let Err(left) = wipe(context, slot).await {
                tracing::warn!(sandbox = %slot.id, error = %left, "a failed start could not be cleaned up");
            }
            Err(error)
        }
    }
}

/// Starts a new container.
async fn begin(
    context: &Arc<RuntimeContext>,
    slot: &Slot,
    name: &str,
    rootfs: &Path,
    start: &StartSpec,
    image: Option<&Path>,
) -> Result<(Live, Child)> {
    let bundle = context.settings.bundle(name);
    let disk = start.limits.disk;
    let layout = start.layout;
    let verb = match image {
        None => RunscCommand::Run { bundle: &bundle, layout, disk },
        Some(image) => RunscCommand::Restore { bundle: &bundle, layout, image },
    };
    let what = verb.name();
    if start.limits.cpus.is_some()
        && let Err(why) = &context.cgroups
    {
        tracing::warn!(sandbox = %slot.id, why, "the CPU limit is not enforced");
    }
    let group = launch::make_group(context, name, &start.limits)?;
    // Stored in the slot first, so that a later failure removes it.
    (*slot.group.lock()).clone_from(&group);
    let bundled = launch::make_bundle(context, name, layout, rootfs).await;
    bundled.map_err(|error| Error::Failed { what, why: error.to_string() })?;
    let fence = context.guard.arm(name, context.settings.state_file(name), start.deadline).await?;
    extend_if_renewed(context, slot, name);
    let mut begun = Begun::start(context, name, verb, group.as_ref()).await?;
    let (doomed, cancelled) = (begun.doomed.clone(), slot.starting.lock().clone());
    let watched = |begun: &Begun| apply_limits(context, slot, begun, group.as_ref(), &fence, &start.limits);
    let started = tokio::select! {
        biased;
        () = cancelled.cancelled() => Err(Error::NotIn("wanted any more")),
        () = doomed.cancelled() => Err(over(what)),
        synced = sync(context, &mut begun, start, image.is_some(), group.as_ref(), watched) => synced,
    };
    let started = started.and_then(|()| throttle(group.as_ref(), what));
    if let Err(error) = started {
        return Err(begun.discard(context, what, error).await);
    }
    context.guard.synced(name);
    Ok(begun.into_live(context, &slot.id, fence, start))
}

/// Returns once the agent has answered. A restored container runs before that and is limited from its first
/// moment: `watched` is called as soon as its processes exist.
async fn sync(
    context: &RuntimeContext,
    begun: &mut Begun,
    start: &StartSpec,
    is_restored: bool,
    group: Option<&Group>,
    watched: impl FnOnce(&Begun),
) -> Result<()> {
    let (channel, has_egress) = (begun.channel.clone(), launch::has_egress(context, start));
    let mut answered = pin!(maybe_done(async {
        if is_restored {
            channel.resync(start, has_egress, START_TIMEOUT).await
        } else {
            channel.assign(start, has_egress, START_TIMEOUT).await
        }
    }));
    let found = tokio::select! {
        biased;
        () = begun.appear(context) => Ok(()),
        () = &mut answered => begun.find_processes(context).await,
    };
    if found.is_ok() {
        watched(begun);
    }
    if is_restored {
        tokio::select! {
            biased;
            () = &mut answered => {}
            () = begun.runs(context) => throttle(group, "restore")?,
        }
    }
    answered.as_mut().await;
    answered.take_output().unwrap_or_else(|| Err(gone())).and(found)
}

/// Enforces the container's limits from now on.
fn apply_limits(
    context: &RuntimeContext,
    slot: &Slot,
    begun: &Begun,
    group: Option<&Group>,
    fence: &watch::Receiver<Fence>,
    limits: &Limits,
) {
    let subject = begun.subject(context, &slot.id, group, fence);
    if let Some(watched) = subject.and_then(|subject| memory_watch::watch(&context.clock, subject, limits)) {
        context.tasks.spawn(watched);
    }
}

fn over(what: &'static str) -> Error {
    Error::Failed { what, why: "the sandbox went far over its limits".to_owned() }
}

/// Assigns a warm container to the sandbox: first the guard gets the deadline, then the agent the assignment.
/// Returns `None` if the container was unusable; it is dead then.
async fn take_warm(
    context: &Arc<RuntimeContext>,
    slot: &Slot,
    warm: WarmContainer,
    start: &StartSpec,
) -> Option<(Live, Child)> {
    let WarmContainer { begun, group } = warm;
    let (name, own) = (begun.name.clone(), slot.name.lock().replace(begun.name.clone()));
    (*slot.group.lock()).clone_from(&group);
    let taken = async {
        let fence = context.guard.arm_warm(&name, start.deadline).await?;
        extend_if_renewed(context, slot, &name);
        apply_limits(context, slot, &begun, group.as_ref(), &fence, &start.limits);
        begun.channel.assign(start, launch::has_egress(context, start), pool::OFFER_TIMEOUT).await?;
        throttle(group.as_ref(), "create")?;
        Ok(fence)
    };
    let taken = taken.await;
    context.pool.served(taken.is_ok());
    match taken {
        Ok(fence) => {
            context.guard.synced(&name);
            Some(begun.into_live(context, &slot.id, fence, start))
        }
        Err(error) => {
            begun.end(context).await;
            *slot.name.lock() = own;
            slot.group.lock().take();
            context.pool.remove_later(Remains { name, group }, &error);
            None
        }
    }
}

/// Applies a renewal that arrived before the guard knew this container's deadline.
fn extend_if_renewed(context: &RuntimeContext, slot: &Slot, name: &str) {
    if let Some(deadline) = *slot.renewed.lock() {
        context.guard.extend(name, deadline);
    }
}

/// Throttles the CPU once the start, which runs at full speed, is over: from now on the sandbox's own code runs.
fn throttle(group: Option<&Group>, what: &'static str) -> Result<()> {
    group.map_or(Ok(()), Group::throttle).map_err(|error| no_group(what, &error))
}

pub(super) async fn pause(context: &RuntimeContext, slot: &Slot) -> Result<()> {
    let live = running(slot)?;
    if live.is_paused() {
        return Ok(());
    }
    live.paused.send_replace(true);
    live.channel.set_gate(false);
    let paused = ask(context, &live, "pause", live.control.pause()).await;
    if paused.is_err() && !live.is_fenced() && ask(context, &live, "resume", live.control.resume()).await.is_ok() {
        live.paused.send_replace(false);
        live.channel.ping();
    }
    // The commands are paused: what follows is our own work, and others wait for it.
    if paused.is_ok()
        && let Some(group) = &*slot.group.lock()
        && let Err(error) = group.unthrottle()
    {
        tracing::warn!(sandbox = %slot.id, %error, "the CPU limit could not be lifted for the checkpoint");
    }
    shown(slot, &live, paused).await
}

/// Waits for the sentry's answer, up to the timeout. A fence ends the wait; the sentry answers later.
async fn ask(
    context: &RuntimeContext,
    live: &Live,
    what: &'static str,
    asking: impl Future<Output = std::io::Result<()>>,
) -> Result<()> {
    let mut fence = live.fence.clone();
    tokio::select! {
        biased;
        asked = context.clock.timeout(COMMAND_TIMEOUT, asking) => match asked {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::Failed { what, why: format!("the sandbox gives no answer: {error}") }),
            Err(elapsed) => Err(Error::TimedOut { what, after: elapsed.0 }),
        },
        _ = fence.wait_for(|fence| *fence != Fence::Running) => {
            Err(Error::Failed { what, why: "the sandbox was stopped in the middle of it".to_owned() })
        }
    }
}

pub(super) async fn resume(context: &RuntimeContext, slot: &Slot) -> Result<()> {
    let live = slot.live().filter(|live| !live.has_ended()).ok_or(Error::NotIn("here"))?;
    if let Some(connections) = &live.connections {
        connections.stay();
    }
    if live.is_fenced() {
        let deadline = *live.deadline.lock();
        if deadline <= context.clock.now() {
            return Err(Error::NotIn("allowed to run"));
        }
        context.guard.resume(&live.name, deadline, live.fence.clone()).await?;
    }
    if live.is_paused() {
        let held = slot.group.lock().as_ref().map_or(Ok(()), Group::throttle);
        held.map_err(|error| no_group("resume", &error))?;
        if let Err(error) = ask(context, &live, "resume", live.control.resume()).await {
            // The sentry did not answer; the agent may.
            let ping = live.channel.ping();
            live.channel.ponged(ping, WAKE).await.map_err(|_| error)?;
        }
        live.paused.send_replace(false);
    }
    live.channel.ping();
    shown(slot, &live, Ok(())).await
}

/// Applies a policy to the connections of the container, and tells the agent whether it takes new ones.
pub(super) fn set_egress(context: &RuntimeContext, slot: &Slot, egress: &Egress) -> Result<()> {
    let live = slot.live().filter(|live| !live.has_ended()).ok_or(Error::NotIn("here"))?;
    if let Some(connections) = &live.connections {
        live.channel.set_egress(context.settings.network.is_open(egress));
        connections.set_egress(egress);
    }
    Ok(())
}

pub(super) async fn checkpoint(context: &RuntimeContext, slot: &Slot, image: &Path) -> Result<()> {
    let live = running(slot)?;
    if !live.is_paused() {
        return Err(Error::NotIn("paused"));
    }
    let pid = live.sentry().map_or(0, ProcessHandle::pid);
    let _room = disk_space::make_room(image.to_owned(), pid, &context.promised).await?;
    let verb = RunscCommand::Checkpoint { image };
    let written = context.runsc.call(verb, &live.name, IMAGE_TIMEOUT, Some(live.fence.clone())).await;
    let written = match written {
        Ok(()) => disk_space::verify(image).await,
        Err(error) => Err(error),
    };
    if written.is_err() {
        disk_space::wipe_image(image).await;
    }
    written
}

/// Writes the changes on the root file system into `upper` and returns how long the sandbox was paused.
pub(super) async fn upper(context: &RuntimeContext, slot: &Slot, upper: &Path) -> Result<Duration> {
    let live = running(slot)?;
    let was_paused = live.is_paused();
    let pid = live.sentry().map_or(0, ProcessHandle::pid);
    disk_space::check_room(upper.to_owned(), pid).await?;
    let began = context.clock.now();
    if !was_paused {
        pause(context, slot).await?;
    }
    let written = write_upper(context, &live, upper).await;
    if !was_paused && !live.is_fenced() {
        let resumed = resume(context, slot).await;
        written.and(resumed)?;
    } else {
        written?;
    }
    Ok(context.clock.now() - began)
}

/// The sentry writes into a pipe that is closed when the archive grows too large. A failure leaves nothing
/// behind.
async fn write_upper(context: &RuntimeContext, live: &Live, upper: &Path) -> Result<()> {
    let most = upper::largest(live.disk, context.settings.archive_limits.size);
    let piped = upper::pipe().map_err(|error| Error::Failed { what: "snapshot", why: error.to_string() });
    let (to_sentry, from_sentry) = piped?;
    let called =
        context.runsc.call_with(RunscCommand::Tar, &live.name, IMAGE_TIMEOUT, Some(live.fence.clone()), to_sentry);
    let (mut called, mut received) = (pin!(called), pin!(maybe_done(upper::receive(from_sentry, upper, most))));
    let written = tokio::select! {
        biased;
        written = &mut called => written,
        () = &mut received => called.await,
    };
    // A sentry that does not answer may hold the pipe open, but what it still writes is ignored.
    if written.is_ok() {
        let ended = context.clock.timeout(COMMAND_TIMEOUT, &mut received).await;
        ended.map_err(|elapsed| Error::TimedOut { what: "snapshot", after: elapsed.0 })?;
    }
    let whole = match (received.as_mut().take_output(), written) {
        // The reason for the cut-off is the more helpful error.
        (Some(Err(error)), _) | (_, Err(error)) => Err(error),
        (Some(Ok(())) | None, Ok(())) => Ok(()),
    };
    if whole.is_err() {
        let _ = tokio::fs::remove_file(upper).await;
    }
    whole
}

pub(super) async fn remove(context: &RuntimeContext, slot: &Slot) -> Result<()> {
    if let Some(live) = slot.live() {
        // Without a runsc command: it would hang on a fenced container, and a kill is faster.
        live.unwanted.store(true, Ordering::Relaxed);
        live.doomed.cancel();
        let ended = context.clock.timeout(COMMAND_TIMEOUT, live.ended.cancelled()).await;
        ended.map_err(|elapsed| Error::TimedOut { what: "remove", after: elapsed.0 })?;
    }
    wipe(context, slot).await
}

/// Deletes what is left of a container whose processes are dead.
async fn wipe(context: &RuntimeContext, slot: &Slot) -> Result<()> {
    let Some(name) = slot.name.lock().clone() else { return Ok(()) };
    slot.show(Container::Partial);
    slot.live.lock().take();
    let group = slot.group.lock().clone();
    launch::clear(context, &name, group.as_ref()).await?;
    slot.group.lock().take();
    slot.root.lock().take();
    slot.name.lock().take();
    slot.pool_slot.lock().take();
    slot.show(Container::Absent);
    Ok(())
}

fn running(slot: &Slot) -> Result<Arc<Live>> {
    let live = slot.live().filter(|live| !live.has_ended()).ok_or(Error::NotIn("here"))?;
    match *live.fence.borrow() {
        Fence::Running => {}
        Fence::Fenced | Fence::Killed => return Err(Error::NotIn("running")),
    }
    Ok(live)
}

/// An action is done once its effect is visible to all watchers.
async fn shown(slot: &Slot, live: &Live, done: Result<()>) -> Result<()> {
    let expected = live.view();
    let mut seen = slot.seen.subscribe();
    let _ = tokio::select! {
        seen = seen.wait_for(|seen| seen.container == expected.container) => seen.map(drop),
        () = live.ended.cancelled() => Ok(()),
    };
    done
}
