//! The actions on one container, each from beginning to end.

use std::{
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{io::AsyncReadExt, process::Child, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{
    Container, Error, Result, Start,
    agent::Channel,
    argv::Verb,
    bundle,
    cgroup::{self, Group},
    containers::{Slot, Tools, lock},
    control::Control,
    guard_link::{Fence, seek},
    live::{Live, all_ended, watch_over},
    roots, space,
    spawn::NOT_TAKEN,
    usage,
};
use crate::guard::process::Process;

const START: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(20);
/// Writing an image of many gigabytes takes its time.
const LONG: Duration = Duration::from_secs(600);
const WAKE: Duration = Duration::from_secs(5);
/// Both pipes of the agent are made this large: fewer, larger reads.
const PIPE: usize = 1 << 20;
const STDERR_READ: u64 = 64 << 10;

/// First start, or start from the checkpoint in `image`.
pub(super) async fn start(tools: &Arc<Tools>, slot: &Arc<Slot>, start: &Start, image: Option<&Path>) -> Result<()> {
    if lock(&slot.name).is_some() {
        return Err(Error::NotIn("absent"));
    }
    let binary = roots::binary(tools, start.runsc.as_deref())?;
    let root = roots::find(tools, start.rootfs.as_deref())?;
    let rootfs = root.path.clone();
    *lock(&slot.root) = Some(root);
    let name = baton_protocol::id::hex(&tools.clock.bits()[..8]);
    if let Some(binary) = binary {
        tools.runsc.choose(&name, binary);
    }
    *lock(&slot.renewed) = None;
    *lock(&slot.name) = Some(name.clone());
    slot.show(Container::Partial);
    match begin(tools, slot, &name, &rootfs, start, image).await {
        Ok((live, child)) => {
            let live = Arc::new(live);
            *lock(&slot.live) = Some(live.clone());
            if let Some(deadline) = lock(&slot.renewed).take() {
                live.extend(tools, deadline);
            }
            if let Some(watched) = usage::watch(tools, slot, &live, &start.limits) {
                tools.tasks.spawn(watched);
            }
            tools.tasks.spawn(watch_over(tools.clone(), slot.clone(), live, child));
            slot.seen.subscribe().wait_for(|seen| seen.container != Container::Partial).await.map_err(|_| gone())?;
            Ok(())
        }
        Err(error) => {
            if let Err(left) = wipe(tools, slot).await {
                tracing::warn!(sandbox = %slot.id, error = %left, "something is left of a failed start");
            }
            Err(error)
        }
    }
}

async fn begin(
    tools: &Arc<Tools>,
    slot: &Slot,
    name: &str,
    rootfs: &Path,
    start: &Start,
    image: Option<&Path>,
) -> Result<(Live, Child)> {
    let what = if image.is_some() { "restore" } else { "create" };
    let failed = |error: std::io::Error| Error::Failed { what, why: error.to_string() };
    let bundle = tools.settings.bundle(name);
    make_bundle(tools, &bundle, rootfs).await.map_err(failed)?;
    let state_file = tools.settings.state_file(name);
    let fence = tools.guard.arm(name, state_file.clone(), start.deadline).await?;
    if let Some(deadline) = *lock(&slot.renewed) {
        // It came before the guard knew the name.
        tools.guard.extend(name, deadline);
    }
    let log = bundle.join("log");
    let disk = start.limits.disk;
    let verb = image.map_or(Verb::Run { bundle: &bundle, disk }, |image| Verb::Restore { bundle: &bundle, image });
    let group = make_group(tools, slot, name, start, what)?;
    let mut child = tools.runsc.attach(verb, name, &log, group.as_ref().map_or(&[], Group::directories)).await?;
    let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(Error::Failed { what, why: "runsc has no pipes".to_owned() });
    };
    // Smaller ones only cost speed.
    let _ = rustix::pipe::fcntl_setpipe_size(&stdin, PIPE);
    let _ = rustix::pipe::fcntl_setpipe_size(&stdout, PIPE);
    tools.tasks.spawn(drain(stderr));
    let channel = Channel::start(stdin, stdout, tools);
    let synced = match image {
        None => channel.assign(start, START).await,
        Some(_) => channel.resync(start, START).await,
    };
    let found = seek(&state_file, &tools.clock, SHORT).await;
    let processes: Vec<_> =
        found.iter().flat_map(|pids| [pids.sentry, pids.gofer]).filter_map(|pid| Process::open(pid).ok()).collect();
    // It started as fast as it could; what runs in it from now on is not ours.
    let held = || group.as_ref().map_or(Ok(()), Group::hold_back).map_err(|error| no_group(what, &error));
    let started = synced.and_then(|()| if processes.is_empty() { Err(gone()) } else { held() });
    if let Err(error) = started {
        return Err(discard(tools, name, &log, what, child, processes, error).await);
    }
    tools.guard.synced(name);
    let live = Live {
        name: name.to_owned(),
        channel,
        fence,
        processes,
        control: Control::new(tools.settings.control_socket(name)),
        paused: watch::channel(false).0,
        deadline: start.deadline.into(),
        doomed: CancellationToken::new(),
        ended: CancellationToken::new(),
        unwanted: false.into(),
        log,
    };
    Ok((live, child))
}

/// Ends what has started but did not answer. The reason runsc gives is better than ours.
async fn discard(
    tools: &Tools,
    name: &str,
    log: &Path,
    what: &'static str,
    mut child: Child,
    mut processes: Vec<Process>,
    error: Error,
) -> Error {
    let by_itself = tools.clock.timeout(Duration::from_millis(100), child.wait()).await;
    let why = match by_itself {
        Ok(Ok(status)) if status.code() == Some(128) => Some(tools.runsc.why(log).await),
        Ok(Ok(status)) if status.code() == Some(NOT_TAKEN.into()) => Some("its cgroup does not take it".to_owned()),
        Ok(_) | Err(_) => None,
    };
    // Those that no state file names yet are still children of runsc.
    processes.extend(child.id().into_iter().flat_map(Process::children_of));
    for process in &processes {
        let _ = process.signal(rustix::process::Signal::KILL);
    }
    let _ = child.kill().await;
    all_ended(&processes, &tools.clock).await;
    tracing::debug!(container = name, %error, "a start was given up");
    why.map_or(error, |why| Error::Failed { what, why })
}

/// The cgroup that the container will be in, if its limits need one and there can be one. In the slot first: what
/// fails afterwards removes it.
fn make_group(tools: &Tools, slot: &Slot, name: &str, start: &Start, what: &'static str) -> Result<Option<Group>> {
    let bounds = cgroup::Bounds::of(&start.limits);
    let group = match &tools.cgroups {
        Ok(cgroups) if bounds != cgroup::Bounds::default() => {
            Some(cgroups.make(name, &bounds).map_err(|error| no_group(what, &error))?)
        }
        Ok(_) => None,
        Err(why) => {
            if start.limits.cpus.is_some() {
                tracing::warn!(sandbox = %slot.id, why, "nothing holds it to its share of the CPUs");
            }
            None
        }
    };
    (*lock(&slot.group)).clone_from(&group);
    Ok(group)
}

fn no_group(what: &'static str, error: &std::io::Error) -> Error {
    Error::Failed { what, why: format!("its limits cannot be set: {error}") }
}

async fn make_bundle(tools: &Tools, bundle: &Path, rootfs: &Path) -> std::io::Result<()> {
    let settings = &tools.settings;
    let agent_dir = bundle.join("agent");
    tokio::fs::create_dir_all(&agent_dir).await?;
    // A private copy: the original may be replaced while sandboxes run.
    let agent = agent_dir.join("agent");
    tokio::fs::copy(&settings.agent, &agent).await?;
    tokio::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o555)).await?;
    let spec = bundle::spec(rootfs, &agent_dir, settings.cpu_features.as_deref());
    tokio::fs::write(bundle.join("config.json"), spec.to_string()).await
}

