//! The API's end: a bus that forwards to the reconciler's bus, and links to agents over sockets.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton_protocol::{frame::Frame, id::SandboxId};
use futures::{SinkExt, StreamExt, stream::SplitStream};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::{
    Error, FromApi, FromReconciler, Handshake, IpcHello, IpcStream, VERSION, ipc_frames, ipc_ports::RemotePorts,
    ipc_socket, packed, remote_store::RemoteStore, unpacked, wire,
};
use crate::{
    bus::Bus,
    clock::SharedClock,
    network::PortLinks,
    runtime::{AgentLinks, FrameLink, OutputQueue},
    storage::store::Store,
};

/// Timeout for the reconciler half to send its hello and what it holds.
const GREETING: Duration = Duration::from_secs(5);
/// Capacity of a link, in frames, on either side.
const LINK_FRAMES: usize = 32;

/// The connection to the reconciler half.
#[derive(Debug)]
pub struct IpcClient {
    pub hello: IpcHello,
    pub bus: Arc<Bus>,
    pub execs: Arc<dyn AgentLinks>,
    /// Records of sandboxes that end with their instance.
    pub memory: Arc<dyn Store>,
    /// Ports inside the sandboxes.
    pub ports: Arc<dyn PortLinks>,
    /// True once the reconciler half drains.
    pub draining: watch::Receiver<bool>,
    /// Cancelled when the reconciler half is gone. Nothing in this value works after that.
    pub gone: CancellationToken,
    /// Dropping this closes the connection.
    pub hold: DropGuard,
}

