//! The reconciler's end: answers the API's half from the board, the containers and the memory.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_protocol::id::SandboxId;
use bytes::BytesMut;
use futures::{SinkExt, StreamExt};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Notify, mpsc, watch},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use super::{Hail, Hello, News, Said, VERSION, Wire, carry, memory, packed, socket, unpacked, wire};
use crate::{
    clock::SharedClock,
    runtime::{Container, Execs, Lifecycle, Link, Seen},
    storage::{
        board::{Attached, Board, Follower, Passing, Tenure, Told, Wanted},
        store::Store,
    },
};

/// For a peer to say what it wants, and for a link that was announced to come.
const PATIENCE: Duration = Duration::from_secs(5);
/// News that wait to be written; whoever has more waits.
const OUTBOX: usize = 256;
/// After the end of the reconciler its last news are still told.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What the API's half may see and do.
#[derive(Debug)]
pub struct Back {
    pub hello: Hello,
    pub clock: SharedClock,
    pub board: Arc<Board>,
    pub execs: Arc<dyn Execs>,
    pub lifecycle: Arc<dyn Lifecycle>,
    pub memory: Arc<dyn Store>,
    /// True from the moment the instance is on its way out.
    pub leaving: watch::Receiver<bool>,
    /// Whose the API may be, besides our own user.
    pub api_user: u32,
}

/// Links that were opened and not yet fetched.
#[derive(Debug, Default)]
struct Waiting {
    links: Mutex<BTreeMap<u64, Option<Link>>>,
    come: Notify,
}

impl Waiting {
    fn links(&self) -> MutexGuard<'_, BTreeMap<u64, Option<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, number: u64, link: Option<Link>) {
        self.links().insert(number, link);
        self.come.notify_waiters();
    }

    async fn take(&self, number: u64) -> Option<Link> {
        loop {
            let come = self.come.notified();
            if let Some(link) = self.links().remove(&number) {
                return link;
            }
            come.await;
        }
    }
}

struct Server {
    back: Back,
    waiting: Waiting,
    has_api: AtomicBool,
    stop: CancellationToken,
}

