//! Servers as an operator starts them: `baton serve`, several on one machine, on one shared store.

use std::{
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use baton_fake_gcs::{FakeGcs, FakeGcsOptions};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::{Child, Command},
};

use super::fixture::{Permit, clock, directory, eventually, is_unmounted, permit, piece, processes};

const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// Whether the full figures are wanted, which take their time.
pub fn is_proof() -> bool {
    std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof")
}

/// Whether a server is one process or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    One,
    Halves,
}

impl Shape {
    /// One, unless `BATON_TEST_SHAPE=halves`: then every test of servers is about halves.
    fn usual() -> Self {
        if std::env::var("BATON_TEST_SHAPE").is_ok_and(|shape| shape == "halves") { Self::Halves } else { Self::One }
    }
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
    shape: Shape,
    /// The words before those of a server.
    launcher: Vec<String>,
    _permit: Permit,
}

impl Machine {
    pub async fn with_a_directory() -> Self {
        let machine = Self::with(Shared::Directory, permit().await);
        std::fs::create_dir(machine.data()).unwrap();
        machine
    }

    /// A Cloud Storage as far away as the real one.
    pub async fn with_a_bucket() -> Self {
        let options = FakeGcsOptions { latency: Duration::from_millis(30), ..FakeGcsOptions::default() };
        let bucket = FakeGcs::start(SocketAddr::from(([127, 0, 0, 1], 0)), options).await.unwrap();
        Self::with(Shared::Bucket(bucket), permit().await)
    }

    fn with(shared: Shared, permit: Permit) -> Self {
        Self { _permit: permit, directory: directory(), shared, shape: Shape::usual(), launcher: vec![] }
    }

    /// With servers that are started by other programs, which become them.
    pub fn launched_by(mut self, launcher: Vec<String>) -> Self {
        self.launcher = launcher;
        self
    }

    /// With servers of two processes each.
    pub fn in_halves(mut self) -> Self {
        self.shape = Shape::Halves;
        self
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

    /// Puts something else there, past the servers.
    pub fn replace(&self, name: &str, bytes: Vec<u8>) {
        match &self.shared {
            Shared::Directory => std::fs::write(self.data().join(name), bytes).unwrap(),
            Shared::Bucket(bucket) => bucket.put("b", name, bytes),
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
        let log = self.directory.path().join(format!("{name}.log"));
        let skip = std::fs::metadata(&log).map_or(0, |file| file.len());
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let (state, launcher) = (self.directory.path().join(name), self.launcher.clone());
        let plan = Plan { state, log, settings, shared: self.place(), launcher };
        let user = if self.shape == Shape::Halves { self.open_to_nobody() } else { None };
        let (back, child) = match self.shape {
            Shape::One => (None, plan.spawn("serve", None)),
            Shape::Halves => (Some(plan.spawn("reconciler", user)), plan.spawn("api", user)),
        };
        let mut server = Server {
            name: name.to_owned(),
            child,
            back,
            plan,
            user,
            skip,
            address: String::new(),
            state: PathBuf::new(),
        };
        server.state.clone_from(&server.plan.state);
        server.address = server.said("serving address=").await;
        server
    }

    /// The variables that name the store.
    pub fn place(&self) -> Vec<(&'static str, String)> {
        match &self.shared {
            Shared::Directory => vec![("CHECKPOINT_AND_RESTORE_PATH", self.data().display().to_string())],
            Shared::Bucket(bucket) => vec![
                ("BATON_GCS_ENDPOINT", bucket.url().to_owned()),
                ("SANDBOX_METADATA_BUCKET", "b".to_owned()),
                ("SANDBOX_CHECKPOINT_BUCKET", "b".to_owned()),
                ("FILESYSTEM_SNAPSHOT_BUCKET", "b".to_owned()),
            ],
        }
    }

    /// As whom the API runs: nobody, where the store is a bucket. A directory is root's here.
    fn open_to_nobody(&self) -> Option<u32> {
        if matches!(self.shared, Shared::Directory) {
            return None;
        }
        let (root, program) = (self.directory.path(), self.directory.path().join("baton"));
        if !program.exists() {
            std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o711)).unwrap();
            // By another process: whatever this one forks meanwhile would have the file open for writing, and then
            // it cannot be executed.
            let copied = std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_baton")).arg(&program).status();
            assert!(copied.unwrap().success());
        }
        Some(NOBODY)
    }
}

