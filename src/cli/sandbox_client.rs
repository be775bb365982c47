//! A sandbox on a server: its token, attaching to it, and requests to it.

use std::{process::ExitCode, time::Duration};

use anyhow::{Result, anyhow, bail};
use baton_client::{Connection, Error, Sandbox, SandboxId, Token};
use serde_json::Value;

use super::{
    global_options::{OutputFormat, ServerOptions},
    progress_line, screen,
    server_client::{ServerClient, describe_error},
    stdio_bridge::Signals,
    token_file::SavedToken,
};
use crate::clock::SharedClock;

/// How long closing a connection may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The options of a verb that attaches to an existing sandbox.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SandboxOptions {
    /// Token of the sandbox, if it is not saved here; other users of this machine can see options
    #[arg(long, env = "BATON_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    #[command(flatten)]
    pub server: ServerOptions,
}

#[derive(Clone, Debug)]
pub struct SandboxClient {
    clock: SharedClock,
    pub server: ServerClient,
    /// Takes precedence over a saved one.
    token: Option<String>,
}

/// The answer to a request, as text and as JSON.
#[derive(Clone, Debug)]
pub struct VerbOutput {
    pub text: String,
    pub json: Value,
}

impl SandboxClient {
    pub fn new(clock: SharedClock, server: ServerClient, token: Option<String>) -> Self {
        Self { clock, server, token }
    }

    /// Whether a token for the sandbox is given or saved.
    pub fn has_token(&self, text: &str) -> Result<bool> {
        Ok(self.token.is_some() || self.server.saved_token(text)?.is_some())
    }

    /// Finds the sandbox that `text` names, and its token.
    pub fn find(&self, text: &str) -> Result<SavedToken> {
        let Some(found) = self.find_token(text)? else {
            bail!("no token for `{text}` is saved here: pass it with BATON_TOKEN or --token, or see `baton create`")
        };
        Ok(found)
    }

    /// Returns `None` if no token of the sandbox is given or saved.
    pub fn find_token(&self, text: &str) -> Result<Option<SavedToken>> {
        let saved = match (self.server.tokens(), &self.token) {
            (Ok(tokens), _) => tokens.find(text)?,
            (Err(_), Some(_)) => None,
            (Err(error), None) => return Err(error),
        };
        let url = self.server.url_of(saved.as_ref()).to_owned();
        let (id, token) = match (saved, &self.token) {
            (Some(saved), token) => (saved.id, token.clone().map_or(saved.token, Token)),
            (None, Some(token)) => {
                let id = SandboxId::parse(text).map_err(|_| anyhow!("`{text}` is not a sandbox id"))?;
                (id, Token(token.clone()))
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(SavedToken { id, token, url }))
    }

    pub async fn attach(&self, text: &str) -> Result<Sandbox> {
        self.attach_with(text, |connection| connection).await
    }

    async fn attach_with(&self, text: &str, how: impl FnOnce(Connection) -> Connection) -> Result<Sandbox> {
        let SavedToken { id, token, url } = self.find(text)?;
        let connection = how(self.server.connection(&url));
        let attached = Sandbox::attach_with(&url, id.clone(), token, connection).await;
        attached.map_err(|error| {
            if error == Error::NotFound {
                // The sandbox is gone, so its token is useless.
                let _ = self.server.tokens().and_then(|tokens| tokens.forget(&id));
            }
            describe_error(error, &url)
        })
    }

    /// Closes the connection; the sandbox stays.
    pub async fn close(&self, sandbox: Sandbox) {
        let _ = self.clock.timeout(CLOSE_TIMEOUT, sandbox.close()).await;
    }

    /// Attaches, sends a request while progress is shown, prints the answer and closes the connection.
    pub async fn request(
        &self,
        text: &str,
        format: OutputFormat,
        send: impl AsyncFnOnce(&Sandbox, &str) -> Result<VerbOutput, Error>,
    ) -> Result<ExitCode> {
        let mut signals = Signals::listen()?;
        let url = self.find(text)?.url;
        let requested = async {
            let (progress, on_status) = progress_line::to_the_end().unzip();
            let sandbox = self.attach_with(text, |connection| Connection { on_status, ..connection }).await?;
            let answer = send(&sandbox, &url).await.map_err(|error| describe_error(error, &url));
            self.close(sandbox).await;
            if let Some(progress) = progress {
                progress.clear();
            }
            answer
        };
        let answer = tokio::select! {
            answer = requested => answer?,
            code = signals.end() => return Ok(ExitCode::from(code)),
        };
        match format {
            OutputFormat::Table | OutputFormat::Name => screen::print(&answer.text)?,
            OutputFormat::Json => screen::print(&screen::json(&answer.json))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{super::server_client::DEFAULT_URL, *};
    use crate::clock::SystemClock;

    #[test]
    fn a_token_given_comes_before_one_saved_and_is_enough() {
        let space = tempfile::tempdir().unwrap();
        let id = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
        let server = ServerClient {
            url: None,
            api_key: None,
            headers: Vec::new(),
            auth: None,
            token_file: Some(space.path().join("t")),
            context: None,
        };
        let mut client = SandboxClient::new(Arc::new(SystemClock), server, None);
        assert!(client.find(id).unwrap_err().to_string().contains("BATON_TOKEN"));
        client.token = Some("given".into());
        assert_eq!(client.find(id).unwrap().url, DEFAULT_URL);
        assert!(client.find("0b9").is_err(), "a beginning is only enough for one that is saved");
        let saved =
            SavedToken { id: SandboxId::parse(id).unwrap(), token: Token("saved".into()), url: "ws://there".into() };
        client.server.tokens().unwrap().keep(&saved).unwrap();
        assert_eq!(client.find("0b9").unwrap().token, Token("given".into()));
        client.token = None;
        assert_eq!(client.find("0b9").unwrap(), saved);
        client.server.url = Some("ws://here".into());
        assert_eq!(client.find("0b9").unwrap().url, "ws://here");
    }
}
