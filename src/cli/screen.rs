//! The one way from the command line to a terminal. Labels, messages, names and errors may be a stranger's words, so
//! whatever goes this way is made printable.
//!
//! Only the output of a command goes another way ([`attend`](super::attend)), untouched: it is what was asked for.

use std::{
    fmt::Display,
    io::{self, Write},
};

use baton_protocol::printable::{escape_json, printable_lines};
use serde_json::Value;

/// Writes to standard output. A reader that has seen enough is no error.
pub fn print(text: &str) -> anyhow::Result<()> {
    write(&printable_lines(text))
}

/// An empty screen, for a table that is drawn again and again.
pub fn clear() -> anyhow::Result<()> {
    write("\x1b[H\x1b[2J")
}

/// One or more lines on standard error. A terminal that is gone is no reason to stop.
pub fn say(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", printable_lines(&text.to_string()));
}

/// JSON for a program, and harmless to the terminal that a person reads it on: [`print`] leaves it as it is.
pub fn json(value: &Value) -> String {
    escape_json(&format!("{value:#}\n")).into_owned()
}

fn write(text: &str) -> anyhow::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
