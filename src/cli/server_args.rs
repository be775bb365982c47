//! Which server to use, and how to attach to a sandbox on it.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use baton_client::{Auth, Connection, Error, Sandbox, SandboxId, Token};

use super::{
    progress,
    token_file::{SavedToken, Tokens},
};
use crate::config;

pub const DEFAULT_URL: &str = "ws://127.0.0.1:8080";

/// If one of these is set, an operator's verbs work on the storage.
const STORAGE: [&str; 5] = [
    "SANDBOX_METADATA_BUCKET",
    "SANDBOX_METADATA_MOUNT_PATH",
    "SANDBOX_CHECKPOINT_BUCKET",
    "SANDBOX_CHECKPOINT_MOUNT_PATH",
    "CHECKPOINT_AND_RESTORE_PATH",
];

/// The server, and what it wants to see.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// The server; without it the one a sandbox was created on, or ws://127.0.0.1:8080.
    #[arg(long, env = "BATON_URL")]
    pub url: Option<String>,
    /// What the server asks for, if it does.
    #[arg(long, env = "BATON_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// A header for whatever stands before the server; may be given more than once.
    #[arg(long, env = "BATON_HEADER", hide_env_values = true, value_name = "NAME: VALUE", value_parser = header)]
    pub header: Vec<(String, String)>,
    /// Prove who calls to what stands before the server: `google` sends an ID token for its address.
    #[arg(long, env = "BATON_AUTH", value_enum, value_name = "KIND")]
    pub auth: Option<AuthKind>,
    /// The file that keeps the tokens of sandboxes [default: baton/tokens.json in XDG_STATE_HOME or ~/.local/state].
    #[arg(long, env = "BATON_TOKENS", value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    #[arg(long, env = "XDG_STATE_HOME", hide = true)]
    pub state_home: Option<PathBuf>,
    #[arg(long, env = "HOME", hide = true)]
    pub home: Option<PathBuf>,
}

/// Credentials that are not the server's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthKind {
    Google,
    // An empty variable counts as unset.
    #[value(alias = "")]
    None,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once(':') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_owned(), value.trim().to_owned())),
        _ => Err("write it as NAME: VALUE".to_owned()),
    }
}

impl ServerArgs {
    pub fn connection(&self) -> Connection {
        Connection {
            api_key: self.api_key.clone(),
            headers: self.header.clone(),
            auth: self.auth(),
            on_status: progress::until_running(),
            ..Connection::default()
        }
    }

    pub fn auth(&self) -> Option<Auth> {
        self.auth.filter(|kind| *kind == AuthKind::Google).map(|_| Auth::google())
    }

    /// Whether a verb that can work without a server uses one anyway: if a server is named, or if no storage
    /// is configured.
    pub fn is_wire(&self, sandbox: Option<&str>) -> bool {
        let set = |name: &str| config::process_environment(name).filter(|value| !value.is_empty());
        // A flag takes precedence over a variable.
        let is_flag = self.url.is_some() && self.url != set("BATON_URL");
        let is_kept = || {
            let kept = sandbox.and_then(|text| self.tokens().ok()?.find(text).ok().flatten());
            kept.is_some()
        };
        is_flag || (!STORAGE.into_iter().any(|name| set(name).is_some()) && (self.url.is_some() || is_kept()))
    }

    /// The sandbox's id, which may be abbreviated if its token is saved here.
    pub fn id_of(&self, text: &str) -> anyhow::Result<Option<SandboxId>> {
        let kept = self.tokens().ok().and_then(|tokens| tokens.find(text).transpose()).transpose()?;
        Ok(kept.map(|kept| kept.id).or_else(|| SandboxId::parse(text).ok()))
    }

    /// The server for a sandbox that does not exist yet.
    pub fn url(&self) -> &str {
        self.url.as_deref().unwrap_or(DEFAULT_URL)
    }

    pub fn tokens(&self) -> anyhow::Result<Tokens> {
        let found = self.tokens.clone().or_else(|| {
            let state = self.state_home.clone().filter(|path| path.is_absolute());
            let state = state.or_else(|| Some(self.home.as_ref()?.join(".local/state")))?;
            Some(state.join("baton/tokens.json"))
        });
        found.map(Tokens::at).context("there is no place for tokens: set HOME, or name a file with --tokens")
    }
}

/// A sandbox that exists.
#[derive(Clone, Debug, clap::Args)]
pub struct SandboxArgs {
    /// The sandbox's token, if it is not kept here; other users of this machine can see flags.
    #[arg(long, env = "BATON_TOKEN", hide_env_values = true, help_heading = "Server")]
    pub token: Option<String>,
    #[command(flatten)]
    pub server: ServerArgs,
}

