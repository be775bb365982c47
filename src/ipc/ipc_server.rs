//! The reconciler's end: serves the API half from the bus, the containers and the memory store.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_protocol::id::SandboxId;
use bytes::BytesMut;
use futures::{SinkExt, StreamExt};
use parking_lot::Mutex;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Notify, mpsc, watch},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use super::{
    FromApi, FromReconciler, Handshake, IpcHello, IpcStream, VERSION, ipc_frames, ipc_ports, ipc_socket, packed,
    remote_store, unpacked, wire,
};
use crate::{
    bus::{AttachGuard, Bus, BusMessage, Evictability, EvictionRequest, LifecycleEvent, Subscription},
    clock::SharedClock,
    network::PortLinks,
    runtime::{AgentLinks, Container, ContainerView, FrameLink, Lifecycle},
    storage::store::Store,
};

/// Timeout for a peer's handshake, and for the connection of an announced link.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Capacity of the queue of outgoing messages; senders wait when it is full.
const OUTBOX: usize = 256;
/// Time to send the last messages after the reconciler has ended.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What the API half can see and do.
#[derive(Debug)]
pub struct IpcServer {
    pub hello: IpcHello,
    pub clock: SharedClock,
    pub bus: Arc<Bus>,
    pub execs: Arc<dyn AgentLinks>,
    pub lifecycle: Arc<dyn Lifecycle>,
    pub memory: Arc<dyn Store>,
    pub ports: Arc<dyn PortLinks>,
    /// True once the instance drains.
    pub leaving: watch::Receiver<bool>,
    /// The user the API may run as, besides our own.
    pub api_user: u32,
}

/// Links that were opened and not yet connected.
#[derive(Debug, Default)]
struct Waiting {
    links: Mutex<BTreeMap<u64, Option<FrameLink>>>,
    come: Notify,
}

impl Waiting {
    fn put(&self, number: u64, link: Option<FrameLink>) {
        self.links.lock().insert(number, link);
        self.come.notify_waiters();
    }

    async fn connect_link(&self, number: u64) -> Option<FrameLink> {
        loop {
            let come = self.come.notified();
            if let Some(link) = self.links.lock().remove(&number) {
                return link;
            }
            come.await;
        }
    }
}

struct Server {
    back: IpcServer,
    waiting: Waiting,
    has_api: AtomicBool,
    stop: CancellationToken,
}

impl IpcServer {
    /// Serves until `stop`, and a moment longer.
    pub async fn serve(self, listener: UnixListener, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let server = Arc::new(Server {
            back: self,
            waiting: Waiting::default(),
            has_api: AtomicBool::new(false),
            stop: stop.clone(),
        });
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let server = server.clone();
                    tasks.spawn(async move {
                        if let Err(error) = server.answer(stream).await {
                            tracing::warn!(%error, "a connection from the API failed");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection from the API could not be accepted");
                    server.back.clock.sleep(Duration::from_millis(50)).await;
                }
            }
        }
        tasks.close();
        let _ = server.back.clock.timeout(LAST_WORDS * 2, tasks.wait()).await;
    }
}

impl Server {
    async fn answer(self: Arc<Self>, stream: UnixStream) -> io::Result<()> {
        ipc_socket::check(&stream, &[ipc_socket::own_user(), self.back.api_user])?;
        let clock = self.back.clock.clone();
        let mut wire = wire(stream);
        let Ok(Some(hail)) = clock.timeout(HANDSHAKE_TIMEOUT, wire.next()).await else { return Ok(()) };
        match unpacked(hail)? {
            Handshake::Memory(call) => remote_store::serve(&*self.back.memory, call, wire).await,
            Handshake::Port(call) => ipc_ports::serve(&*self.back.ports, call, wire, &clock, &self.stop).await,
            Handshake::Link { number } => {
                let link = clock.timeout(HANDSHAKE_TIMEOUT, self.waiting.connect_link(number)).await;
                let Ok(Some(link)) = link else { return Ok(()) };
                // Frames may have followed the handshake immediately.
                let parts = wire.into_parts();
                ipc_frames::serve(parts.io, &parts.read_buf, link).await;
                Ok(())
            }
            Handshake::Board { version } => {
                if self.has_api.swap(true, Ordering::SeqCst) {
                    return Err(io::Error::other("another API is connected already"));
                }
                tracing::info!(version, "the API connected");
                let ended = self.clone().with_api(wire, version == VERSION).await;
                self.waiting.links.lock().clear();
                self.has_api.store(false, Ordering::SeqCst);
                tracing::info!("the API disconnected");
                ended
            }
        }
    }

