//! Starts a command: pipes or a terminal, its own session, its directory, its user.
//!
//! `posix_spawn` is the only way to start a process that neither copies the agent's memory nor needs `unsafe`.
//! What it cannot change in the child, the agent temporarily changes in itself, which is safe with a single
//! thread.
//!
//! Inside a sandbox every system call is expensive, and a short command is hardly more than its start, so
//! unnecessary calls are avoided.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    fs,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
};

use baton_protocol::{
    agent::{AgentExec, Pty},
    printable::printable_start,
};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::{signal::SigSet, stat::Mode},
    unistd::{self, Gid, Uid},
};
use rustix::{
    fs::{OFlags, fcntl_setfl},
    io::fcntl_dupfd_cloexec,
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::{
    file_exec,
    rlimits::ProcessLimits,
    users::{self, User},
};

/// glibc's `POSIX_SPAWN_SETSID`.
const SET_SESSION: i32 = 0x80;
const PIPE_SIZE: usize = 1 << 20;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The exit codes of shells for a program that does not exist, or that may not be run.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;
/// The environment variable that identifies a command's orphans.
pub const EXEC_VARIABLE: &str = "BATON_EXEC";

/// A running command, and the agent's ends of its streams.
#[derive(Debug)]
pub struct Spawned {
    pub pid: i32,
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: Option<OwnedFd>,
}

/// What all commands of the sandbox share.
#[derive(Debug, Default)]
pub struct ExecDefaults {
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    pub held: ProcessLimits,
}

/// Why a command did not start.
#[derive(Debug)]
pub enum SpawnError {
    /// The program cannot be run: the command ends as in a shell, with this exit code and this text.
    Program { code: i32, text: String },
    /// Anything else is a refusal.
    Refused(String),
}

impl SpawnError {
    /// The exit code and the words of a shell; `None` for errors that are not about the program.
    fn of_program(error: Errno, program: &str) -> Option<Self> {
        let program = plain(program);
        let is_missing = matches!(error, Errno::ENOENT | Errno::ENOTDIR);
        if !is_missing && !matches!(error, Errno::EACCES | Errno::ELIBBAD) {
            return None;
        }
        let was_searched = error == Errno::ENOENT && !program.contains('/');
        let why = if was_searched { "command not found" } else { error.desc() };
        let code = if is_missing { NOT_FOUND } else { NOT_EXECUTABLE };
        Some(Self::Program { code, text: format!("{program}: {why}") })
    }
}

impl From<String> for SpawnError {
    fn from(text: String) -> Self {
        Self::Refused(text)
    }
}

impl From<&str> for SpawnError {
    fn from(text: &str) -> Self {
        Self::Refused(text.to_owned())
    }
}

/// Starts `exec`; the error says why that failed.
pub fn spawn(exec: &AgentExec, number: u32, shared: &ExecDefaults) -> Result<Spawned, SpawnError> {
    let user = match &exec.user {
        Some(name) => Some(users::find(name).ok_or_else(|| format!("No such user: {}", plain(name)))?),
        None => None,
    };
    let env = match exec.file {
        None => environment(exec, number, shared, user.as_ref()),
        Some(_) => BTreeMap::from([(EXEC_VARIABLE.to_owned(), number.to_string())]),
    };
    let words = exec.file.as_ref().map_or_else(|| exec.argv.clone(), file_exec::argv);
    let argv = words.iter().map(|word| c_string(word)).collect::<Result<Vec<_>, _>>()?;
    let words = env.iter().map(|(name, value)| c_string(&format!("{name}={value}"))).collect::<Result<Vec<_>, _>>()?;
    let program = exec.argv.first().filter(|program| !program.is_empty()).ok_or("The command is empty")?;

    let _directory = Directory::enter([shared.cwd.as_deref(), exec.cwd.as_deref()])?;
    let path = match exec.file {
        None => locate(program, env.get("PATH").map_or(PATH, |path| path)).map_err(|error| refuse(error, program))?,
        Some(_) => PathBuf::from(file_exec::PROGRAM),
    };
    let ends = match exec.pty {
        Some(pty) => terminal(pty, user.as_ref()),
        None => pipes(exec.stdin),
    }
    .map_err(|error| format!("{}: {}", Errno::from_raw(error.raw_os_error()).desc(), plain(program)))?;
    let pid = start(&path, &ends, user.as_ref(), shared.held, &argv, &words).map_err(|error| refuse(error, program))?;
    Ok(Spawned { pid, stdin: ends.stdin, stdout: ends.stdout, stderr: ends.stderr })
}

fn refuse(error: Errno, program: &str) -> SpawnError {
    let about = SpawnError::of_program(error, program);
    about.unwrap_or_else(|| SpawnError::Refused(format!("{}: {}", error.desc(), plain(program))))
}

fn environment(exec: &AgentExec, number: u32, shared: &ExecDefaults, user: Option<&User>) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), PATH.to_owned()),
        ("HOME".to_owned(), user.map_or("/root", |user| &user.home).to_owned()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
    ]);
    if exec.pty.is_some() {
        env.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    if let Some(name) = user.and_then(|user| user.name.as_ref()) {
        env.insert("USER".to_owned(), name.clone());
    }
    env.extend(shared.env.clone());
    env.extend(exec.env.clone());
    env.insert(EXEC_VARIABLE.to_owned(), number.to_string());
    env
}