impl Back {
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
                            tracing::warn!(%error, "a connection of the other half failed");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection of the other half could not be taken");
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
        socket::check(&stream, &[socket::own_user(), self.back.api_user])?;
        let clock = self.back.clock.clone();
        let mut wire = wire(stream);
        let Ok(Some(hail)) = clock.timeout(PATIENCE, wire.next()).await else { return Ok(()) };
        match unpacked(hail)? {
            Hail::Memory(call) => memory::serve(&*self.back.memory, call, wire).await,
            Hail::Link { number } => {
                let link = clock.timeout(PATIENCE, self.waiting.take(number)).await;
                let Ok(Some(link)) = link else { return Ok(()) };
                // Frames may have come right behind the hail.
                let parts = wire.into_parts();
                carry::serve(parts.io, &parts.read_buf, link).await;
                Ok(())
            }
            Hail::Board { version } => {
                if self.has_api.swap(true, Ordering::SeqCst) {
                    return Err(io::Error::other("another API is connected already"));
                }
                tracing::info!(version, "the API has come");
                let ended = self.clone().with_api(wire, version == VERSION).await;
                self.waiting.links().clear();
                self.has_api.store(false, Ordering::SeqCst);
                tracing::info!("the API has gone");
                ended
            }
        }
    }

    /// Until either half ends. Its sessions leave the board with this connection.
    async fn with_api(&self, wire: Wire, fits: bool) -> io::Result<()> {
        let (mut sink, mut stream) = wire.split();
        sink.send(packed(&News::Hello(self.back.hello.clone()))?).await?;
        if !fits {
            return Ok(());
        }
        let (out, mut outbox) = mpsc::channel::<News>(OUTBOX);
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
                sessions.hear(said)?;
            }
            Ok::<_, io::Error>(())
        };
        let drain = async {
            let mut leaving = self.back.leaving.clone();
            if leaving.wait_for(|leaving| *leaving).await.is_ok() {
                let _ = out.send(News::Draining).await;
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

    /// What is held and how, and to what a link can be opened: all of it first, then every change.
    async fn tell_holds(&self, lives: &Lives, out: &mpsc::Sender<News>) {
        let mut changes = self.back.board.holds();
        let mut known: BTreeMap<SandboxId, Known> = BTreeMap::new();
        let tasks = TaskTracker::new();
        let mut ready = false;
        loop {
            changes.mark_unchanged();
            let held = self.back.board.held_places();
            let gone: Vec<_> = known.keys().filter(|id| !held.contains_key(*id)).cloned().collect();
            for id in gone {
                known.remove(&id);
                lives.forget(&id);
                let _ = out.send(News::Held { id, held: false }).await;
            }
            for (id, tenure) in held {
                if !known.contains_key(&id) {
                    let seen = self.back.lifecycle.watch(&id);
                    let _ = out.send(News::Held { id: id.clone(), held: true }).await;
                    let live = lives.news(&id, is_live(*seen.borrow()));
                    let _ = out.send(live).await;
                    let watch = watch_life(id.clone(), seen, lives.clone(), out.clone());
                    let watch = AbortOnDropHandle::new(tasks.spawn(watch));
                    known.insert(id.clone(), Known { tenure: Tenure::default(), watch });
                }
                if let Some(known) = known.get_mut(&id).filter(|known| known.tenure != tenure) {
                    known.tenure = tenure;
                    let _ = out.send(News::Tenure { id, tenure }).await;
                }
            }
            if !std::mem::replace(&mut ready, true) {
                let _ = out.send(News::Ready).await;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// What the API has been told of a sandbox that is held.
struct Known {
    tenure: Tenure,
    #[expect(dead_code, reason = "held as long as the sandbox is")]
    watch: AbortOnDropHandle<()>,
}

/// A link can be opened, as the runtime sees it.
fn is_live(seen: Seen) -> bool {
    matches!(seen.container, Container::Running | Container::Paused | Container::Fenced)
}

async fn watch_life(id: SandboxId, mut seen: watch::Receiver<Seen>, lives: Lives, out: mpsc::Sender<News>) {
    let mut told = None;
    loop {
        let live = is_live(*seen.borrow_and_update());
        if told.replace(live) != Some(live) && out.send(lives.news(&id, live)).await.is_err() {
            return;
        }
        if seen.changed().await.is_err() {
            return;
        }
    }
}

/// Numbers the containers of each sandbox, as far as the API has to tell them apart.
#[derive(Clone, Debug, Default)]
struct Lives(Arc<Mutex<BTreeMap<SandboxId, (u64, bool)>>>);

impl Lives {
    fn lives(&self) -> MutexGuard<'_, BTreeMap<SandboxId, (u64, bool)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn news(&self, id: &SandboxId, live: bool) -> News {
        let mut lives = self.lives();
        let (number, was_live) = lives.entry(id.clone()).or_insert((0, false));
        if live && !*was_live {
            *number += 1;
        }
        *was_live = live;
        News::Live { id: id.clone(), life: live.then_some(*number) }
    }

    fn forget(&self, id: &SandboxId) {
        // The number stays: a later container is another one.
        if let Some((_, live)) = self.lives().get_mut(id) {
            *live = false;
        }
    }
}

/// The sessions of the other half, on our board.
struct Sessions<'a> {
    server: &'a Server,
    lives: &'a Lives,
    out: &'a mpsc::Sender<News>,
    visits: BTreeMap<SandboxId, Visit>,
    /// Places for which somebody waits.
    wanted: BTreeMap<SandboxId, Wanted>,
}

struct Visit {
    attached: Vec<Attached>,
    #[expect(dead_code, reason = "held as long as somebody listens")]
    follower: AbortOnDropHandle<()>,
}

impl Sessions<'_> {
    fn hear(&mut self, said: io::Result<BytesMut>) -> io::Result<()> {
        let back = &self.server.back;
        match unpacked(said)? {
            Said::Open { id, number } => self.server.waiting.put(number, back.execs.open(&id)),
            Said::Told(Told::Nudged(id)) => back.board.nudge(&id),
            Said::Told(Told::Touched(id)) => back.board.touch(&id),
            Said::Told(Told::Alive(id, number)) => back.board.alive(&id, number),
            Said::Told(Told::Wanted(id)) => {
                self.wanted.entry(id).or_insert_with_key(|id| back.board.want(id));
            }
            Said::Told(Told::Unwanted(id)) => drop(self.wanted.remove(&id)),
            Said::Told(Told::Leased { id, lease }) => back.board.note_lease(&id, lease),
            Said::Told(Told::Unleased(id)) => back.board.unlease(&id),
            Said::Told(Told::Attached(id)) => {
                let attached = back.board.attach(&id);
                if let Some(visit) = self.visits.get_mut(&id) {
                    visit.attached.push(attached);
                    return Ok(());
                }
                let follow = forward(back.board.follow(&id), id.clone(), self.lives.clone(), self.out.clone());
                let follower = AbortOnDropHandle::new(TaskTracker::new().spawn(follow));
                self.visits.insert(id, Visit { attached: vec![attached], follower });
            }
            Said::Told(Told::Left(id)) => {
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

async fn forward(mut follower: Follower, id: SandboxId, lives: Lives, out: mpsc::Sender<News>) {
    loop {
        let passing = follower.next().await.passing;
        // Who hears that it runs opens a link at once.
        if matches!(passing, Passing::Running { .. }) && out.send(lives.news(&id, true)).await.is_err() {
            return;
        }
        if out.send(News::Posted { id: id.clone(), passing }).await.is_err() {
            return;
        }
    }
}
