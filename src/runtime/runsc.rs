//! Runs one runsc command: with a timeout, never while the container is fenced, and with the error text taken
//! from its log, never from its output.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Deserialize;
use tokio::{io::AsyncReadExt, process::Child, sync::watch};

use super::{
    Error, Result,
    argv::{self, RunscCommand},
    guard_link::Fence,
    runtime_settings::RuntimeSettings,
    spawner::Spawner,
};
use crate::clock::SharedClock;

/// At most this many bytes of a log are read.
const LOG_READ: u64 = 64 << 10;

#[derive(Debug)]
pub struct Runsc {
    settings: Arc<RuntimeSettings>,
    clock: SharedClock,
    spawner: Spawner,
    calls: AtomicU64,
    /// Containers that use another binary than the default one.
    others: Mutex<BTreeMap<String, PathBuf>>,
}

#[derive(Deserialize)]
struct LogLine {
    #[serde(default)]
    msg: String,
    #[serde(default)]
    level: String,
}

impl Runsc {
    pub fn new(settings: Arc<RuntimeSettings>, clock: SharedClock, spawner: Spawner) -> Self {
        Self { settings, clock, spawner, calls: AtomicU64::new(0), others: Mutex::default() }
    }

    /// Uses this binary for every command on the container, until the container is forgotten.
    pub fn choose(&self, container: &str, binary: PathBuf) {
        self.others.lock().insert(container.to_owned(), binary);
    }

    pub fn forget(&self, container: &str) {
        self.others.lock().remove(container);
    }

    fn binary(&self, container: &str) -> PathBuf {
        self.others.lock().get(container).unwrap_or(&self.settings.runsc).clone()
    }

    pub fn spawner(&self) -> &Spawner {
        &self.spawner
    }

    /// Starts a container attached to this process, in these cgroups. It lives as long as the returned child.
    pub async fn attach(
        &self,
        verb: RunscCommand<'_>,
        container: &str,
        log: &Path,
        cgroups: &[PathBuf],
    ) -> Result<Child> {
        let line = argv::line(&self.settings.root(), &self.settings.overlay(), log, verb, container);
        let stdio = [Stdio::piped(), Stdio::piped(), Stdio::piped()];
        let started = self.spawner.spawn(self.binary(container).as_os_str(), &line, cgroups, stdio).await;
        started.map_err(|error| Error::Failed { what: verb.name(), why: format!("runsc does not start: {error}") })
    }

    /// Runs a short command to completion. A fence aborts it, because it would hang while the sentry is stopped.
    pub async fn call(
        &self,
        verb: RunscCommand<'_>,
        container: &str,
        limit: Duration,
        fence: Option<watch::Receiver<Fence>>,
    ) -> Result<()> {
        self.call_with(verb, container, limit, fence, Stdio::null()).await
    }

    /// Like [`call`](Self::call), with the given stdin for runsc.
    pub async fn call_with(
        &self,
        verb: RunscCommand<'_>,
        container: &str,
        limit: Duration,
        fence: Option<watch::Receiver<Fence>>,
        stdin: Stdio,
    ) -> Result<()> {
        let what = verb.name();
        let log = self.settings.logs().join(format!("{container}-{}", self.calls.fetch_add(1, Ordering::Relaxed)));
        let line = argv::line(&self.settings.root(), &self.settings.overlay(), &log, verb, container);
        let stdio = [stdin, Stdio::null(), Stdio::null()];
        let started = self.spawner.spawn(self.binary(container).as_os_str(), &line, &[], stdio).await;
        let mut child =
            started.map_err(|error| Error::Failed { what, why: format!("runsc does not start: {error}") })?;
        let fenced = async {
            match fence {
                Some(mut fence) => drop(fence.wait_for(|fence| *fence != Fence::Running).await),
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            biased;
            ended = self.clock.timeout(limit, child.wait()) => ended,
            () = fenced => {
                end(&mut child).await;
                let _ = tokio::fs::remove_file(&log).await;
                return Err(Error::Failed { what, why: "the sandbox was stopped in the middle of it".to_owned() });
            }
        };
        let result = match ended {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(_)) => Err(Error::Failed { what, why: self.why(&log).await }),
            Ok(Err(error)) => Err(Error::Failed { what, why: error.to_string() }),
            Err(elapsed) => {
                end(&mut child).await;
                Err(Error::TimedOut { what, after: elapsed.0 })
            }
        };
        let _ = tokio::fs::remove_file(&log).await;
        result
    }

    /// The last error in a log, without paths of this machine.
    pub async fn why(&self, log: &Path) -> String {
        let text = read(log).await.unwrap_or_default();
        let lines = serde_json::Deserializer::from_slice(&text).into_iter::<LogLine>();
        let errors = lines.map_while(std::result::Result::ok).filter(|line| matches!(&*line.level, "error" | "fatal"));
        let last = errors.last().map_or_else(|| "runsc gives no reason".to_owned(), |line| line.msg);
        let hidden = [&self.settings.state_dir, &self.settings.rootfs, &self.settings.runsc];
        let plain = hidden.iter().fold(last, |text, path| text.replace(&*path.to_string_lossy(), "…"));
        plain.chars().take(400).collect()
    }

    /// Returns the output of `runsc` with these arguments, for the probe at start.
    pub async fn ask(&self, words: &[&str]) -> io::Result<String> {
        let words: Vec<_> = words.iter().map(Into::into).collect();
        let stdio = [Stdio::null(), Stdio::piped(), Stdio::piped()];
        let child = self.spawner.spawn(self.settings.runsc.as_os_str(), &words, &[], stdio).await?;
        let limit = Duration::from_secs(20);
        let output = self.clock.timeout(limit, child.wait_with_output()).await.map_err(io::Error::other)??;
        // `help` of a verb exits with an error and writes to stderr: only the text matters.
        Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }
}

async fn read(log: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    tokio::fs::File::open(log).await?.take(LOG_READ).read_to_end(&mut text).await?;
    Ok(text)
}

async fn end(child: &mut Child) {
    // It may have exited already; after SIGKILL the wait is short.
    let _ = child.kill().await;
}
