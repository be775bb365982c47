//! `baton cp`: files and directories into a sandbox and out of it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use baton_client::{Error, FileKind, FileMode, Sandbox, Transfer};
use futures::stream;
use tokio::io::AsyncReadExt;

use super::{
    progress::Progress,
    screen,
    server_args::{SandboxArgs, explain},
    stdio_bridge::{Signals, raw_terminal, write},
};
use crate::clock::{SharedClock, SystemClock};

/// How many left-out files are listed by name.
const MOST_NAMED: u64 = 20;
const CHUNK: usize = 256 << 10;
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// Copy files and directories between this machine and a sandbox.
///
/// A path in a sandbox is written SANDBOX:PATH; `-` is our stdin or stdout. What is copied keeps its
/// mode and time, and appears as a whole or not at all. If the target is a directory the copy goes
/// into it; a source that ends with `/.` means what is in it. A broken connection is taken up again
/// where it was. What comes out of a sandbox is not trusted: nothing is written beside the target,
/// and links that lead out of it are left out.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton cp data.csv 0b9f:/data/\n  \
                  baton cp -q src/. 0b9f:/src\n  \
                  baton cp 0b9f:/results .\n  \
                  pg_dump shop | baton cp - 0b9f:/data/shop.sql\n  \
                  baton cp 0b9f:/var/log/app.log - | tail")]
pub struct CpArgs {
    /// Show no progress.
    #[arg(short, long)]
    pub quiet: bool,
    /// Whose rights count inside the sandbox: a name or a number.
    #[arg(short, long)]
    pub user: Option<String>,
    #[command(flatten)]
    pub link: SandboxArgs,
    /// What to copy.
    pub from: String,
    /// Where to.
    pub to: String,
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Here(PathBuf),
    /// Our stdin or stdout.
    Stream,
    Sandbox {
        sandbox: String,
        path: String,
    },
}

impl End {
    /// Text before a colon is a sandbox, unless it contains a slash: `./a:b` is a file.
    fn parse(text: &str) -> anyhow::Result<Self> {
        match text.split_once(':') {
            _ if text.is_empty() => bail!("a path is empty"),
            _ if text == "-" => Ok(Self::Stream),
            Some((sandbox, path)) if !sandbox.is_empty() && !sandbox.contains('/') => {
                if path.is_empty() {
                    bail!(
                        "`{text}` names no path in the sandbox: write `{text}/`, or `{text}.` for where commands start"
                    );
                }
                Ok(Self::Sandbox { sandbox: sandbox.to_owned(), path: path.to_owned() })
            }
            _ => Ok(Self::Here(text.into())),
        }
    }
}

