//! The terminal we were started on: its size, and raw mode, which is always restored.

use std::io::{self, IsTerminal};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

pub fn is_stdin() -> bool {
    io::stdin().is_terminal()
}

pub fn is_stderr() -> bool {
    io::stderr().is_terminal()
}

/// Columns and rows of whichever of our streams is a terminal.
pub fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// Passes every key unchanged to the command while this value lives. Dropping it, also in a panic,
/// restores the terminal.
#[derive(Debug)]
pub struct Raw(Termios);

impl Raw {
    /// Returns `None` if stdin is not a terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        if !is_stdin() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to restore.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