    /// Runs until either half ends. The API's sessions leave the bus when this connection closes.
    async fn with_api(&self, wire: IpcStream, fits: bool) -> io::Result<()> {
        let (mut sink, mut stream) = wire.split();
        sink.send(packed(&FromReconciler::Hello(self.back.hello.clone()))?).await?;
        if !fits {
            return Ok(());
        }
        let (out, mut outbox) = mpsc::channel::<FromReconciler>(OUTBOX);
        let lives = Lives::default();
        let write = async {
            while let Some(news) = outbox.recv().await {
                sink.feed(packed(&news)?).await?;
                while let Ok(news) = outbox.try_recv() {
                    sink.feed(packed(&news)?).await?;
                }
                sink.flush().await?;
            }
            Ok::<_, io::Error>(())
        };
        let hear = async {
            let mut sessions =
                Sessions { server: self, lives: &lives, out: &out, visits: BTreeMap::new(), wanted: BTreeMap::new() };
            while let Some(said) = stream.next().await {
                sessions.handle(said)?;
            }
            Ok::<_, io::Error>(())
        };
        let drain = async {
            let mut leaving = self.back.leaving.clone();
            if leaving.wait_for(|leaving| *leaving).await.is_ok() {
                let _ = out.send(FromReconciler::Draining).await;
            }
            std::future::pending::<()>().await;
        };
        let stop = async {
            self.stop.cancelled().await;
            self.back.clock.sleep(LAST_WORDS).await;
        };
        tokio::select! {
            written = write => written,
            heard = hear => heard,
            () = self.tell_holds(&lives, &out) => Ok(()),
            () = drain => Ok(()),
            () = stop => Ok(()),
        }
    }

