//! Starts processes that die with the server, from a thread that lives as long as the server.
//!
//! The kernel sends the death signal when the *thread* that started a child ends, so no child may be started
//! from a thread pool. The child sets the signal itself: it is our own binary under the verb [`VERB`], which
//! then executes the real program.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{ExitCode, Stdio},
    sync::mpsc,
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::{
    process::{Child, Command},
    runtime::Handle,
    sync::oneshot,
};

pub const VERB: &str = "die-with";
/// Exit status of a child that could not join its cgroup.
pub const NOT_TAKEN: u8 = 125;

type Job = (Command, oneshot::Sender<io::Result<Child>>);

#[derive(Debug)]
pub struct Spawner {
    exe: PathBuf,
    jobs: mpsc::Sender<Job>,
}

impl Spawner {
    /// Must be called inside a tokio runtime. Dropping it ends its thread and with it every child.
    pub fn start(exe: PathBuf) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let runtime = Handle::current();
        std::thread::Builder::new().name("spawn".to_owned()).spawn(move || {
            let _inside = runtime.enter();
            for (mut command, started) in queue {
                let _ = started.send(command.spawn());
            }
        })?;
        Ok(Self { exe, jobs })
    }

    /// Starts `program` with an empty environment, in the cgroups of these directories. It is killed when the
    /// server ends or the returned child is dropped.
    pub async fn spawn(
        &self,
        program: &OsStr,
        arguments: &[OsString],
        cgroups: &[PathBuf],
        [stdin, stdout, stderr]: [Stdio; 3],
    ) -> io::Result<Child> {
        let mut command = Command::new(&self.exe);
        command.arg(VERB).arg(std::process::id().to_string()).args(cgroups).arg("--").arg(program).args(arguments);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
        command.stdin(stdin).stdout(stdout).stderr(stderr).kill_on_drop(true);
        let (started, child) = oneshot::channel();
        let ended = || io::Error::other("the spawning thread has ended");
        self.jobs.send((command, started)).map_err(|_| ended())?;
        child.await.map_err(|_| ended())?
    }
}

/// The verb: `die-with PPID [CGROUP…] -- PROGRAM ARGUMENT…`. Returns only if the program could not be executed.
pub fn die_with(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let parent = arguments.next().and_then(|word| word.to_str()?.parse::<i32>().ok());
    let cgroups: Vec<PathBuf> = arguments.by_ref().take_while(|word| word != "--").map(PathBuf::from).collect();
    let (Some(parent), Some(program)) = (parent, arguments.next()) else {
        eprintln!("usage: baton {VERB} PPID [CGROUP…] -- PROGRAM [ARGUMENT…]");
        return ExitCode::from(2);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        eprintln!("cannot ask for a death signal: {error}");
        return ExitCode::FAILURE;
    }
    // The parent may have died before the signal was set.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return ExitCode::FAILURE;
    }
    // Join before the exec, so that everything the program starts is in the cgroups too.
    for cgroup in cgroups {
        if let Err(error) = std::fs::write(cgroup.join(super::cgroup::MEMBERS), "0") {
            eprintln!("the cgroup {} does not take it: {error}", cgroup.display());
            return ExitCode::from(NOT_TAKEN);
        }
    }
    let error = std::process::Command::new(&program).args(arguments).exec();
    eprintln!("cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}