pub async fn run(args: CpArgs) -> anyhow::Result<ExitCode> {
    let (from, to) = (End::parse(&args.from)?, End::parse(&args.to)?);
    let name = match (&from, &to) {
        (End::Sandbox { .. }, End::Sandbox { .. }) => bail!("copy between sandboxes in two steps, through here"),
        (End::Sandbox { sandbox, .. }, _) | (_, End::Sandbox { sandbox, .. }) => sandbox.clone(),
        _ => bail!("one of the two must be in a sandbox: SANDBOX:PATH"),
    };
    let mut signals = Signals::listen()?;
    let sandbox = tokio::select! {
        attached = args.link.attach(&name) => attached?,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let shown = !args.quiet && to != End::Stream && raw_terminal::is_stderr();
    let copying = Copying::new(&args, shown);
    let code = tokio::select! {
        copied = copying.copy(&sandbox, &from, &to) => copied.map(|()| 0),
        // Dropping the transfer also ends it in the sandbox.
        code = signals.end() => Ok(code),
    };
    copying.progress.clear();
    copying.tell_left_out();
    let clock: SharedClock = Arc::new(SystemClock);
    let _ = clock.timeout(LEAVE_WITHIN, sandbox.close()).await;
    code.map(ExitCode::from)
}

struct Copying {
    how: Transfer,
    progress: Arc<Progress>,
    left_out: Arc<Mutex<Vec<String>>>,
    count: Arc<AtomicU64>,
}

impl Copying {
    fn new(args: &CpArgs, shown: bool) -> Self {
        let clock: SharedClock = Arc::new(SystemClock);
        let progress = Arc::new(Progress::new(clock, shown));
        let (left_out, count) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let how = Transfer {
            user: args.user.clone(),
            on_bytes: Some({
                let progress = progress.clone();
                Arc::new(move |bytes| progress.add(bytes))
            }),
            on_left_out: Some({
                let (left_out, count) = (left_out.clone(), count.clone());
                Arc::new(move |line: &str| {
                    if count.fetch_add(1, Ordering::Relaxed) < MOST_NAMED
                        && let Ok(mut left_out) = left_out.lock()
                    {
                        left_out.push(baton_files::plain(line));
                    }
                })
            }),
            ..Transfer::default()
        };
        Self { how, progress, left_out, count }
    }

    fn tell_left_out(&self) {
        let named = self.left_out.lock().map(|mut named| std::mem::take(&mut *named)).unwrap_or_default();
        for line in &named {
            screen::say(format_args!("baton: left out: {line}"));
        }
        let count = self.count.load(Ordering::Relaxed);
        if count > MOST_NAMED {
            screen::say(format_args!("baton: left out: {} more", count - MOST_NAMED));
        }
    }

    async fn copy(&self, sandbox: &Sandbox, from: &End, to: &End) -> anyhow::Result<()> {
        let said = |error: Error| explain(error, "");
        match (from, to) {
            (End::Here(here), End::Sandbox { path, .. }) => {
                let target = self.target_there(sandbox, here, path).await.map_err(said)?;
                let about = std::fs::metadata(here).with_context(|| here.display().to_string())?;
                self.progress.total(about.is_file().then_some(about.len()));
                sandbox.upload_with(here, &target, &self.how).await.map_err(said)
            }
            (End::Stream, End::Sandbox { path, .. }) => {
                let stdin = stream::try_unfold(tokio::io::stdin(), |mut stdin| async {
                    let mut buffer = vec![0; CHUNK];
                    let read = stdin.read(&mut buffer).await;
                    let count = read.map_err(|error| Error::Ended(format!("stdin cannot be read: {error}")))?;
                    buffer.truncate(count);
                    Ok((count > 0).then(|| (buffer.into(), stdin)))
                });
                sandbox.write_stream(path, FileMode::default(), stdin, &self.how).await.map_err(said)
            }
            (End::Sandbox { path, .. }, End::Here(here)) => {
                let target = target_here(path, here)?;
                let listed = sandbox.list_files(path, 0).await.map_err(said)?;
                let file = listed.first().filter(|entry| entry.kind == FileKind::File);
                self.progress.total(file.map(|entry| entry.size));
                sandbox.download_with(path, &target, &self.how).await.map_err(said)
            }
            (End::Sandbox { path, .. }, End::Stream) => {
                let mut reading = sandbox.read_stream(path, &self.how).await.map_err(said)?;
                let mut stdout = tokio::io::stdout();
                while let Some(bytes) = reading.next().await.map_err(said)? {
                    match write(&mut stdout, &bytes).await {
                        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                        written => written.context("the output cannot be written")?,
                    }
                }
                Ok(())
            }
            (End::Sandbox { .. }, End::Sandbox { .. }) | (End::Here(_) | End::Stream, End::Here(_) | End::Stream) => {
                Ok(())
            }
        }
    }

    /// The target path in the sandbox.
    async fn target_there(&self, sandbox: &Sandbox, here: &Path, path: &str) -> Result<String, Error> {
        if means_content(&here.to_string_lossy()) {
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
fn target_here(path: &str, here: &Path) -> anyhow::Result<PathBuf> {
    let text = here.to_string_lossy();
    if means_content(path) || !(here.is_dir() || text.ends_with('/')) {
        return Ok(here.to_owned());
    }
    match Path::new(path).file_name() {
        Some(name) => Ok(here.join(name)),
        None => bail!("`{path}` has no name of its own: name the target, as in {}", here.join("copy").display()),
    }
}

/// Whether the path ends like `a/.`, which means the content of `a`.
fn means_content(path: &str) -> bool {
    path == "." || path.ends_with("/.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_before_a_colon_is_a_sandbox() {
        let sandbox = |sandbox: &str, path: &str| End::Sandbox { sandbox: sandbox.into(), path: path.into() };
        assert_eq!(End::parse("0b9f:/a:b").unwrap(), sandbox("0b9f", "/a:b"));
        assert_eq!(End::parse("0b9f:x").unwrap(), sandbox("0b9f", "x"));
        assert_eq!(End::parse("./a:b").unwrap(), End::Here("./a:b".into()));
        assert_eq!(End::parse("/a:b").unwrap(), End::Here("/a:b".into()));
        assert_eq!(End::parse("-").unwrap(), End::Stream);
        assert!(End::parse("0b9f:").is_err() && End::parse("").is_err());
    }

    #[test]
    fn a_copy_goes_into_a_directory_and_else_becomes_the_target() {
        let space = tempfile::tempdir().unwrap();
        let here = |name: &str| space.path().join(name);
        assert_eq!(target_here("/data/x", space.path()).unwrap(), here("x"));
        assert_eq!(target_here("/data/x", &here("new")).unwrap(), here("new"));
        assert_eq!(target_here("/data/x", &here("new/")).unwrap(), here("new/x"));
        assert_eq!(target_here("/data/.", space.path()).unwrap(), space.path());
        assert_eq!(target_here("/data/..x/", space.path()).unwrap(), here("..x"));
        assert!(target_here("/", space.path()).is_err());
        assert!(target_here("/data/..", space.path()).is_err());
    }
}
