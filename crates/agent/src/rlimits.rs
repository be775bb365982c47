//! Limits for the processes and open files of a command: the kernel's own, set where a command cannot raise
//! them. A checkpoint includes them.

use std::{thread, time::Duration};

use rustix::{
    io::Errno,
    process::{Pid, Resource, Rlimit, prlimit, setrlimit},
};

/// Processes above the limit that only the agent can start, so that a client can always get in.
const RESERVED_PROCESSES: u64 = 16;
/// How often, and at which interval, to retry limiting a child that starts as another user: the child becomes
/// that user only a moment after the agent continues.
const LIMIT_ATTEMPTS: u32 = 200;
const LIMIT_RETRY_INTERVAL: Duration = Duration::from_micros(50);

/// The limits; `None` means no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessLimits {
    /// Processes and threads of one user, counted over the whole sandbox.
    pub pids: Option<u32>,
    pub files: Option<u32>,
}

impl ProcessLimits {
    /// Limits the agent itself, and with it all its children, so that taking over the agent gains nothing.
    pub fn own(self) -> rustix::io::Result<()> {
        self.pids.map_or(Ok(()), |pids| setrlimit(Resource::Nproc, fixed(u64::from(pids) + RESERVED_PROCESSES)))
    }

    /// Limits a command that has just started. One that has already exited needs no limit.
    pub fn child(self, pid: i32) {
        let pid = Pid::from_raw(pid);
        for (resource, most) in [(Resource::Nproc, self.pids), (Resource::Nofile, self.files)] {
            let Some(most) = most else { continue };
            for _ in 0..LIMIT_ATTEMPTS {
                // Without the capability, this is refused until the child runs as the user that the agent acts as.
                if prlimit(pid, resource, fixed(most.into())) != Err(Errno::PERM) {
                    break;
                }
                thread::sleep(LIMIT_RETRY_INTERVAL);
            }
        }
    }
}

fn fixed(most: u64) -> Rlimit {
    Rlimit { current: Some(most), maximum: Some(most) }
}
