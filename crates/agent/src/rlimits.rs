//! What one command may have of processes and open files: the kernel's own limits, set where a command cannot
//! raise them. They lie in a checkpoint with everything else.

use std::{thread, time::Duration};

use rustix::{
    io::Errno,
    process::{Pid, Resource, Rlimit, prlimit, setrlimit},
};

/// Processes on top of the limit that only the agent can start, so that there is always a way in.
const RESERVE: u64 = 16;
/// A child that starts as another user is that user a moment after the agent goes on: how often, and after which time,
/// it is tried again to limit it.
const TRIES: u32 = 200;
const MOMENT: Duration = Duration::from_micros(50);

/// `None` is no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Processes and threads of one user, counted over the whole sandbox.
    pub pids: Option<u32>,
    pub files: Option<u32>,
}

impl Held {
    /// The agent itself is held too: whoever takes it over gains nothing. What it starts inherits this.
    pub fn own(self) -> rustix::io::Result<()> {
        self.pids.map_or(Ok(()), |pids| setrlimit(Resource::Nproc, fixed(u64::from(pids) + RESERVE)))
    }

    /// A command that has just started. One that ended already needs no limit.
    pub fn child(self, pid: i32) {
        let pid = Pid::from_raw(pid);
        for (resource, most) in [(Resource::Nproc, self.pids), (Resource::Nofile, self.files)] {
            let Some(most) = most else { continue };
            for _ in 0..TRIES {
                // Whoever is not the child's user yet, and has no capability for it, is refused.
                if prlimit(pid, resource, fixed(most.into())) != Err(Errno::PERM) {
                    break;
                }
                thread::sleep(MOMENT);
            }
        }
    }
}

fn fixed(most: u64) -> Rlimit {
    Rlimit { current: Some(most), maximum: Some(most) }
}
