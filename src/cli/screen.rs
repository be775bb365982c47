//! The only path from the command line to a terminal. Labels, messages, names and errors may be untrusted text, so
//! everything printed here is made printable.
//!
//! Only the output of a command takes another path (`stdio_bridge`), unchanged, because it is
//! what the user asked for.

use std::{
    fmt::Display,
    io::{self, Write},
};

use baton_protocol::printable::{escape_json, printable_lines};
use serde_json::Value;

/// Writes to standard output. A reader that closes the pipe is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    write(&printable_lines(text))
}

/// Clears the screen, for a table that is redrawn.
pub fn clear() -> anyhow::Result<()> {
    write("\x1b[H\x1b[2J")
}

/// Writes one or more lines to standard error. A closed terminal is no reason to stop.
pub fn report(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", printable_lines(&text.to_string()));
}

/// JSON for programs that is also safe for a terminal: [`print`](print()) leaves it unchanged.
pub fn json(value: &Value) -> String {
    escape_json(&format!("{value:#}\n")).into_owned()
}

fn write(text: &str) -> anyhow::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
