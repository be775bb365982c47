//! Sets a socket option from raw bytes: the only `unsafe` code of the workspace.
//!
//! The kernel takes the redirect rule as an option whose value is a table of variable length. Neither rustix nor nix
//! has a safe function for that.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use nix::{errno::Errno, libc};

/// Sets the option `name` of `level` to `value`. The kernel copies the bytes and keeps no reference to them.
///
/// The caller must not use it for an option whose value contains an address the kernel writes to.
pub fn set_raw_option(socket: impl AsFd, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the descriptor is open for as long as it is borrowed, and `setsockopt` reads exactly `length` bytes from
    // the pointer, which are those of `value`. It writes nothing and keeps no pointer.
    let result = unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    Errno::result(result).map(drop)
}