/// Connects to the reconciler half. Completes when everything it holds is on the bus.
pub async fn connect(directory: &Path, clock: &SharedClock, tasks: &TaskTracker) -> Result<IpcClient, Error> {
    let path = ipc_socket::path(directory);
    let broken = |error: std::io::Error| Error::Broken(error.to_string());
    let mut wire = wire(ipc_socket::dial(&path).await?);
    wire.send(packed(&Handshake::Board { version: VERSION.to_owned() }).map_err(broken)?).await.map_err(broken)?;
    let (said, mut outbox) = mpsc::unbounded_channel();
    let teller = said.clone();
    let bus = Bus::telling(clock.clone(), move |told| {
        // The receiver is gone when the reconciler half is; then this bus is of no use either.
        let _ = teller.send(FromApi::Told(told));
    });
    let lives = Arc::new(Mutex::new(Lives::new(clock)));
    let (drain, draining) = watch::channel(false);
    let mut mirror = Mirror { bus: bus.clone(), lives: lives.clone(), drain, hello: None };
    let greeted = clock.timeout(GREETING, mirror.until_ready(&mut wire)).await;
    let hello = greeted.map_err(|elapsed| Error::Broken(elapsed.to_string()))??;
    let gone = CancellationToken::new();
    let (mut sink, stream) = wire.split();
    let (end, closed) = (gone.clone(), CancellationToken::new());
    let hold = closed.clone().drop_guard();
    tasks.spawn(async move {
        let write = async {
            while let Some(said) = outbox.recv().await {
                let Ok(bytes) = packed(&said) else { continue };
                if sink.send(bytes).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! {
            () = write => {}
            () = mirror.follow(stream) => {}
            () = closed.cancelled() => {}
        }
        end.cancel();
    });
    let memory = RemoteStore::new(path.clone(), clock.clone());
    let ports = RemotePorts::new(path.clone(), clock.clone(), tasks.clone());
    let execs = Arc::new(Links { path, said, lives, tasks: tasks.clone() });
    Ok(IpcClient { hello, bus, execs, memory, ports, draining, gone, hold })
}

/// Applies the messages of the reconciler half to the API's own bus and tables.
struct Mirror {
    bus: Arc<Bus>,
    lives: Arc<Mutex<Lives>>,
    drain: watch::Sender<bool>,
    hello: Option<IpcHello>,
}

impl Mirror {
    async fn until_ready(&mut self, wire: &mut IpcStream) -> Result<IpcHello, Error> {
        loop {
            let news = wire.next().await.ok_or_else(|| Error::Broken("it closed the connection".to_owned()))?;
            let news = unpacked(news).map_err(|error| Error::Broken(error.to_string()))?;
            if let FromReconciler::Hello(hello) = &news
                && hello.version != VERSION
            {
                return Err(Error::Version { theirs: hello.version.clone() });
            }
            let ready = matches!(news, FromReconciler::Ready);
            self.apply(news);
            if ready {
                return self.hello.take().ok_or_else(|| Error::Broken("it did not say who it is".to_owned()));
            }
        }
    }

    async fn follow(mut self, mut stream: SplitStream<IpcStream>) {
        while let Some(news) = stream.next().await {
            match unpacked(news) {
                Ok(news) => self.apply(news),
                Err(error) => {
                    tracing::warn!(%error, "a message from the reconciler could not be parsed");
                    return;
                }
            }
        }
    }

    fn apply(&mut self, news: FromReconciler) {
        match news {
            FromReconciler::Hello(hello) => self.hello = Some(hello),
            FromReconciler::Ready => {}
            FromReconciler::Held { id, held } => {
                self.bus.set_held(&id, held);
                if !held {
                    self.lives.lock().live.remove(&id);
                    self.bus.forget(&id);
                }
            }
            FromReconciler::Tenure { id, evictability } => self.bus.set_tenure(&id, evictability),
            FromReconciler::Live { id, life } => match life {
                Some(life) => drop(self.lives.lock().live.insert(id, life)),
                None => drop(self.lives.lock().live.remove(&id)),
            },
            FromReconciler::Posted { id, passing } => self.bus.post(&id, passing),
            FromReconciler::Draining => drop(self.drain.send_replace(true)),
        }
    }
}

/// The sandboxes to which a link can be opened.
#[derive(Debug)]
struct Lives {
    live: BTreeMap<SandboxId, u64>,
    latest: BTreeMap<SandboxId, u64>,
    /// The next link number. Numbering starts at a random value, so that the links of an earlier API process have
    /// other numbers.
    next: u64,
}

impl Lives {
    fn new(clock: &SharedClock) -> Self {
        let mut dice = [0; 8];
        clock.fill(&mut dice);
        Self { live: BTreeMap::new(), latest: BTreeMap::new(), next: u64::from_le_bytes(dice) >> 1 }
    }

    /// The reconciler half closed a link. If it was the newest one, its container has ended, whether or not that
    /// message has arrived.
    fn closed(&mut self, id: &SandboxId, life: u64, number: u64) {
        if self.latest.get(id) == Some(&number) {
            self.latest.remove(id);
            if self.live.get(id) == Some(&life) {
                self.live.remove(id);
            }
        }
    }
}

#[derive(Debug)]
struct Links {
    path: PathBuf,
    said: mpsc::UnboundedSender<FromApi>,
    lives: Arc<Mutex<Lives>>,
    tasks: TaskTracker,
}

impl AgentLinks for Links {
    fn open(&self, id: &SandboxId) -> Option<FrameLink> {
        let (life, number) = {
            let mut lives = self.lives.lock();
            let life = *lives.live.get(id)?;
            lives.next += 1;
            let number = lives.next;
            lives.latest.insert(id.clone(), number);
            // Under the lock, so that the reconciler half receives links in the order of their numbers.
            self.said.send(FromApi::Open { id: id.clone(), number }).ok()?;
            (life, number)
        };
        let (to_agent, frames) = mpsc::channel::<Frame>(LINK_FRAMES);
        let (outlet, from_agent, behind) = OutputQueue::new();
        let (path, lives, id) = (self.path.clone(), self.lives.clone(), id.clone());
        self.tasks.spawn(async move {
            let end = match bring(&path, number).await {
                Ok(stream) => ipc_frames::use_it(stream, frames, &outlet).await,
                Err(error) => {
                    tracing::warn!(sandbox = %id, %error, "an agent link could not be opened");
                    ipc_frames::LinkEnd::Theirs
                }
            };
            // First prevent new links, then let the session see that this one has ended.
            if end == ipc_frames::LinkEnd::Theirs {
                lives.lock().closed(&id, life, number);
            }
            drop(outlet);
        });
        Some(FrameLink { to_agent, from_agent, behind })
    }
}

async fn bring(path: &Path, number: u64) -> Result<tokio::net::UnixStream, Error> {
    let broken = |error: std::io::Error| Error::Broken(error.to_string());
    let mut wire = wire(ipc_socket::dial(path).await?);
    wire.send(packed(&Handshake::Link { number }).map_err(broken)?).await.map_err(broken)?;
    // Nothing was read yet, so the codec has buffered no frames.
    Ok(wire.into_inner())
}
