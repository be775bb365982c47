//! `baton cp`: files and directories into a sandbox and out of it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, bail};
use baton_client::{Error, FileKind, FileMode, Sandbox, Transfer};
use futures::stream;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;

use super::{
    context::CommandContext,
    progress_line::ProgressLine,
    sandbox_client::SandboxOptions,
    screen,
    server_client::describe_error,
    stdio_bridge::{Signals, raw_terminal, write},
};
use crate::clock::SharedClock;

/// How many skipped files are listed by name.
const MAX_LISTED_SKIPPED: u64 = 20;
/// How much of stdin is read at once.
const STDIN_CHUNK: usize = 256 << 10;

/// Copy files and directories to or from a sandbox
///
/// A path in a sandbox is written SANDBOX:PATH; `-` is stdin or stdout. Copies keep the mode and the modification time,
/// and appear as a whole or not at all. If the target is a directory, the copy goes into it; a source that ends with
/// `/.` means the content of that directory. A copy continues after a broken connection. Files from a sandbox are not
/// trusted: nothing is written outside the target, and links that lead out of it are skipped.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton cp data.csv 0b9f:/data/\n  \
                  baton cp -q src/. 0b9f:/src\n  \
                  baton cp 0b9f:/results .\n  \
                  pg_dump shop | baton cp - 0b9f:/data/shop.sql\n  \
                  baton cp 0b9f:/var/log/app.log - | tail")]
pub struct CpArgs {
    /// Do not show progress
    #[arg(short, long)]
    pub quiet: bool,
    /// User inside the sandbox, as a name or a number
    #[arg(short, long)]
    pub user: Option<String>,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Source: PATH, SANDBOX:PATH or `-`
    pub from: String,
    /// Target: PATH, SANDBOX:PATH or `-`
    pub to: String,
}

/// The source or the target of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Location {
    Local(PathBuf),
    /// Our stdin or stdout.
    Stdio,
    Sandbox {
        sandbox: String,
        path: String,
    },
}

impl Location {
    /// Text before a colon is a sandbox, unless it contains a slash: `./a:b` is a file.
    fn parse(text: &str) -> anyhow::Result<Self> {
        match text.split_once(':') {
            _ if text.is_empty() => bail!("a path must not be empty"),
            _ if text == "-" => Ok(Self::Stdio),
            Some((sandbox, path)) if !sandbox.is_empty() && !sandbox.contains('/') => {
                if path.is_empty() {
                    bail!(
                        "`{text}` names no path in the sandbox: write `{text}/`, or `{text}.` for the working directory"
                    );
                }
                Ok(Self::Sandbox { sandbox: sandbox.to_owned(), path: path.to_owned() })
            }
            _ => Ok(Self::Local(text.into())),
        }
    }
}