/// The agent's own log, a little of it. The pipe is read to its end, so that nobody ever waits for it.
async fn drain(mut stderr: tokio::process::ChildStderr) {
    let mut text = Vec::new();
    let _ = (&mut stderr).take(STDERR_READ).read_to_end(&mut text).await;
    if !text.is_empty() {
        tracing::debug!(text = %String::from_utf8_lossy(&text).escape_debug(), "the container's stderr");
    }
    let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
}

pub(super) async fn pause(tools: &Tools, slot: &Slot) -> Result<()> {
    let live = running(slot)?;
    if live.is_paused() {
        return Ok(());
    }
    live.paused.send_replace(true);
    live.channel.set_gate(false);
    let paused = ask(tools, &live, "pause", live.control.pause()).await;
    if paused.is_err() && !live.is_fenced() && ask(tools, &live, "resume", live.control.resume()).await.is_ok() {
        live.paused.send_replace(false);
        live.channel.ping();
    }
    // Its commands stand: what is done now is our own work, and others wait for it.
    if paused.is_ok()
        && let Some(group) = &*lock(&slot.group)
        && let Err(error) = group.let_run()
    {
        tracing::warn!(sandbox = %slot.id, %error, "a checkpoint has only the sandbox's share of the CPUs");
    }
    shown(slot, &live, paused).await
}

/// What the sentry is asked, for as long as it may take to answer. A fence ends it: then it answers later.
async fn ask(
    tools: &Tools,
    live: &Live,
    what: &'static str,
    asking: impl Future<Output = std::io::Result<()>>,
) -> Result<()> {
    let mut fence = live.fence.clone();
    tokio::select! {
        biased;
        asked = tools.clock.timeout(SHORT, asking) => match asked {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::Failed { what, why: format!("the sandbox gives no answer: {error}") }),
            Err(elapsed) => Err(Error::TimedOut { what, after: elapsed.0 }),
        },
        _ = fence.wait_for(|fence| *fence != Fence::Running) => {
            Err(Error::Failed { what, why: "the sandbox was stopped in the middle of it".to_owned() })
        }
    }
}

