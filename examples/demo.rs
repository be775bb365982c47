//! Two servers, one storage directory, one counting command: it is handed over three times, then
//! its server gets SIGTERM, then `kill -9`. Says what happens and checks every line of the count.
//!
//! ```text
//! demo BATON DIRECTORY      the server's program, and an empty directory to work in
//! ```
//! The client knows one address only. Behind it stands a door that sends each new connection
//! to one of the servers, as a load balancer would.

#![expect(clippy::disallowed_methods, reason = "a client has no clock of an instance")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use baton_client::{Chunk, Exec, Idle, Options, Running, Sandbox, SandboxConfig, StdStream};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    sync::watch,
    task::JoinSet,
};

const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// The lease's times are a fifth of the usual ones, so that nobody waits half a minute for a takeover.
const TIME_SCALE: &str = "0.2";
const COUNT: &str = "import itertools, time
for i in itertools.count():
    print(i, flush=True)
    time.sleep(0.01)";

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(baton), Some(directory), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        bail!("usage: demo BATON DIRECTORY")
    };
    tokio::time::timeout(5 * STEP_TIMEOUT, show(&baton, &directory)).await.context("the demo took far too long")?
}

async fn show(baton: &Path, directory: &Path) -> Result<()> {
    let began = Instant::now();
    let say = |text: &str| println!("{:7.2} s  {text}", began.elapsed().as_secs_f64());
    let start = |name: &'static str| Server::start(baton, directory, name);
    let (mut a, mut b) = tokio::try_join!(start("a"), start("b"))?;
    let door = Door::open(a.address).await?;
    say("two servers, a and b, share one storage directory; times of the lease are a fifth of the usual ones");

    let config = SandboxConfig { enable_checkpoint: true, idle_timeout: Some(Idle::Never), ..SandboxConfig::default() };
    let sandbox = Sandbox::create(&door.url, Options { config, ..Options::default() }).await?;
    say("a new sandbox runs on a");
    let mut count = Count::new(sandbox.exec(Exec::argv(["python3", "-c", COUNT])).await?);
    say("in it a command counts: one line every 10 ms or so");
    count.read(100).await?;

    for (number, server) in [&b, &a, &b].into_iter().enumerate() {
        let last = count.lines() - 1;
        say(&format!(
            "handoff {}: the connection drops after line {last}; the next one lands on {}",
            number + 1,
            server.name
        ));
        door.turn_to(server.address);
        door.cut();
        count.read(1).await?;
        say(&format!("           line {} comes from {}, after {} of silence", last + 1, server.name, count.silence()));
        count.read(100).await?;
    }

    say("SIGTERM to b: it lets go of everything it runs; new connections go to a");
    door.turn_to(a.address);
    b.signal(Signal::SIGTERM)?;
    ensure!(b.ended().await?.success(), "b ended badly");
    let last = count.read_for(Duration::ZERO).await?;
    say(&format!("           b has ended; the last line so far is {last}"));
    count.read(1).await?;
    say(&format!("           the count goes on, on a; the longest silence was {}", count.silence()));
    b = start("b").await?;
    say("           b starts again");
    count.read(100).await?;

    let last = count.lines() - 1;
    say(&format!("kill -9 of a after line {last}: nobody is left to let go; new connections go to b"));
    door.turn_to(b.address);
    a.signal(Signal::SIGKILL)?;
    a.ended().await?;
    let again = count.read_past_the_crash().await?;
    say(&format!("           b took over after {}, from the last checkpoint:", count.silence()));
    say(&format!("           the command is back at line {again} and writes {} lines again", last + 1 - again));
    count.read(last + 100 - again).await?;

    count.running.kill().await?;
    sandbox.kill().await?;
    b.signal(Signal::SIGTERM)?;
    ensure!(b.ended().await?.success(), "b ended badly");
    let lines = count.check()?;
    println!("\n{lines} lines, none missing, none doubled");
    Ok(())
}

/// What the client has of the count.
struct Count {
    running: Running,
    bytes: Vec<u8>,
    /// When the last bytes came, and the longest time between two since somebody asked.
    last: Instant,
    silence: Duration,
}

impl Count {
    fn new(running: Running) -> Self {
        Self { running, bytes: Vec::new(), last: Instant::now(), silence: Duration::ZERO }
    }

    fn lines(&self) -> usize {
        self.bytes.iter().filter(|byte| **byte == b'\n').count()
    }

    /// The longest silence since the last call, as a text.
    fn silence(&mut self) -> String {
        format!("{:.2} s", std::mem::take(&mut self.silence).as_secs_f64())
    }

