//! Bare `runsc`, driven as simply as possible: what every time is compared with.

use std::{
    cell::Cell,
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::{
    io::AsyncReadExt,
    process::{Child, Command},
};

use crate::{bench_fixture::Pieces, tape::Tape};

const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub struct Bare {
    directory: PathBuf,
    runsc: PathBuf,
    count: Cell<u32>,
}

/// One container. It ends when its input is closed, that is with this process.
#[derive(Debug)]
pub struct Container {
    name: String,
    child: Child,
}

impl Bare {
    pub fn new(directory: &Path, pieces: &Pieces) -> Result<Self> {
        let agent = directory.join("bundle/agent/agent");
        for below in ["root", "overlay", "bundle/agent"] {
            fs::create_dir_all(directory.join(below))?;
        }
        fs::copy(&pieces.agent, &agent)?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o555))?;
        Ok(Self { directory: directory.to_owned(), runsc: pieces.runsc.clone(), count: Cell::new(0) })
    }

    /// The spec of a server's container, with our own copy of the agent.
    pub fn take_spec(&self, mut spec: Value) -> Result<()> {
        let mounts = spec["mounts"].as_array_mut().context("the spec has no mounts")?;
        let agent = mounts.iter_mut().find(|mount| mount["destination"] == "/.baton");
        agent.context("the spec does not mount the agent")?["source"] =
            self.directory.join("bundle/agent").to_string_lossy().into();
        Ok(fs::write(self.directory.join("bundle/config.json"), spec.to_string())?)
    }

    fn command(&self, words: &[&str], name: &str) -> Command {
        let path = |below: &str| self.directory.join(below).into_os_string();
        let mut overlay = OsString::from("--overlay2=root:dir=");
        overlay.push(path("overlay"));
        let mut command = Command::new(&self.runsc);
        command.args(["--platform=systrap", "--network=none", "--ignore-cgroups", "--log-format=json"]);
        command.arg(overlay).arg("--root").arg(path("root")).arg("--log").arg(path("log"));
        command.args(&words[..1]);
        if matches!(words[0], "run" | "restore") {
            command.arg("--bundle").arg(path("bundle"));
        }
        let split = words.iter().position(|word| *word == "--").unwrap_or(words.len());
        command.args(&words[1..split]).arg(name).args(words.get(split + 1..).unwrap_or(&[]));
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn name(&self) -> String {
        self.count.set(self.count.get() + 1);
        format!("bare-{:08}", self.count.get())
    }

    /// Until it has ended well.
    async fn call(&self, words: &[&str], name: &str) -> Result<Duration> {
        let began = Instant::now();
        let mut child = self.command(words, name).spawn()?;
        self.end(words[0], &mut child).await?;
        Ok(began.elapsed())
    }

    async fn end(&self, what: &str, child: &mut Child) -> Result<()> {
        let status = tokio::time::timeout(LIMIT, child.wait()).await.context("runsc does not end")??;
        if !status.success() {
            let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().rev().take(3).collect();
            bail!("runsc {what} ended with {status}: {}", lines.join("\n"));
        }
        Ok(())
    }

    /// `runsc run`, until the first byte of PID 1.
    pub async fn run(&self) -> Result<(Container, Duration)> {
        let name = self.name();
        let began = Instant::now();
        let mut command = self.command(&["run"], &name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.as_mut().context("runsc has no stdout")?;
        let first = tokio::time::timeout(LIMIT, stdout.read_u8()).await.context("PID 1 says nothing")?;
        first.context("runsc run ended")?;
        Ok((Container { name, child }, began.elapsed()))
    }

    /// `runsc restore`, until it says that it is done.
    pub async fn restore(&self, image: &Path) -> Result<(Container, Duration)> {
        let name = self.name();
        let image = image.to_string_lossy().into_owned();
        let began = Instant::now();
        let mut command = self.command(&["restore", "--detach", "--image-path", &image], &name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        // The pipes stay open: PID 1 ends with its input. Waiting on a child would close it.
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        self.end("restore", &mut child).await?;
        let took = began.elapsed();
        (child.stdin, child.stdout) = (stdin, stdout);
        Ok((Container { name, child }, took))
    }

    pub async fn checkpoint(&self, container: &Container) -> Result<Duration> {
        let image = self.directory.join(format!("image-{}", container.name));
        fs::create_dir_all(&image)?;
        let path = image.to_string_lossy().into_owned();
        let words = ["checkpoint", "--leave-running", "--compression=none", "--image-path", &path];
        let took = self.call(&words, &container.name).await?;
        fs::remove_dir_all(&image)?;
        Ok(took)
    }

    /// `runsc exec true`.
    pub async fn exec_true(&self, container: &Container) -> Result<Duration> {
        self.call(&["exec", "--", "true"], &container.name).await
    }

    /// `runsc exec python3 -c … | cat`, every byte compared.
    pub async fn stream(&self, container: &Container, code: &str, mut tape: Tape) -> Result<Duration> {
        let began = Instant::now();
        let (reader, writer) = std::io::pipe()?;
        let words = ["exec", "--", "python3", "-c", code];
        // The command itself is gone at once, and with it our end of the pipe.
        let mut exec = self.command(&words, &container.name).stdout(writer).spawn()?;
        let mut cat = Command::new("cat").stdin(reader).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut stdout = cat.stdout.take().context("cat has no stdout")?;
        let mut chunk = vec![0; 256 << 10];
        loop {
            let count = tokio::time::timeout(LIMIT, stdout.read(&mut chunk)).await.context("cat says nothing")??;
            if count == 0 {
                break;
            }
            tape.read(&chunk[..count])?;
        }
        self.end("exec", &mut exec).await?;
        self.end("cat", &mut cat).await?;
        tape.finish()?;
        Ok(began.elapsed())
    }

    pub async fn delete(&self, mut container: Container) -> Result<()> {
        self.call(&["delete", "--force"], &container.name).await?;
        let _ = container.child.kill().await;
        Ok(())
    }

    pub async fn close(&self) {
        let mount = self.directory.join("root/null-netns");
        let _ = rustix::mount::unmount(mount, rustix::mount::UnmountFlags::DETACH);
    }
}