    /// Sends which sandboxes are held, their evictability, and which accept links: first all of them, then every
    /// change.
    async fn tell_holds(&self, lives: &Lives, out: &mpsc::Sender<FromReconciler>) {
        let mut changes = self.back.bus.holds();
        let mut known: BTreeMap<SandboxId, Known> = BTreeMap::new();
        let tasks = TaskTracker::new();
        let mut ready = false;
        loop {
            changes.mark_unchanged();
            let held = self.back.bus.held_places();
            let gone: Vec<_> = known.keys().filter(|id| !held.contains_key(*id)).cloned().collect();
            for id in gone {
                known.remove(&id);
                lives.forget(&id);
                let _ = out.send(FromReconciler::Held { id, held: false }).await;
            }
            for (id, evictability) in held {
                if !known.contains_key(&id) {
                    let seen = self.back.lifecycle.watch(&id);
                    let _ = out.send(FromReconciler::Held { id: id.clone(), held: true }).await;
                    let live = lives.liveness(&id, is_live(*seen.borrow()));
                    let _ = out.send(live).await;
                    let watch = watch_life(id.clone(), seen, lives.clone(), out.clone());
                    let watch = AbortOnDropHandle::new(tasks.spawn(watch));
                    known.insert(id.clone(), Known { evictability: Evictability::default(), watch });
                }
                if let Some(known) = known.get_mut(&id).filter(|known| known.evictability != evictability) {
                    known.evictability = evictability;
                    let _ = out.send(FromReconciler::Tenure { id, evictability }).await;
                }
            }
            if !std::mem::replace(&mut ready, true) {
                let _ = out.send(FromReconciler::Ready).await;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// What the API knows about a held sandbox.
struct Known {
    evictability: Evictability,
    #[expect(dead_code, reason = "held as long as the sandbox is")]
    watch: AbortOnDropHandle<()>,
}

/// Whether a link can be opened, as the runtime sees it.
fn is_live(seen: ContainerView) -> bool {
    matches!(seen.container, Container::Running | Container::Paused | Container::Fenced)
}

async fn watch_life(
    id: SandboxId,
    mut seen: watch::Receiver<ContainerView>,
    lives: Lives,
    out: mpsc::Sender<FromReconciler>,
) {
    let mut told = None;
    loop {
        let live = is_live(*seen.borrow_and_update());
        if told.replace(live) != Some(live) && out.send(lives.liveness(&id, live)).await.is_err() {
            return;
        }
        if seen.changed().await.is_err() {
            return;
        }
    }
}

/// Numbers the containers of each sandbox, as far as the API has to distinguish them.
#[derive(Clone, Debug, Default)]
struct Lives(Arc<Mutex<BTreeMap<SandboxId, (u64, bool)>>>);

impl Lives {
    fn liveness(&self, id: &SandboxId, live: bool) -> FromReconciler {
        let mut lives = self.0.lock();
        let (number, was_live) = lives.entry(id.clone()).or_insert((0, false));
        if live && !*was_live {
            *number += 1;
        }
        *was_live = live;
        FromReconciler::Live { id: id.clone(), life: live.then_some(*number) }
    }

    fn forget(&self, id: &SandboxId) {
        // The number stays: a later container gets another one.
        if let Some((_, live)) = self.0.lock().get_mut(id) {
            *live = false;
        }
    }
}

/// The API half's sessions, registered on our bus.
struct Sessions<'a> {
    server: &'a Server,
    lives: &'a Lives,
    out: &'a mpsc::Sender<FromReconciler>,
    visits: BTreeMap<SandboxId, AttachedSessions>,
    /// Sandboxes whose eviction the API half requests.
    wanted: BTreeMap<SandboxId, EvictionRequest>,
}

struct AttachedSessions {
    attached: Vec<AttachGuard>,
    #[expect(dead_code, reason = "held as long as a session listens")]
    subscription: AbortOnDropHandle<()>,
}

impl Sessions<'_> {
    fn handle(&mut self, said: io::Result<BytesMut>) -> io::Result<()> {
        let back = &self.server.back;
        match unpacked(said)? {
            FromApi::Open { id, number } => self.server.waiting.put(number, back.execs.open(&id)),
            FromApi::Told(BusMessage::Nudged(id)) => back.bus.wake(&id),
            FromApi::Told(BusMessage::Placed(id)) => back.bus.placed(&id),
            FromApi::Told(BusMessage::Touched(id)) => back.bus.touch(&id),
            FromApi::Told(BusMessage::Alive(id, number)) => back.bus.alive(&id, number),
            FromApi::Told(BusMessage::Wanted(id)) => {
                self.wanted.entry(id).or_insert_with_key(|id| back.bus.want(id));
            }
            FromApi::Told(BusMessage::Unwanted(id)) => drop(self.wanted.remove(&id)),
            FromApi::Told(BusMessage::Leased { id, lease }) => back.bus.note_lease(&id, lease),
            FromApi::Told(BusMessage::Unleased(id)) => back.bus.unlease(&id),
            FromApi::Told(BusMessage::Attached(id)) => {
                let attached = back.bus.attach(&id);
                if let Some(visit) = self.visits.get_mut(&id) {
                    visit.attached.push(attached);
                    return Ok(());
                }
                let follow = forward(back.bus.follow(&id), id.clone(), self.lives.clone(), self.out.clone());
                let subscription = AbortOnDropHandle::new(TaskTracker::new().spawn(follow));
                self.visits.insert(id, AttachedSessions { attached: vec![attached], subscription });
            }
            FromApi::Told(BusMessage::Left(id)) => {
                if let Some(visit) = self.visits.get_mut(&id) {
                    visit.attached.pop();
                    if visit.attached.is_empty() {
                        self.visits.remove(&id);
                    }
                }
            }
        }
        Ok(())
    }
}

async fn forward(mut subscription: Subscription, id: SandboxId, lives: Lives, out: mpsc::Sender<FromReconciler>) {
    loop {
        let passing = subscription.next().await.passing;
        // A client that learns that the sandbox runs opens a link at once.
        if matches!(passing, LifecycleEvent::Running { .. }) && out.send(lives.liveness(&id, true)).await.is_err() {
            return;
        }
        if out.send(FromReconciler::Posted { id: id.clone(), passing }).await.is_err() {
            return;
        }
    }
}
