//! The image without Docker: its file tree is laid out by the script that the Dockerfile uses, and in the proof tier
//! the Dockerfile is built by buildah. The server in it runs sandboxes with nothing else around it.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    fixture::{clock, permit, piece, processes},
    servers::is_proof,
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files of an image, and the variables that its processes have.
struct Image {
    root: PathBuf,
    environment: Vec<(String, String)>,
}

/// The variables that the Dockerfile gives its image.
fn environment() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root().join("Dockerfile")).unwrap().replace("\\\n", " ");
    let lines = text.lines().filter_map(|line| line.strip_prefix("ENV "));
    let pairs = lines.flat_map(str::split_whitespace).map(|pair| pair.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// In the quick tier with the server of this build; in the other with one built for release.
fn lay_out(image: &Path) -> String {
    let mut script = Command::new(root().join("scripts/image-tree"));
    script.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS"));
    script.env("BATON_AGENT", piece("BATON_AGENT"));
    if !is_proof() {
        script.arg("--binary").arg(env!("CARGO_BIN_EXE_baton"));
    }
    let done = script.arg(image).stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Megabytes of everything but the root file system, which is as large as its recipe makes it, and of the server only
/// as much as it has when it is built for release.
fn megabytes(image: &Path) -> u64 {
    let size = |path: &str| {
        let said = said(Command::new("du").arg("-sm").arg(image.join(path)));
        said.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let rest = size("") - size("usr/local/lib/baton/rootfs");
    if is_proof() { rest } else { rest - size("usr/local/bin/baton") + 40 }
}

/// The first process of a namespace of its own: with it everything in there ends, also when a test fails.
struct Namespace(std::process::Child);

impl Drop for Namespace {
    fn drop(&mut self) {
        // Nothing more can be done about either.
        let _ = self.0.kill();
        let _ = self.0.wait();
        for _ in 0..500 {
            if processes(Path::new("/run/baton")).is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

async fn execute(port: &str, code: &str) -> String {
    let work = async {
        let mut socket = TcpStream::connect(format!("127.0.0.1:{port}")).await.unwrap();
        let request = format!(
            "POST /execute?language=python HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{code}",
            code.len()
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        answer
    };
    clock().timeout(Duration::from_secs(60), work).await.expect("it answers")
}

/// What a chunked answer carries, in however many chunks it came.
fn body(answer: &str) -> String {
    let (_, mut rest) = answer.split_once("\r\n\r\n").expect("a body");
    let mut body = String::new();
    while let Some((size, chunk)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("the size of a chunk");
        body += &chunk[..size];
        rest = chunk[size..].trim_start_matches("\r\n");
    }
    body
}

/// What a command says, without the end of its line.
fn said(command: &mut Command) -> String {
    let done = command.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// What is recorded in the image is what lies in it.
fn check_digests(image: &Path) {
    let pieces = image.join("usr/local/lib/baton");
    let recorded = |name: &str| std::fs::read_to_string(pieces.join(name)).unwrap().trim().to_owned();
    let digest = recorded("rootfs/digest");
    assert_eq!(std::fs::read_link(pieces.join("rootfs/current")).unwrap(), Path::new(&digest));
    // The owners, modes and links of every file are part of it.
    let found =
        said(Command::new(root().join("scripts/setup")).arg("--digest").arg(pieces.join("rootfs").join(&digest)));
    assert_eq!(found, digest, "the root file system is the one that is recorded");
    let sum = said(Command::new("sha256sum").arg(pieces.join("runsc")));
    assert_eq!(sum.split_whitespace().next(), Some(recorded("runsc.sha256").as_str()));
    let setup = std::fs::read_to_string(root().join("scripts/setup")).unwrap();
    let pinned = setup.split("RUNSC_SHA256=").nth(1).unwrap().lines().next().unwrap();
    // Whoever brings a runsc of their own is told so by the set-up.
    if piece("BATON_RUNSC").to_string_lossy().contains(pinned) {
        assert_eq!(recorded("runsc.sha256"), pinned);
    }
}

/// A server's process with the tree as its only root, and what it says.
struct Inside<'a> {
    image: &'a Image,
    process: Namespace,
    log: PathBuf,
}

impl<'a> Inside<'a> {
    /// Own mounts and processes: whatever is missing in the tree is missing. A chroot would not do: in one nobody may
    /// make user namespaces.
    fn start(image: &'a Image, log: PathBuf, verb: &str, settings: &[(&str, &str)]) -> Self {
        let script = format!(
            "set -e
            mount --bind $0 $0; cd $0
            mount --rbind /dev dev; mount --rbind /sys sys; mount -t proc proc proc; mount -t tmpfs tmpfs run
            mkdir run/old; pivot_root . run/old; cd /
            lib=/run/old/lib/x86_64-linux-gnu:/run/old/usr/lib/x86_64-linux-gnu
            /run/old/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 --library-path $lib /run/old/bin/umount -l /run/old
            exec /usr/local/bin/baton {verb}"
        );
        let mut server = Command::new("unshare");
        server.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &script]).arg(&image.root);
        Self::run(image, server, log, settings)
    }

    /// Another process in the same place, as the user of the image's target for the API.
    fn start_api(&self, log: PathBuf, settings: &[(&str, &str)]) -> Self {
        let pid = self.process.0.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let mut api = Command::new("nsenter");
        api.args(["--target", children.trim(), "--mount", "--pid", "--setuid", "65532", "--setgid", "65532"]);
        api.args(["/usr/local/bin/baton", "api"]);
        Self::run(self.image, api, log, settings)
    }

    fn run(image: &'a Image, mut command: Command, log: PathBuf, settings: &[(&str, &str)]) -> Self {
        command.env_clear().envs(image.environment.clone()).env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("BATON_LISTEN", "127.0.0.1:0").env("BATON_ADMIN_LISTEN", "off").envs(settings.iter().copied());
        let file = std::fs::File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        Self { image, process: Namespace(command.spawn().unwrap()), log }
    }

    /// The word that follows in its log, once it is there.
    async fn said(&mut self, text: &str) -> String {
        for _ in 0..3_000 {
            let log = std::fs::read_to_string(&self.log).unwrap();
            if let Some((_, rest)) = log.split_once(text) {
                return rest.split_whitespace().next().unwrap_or_default().to_owned();
            }
            assert!(self.process.0.try_wait().unwrap().is_none(), "it ended:\n{log}");
            clock().sleep(Duration::from_millis(10)).await;
        }
        panic!("it never said {text}:\n{}", std::fs::read_to_string(&self.log).unwrap());
    }
}

async fn smoke(port: &str) {
    let answer = execute(port, "import sys; print(6 * 7, sys.version_info.major)").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(body(&answer), "42 3\n", "{answer}");
}

/// A server of this image runs sandboxes, as one process and as two.
async fn runs_sandboxes(image: &Image, directory: &Path) {
    assert!(megabytes(&image.root) < 200);
    check_digests(&image.root);

    let mut server = Inside::start(image, directory.join("log"), "serve", &[]);
    smoke(&server.said("serving address=127.0.0.1:").await).await;
    drop(server);

    let settings = [("BATON_API_USER", "65532")];
    let mut reconciler = Inside::start(image, directory.join("back"), "reconciler", &settings);
    reconciler.said("reconciling").await;
    let mut api = reconciler.start_api(directory.join("front"), &[]);
    assert_eq!(api.said("connected to the reconciler user=").await, "65532", "nobody in the image");
    smoke(&api.said("serving address=127.0.0.1:").await).await;
    drop(api);
}

/// A directory that the user of the API can reach.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("bi").tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_runs_sandboxes_from_the_files_of_the_image_alone() {
    let _permit = permit().await;
    let directory = directory();
    let image = Image { root: directory.path().join("i"), environment: environment() };
    println!("{}", lay_out(&image.root));
    runs_sandboxes(&image, directory.path()).await;
}

/// Takes a quarter of an hour, most of it for an optimised server.
#[tokio::test(flavor = "multi_thread")]
async fn what_buildah_makes_of_the_dockerfile_runs_sandboxes() {
    if !is_proof() {
        return;
    }
    let directory = directory();
    let built = directory.path().join("b");
    println!("{}", said(Command::new(root().join("scripts/image-build")).arg(&built)));
    let config = std::fs::read_to_string(built.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let config = &config["Docker"]["config"];
    assert_eq!(config["Entrypoint"], serde_json::json!(["/usr/local/bin/baton"]));
    assert_eq!((&config["Cmd"], &config["User"]), (&serde_json::json!(["serve"]), &"0:0".into()));
    let pairs = config["Env"].as_array().unwrap().iter().map(|pair| pair.as_str().unwrap().split_once('=').unwrap());
    let image = Image {
        root: built.join("rootfs"),
        environment: pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
    };
    assert_eq!(image.environment, environment(), "the variables of the Dockerfile");
    let _permit = permit().await;
    runs_sandboxes(&image, directory.path()).await;
}
