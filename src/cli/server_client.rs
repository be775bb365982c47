//! The server that a verb talks to, and how the verb authenticates to it.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use baton_client::{Auth, Connection, Error, RollBack};

use super::{
    global_options::AuthKind,
    progress_line,
    saved_contexts::SavedContext,
    screen,
    token_file::{SavedToken, SavedTokens},
};

pub const DEFAULT_URL: &str = "ws://127.0.0.1:8080";

/// The global options of the server, completed by the environment.
#[derive(Clone, Debug)]
pub struct ServerClient {
    /// `None` if neither an option nor a variable names one.
    pub url: Option<String>,
    pub api_key: Option<String>,
    pub headers: Vec<(String, String)>,
    pub auth: Option<AuthKind>,
    /// `None` if there is no home directory either.
    pub token_file: Option<PathBuf>,
    /// What is used where nothing else is named.
    pub context: Option<SavedContext>,
}

impl ServerClient {
    /// The server for a sandbox that does not exist yet.
    pub fn url(&self) -> &str {
        self.url_of(None)
    }

    /// The server of a sandbox, which may have been created on one that is named nowhere else.
    pub fn url_of<'a>(&'a self, saved: Option<&'a SavedToken>) -> &'a str {
        let of_context = || self.context.as_ref().and_then(|context| context.url.as_deref());
        let named = self.url.as_deref().or_else(|| saved.map(|saved| saved.url.as_str()));
        named.or_else(of_context).unwrap_or(DEFAULT_URL)
    }

    fn context_at(&self, url: &str) -> Option<&SavedContext> {
        self.context.as_ref().filter(|context| context.is_at(url))
    }

    fn api_key(&self, url: &str) -> Option<String> {
        self.api_key.clone().or_else(|| self.context_at(url)?.api_key.clone())
    }

    /// The key that lists the most.
    pub fn admin_key(&self, url: &str) -> Option<String> {
        let of_context = || self.context_at(url)?.admin_key.clone();
        self.api_key.clone().or_else(of_context).or_else(|| self.api_key(url))
    }

    pub fn connection(&self, url: &str) -> Connection {
        Connection {
            api_key: self.api_key(url),
            headers: self.headers.clone(),
            auth: self.auth(),
            on_status: progress_line::until_running(),
            on_roll_back: Some(Arc::new(report_roll_back)),
            ..Connection::default()
        }
    }

    pub fn auth(&self) -> Option<Auth> {
        self.auth.filter(|kind| *kind == AuthKind::Google).map(|_| Auth::google())
    }

    pub fn tokens(&self) -> Result<SavedTokens> {
        let file = self.token_file.clone();
        file.map(SavedTokens::at).context("no place to save tokens: set HOME, or name a file with --tokens")
    }

    /// The token that was saved here for the sandbox whose id is or begins with `text`.
    pub fn saved_token(&self, text: &str) -> Result<Option<SavedToken>> {
        match self.tokens() {
            Ok(tokens) => tokens.find(text),
            Err(_) => Ok(None),
        }
    }
}

fn report_roll_back(roll_back: &RollBack) {
    let age = humantime::format_duration(Duration::from_secs(roll_back.age.as_secs()));
    let RollBack { checkpoint_id, .. } = roll_back;
    screen::report(format_args!(
        "baton: the sandbox was rolled back to checkpoint {checkpoint_id}, which is {age} old: later work is lost"
    ));
}

/// What is wrong and what to do about it, in one sentence.
pub fn describe_error(error: Error, url: &str) -> anyhow::Error {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the others describe themselves")]
    match error {
        Error::Connection(cause) => anyhow!(
            "no server answers at {url} ({cause}): start one with `baton serve`, or name another with --url, BATON_URL or --context"
        ),
        Error::Auth(cause) => anyhow!("{cause}"),
        Error::Protocol(cause) => anyhow!("{url} is not a baton server that this client understands: {cause}"),
        Error::Permission(cause) => {
            anyhow!(
                "the server denies access ({cause}): pass its key with --api-key or BATON_API_KEY, a sandbox's token \
                 with BATON_TOKEN, and behind Cloud Run's access control use --auth google"
            )
        }
        Error::Refused { message, .. } => anyhow!("the server refuses the request: {message}"),
        Error::File { code, message } => anyhow!("{code}: {}", baton_files::plain(&message)),
        error => anyhow!("{error}"),
    }
}