pub(super) async fn resume(tools: &Tools, slot: &Slot) -> Result<()> {
    let live = slot.live().filter(|live| !live.has_ended()).ok_or(Error::NotIn("here"))?;
    if live.is_fenced() {
        let deadline = *lock(&live.deadline);
        if deadline <= tools.clock.now() {
            return Err(Error::NotIn("allowed to run"));
        }
        tools.guard.resume(&live.name, deadline, live.fence.clone()).await?;
    }
    if live.is_paused() {
        let held = lock(&slot.group).as_ref().map_or(Ok(()), Group::hold_back);
        held.map_err(|error| no_group("resume", &error))?;
        if let Err(error) = ask(tools, &live, "resume", live.control.resume()).await {
            // The sentry says nothing; perhaps the agent does.
            let ping = live.channel.ping();
            live.channel.ponged(ping, WAKE).await.map_err(|_| error)?;
        }
        live.paused.send_replace(false);
    }
    live.channel.ping();
    shown(slot, &live, Ok(())).await
}

pub(super) async fn checkpoint(tools: &Tools, slot: &Slot, image: &Path) -> Result<()> {
    let live = running(slot)?;
    if !live.is_paused() {
        return Err(Error::NotIn("paused"));
    }
    let pid = live.sentry().map_or(0, Process::pid);
    let _room = space::make_room(image.to_owned(), pid, &tools.promised).await?;
    let verb = Verb::Checkpoint { image };
    let written = tools.runsc.call(verb, &live.name, LONG, Some(live.fence.clone())).await;
    let written = match written {
        Ok(()) => space::verify(image).await,
        Err(error) => Err(error),
    };
    if written.is_err() {
        space::wipe_image(image).await;
    }
    written
}

/// Writes what changed on its root file system into `upper`; how long it stood still for that.
pub(super) async fn upper(tools: &Tools, slot: &Slot, upper: &Path) -> Result<Duration> {
    let live = running(slot)?;
    let was_paused = live.is_paused();
    let pid = live.sentry().map_or(0, Process::pid);
    space::check_room(upper.to_owned(), pid).await?;
    let began = tools.clock.now();
    if !was_paused {
        pause(tools, slot).await?;
    }
    let written = tools.runsc.call(Verb::Tar { archive: upper }, &live.name, LONG, Some(live.fence.clone())).await;
    if written.is_err() {
        let _ = tokio::fs::remove_file(upper).await;
    }
    if !was_paused && !live.is_fenced() {
        let resumed = resume(tools, slot).await;
        written.and(resumed)?;
    } else {
        written?;
    }
    Ok(tools.clock.now() - began)
}

pub(super) async fn remove(tools: &Tools, slot: &Slot) -> Result<()> {
    if let Some(live) = slot.live() {
        // No runsc command: one that is fenced would let it hang, and this is faster.
        live.unwanted.store(true, Ordering::Relaxed);
        live.doomed.cancel();
        let ended = tools.clock.timeout(SHORT, live.ended.cancelled()).await;
        ended.map_err(|elapsed| Error::TimedOut { what: "remove", after: elapsed.0 })?;
    }
    wipe(tools, slot).await
}

/// What is left of a container whose processes are dead.
async fn wipe(tools: &Tools, slot: &Slot) -> Result<()> {
    let Some(name) = lock(&slot.name).clone() else { return Ok(()) };
    slot.show(Container::Partial);
    lock(&slot.live).take();
    if tokio::fs::try_exists(tools.settings.state_file(&name)).await.unwrap_or(true) {
        tools.runsc.call(Verb::Delete, &name, SHORT, None).await?;
    }
    tools.guard.disarm(&name).await?;
    let group = lock(&slot.group).clone();
    if let Some(group) = group {
        let removed = group.remove(&tools.clock).await;
        removed.map_err(|error| Error::Failed { what: "remove", why: format!("its cgroup stays: {error}") })?;
    }
    lock(&slot.group).take();
    match tokio::fs::remove_dir_all(tools.settings.bundle(&name)).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::Failed { what: "remove", why: error.to_string() });
        }
        Ok(()) | Err(_) => {}
    }
    tools.runsc.forget(&name);
    lock(&slot.root).take();
    lock(&slot.name).take();
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

/// An action is done when everybody can see it.
async fn shown(slot: &Slot, live: &Live, done: Result<()>) -> Result<()> {
    let expected = live.look();
    let mut seen = slot.seen.subscribe();
    let _ = tokio::select! {
        seen = seen.wait_for(|seen| seen.container == expected.container) => seen.map(drop),
        () = live.ended.cancelled() => Ok(()),
    };
    done
}

fn gone() -> Error {
    Error::NotIn("there any more")
}