    /// Takes one piece; where the count began anew, if it did.
    async fn step(&mut self) -> Result<Option<usize>> {
        let next = tokio::time::timeout(STEP_TIMEOUT, self.running.next()).await.context("the count fell silent")?;
        let now = Instant::now();
        self.silence = self.silence.max(now - self.last);
        self.last = now;
        match next.context("the command ended")? {
            (StdStream::Stdout, Chunk::Data(bytes)) => self.bytes.extend_from_slice(&bytes),
            (StdStream::Stdout, Chunk::Rewound { to }) => {
                self.bytes.truncate(usize::try_from(to)?);
                return Ok(Some(self.lines()));
            }
            (StdStream::Stdout, Chunk::Gap { from, to }) => bail!("the bytes {from} to {to} are lost"),
            (StdStream::Stderr, Chunk::Data(bytes)) => {
                bail!("the command complains: {}", String::from_utf8_lossy(&bytes))
            }
            (StdStream::Stderr, Chunk::Gap { .. } | Chunk::Rewound { .. }) => {}
        }
        Ok(None)
    }

    /// Reads so many lines more; nothing may be written twice.
    async fn read(&mut self, more: usize) -> Result<()> {
        let until = self.lines() + more;
        while self.lines() < until {
            ensure!(self.step().await?.is_none(), "the count went back without a crash");
        }
        Ok(())
    }

    /// Reads what is there; the number of the last line.
    async fn read_for(&mut self, span: Duration) -> Result<usize> {
        let until = tokio::time::Instant::now() + span;
        while let Ok(step) = tokio::time::timeout_at(until, self.step()).await {
            ensure!(step?.is_none(), "the count went back without a crash");
        }
        Ok(self.lines() - 1)
    }

    /// Reads until the count has begun anew; at which line it did.
    async fn read_past_the_crash(&mut self) -> Result<usize> {
        loop {
            if let Some(line) = self.step().await? {
                self.step().await?;
                return Ok(line);
            }
        }
    }

    /// Every line is the number of its place.
    fn check(&self) -> Result<usize> {
        let text = std::str::from_utf8(&self.bytes)?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for (place, line) in whole.lines().enumerate() {
            ensure!(line == place.to_string(), "line {place} says {line}");
        }
        Ok(whole.lines().count())
    }
}

/// One address for clients; each new connection goes to the server it is turned to.
struct Door {
    url: String,
    to: watch::Sender<SocketAddr>,
    cuts: watch::Sender<()>,
    _task: JoinSet<()>,
}

impl Door {
    async fn open(to: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("ws://{}", listener.local_addr()?);
        let (to, cuts) = (watch::Sender::new(to), watch::Sender::new(()));
        let (target, cut) = (to.subscribe(), cuts.subscribe());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let (target, mut cut) = (*target.borrow(), cut.clone());
                cut.mark_unchanged();
                connections.spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Ok(Self { url, to, cuts, _task: task })
    }

    fn turn_to(&self, server: SocketAddr) {
        self.to.send_replace(server);
    }

    /// Ends every connection there is, in the middle of whatever it carries.
    fn cut(&self) {
        self.cuts.send_replace(());
    }
}

struct Server {
    name: &'static str,
    child: Child,
    address: SocketAddr,
}

impl Server {
    async fn start(baton: &Path, directory: &Path, name: &'static str) -> Result<Self> {
        let log = directory.join(format!("{name}.log"));
        let file = std::fs::File::create(&log)?;
        let child = Command::new(baton)
            .arg("serve")
            .env("BATON_STATE_DIR", directory.join(name))
            .env("BATON_STORE_RUNTIME", "false")
            .env("CHECKPOINT_AND_RESTORE_PATH", directory.join("data"))
            .env("BATON_LISTEN", "127.0.0.1:0")
            .env("BATON_LOG", "info")
            .env("BATON_TIME_SCALE", TIME_SCALE)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .context("the server does not start")?;
        let mut server = Self { name, child, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let until = Instant::now() + STEP_TIMEOUT;
        loop {
            let text = std::fs::read_to_string(&log)?;
            let address = text.split_once("serving address=").and_then(|(_, rest)| rest.split_whitespace().next());
            if let Some(address) = address {
                server.address = address.parse()?;
                return Ok(server);
            }
            ensure!(
                server.child.try_wait()?.is_none() && Instant::now() < until,
                "server {name} did not start:\n{text}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.child.id().context("it has ended already")?;
        Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?)
    }

    async fn ended(&mut self) -> Result<std::process::ExitStatus> {
        Ok(tokio::time::timeout(STEP_TIMEOUT, self.child.wait()).await.context("the server does not end")??)
    }
}