/// The child's side and the agent's side of a command's streams.
struct Ends {
    actions: Vec<Action>,
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
}

/// The source of one of the child's descriptors.
enum Action {
    Open(CString, OFlag, i32),
    Copy(OwnedFd, i32),
    Same(i32, i32),
}

fn pipes(with_stdin: bool) -> rustix::io::Result<Ends> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC);
    let (stdin, first) = if with_stdin {
        let (read, write) = pipe()?;
        (Some(nonblocking(write)?), Action::Copy(read, 0))
    } else {
        (None, Action::Open(c"/dev/null".to_owned(), OFlag::O_RDONLY, 0))
    };
    let (stdout, second) = pipe()?;
    let (stderr, third) = pipe()?;
    Ok(Ends {
        actions: vec![first, Action::Copy(second, 1), Action::Copy(third, 2)],
        stdin,
        stdout: nonblocking(stdout)?,
        stderr: Some(nonblocking(stderr)?),
    })
}

fn terminal(pty: Pty, user: Option<&User>) -> rustix::io::Result<Ends> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    resize(&master, pty.cols, pty.rows)?;
    let name = ptsname(&master, Vec::new())?;
    if let Some(user) = user {
        rustix::fs::chown(&name, Some(rustix::fs::Uid::from_raw(user.uid)), None)?;
    }
    let master = nonblocking(master)?;
    let writer = fcntl_dupfd_cloexec(&master, 3)?;
    // The leader of a new session gets the first terminal it opens as its controlling terminal.
    let actions = vec![Action::Open(name, OFlag::O_RDWR, 0), Action::Same(0, 1), Action::Same(0, 2)];
    Ok(Ends { actions, stdin: Some(writer), stdout: master, stderr: None })
}

/// Sets a terminal's window size.
pub fn resize(master: impl AsFd, cols: u16, rows: u16) -> rustix::io::Result<()> {
    tcsetwinsize(master, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })
}

/// Makes a new descriptor non-blocking. It has no other flags that could be lost.
fn nonblocking(fd: OwnedFd) -> rustix::io::Result<OwnedFd> {
    fcntl_setfl(&fd, OFlags::NONBLOCK)?;
    Ok(fd)
}

/// Enlarges a pipe that much data passes through. Best-effort: this affects only speed.
pub fn enlarge(pipe: impl AsFd) {
    let _ = fcntl_setpipe_size(pipe, PIPE_SIZE);
}

