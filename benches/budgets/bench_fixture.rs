//! Where it is measured: the pieces, a directory of its own, servers of the release build.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use baton_fake_gcs::FakeGcs;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::{Child, Command},
};

use crate::{
    bare::Bare,
    bench_client::{Client, Dialect},
};

const SETUP: &str = "run `make setup` (scripts/setup), which gets it";
pub const BUCKET: &str = "bench";
/// What of the caller's environment a server must not hear.
const FOREIGN: [&str; 4] = ["BATON_", "SANDBOX_", "FILESYSTEM_SNAPSHOT_", "CHECKPOINT_AND_RESTORE_"];

#[derive(Debug)]
pub struct Place {
    pieces: Pieces,
    directory: tempfile::TempDir,
    pub bare: Bare,
}

#[derive(Clone, Debug)]
pub struct Pieces {
    pub runsc: PathBuf,
    pub rootfs: PathBuf,
    pub agent: PathBuf,
}

impl Pieces {
    fn find() -> Result<Self> {
        let piece = |name: &str| {
            let path = std::env::var_os(name).map(PathBuf::from);
            let path = path.with_context(|| format!("{name} is not set: {SETUP}"))?;
            if !path.exists() {
                bail!("{name} is {}, which is not there: {SETUP}", path.display());
            }
            Ok(path)
        };
        Ok(Self { runsc: piece("BATON_RUNSC")?, rootfs: piece("BATON_ROOTFS")?, agent: piece("BATON_AGENT")? })
    }
}

/// What servers share.
#[derive(Clone, Copy, Debug)]
pub enum Store<'a> {
    Directory(&'a Path),
    Bucket(&'a FakeGcs),
}

impl Place {
    pub async fn open() -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("containers need root: run `make bench` as root");
        }
        let pieces = Pieces::find()?;
        // A short path: sockets lie below it.
        let directory = tempfile::Builder::new().prefix("bb").tempdir()?;
        let bare = Bare::new(&directory.path().join("bare"), &pieces)?;
        let place = Self { pieces, directory, bare };
        place.learn_spec().await.context("the spec of a sandbox could not be learnt")?;
        Ok(place)
    }

    /// Bare runsc runs what the server runs, taken from a sandbox of the server.
    async fn learn_spec(&self) -> Result<()> {
        let server = self.server("spec", Store::Directory(&self.data("spec")?)).await?;
        let (client, _) = Client::create(&server, Dialect::V1, &serde_json::json!({})).await?;
        let bundle = fs::read_dir(server.state_dir.join("bundles"))?.next().context("it has no bundle")??;
        let spec: Value = serde_json::from_slice(&fs::read(bundle.path().join("config.json"))?)?;
        self.bare.take_spec(spec)?;
        client.kill().await?;
        server.stop().await
    }

    /// An empty directory of this name.
    pub fn data(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.path().join(format!("data-{name}"));
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// With nothing warm.
    pub async fn server(&self, name: &str, store: Store<'_>) -> Result<Server> {
        self.server_with(name, store, &[("BATON_WARM", "0")]).await
    }

    pub async fn server_with(&self, name: &str, store: Store<'_>, settings: &[(&str, &str)]) -> Result<Server> {
        let state_dir = self.directory.path().join(name);
        fs::create_dir_all(&state_dir)?;
        let log = state_dir.join("server.log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        for (variable, _) in std::env::vars().filter(|(name, _)| FOREIGN.iter().any(|start| name.starts_with(start))) {
            command.env_remove(variable);
        }
        let filter = std::env::var("BATON_BENCH_LOG").unwrap_or_else(|_| "warn,baton::cli=info".to_owned());
        command
            .arg("serve")
            .env("BATON_RUNSC", &self.pieces.runsc)
            .env("BATON_ROOTFS", &self.pieces.rootfs)
            .env("BATON_AGENT", &self.pieces.agent)
            .env("BATON_STATE_DIR", &state_dir)
            .env("BATON_CACHE_DIR", state_dir.with_extension("cache"))
            .env("BATON_STORE_RUNTIME", "false")
            .env("BATON_LISTEN", "127.0.0.1:0")
            .env("BATON_ADMIN_LISTEN", "127.0.0.1:0")
            .env("BATON_RATE_LIMIT", "off")
            .env("BATON_LOG", filter)
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .kill_on_drop(true);
        match store {
            Store::Directory(path) => command.env("CHECKPOINT_AND_RESTORE_PATH", path),
            Store::Bucket(fake) => command
                .env("BATON_GCS_ENDPOINT", fake.url())
                .env("SANDBOX_METADATA_BUCKET", BUCKET)
                .env("SANDBOX_CHECKPOINT_BUCKET", BUCKET),
        };
        let mut child = command.spawn().context("the server does not start")?;
        for _ in 0..2_000 {
            let text = fs::read_to_string(&log)?;
            let said = |before: &str| Some(text.split_once(before)?.1.split_whitespace().next()?.to_owned());
            if let (Some(address), Some(figures)) = (said("serving address="), said("serving metrics address=")) {
                return Ok(Server { address, figures, child, state_dir, log });
            }
            if child.try_wait()?.is_some() {
                bail!("the server does not start: {text}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bail!("the server does not say its address")
    }

    pub async fn close(self) -> Result<()> {
        self.bare.close().await;
        Ok(self.directory.close()?)
    }
}

/// One `baton serve`.
#[derive(Debug)]
pub struct Server {
    pub address: String,
    /// Where its figures are.
    figures: String,
    pub state_dir: PathBuf,
    child: Child,
    log: PathBuf,
}

impl Server {
    pub fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    /// One of its figures; zero while it has none.
    async fn figure(&self, name: &str) -> Result<u64> {
        let mut socket = TcpStream::connect(&self.figures).await?;
        socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut page = String::new();
        socket.read_to_string(&mut page).await?;
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.map_or(Ok(0), |value| value.trim().parse())?)
    }

    /// Until a warm container waits.
    pub async fn is_warm(&self) -> Result<()> {
        for _ in 0..2_000 {
            if self.figure("baton_warm_ready").await? > 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bail!("no warm container is ready")
    }

    /// How many sandboxes began in a warm container.
    pub async fn taken(&self) -> Result<u64> {
        self.figure("baton_warm_taken_total").await
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(pid as i32)) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Without a word, as a machine dies.
    pub async fn kill(&mut self) -> Result<()> {
        self.child.kill().await?;
        self.unmount();
        Ok(())
    }

    /// Two signals end it at once, and it tidies up itself. What it complained of is shown.
    pub async fn stop(mut self) -> Result<()> {
        for _ in 0..2 {
            self.signal(Signal::TERM);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        if tokio::time::timeout(Duration::from_secs(20), self.child.wait()).await.is_err() {
            self.child.kill().await?;
            bail!("the server does not end");
        }
        self.unmount();
        let text = fs::read_to_string(&self.log)?;
        for line in text.lines().filter(|line| line.contains("ERROR")) {
            println!("  server: {line}");
        }
        Ok(())
    }

    fn unmount(&self) {
        let _ = rustix::mount::unmount(self.state_dir.join("runsc/null-netns"), rustix::mount::UnmountFlags::DETACH);
    }
}

/// After a failed row too: a mount would keep the directory, and a server its sandboxes.
impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.start_kill();
        self.unmount();
    }
}

/// One line about the machine.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map_or("", |it| it.1);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let (kernel, load) = (read("/proc/sys/kernel/osrelease"), read("/proc/loadavg"));
    let load = load.split(' ').take(3).collect::<Vec<_>>().join(" ");
    format!("{model}, {cores} cores, Linux {}, load before {load}", kernel.trim())
}