impl SandboxArgs {
    /// Finds the sandbox that `text` names, and its token.
    pub fn find(&self, text: &str) -> anyhow::Result<SavedToken> {
        let kept = match (self.server.tokens(), &self.token) {
            (Ok(tokens), _) => tokens.find(text)?,
            (Err(_), Some(_)) => None,
            (Err(error), None) => return Err(error),
        };
        let url = self.server.url.clone();
        match (kept, &self.token) {
            (Some(kept), token) => {
                Ok(SavedToken { token: token.clone().map_or(kept.token, Token), url: url.unwrap_or(kept.url), ..kept })
            }
            (None, Some(token)) => {
                let id = SandboxId::parse(text).map_err(|_| anyhow!("`{text}` is no sandbox's id"))?;
                Ok(SavedToken { id, token: Token(token.clone()), url: url.unwrap_or_else(|| DEFAULT_URL.to_owned()) })
            }
            (None, None) => {
                bail!("no token of `{text}` is kept here: give it with BATON_TOKEN or --token, or see `baton create`")
            }
        }
    }

    pub async fn attach(&self, text: &str) -> anyhow::Result<Sandbox> {
        self.attach_with(text, self.server.connection()).await
    }

    /// Like `attach`, for a verb that requests something long and shows its progress.
    pub async fn attach_to_ask(&self, text: &str) -> anyhow::Result<Sandbox> {
        let connection = Connection { on_status: progress::to_the_end(), ..self.server.connection() };
        self.attach_with(text, connection).await
    }

    async fn attach_with(&self, text: &str, connection: Connection) -> anyhow::Result<Sandbox> {
        let SavedToken { id, token, url } = self.find(text)?;
        let attached = Sandbox::attach_with(&url, id.clone(), token, connection).await;
        attached.map_err(|error| {
            if error == Error::NotFound {
                // The sandbox is gone, so its token is useless.
                let _ = self.server.tokens().and_then(|tokens| tokens.forget(&id));
            }
            explain(error, &url)
        })
    }
}

/// What is wrong and what to do about it, in one sentence.
pub fn explain(error: Error, url: &str) -> anyhow::Error {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the others say it themselves")]
    match error {
        Error::Connection(cause) => anyhow!(
            "no server answers at {url} ({cause}): start one with `baton serve`, or name another with --url or BATON_URL"
        ),
        Error::Auth(cause) => anyhow!("{cause}"),
        Error::Protocol(cause) => anyhow!("{url} is no baton server that this client understands: {cause}"),
        Error::Permission(cause) => {
            anyhow!(
                "the server denies it ({cause}): give its key with --api-key or BATON_API_KEY, a token with BATON_TOKEN, \
                 and behind Cloud Run's access control --auth google"
            )
        }
        Error::Refused { message, .. } => anyhow!("the server refuses it: {message}"),
        Error::File { code, message } => anyhow!("{code}: {}", baton_files::plain(&message)),
        error => anyhow!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_lie_where_they_are_told_to_or_below_home() {
        let at = |args: ServerArgs| format!("{:?}", args.tokens().unwrap());
        let home = ServerArgs { home: Some("/home/ada".into()), ..ServerArgs::default() };
        assert!(at(home.clone()).contains("/home/ada/.local/state/baton/tokens.json"));
        let state = ServerArgs { state_home: Some("/state".into()), ..home };
        assert!(at(state.clone()).contains("/state/baton/tokens.json"));
        assert!(at(ServerArgs { tokens: Some("here".into()), ..state }).contains("\"here\""));
        assert!(ServerArgs::default().tokens().is_err());
    }

    #[test]
    fn a_token_given_comes_before_one_kept_and_is_enough() {
        let space = tempfile::tempdir().unwrap();
        let id = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
        let server = ServerArgs { tokens: Some(space.path().join("t")), ..ServerArgs::default() };
        let mut args = SandboxArgs { token: None, server };
        assert!(args.find(id).unwrap_err().to_string().contains("BATON_TOKEN"));
        args.token = Some("given".into());
        assert_eq!(args.find(id).unwrap().url, DEFAULT_URL);
        assert!(args.find("0b9").is_err(), "a beginning is only enough for one that is kept");
        let kept =
            SavedToken { id: SandboxId::parse(id).unwrap(), token: Token("kept".into()), url: "ws://there".into() };
        args.server.tokens().unwrap().keep(&kept).unwrap();
        assert_eq!(args.find("0b9").unwrap().token, Token("given".into()));
        args.token = None;
        assert_eq!(args.find("0b9").unwrap(), kept);
        args.server.url = Some("ws://here".into());
        assert_eq!(args.find("0b9").unwrap().url, "ws://here");
    }
}