pub const NOBODY: u32 = 65_534;

/// What the manifest for Kubernetes gives to a reconciler: those here have no more either.
pub fn capabilities() -> Vec<String> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/kubernetes.yaml");
    let text = std::fs::read_to_string(manifest).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let documents = documents.map(|one| <serde_json::Value as serde::Deserialize>::deserialize(one).unwrap());
    let containers = documents.filter_map(|one| one.pointer("/spec/template/spec/containers").cloned());
    let containers: Vec<_> = containers.flat_map(|list| list.as_array().unwrap().clone()).collect();
    let reconciler = containers.iter().find(|one| one["name"] == "reconciler").expect("a reconciler");
    let added = reconciler["securityContext"]["capabilities"]["add"].as_array().unwrap();
    added.iter().map(|name| name.as_str().unwrap().to_ascii_lowercase()).collect()
}

/// A set of capabilities as `setpriv` reads it.
fn only(names: &[String]) -> String {
    names.iter().fold("-all".to_owned(), |set, name| format!("{set},+{name}"))
}

/// How the processes of one server are started.
#[derive(Debug)]
struct Plan {
    state: PathBuf,
    log: PathBuf,
    settings: Vec<(String, String)>,
    shared: Vec<(&'static str, String)>,
    launcher: Vec<String>,
}

impl Plan {
    fn sockets(&self) -> PathBuf {
        self.state.with_extension("d")
    }

    /// `user` is whom the API runs as.
    fn spawn(&self, verb: &str, user: Option<u32>) -> Child {
        let file = std::fs::File::options().create(true).append(true).open(&self.log).unwrap();
        let copy = self.state.with_file_name("baton");
        let program = if user.is_some() { copy } else { PathBuf::from(env!("CARGO_BIN_EXE_baton")) };
        let mut words = self.launcher.clone();
        match (verb, user) {
            ("api", Some(user)) => {
                words.extend(["setpriv".into(), format!("--reuid={user}"), format!("--regid={user}")]);
                words.extend(["--clear-groups", "--inh-caps=-all", "--bounding-set=-all"].map(str::to_owned));
                words.push("--no-new-privs".into());
            }
            ("reconciler", _) => {
                let kept = format!("--bounding-set={}", only(&capabilities()));
                words.extend(["setpriv".into(), "--inh-caps=-all".into(), kept]);
            }
            _ => {}
        }
        words.push(program.to_str().unwrap().to_owned());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .arg(verb)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .kill_on_drop(true)
            .env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("BATON_LISTEN", "127.0.0.1:0").env("BATON_LOG", "baton=debug,info");
        command.env("BATON_ADMIN_LISTEN", "127.0.0.1:0").env("BATON_SOCKET_DIR", self.sockets());
        if verb != "api" {
            command.env("BATON_STATE_DIR", &self.state);
            command.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_AGENT", piece("BATON_AGENT"));
            command.env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS"));
            // Only where a test is about it: hundreds of megabytes are packed and stored.
            command.env("BATON_STORE_RUNTIME", "false");
            // Only where a test is about it: one more container for each server.
            command.env("BATON_WARM", "0");
            // A cache of its own: what one server has, another has never seen.
            let mut cache = self.state.clone().into_os_string();
            cache.push("-cache");
            command.env("BATON_CACHE_DIR", cache);
            if let Some(user) = user {
                command.env("BATON_API_USER", user.to_string());
            }
        }
        command.envs(self.shared.iter().map(|(name, value)| (name, value)));
        command.envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.spawn().unwrap()
    }
}

/// One server, as one process or as two halves. Ends with this value, and its containers with it.
#[derive(Debug)]
pub struct Server {
    pub name: String,
    /// The one process, or the API's half.
    child: Child,
    /// The reconciler's half.
    back: Option<Child>,
    plan: Plan,
    user: Option<u32>,
    pub state: PathBuf,
    /// Where this process began in the log.
    skip: u64,
    /// `127.0.0.1:port`.
    pub address: String,
}

impl Server {
    pub fn log(&self) -> String {
        let bytes = std::fs::read(&self.plan.log).unwrap_or_default();
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
            let ended = [Some(&mut self.child), self.back.as_mut()].into_iter().flatten();
            if let Some(status) = ended.filter_map(|child| child.try_wait().unwrap()).next() {
                panic!("server {} ended with {status} before it said {text:?}:\n{log}", self.name);
            }
            clock().sleep(Duration::from_millis(10)).await;
        }
        panic!("server {} never said {text:?}:\n{}", self.name, self.log());
    }

