//! Moves the agent into memory: it copies itself into a sealed memory file and continues from there.
//!
//! A checkpoint contains memory but only the names of files. An agent that still ran from a file would continue
//! with whatever that file contains on the next host.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::Command,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The argument that shows that the move is done.
const DONE: &str = "sealed";
/// Freed memory is unmapped at once, instead of being part of every checkpoint.
const TUNABLES: &str = "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072";

/// Returns if the process already runs from memory; otherwise re-executes it from there.
pub fn into_memory() -> Result<(), crate::Failure> {
    if std::env::args_os().nth(1).is_some_and(|word| word == DONE) {
        return Ok(());
    }
    let memory = memfd_create("baton-agent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut memory = File::from(memory);
    io::copy(&mut File::open("/proc/self/exe")?, &mut memory)?;
    fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Err(Command::new(path).arg0("baton-agent").arg(DONE).env("GLIBC_TUNABLES", TUNABLES).exec().into())
}
