//! `baton port-forward`: local listeners whose connections end at ports in a sandbox.

use std::{net::IpAddr, process::ExitCode, str::FromStr};

use anyhow::{Context, Result};
use baton_client::{Connection, Error, Port};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use super::{
    context::CommandContext,
    sandbox_client::{SandboxClient, SandboxOptions},
    screen,
    server_client::describe_error,
    stdio_bridge::Signals,
    token_file::SavedToken,
};
use crate::api::port_number;

/// Reach ports in a sandbox from this machine
///
/// Listens here and carries each TCP connection to the port in the sandbox, until Ctrl-C: for a web server, a database
/// or ssh. A sandbox that is checkpointed is restored by the first connection. When the sandbox moves to another
/// instance, open connections are reset and new ones wait for it.
#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  baton port-forward 0b9f 8000           localhost:8000 is port 8000 in the sandbox\n  \
                  baton port-forward 0b9f 8080:80 5432   two ports, the first under another number\n  \
                  baton port-forward 0b9f :80            a free local port, which is printed"
)]
pub struct PortForwardArgs {
    /// Local address to listen on; anyone who reaches it reaches the port in the sandbox
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub address: IpAddr,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
    /// Local port and port in the sandbox; one number is both
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    pub ports: Vec<ForwardedPort>,
}

/// A local port, 0 for any free one, and the port in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardedPort {
    local: u16,
    inside: u16,
}

impl FromStr for ForwardedPort {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (local, inside) = text.split_once(':').unwrap_or((text, text));
        let local = if local.is_empty() { Some(0) } else { port_number(local) };
        let both = local.zip(port_number(inside));
        both.map(|(local, inside)| Self { local, inside }).ok_or("write it as REMOTE, LOCAL:REMOTE or :REMOTE")
    }
}

pub async fn port_forward(args: PortForwardArgs, context: &CommandContext) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let code = tokio::select! {
        ended = forward(&args, &client) => return ended.map(|()| ExitCode::SUCCESS),
        code = signals.end() => code,
    };
    Ok(ExitCode::from(code))
}

/// Listens until a local listener fails; connections end with it.
async fn forward(args: &PortForwardArgs, client: &SandboxClient) -> Result<()> {
    let SavedToken { id, token, url } = client.find(&args.sandbox)?;
    let connection = Connection { on_status: None, ..client.server.connection(&url) };
    let mut listeners = Vec::new();
    for ForwardedPort { local, inside } in &args.ports {
        let listener = TcpListener::bind((args.address, *local)).await;
        let listener = listener.with_context(|| format!("{}:{local} cannot be listened on", args.address))?;
        let port = Port::of(&url, id.clone(), token.clone(), *inside, connection.clone());
        listeners.push((listener, *inside, port.map_err(|error| describe_error(error, &url))?));
    }
    // All listen before the first line says so.
    for (listener, inside, _) in &listeners {
        screen::print(&format!("Forwarding {} to port {inside} of {id}\n", listener.local_addr()?))?;
    }
    let mut tasks = JoinSet::new();
    for (listener, inside, port) in listeners {
        let url = url.clone();
        tasks.spawn(async move { accept(&listener, inside, &port, &url).await });
    }
    match tasks.join_next().await {
        Some(ended) => ended?,
        None => Ok(()),
    }
}

async fn accept(listener: &TcpListener, inside: u16, port: &Port, url: &str) -> Result<()> {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (local, peer) = accepted.context("a connection could not be accepted")?;
                let (port, url) = (port.clone(), url.to_owned());
                open.spawn(async move {
                    if let Err(error) = carry(local, &port).await {
                        let error = describe_error(error, &url);
                        screen::report(format_args!("baton: {peer} to port {inside}: {error}"));
                    }
                });
            }
            Some(_) = open.join_next() => {}
        }
    }
}

/// Carries one connection. If the other side resets it, or there is none, this one is reset too.
async fn carry(mut local: TcpStream, port: &Port) -> Result<(), Error> {
    let _ = local.set_nodelay(true);
    let outcome = match port.connect().await {
        Ok(mut inside) => match tokio::io::copy_bidirectional(&mut local, &mut inside).await {
            Ok(_) => return Ok(()),
            // The user sees a reset connection, as without a forward.
            Err(_) => Ok(()),
        },
        Err(error) => Err(error),
    };
    let _ = local.set_zero_linger();
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_one_number_or_two() {
        let parse = |text: &str| text.parse().ok().map(|ForwardedPort { local, inside }| (local, inside));
        assert_eq!(parse("8080"), Some((8080, 8080)));
        assert_eq!(parse("8080:80"), Some((8080, 80)));
        assert_eq!(parse(":80"), Some((0, 80)));
        for bad in ["", ":", "80:", "0", "80:0", "65536", "a", "1:2:3", "+1", "080"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
