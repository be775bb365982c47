//! `baton kill`: ends sandboxes through a server, also while clients are attached; where only storage is configured,
//! through that.

use std::{process::ExitCode, time::Duration};

use anyhow::{Result, bail};
use baton_client::{Connection, Error, Sandbox};

use super::{
    admin_api::AdminApi,
    backend::Backend,
    context::CommandContext,
    delete,
    sandbox_client::{SandboxClient, SandboxOptions},
    screen,
    server_client::describe_error,
    stdio_bridge::Signals,
    storage_admin::{AdminResult, WaitArgs},
};

/// How long to wait for the holder of a sandbox, where there is only storage.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(300);

/// End sandboxes and delete their stored state, also while clients are attached
///
/// This takes the sandbox's token, the API key of its tenant, or the admin key. Without a server it works on the storage,
/// like `baton delete`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton kill 0b9f\n  baton kill 0b9f 77aa")]
pub struct KillArgs {
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox ids, or the beginnings of them
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

pub async fn kill(args: KillArgs, context: &CommandContext) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let mut has_failed = false;
    for text in &args.sandboxes {
        tokio::select! {
            killed = kill_one(&client, &args.options, text, context) => if let Err(error) = killed {
                screen::report(format_args!("baton: {text}: {error:#}"));
                has_failed = true;
            },
            code = signals.end() => return Ok(ExitCode::from(code)),
        }
    }
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn kill_one(
    client: &SandboxClient,
    options: &SandboxOptions,
    text: &str,
    context: &CommandContext,
) -> Result<()> {
    let has_key = client.server.admin_key(client.server.url()).is_some();
    if !has_key
        && !client.has_token(text)?
        && context.has_storage(&options.server.context)?
        && let Backend::Storage(storage) = context.backend(&options.server, Some(text))?
    {
        let id = storage.sandbox_id(text).await?;
        let wait = WaitArgs { no_wait: false, timeout: HOLDER_TIMEOUT };
        return match delete::delete_sandbox(&storage, &id, wait).await? {
            AdminResult::Done(_) => Ok(()),
            AdminResult::Refused(line) | AdminResult::Late(line) => bail!(line),
        };
    }
    kill_through_server(client, text, has_key).await
}

async fn kill_through_server(client: &SandboxClient, text: &str, has_key: bool) -> Result<()> {
    let server = &client.server;
    let (id, token, url) = match client.find_token(text)? {
        Some(found) => (found.id, Some(found.token), found.url),
        None if has_key => {
            (AdminApi::new(server, server.url())?.sandbox_id(text).await?, None, server.url().to_owned())
        }
        None => bail!(
            "no token for `{text}` is saved here: pass it with BATON_TOKEN or --token, or a key with BATON_API_KEY"
        ),
    };
    let connection = Connection { api_key: server.admin_key(&url), ..server.connection(&url) };
    let killed = Sandbox::kill_by_id(&url, &id, token.as_ref(), connection).await;
    if matches!(killed, Ok(()) | Err(Error::NotFound)) {
        // The token is useless from now on. A sandbox that is killed by key alone may have none saved here.
        if let Ok(tokens) = server.tokens() {
            tokens.forget(&id)?;
        }
    }
    killed.map_err(|error| describe_error(error, &url))
}