fn start(
    path: &Path,
    ends: &Ends,
    user: Option<&User>,
    held: ProcessLimits,
    argv: &[CString],
    env: &[CString],
) -> Result<i32, Errno> {
    let mut actions = PosixSpawnFileActions::init()?;
    for action in &ends.actions {
        match action {
            Action::Open(path, flags, number) => actions.add_open(*number, path.as_c_str(), *flags, Mode::empty())?,
            Action::Copy(fd, number) => actions.add_dup2(fd.as_raw_fd(), *number)?,
            Action::Same(number, copy) => actions.add_dup2(*number, *copy)?,
        }
    }
    let mut flags = PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
        | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
        | PosixSpawnFlags::from_bits_retain(SET_SESSION);
    if user.is_some() {
        flags |= PosixSpawnFlags::POSIX_SPAWN_RESETIDS;
    }
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(flags)?;
    attributes.set_sigmask(&SigSet::empty())?;
    // All signals, also because glibc queries the action of any other signal in the child before resetting it:
    // two calls instead of one.
    attributes.set_sigdefault(&SigSet::all())?;
    let _identity = user.map(Identity::assume).transpose()?;
    let pid = match posix_spawn(path, &actions, &attributes, argv, env) {
        // A script without an interpreter line is run by the shell.
        Err(Errno::ENOEXEC) => {
            let script = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Errno::EINVAL)?;
            let rest = argv.get(1..).unwrap_or_default().iter().map(CString::as_c_str);
            let words: Vec<&CStr> = [c"sh", script.as_c_str()].into_iter().chain(rest).collect();
            posix_spawn("/bin/sh", &actions, &attributes, &words, env)?
        }
        started => started?,
    };
    // Still under the child's identity: only its own user may limit it.
    held.child(pid.as_raw());
    Ok(pid.as_raw())
}

/// Finds the program called `name`, relative to the agent's current directory.
fn locate(name: &str, path: &str) -> Result<PathBuf, Errno> {
    if name.contains('/') {
        return Ok(PathBuf::from(name));
    }
    let mut refused = Errno::ENOENT;
    for directory in path.split(':') {
        let candidate = Path::new(if directory.is_empty() { "." } else { directory }).join(name);
        match fs::metadata(&candidate) {
            Ok(found) if found.is_file() && found.permissions().mode() & 0o111 != 0 => return Ok(candidate),
            Ok(found) if found.is_file() => refused = Errno::EACCES,
            Ok(_) | Err(_) => {}
        }
    }
    Err(refused)
}

/// Keeps the agent in a command's directory until dropped, then returns to the root directory.
struct Directory;

impl Directory {
    fn enter(steps: [Option<&str>; 2]) -> Result<Option<Self>, String> {
        let mut entered = None;
        for step in steps.into_iter().flatten() {
            entered.get_or_insert(Self);
            unistd::chdir(step).map_err(|error| format!("{}: {}", error.desc(), plain(step)))?;
        }
        Ok(entered)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        unistd::chdir("/").expect("the root directory is always there");
    }
}

/// Changes the agent's real user until dropped. The effective user stays, and the child makes the real one its
/// effective one.
struct Identity {
    groups: Vec<Gid>,
}

impl Identity {
    fn assume(user: &User) -> Result<Self, Errno> {
        let assumed = Self { groups: unistd::getgroups()? };
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        let groups: Vec<Gid> = user.groups.iter().copied().map(Gid::from_raw).collect();
        unistd::setgroups(&groups)?;
        unistd::setresgid(gid, Gid::effective(), Gid::effective())?;
        unistd::setresuid(uid, Uid::effective(), Uid::effective())?;
        Ok(assumed)
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let (uid, gid) = (Uid::effective(), Gid::effective());
        let back = unistd::setresuid(uid, uid, uid)
            .and_then(|()| unistd::setresgid(gid, gid, gid))
            .and_then(|()| if uid.is_root() { unistd::setgroups(&self.groups) } else { Ok(()) });
        // The agent must not continue with another identity.
        back.expect("the effective user may always become the real one");
    }
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "The command has a zero byte in it".to_owned())
}

/// `text` for use in a message: shortened, and without control characters.
pub fn plain(text: &str) -> String {
    printable_start(text, 120)
}
