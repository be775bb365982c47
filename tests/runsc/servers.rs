//! Servers as an operator starts them: `baton serve`, several on one machine, on one shared store.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use baton_fake_gcs::{FakeGcs, Options};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::{Child, Command},
};

use crate::place::{Permit, clock, directory, eventually, permit, piece, processes, unmount};

const PATIENCE: Duration = Duration::from_secs(60);

/// Whether the full figures are wanted, which take their time.
pub fn is_proof() -> bool {
    std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof")
}

/// What the servers share.
#[derive(Debug)]
pub enum Shared {
    Directory,
    Bucket(FakeGcs),
}

/// One machine with a store that any number of servers share.
#[derive(Debug)]
pub struct Machine {
    pub directory: tempfile::TempDir,
    pub shared: Shared,
    _permit: Permit,
}

impl Machine {
    pub async fn with_a_directory() -> Self {
        let machine = Self { _permit: permit().await, directory: directory(), shared: Shared::Directory };
        std::fs::create_dir(machine.data()).unwrap();
        machine
    }

    /// A Cloud Storage as far away as the real one.
    pub async fn with_a_bucket() -> Self {
        let options = Options { latency: Duration::from_millis(30), ..Options::default() };
        let bucket = FakeGcs::start(SocketAddr::from(([127, 0, 0, 1], 0)), options).await.unwrap();
        Self { _permit: permit().await, directory: directory(), shared: Shared::Bucket(bucket) }
    }

    pub fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    pub fn bucket(&self) -> &FakeGcs {
        match &self.shared {
            Shared::Bucket(bucket) => bucket,
            Shared::Directory => panic!("the store is a directory"),
        }
    }

    /// An object of the store, past the servers.
    pub fn object(&self, name: &str) -> Option<Vec<u8>> {
        match &self.shared {
            Shared::Directory => std::fs::read(self.data().join(name)).ok(),
            Shared::Bucket(bucket) => bucket.content("b", name).map(|bytes| bytes.to_vec()),
        }
    }

    pub fn json(&self, name: &str) -> serde_json::Value {
        let bytes = self.object(name).unwrap_or_else(|| panic!("there is no {name}"));
        serde_json::from_slice(&bytes).unwrap()
    }

    pub fn lock(&self, id: &str) -> serde_json::Value {
        self.json(&format!("sandboxes/{id}/lock.json"))
    }

    pub async fn server(&self, name: &str) -> Server {
        self.server_with(name, &[]).await
    }

    /// With more settings than those every server here has.
    pub async fn server_with(&self, name: &str, settings: &[(&str, &str)]) -> Server {
        let state = self.directory.path().join(name);
        let log = self.directory.path().join(format!("{name}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log).unwrap();
        let skip = file.metadata().unwrap().len();
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.arg("serve").stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).kill_on_drop(true).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("BATON_STATE_DIR", &state).env("BATON_LISTEN", "127.0.0.1:0").env("BATON_LOG", "baton=debug,info");
        command.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_AGENT", piece("BATON_AGENT"));
        command.env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS"));
        // Only where a test is about it: hundreds of megabytes are packed and stored.
        command.env("BATON_STORE_RUNTIME", "false");
        // A cache of its own: what one server has, another has never seen.
        command.env("BATON_CACHE_DIR", self.directory.path().join(format!("{name}-cache")));
        match &self.shared {
            Shared::Directory => command.env("CHECKPOINT_AND_RESTORE_PATH", self.data()),
            Shared::Bucket(bucket) => command
                .env("BATON_GCS_ENDPOINT", bucket.url())
                .env("SANDBOX_METADATA_BUCKET", "b")
                .env("SANDBOX_CHECKPOINT_BUCKET", "b")
                .env("FILESYSTEM_SNAPSHOT_BUCKET", "b"),
        };
        command.envs(settings.iter().copied());
        let child = command.spawn().unwrap();
        let mut server = Server { name: name.to_owned(), child, state, log, skip, address: String::new() };
        server.address = server.said("serving address=").await;
        server
    }
}

/// One `baton serve`. Ends with this value, and its containers with it.
#[derive(Debug)]
pub struct Server {
    pub name: String,
    child: Child,
    pub state: PathBuf,
    log: PathBuf,
    /// Where this process began in the log.
    skip: u64,
    /// `127.0.0.1:port`.
    pub address: String,
}

impl Server {
    pub fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let skip = usize::try_from(self.skip).unwrap().min(bytes.len());
        String::from_utf8_lossy(&bytes[skip..]).into_owned()
    }

    /// The word after `text` in the log, once it is there.
    pub async fn said(&mut self, text: &str) -> String {
        let mut word = String::new();
        for _ in 0..6_000 {
            let log = self.log();
            if let Some((_, rest)) = log.split_once(text) {
                rest.split_whitespace().next().unwrap_or_default().clone_into(&mut word);
                return word;
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("server {} ended with {status} before it said {text:?}:\n{log}", self.name);
            }
            clock().sleep(Duration::from_millis(10)).await;
        }
        panic!("server {} never said {text:?}:\n{}", self.name, self.log());
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id().expect("it runs")).unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// How the process ended.
    pub async fn ended(&mut self) -> std::process::ExitStatus {
        clock().timeout(PATIENCE, self.child.wait()).await.expect("it ends").unwrap()
    }

    /// `kill -9`; nothing of it is left to run.
    pub async fn die(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
        let state = self.state.clone();
        eventually("its containers die with the server", || processes(&state).is_empty()).await;
    }

    /// SIGTERM, and everything is in order after it.
    pub async fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        assert!(self.ended().await.success(), "{}", self.log());
        assert_eq!(processes(&self.state).len(), 0, "nothing runs any more");
    }

    /// One `GET`, its status and its body.
    pub async fn get(&self, path: &str) -> (u16, String) {
        let asked = async {
            let mut socket = TcpStream::connect(&self.address).await?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
            socket.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = clock().timeout(PATIENCE, asked).await.expect("it answers").unwrap();
        let status = answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a status line");
        (status, answer.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned()))
    }

    pub fn staging(&self) -> PathBuf {
        self.state.join("staging")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let tail = log.len() - log.len().min(12_000);
            let tail = (tail..log.len()).find(|at| log.is_char_boundary(*at)).unwrap_or(log.len());
            eprintln!("-- the log of server {}:\n{}", self.name, &log[tail..]);
        }
        if self.child.id().is_some() {
            let _ = self.child.start_kill();
            for _ in 0..500 {
                if !matches!(self.child.try_wait(), Ok(None)) && processes(&self.state).is_empty() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        unmount(&self.state);
    }
}

/// How many files lie under a directory, at any depth.
pub fn files_under(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.flatten().map(|entry| if entry.path().is_dir() { files_under(&entry.path()) } else { 1 }).sum()
}