    pub fn pid(&self) -> Pid {
        pid(&self.child)
    }

    /// What the kernel says of the process that runs sandboxes.
    pub fn reconciler_status(&self) -> String {
        let process = self.back.as_ref().unwrap_or(&self.child);
        std::fs::read_to_string(format!("/proc/{}/status", pid(process))).unwrap()
    }

    /// To the server, to both halves at once.
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
        if let Some(back) = &self.back {
            kill(pid(back), signal).unwrap();
        }
    }

    /// How the server ended: well, if both halves did.
    pub async fn ended(&mut self) -> ExitStatus {
        let front = wait(&mut self.child).await;
        match &mut self.back {
            Some(back) if front.success() => wait(back).await,
            Some(_) | None => front,
        }
    }

    /// `kill -9` of the API's half, and another one in its place once `between` has happened.
    pub async fn replace_api(&mut self, between: impl AsyncFnOnce()) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        wait(&mut self.child).await;
        between().await;
        self.skip = std::fs::metadata(&self.plan.log).unwrap().len();
        self.child = self.plan.spawn("api", self.user);
        self.address = self.said("serving address=").await;
    }

    /// `kill -9` of the reconciler's half, and another one in its place once `between` has happened.
    pub async fn replace_reconciler(&mut self, between: impl AsyncFnOnce()) {
        let back = self.back.as_mut().expect("a half of its own");
        kill(pid(back), Signal::SIGKILL).unwrap();
        wait(back).await;
        between().await;
        self.skip = std::fs::metadata(&self.plan.log).unwrap().len();
        self.back = Some(self.plan.spawn("reconciler", self.user));
        self.said("serving address=").await;
    }

    pub fn socket(&self) -> PathBuf {
        self.plan.sockets().join("baton.sock")
    }

    /// Another API of this server, as another user.
    pub fn stranger(&self, user: u32) -> Child {
        self.plan.spawn("api", Some(user))
    }

    /// The pages of figures of all its processes.
    pub async fn figures(&mut self) -> String {
        let processes = if self.back.is_some() { 2 } else { 1 };
        let log = self.log();
        let places: Vec<_> = log.split("serving metrics address=").skip(1).take(processes).collect();
        assert_eq!(places.len(), processes, "{log}");
        let mut pages = String::new();
        for place in places {
            pages += &get(place.split_whitespace().next().unwrap(), "/metrics").await.unwrap().1;
        }
        pages
    }

    /// `kill -9`; nothing of it is left to run.
    pub async fn die(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
        if let Some(back) = &mut self.back {
            wait(back).await;
        }
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
        get(&self.address, path).await.unwrap()
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
        let back = self.back.as_mut().filter(|back| back.id().is_some());
        let mut alive: Vec<_> = [Some(&mut self.child), back].into_iter().flatten().collect();
        if alive.iter().any(|child| child.id().is_some()) {
            for child in &mut alive {
                let _ = child.start_kill();
            }
        }
        for _ in 0..500 {
            if alive.iter_mut().all(|child| !matches!(child.try_wait(), Ok(None)))
                && processes(&self.state).is_empty()
                && is_unmounted(&self.state)
            {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id().expect("it runs")).unwrap())
}

async fn wait(child: &mut Child) -> ExitStatus {
    clock().timeout(SERVER_TIMEOUT, child.wait()).await.expect("it ends").unwrap()
}

/// One `GET`, its status and its body.
pub async fn get(address: &str, path: &str) -> std::io::Result<(u16, String)> {
    let asked = async {
        let mut socket = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = clock().timeout(SERVER_TIMEOUT, asked).await.expect("it answers")?;
    let status = answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a status line");
    Ok((status, answer.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned())))
}

/// How many files lie under a directory, at any depth.
pub fn files_under(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.flatten().map(|entry| if entry.path().is_dir() { files_under(&entry.path()) } else { 1 }).sum()
}
