//! `baton logs`: the output of a command, as far as it is still buffered.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use baton_client::{Chunk, ExecId, ExecView, Offsets, Running, Sandbox, StdStream};

use super::{
    context::CommandContext,
    sandbox_client::SandboxOptions,
    screen,
    server_client::describe_error,
    stdio_bridge::{Signals, write},
};

/// Print the buffered output of a command
///
/// Without an exec id, this is the output of the last command. The output stays buffered and can be read again, by this
/// and by other clients, also with --follow: of a running command the last 3 MiB of each stream, and of one that has
/// ended all that was left. The 100 commands that ended last are kept, until a client has received their output and
/// exit code.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton logs 0b9f\n  \
                  baton logs --list 0b9f\n  \
                  baton logs --follow 0b9f x1f0a")]
pub struct LogsArgs {
    /// Continue until the command ends, and exit with its exit code
    #[arg(short, long)]
    pub follow: bool,
    /// List the known commands instead: when each was started, its state, its output in bytes and its beginning
    #[arg(short, long, conflicts_with = "follow")]
    pub list: bool,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
    /// Exec id, as `baton exec --detach` printed it
    pub exec: Option<String>,
}

pub async fn logs(args: LogsArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let sandbox = tokio::select! {
        attached = client.attach(&args.sandbox) => attached?,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let code = tokio::select! {
        code = show(&sandbox, &args) => code,
        code = signals.end() => Ok(code),
    };
    client.close(sandbox).await;
    code.map(ExitCode::from)
}

async fn show(sandbox: &Sandbox, args: &LogsArgs) -> anyhow::Result<u8> {
    let views = sandbox.execs();
    if args.list {
        screen::print(&table(&views))?;
        return Ok(0);
    }
    let view = match &args.exec {
        Some(text) => {
            let id = ExecId::parse(text).ok().with_context(|| format!("`{text}` is not an exec id"))?;
            let found = views.into_iter().rev().find(|view| view.exec_id == id);
            found.with_context(|| format!("the sandbox has no command `{text}`: see `baton logs --list`"))?
        }
        None => views.into_iter().max_by_key(|view| view.exec).context("the sandbox has run no command")?,
    };
    let from = Offsets { stdout: view.stdout.from, stderr: view.stderr.from };
    let lost = view.stdout.from.saturating_add(view.stderr.from);
    if lost > 0 {
        screen::report(format_args!("baton: {lost} earlier bytes are no longer buffered"));
    }
    // Others get the output too: nothing is acknowledged.
    let running = sandbox.peek(&view.exec_id, from).await.map_err(|error| describe_error(error, ""))?;
    if args.follow { follow(running).await } else { print_buffered(running, &view).await }
}

/// The commands, with columns as wide as their content.
fn table(views: &[ExecView]) -> String {
    let head = ["EXEC", "STARTED", "STATE", "BYTES", "COMMAND"].map(str::to_owned);
    let row = |view: &ExecView| {
        let bytes = view.stdout.to.saturating_add(view.stderr.to);
        let command = view.command.as_deref().map_or("-".to_owned(), baton_files::plain);
        [view.exec_id.to_string(), started(view), state(view), bytes.to_string(), command]
    };
    let rows: Vec<_> = std::iter::once(head).chain(views.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    let line = |row: &[String; 5]| {
        let cells: String = widths.iter().zip(row).map(|(width, cell)| format!("{cell:width$}  ")).collect();
        format!("{cells}{}\n", row[4])
    };
    rows.iter().map(line).collect()
}

fn started(view: &ExecView) -> String {
    let at = view.started_ms.and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    // A time that no calendar has comes from a hostile sandbox.
    let year_9999 = Duration::from_secs(253_402_300_799);
    let at = at.filter(|at| at.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since <= year_9999));
    at.map_or("-".to_owned(), |at| humantime::format_rfc3339_seconds(at).to_string())
}

fn state(view: &ExecView) -> String {
    match (view.running, view.exit_code, view.signal) {
        (true, ..) => "running".to_owned(),
        (false, Some(code), _) => format!("exit {code}"),
        (false, None, Some(signal)) => format!("signal {signal}"),
        (false, None, None) => "ended".to_owned(),
    }
}

/// Prints the output that is buffered now, and no more.
async fn print_buffered(mut running: Running, view: &ExecView) -> anyhow::Result<u8> {
    let (mut stdout, mut stderr) = (view.stdout.from, view.stderr.from);
    while stdout < view.stdout.to || stderr < view.stderr.to {
        let Some((output, chunk)) = running.next().await else { break };
        let (at, end) = match output {
            StdStream::Stdout => (&mut stdout, view.stdout.to),
            StdStream::Stderr => (&mut stderr, view.stderr.to),
        };
        match chunk {
            Chunk::Data(bytes) => {
                let wanted = bytes.len().min(usize::try_from(end.saturating_sub(*at))?);
                write_to(output, &bytes[..wanted]).await?;
                *at = at.saturating_add(bytes.len() as u64);
            }
            Chunk::Gap { to, .. } => *at = to,
            Chunk::Rewound { .. } => bail!("the sandbox was rolled back to an older checkpoint"),
        }
    }
    Ok(0)
}

async fn follow(mut running: Running) -> anyhow::Result<u8> {
    while let Some((output, chunk)) = running.next().await {
        match chunk {
            Chunk::Data(bytes) => write_to(output, &bytes).await?,
            Chunk::Gap { from, to } => screen::report(format_args!(
                "baton: {} bytes are missing: they are no longer buffered",
                to.saturating_sub(from)
            )),
            Chunk::Rewound { .. } => bail!("the sandbox was rolled back to an older checkpoint"),
        }
    }
    let outcome = running.wait().await.map_err(|error| describe_error(error, ""))?;
    super::stdio_bridge::BridgeEnd::Outcome(outcome).code()
}

async fn write_to(output: StdStream, bytes: &[u8]) -> anyhow::Result<()> {
    let written = match output {
        StdStream::Stdout => write(&mut tokio::io::stdout(), bytes).await,
        StdStream::Stderr => write(&mut tokio::io::stderr(), bytes).await,
    };
    written.context("the output cannot be written")
}

#[cfg(test)]
mod tests {
    use baton_protocol::event::Kept;

    use super::*;

    #[test]
    fn a_command_is_listed_with_its_start_its_state_and_its_line() {
        let view = ExecView {
            exec_id: ExecId::parse("x1").unwrap(),
            exec: 1,
            running: false,
            command: Some("make -j2\u{1b}[2J".to_owned()),
            started_ms: Some(1_700_000_000_000),
            stdin: 0,
            stdin_crc32: None,
            stdout: Kept { from: 0, to: 7 },
            stderr: Kept::default(),
            exit_code: Some(3),
            signal: None,
        };
        let hostile = ExecView { command: None, started_ms: Some(u64::MAX), running: true, ..view.clone() };
        let table = table(&[view, hostile]);
        let rows: Vec<_> = table.lines().collect();
        assert_eq!(rows[0], "EXEC  STARTED               STATE    BYTES  COMMAND");
        assert_eq!(rows[1], "x1    2023-11-14T22:13:20Z  exit 3   7      make -j2?[2J");
        assert_eq!(rows[2], "x1    -                     running  7      -");
    }
}