pub async fn cp(args: CpArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let (from, to) = (Location::parse(&args.from)?, Location::parse(&args.to)?);
    let name = match (&from, &to) {
        (Location::Sandbox { .. }, Location::Sandbox { .. }) => {
            bail!("a copy between two sandboxes needs two steps, through this machine")
        }
        (Location::Sandbox { sandbox, .. }, _) | (_, Location::Sandbox { sandbox, .. }) => sandbox.clone(),
        _ => bail!("the source or the target must be in a sandbox: SANDBOX:PATH"),
    };
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let sandbox = tokio::select! {
        attached = client.attach(&name) => attached?,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let is_shown = !args.quiet && to != Location::Stdio && raw_terminal::is_stderr();
    let copying = Copying::new(&args, context.clock.clone(), is_shown);
    let code = tokio::select! {
        copied = copying.copy(&sandbox, &from, &to) => copied.map(|()| 0),
        // Dropping the transfer also ends it in the sandbox.
        code = signals.end() => Ok(code),
    };
    copying.progress.clear();
    copying.report_skipped();
    client.close(sandbox).await;
    code.map(ExitCode::from)
}

struct Copying {
    transfer: Transfer,
    progress: Arc<ProgressLine>,
    skipped: Arc<Mutex<Vec<String>>>,
    skipped_count: Arc<AtomicU64>,
}

impl Copying {
    fn new(args: &CpArgs, clock: SharedClock, is_shown: bool) -> Self {
        let progress = Arc::new(ProgressLine::new(clock, is_shown));
        let (skipped, skipped_count) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let transfer = Transfer {
            user: args.user.clone(),
            on_bytes: Some({
                let progress = progress.clone();
                Arc::new(move |bytes| progress.add(bytes))
            }),
            on_left_out: Some({
                let (skipped, count) = (skipped.clone(), skipped_count.clone());
                Arc::new(move |line: &str| {
                    if count.fetch_add(1, Ordering::Relaxed) < MAX_LISTED_SKIPPED {
                        skipped.lock().push(baton_files::plain(line));
                    }
                })
            }),
            ..Transfer::default()
        };
        Self { transfer, progress, skipped, skipped_count }
    }

    fn report_skipped(&self) {
        let listed = std::mem::take(&mut *self.skipped.lock());
        for line in &listed {
            screen::report(format_args!("baton: left out: {line}"));
        }
        let count = self.skipped_count.load(Ordering::Relaxed);
        if count > MAX_LISTED_SKIPPED {
            screen::report(format_args!("baton: left out: {} more", count - MAX_LISTED_SKIPPED));
        }
    }

    async fn copy(&self, sandbox: &Sandbox, from: &Location, to: &Location) -> anyhow::Result<()> {
        let described = |error: Error| describe_error(error, "");
        match (from, to) {
            (Location::Local(here), Location::Sandbox { path, .. }) => {
                let target = self.target_in_sandbox(sandbox, here, path).await.map_err(described)?;
                let about = std::fs::metadata(here).with_context(|| here.display().to_string())?;
                self.progress.total(about.is_file().then_some(about.len()));
                sandbox.upload_with(here, &target, &self.transfer).await.map_err(described)
            }
            (Location::Stdio, Location::Sandbox { path, .. }) => {
                let stdin = stream::try_unfold(tokio::io::stdin(), |mut stdin| async {
                    let mut buffer = vec![0; STDIN_CHUNK];
                    let read = stdin.read(&mut buffer).await;
                    let count = read.map_err(|error| Error::Ended(format!("stdin cannot be read: {error}").into()))?;
                    buffer.truncate(count);
                    Ok((count > 0).then(|| (buffer.into(), stdin)))
                });
                sandbox.write_stream(path, FileMode::default(), stdin, &self.transfer).await.map_err(described)
            }
            (Location::Sandbox { path, .. }, Location::Local(here)) => {
                let target = local_target(path, here)?;
                let listed = sandbox.list_files(path, 0).await.map_err(described)?;
                let file = listed.first().filter(|entry| entry.kind == FileKind::File);
                self.progress.total(file.map(|entry| entry.size));
                sandbox.download_with(path, &target, &self.transfer).await.map_err(described)
            }
            (Location::Sandbox { path, .. }, Location::Stdio) => {
                let mut reading = sandbox.read_stream(path, &self.transfer).await.map_err(described)?;
                let mut stdout = tokio::io::stdout();
                while let Some(bytes) = reading.next().await.map_err(described)? {
                    match write(&mut stdout, &bytes).await {
                        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                        written => written.context("the output cannot be written")?,
                    }
                }
                Ok(())
            }
            (Location::Sandbox { .. }, Location::Sandbox { .. })
            | (Location::Local(_) | Location::Stdio, Location::Local(_) | Location::Stdio) => Ok(()),
        }
    }

    /// The target path in the sandbox.
    async fn target_in_sandbox(&self, sandbox: &Sandbox, here: &Path, path: &str) -> Result<String, Error> {
        if names_content(&here.to_string_lossy()) {
            return Ok(path.to_owned());
        }
        let Some(name) = here.canonicalize().ok().and_then(|real| Some(real.file_name()?.to_owned())) else {
            return Ok(path.to_owned());
        };
        let name = here.file_name().unwrap_or(&name).to_string_lossy().into_owned();
        let is_directory = path.ends_with('/') || is_directory(sandbox, path).await?;
        Ok(if is_directory { format!("{}/{name}", path.trim_end_matches('/')) } else { path.to_owned() })
    }
}

/// Whether the path is a directory, or a link to one.
async fn is_directory(sandbox: &Sandbox, path: &str) -> Result<bool, Error> {
    match sandbox.list_files(&format!("{path}/."), 0).await {
        Ok(_) => Ok(true),
        Err(Error::File { code, .. }) if code == "ENOENT" || code == "ENOTDIR" => Ok(false),
        Err(error) => Err(error),
    }
}

/// The target path on this machine.
fn local_target(path: &str, here: &Path) -> anyhow::Result<PathBuf> {
    let text = here.to_string_lossy();
    if names_content(path) || !(here.is_dir() || text.ends_with('/')) {
        return Ok(here.to_owned());
    }
    match Path::new(path).file_name() {
        Some(name) => Ok(here.join(name)),
        None => bail!("`{path}` has no file name: name the target, as in {}", here.join("copy").display()),
    }
}

/// Whether the path ends like `a/.`, which means the content of `a`.
fn names_content(path: &str) -> bool {
    path == "." || path.ends_with("/.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_before_a_colon_is_a_sandbox() {
        let sandbox = |sandbox: &str, path: &str| Location::Sandbox { sandbox: sandbox.into(), path: path.into() };
        assert_eq!(Location::parse("0b9f:/a:b").unwrap(), sandbox("0b9f", "/a:b"));
        assert_eq!(Location::parse("0b9f:x").unwrap(), sandbox("0b9f", "x"));
        assert_eq!(Location::parse("./a:b").unwrap(), Location::Local("./a:b".into()));
        assert_eq!(Location::parse("/a:b").unwrap(), Location::Local("/a:b".into()));
        assert_eq!(Location::parse("-").unwrap(), Location::Stdio);
        assert!(Location::parse("0b9f:").is_err() && Location::parse("").is_err());
    }

    #[test]
    fn a_copy_goes_into_a_directory_and_else_becomes_the_target() {
        let space = tempfile::tempdir().unwrap();
        let here = |name: &str| space.path().join(name);
        assert_eq!(local_target("/data/x", space.path()).unwrap(), here("x"));
        assert_eq!(local_target("/data/x", &here("new")).unwrap(), here("new"));
        assert_eq!(local_target("/data/x", &here("new/")).unwrap(), here("new/x"));
        assert_eq!(local_target("/data/.", space.path()).unwrap(), space.path());
        assert_eq!(local_target("/data/..x/", space.path()).unwrap(), here("..x"));
        assert!(local_target("/", space.path()).is_err());
        assert!(local_target("/data/..", space.path()).is_err());
    }
}
