//! What every verb gets besides its own arguments: the environment and the clock.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::Result;
use clap::ValueEnum;

use super::{
    backend::Backend,
    global_options::{AuthKind, ServerOptions, parse_header},
    sandbox_client::{SandboxClient, SandboxOptions},
    screen,
    server_client::ServerClient,
    storage_admin::StorageAdmin,
};
use crate::{
    clock::{SharedClock, SystemClock},
    config::{self, Config, Flags},
};

/// Returns the value of an environment variable.
pub type Environment = fn(&str) -> Option<String>;

#[derive(Clone, Debug)]
pub struct CommandContext {
    pub clock: SharedClock,
    environment: Environment,
}

/// A mistake on the command line or in a variable that stands for an option: exit code 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl UsageError {
    pub const EXIT_CODE: u8 = 2;
}

/// Prints an error and returns its exit code.
pub fn report_error(error: &anyhow::Error) -> ExitCode {
    screen::say(format_args!("baton: {error:#}"));
    if error.is::<UsageError>() { ExitCode::from(UsageError::EXIT_CODE) } else { ExitCode::FAILURE }
}

impl CommandContext {
    /// The environment and the clock of this process.
    pub fn of_process() -> Self {
        Self::new(Arc::new(SystemClock), config::process_environment)
    }

    pub fn new(clock: SharedClock, environment: Environment) -> Self {
        Self { clock, environment }
    }

    /// An environment variable; an empty one counts as unset.
    pub fn variable(&self, name: &str) -> Option<String> {
        (self.environment)(name).filter(|value| !value.is_empty())
    }

    /// The settings of a server in this environment.
    pub fn config(&self, flags: &Flags) -> Result<Config> {
        Ok(Config::read(flags, self.environment)?)
    }

    /// The server that the options name. An option takes precedence over its variable.
    pub fn server(&self, options: &ServerOptions) -> Result<ServerClient> {
        let headers = match self.variable("BATON_HEADER").filter(|_| options.header.is_empty()) {
            Some(text) => {
                vec![
                    parse_header(&text)
                        .map_err(|error| UsageError(format!("BATON_HEADER is not a header: {error}")))?,
                ]
            }
            None => options.header.clone(),
        };
        let auth = match self.variable("BATON_AUTH").filter(|_| options.auth.is_none()) {
            Some(text) => Some(AuthKind::from_str(&text, false).map_err(|_| {
                UsageError(format!("BATON_AUTH is '{}': it must be google or none", baton_files::plain(&text)))
            })?),
            None => options.auth,
        };
        Ok(ServerClient {
            url: options.url.clone().or_else(|| self.variable("BATON_URL")),
            api_key: options.api_key.clone().or_else(|| self.variable("BATON_API_KEY")),
            headers,
            auth,
            token_file: options.tokens.clone().or_else(|| self.token_file()),
        })
    }

    fn token_file(&self) -> Option<PathBuf> {
        let path = |name: &str| self.variable(name).map(PathBuf::from);
        path("BATON_TOKENS").or_else(|| {
            let state = path("XDG_STATE_HOME").filter(|path| path.is_absolute());
            let state = state.or_else(|| Some(path("HOME")?.join(".local/state")))?;
            Some(state.join("baton/tokens.json"))
        })
    }

    /// The server of an existing sandbox, with the token that the options name.
    pub fn sandbox(&self, options: &SandboxOptions) -> Result<SandboxClient> {
        let server = self.server(&options.server)?;
        Ok(SandboxClient::new(self.clock.clone(), server, options.token.clone()))
    }

    /// The storage that the environment configures.
    pub fn storage(&self) -> Result<StorageAdmin> {
        StorageAdmin::open(&self.config(&Flags::new())?, &self.clock)
    }

    /// Where a verb that can do without a server does its work, for one sandbox or for all of them.
    pub fn backend(&self, options: &ServerOptions, sandbox: Option<&str>) -> Result<Backend> {
        Backend::choose(self, options, sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(environment: Environment) -> CommandContext {
        CommandContext::new(Arc::new(SystemClock), environment)
    }

    #[test]
    fn tokens_lie_where_they_are_told_to_or_below_home() {
        let token_file = |environment: Environment, options: &ServerOptions| {
            context(environment).server(options).unwrap().token_file.map(|path| path.display().to_string())
        };
        let home: Environment = |name| (name == "HOME").then(|| "/home/ada".to_owned());
        let state: Environment = |name| match name {
            "HOME" => Some("/home/ada".to_owned()),
            "XDG_STATE_HOME" => Some("/state".to_owned()),
            _ => None,
        };
        let named: Environment = |name| (name == "BATON_TOKENS").then(|| "there".to_owned());
        let none = ServerOptions::default();
        assert_eq!(token_file(home, &none).as_deref(), Some("/home/ada/.local/state/baton/tokens.json"));
        assert_eq!(token_file(state, &none).as_deref(), Some("/state/baton/tokens.json"));
        assert_eq!(token_file(named, &none).as_deref(), Some("there"));
        let here = ServerOptions { tokens: Some("here".into()), ..ServerOptions::default() };
        assert_eq!(token_file(named, &here).as_deref(), Some("here"));
        assert_eq!(token_file(|_| None, &none), None);
        assert!(context(|_| None).server(&none).unwrap().tokens().is_err());
    }

    #[test]
    fn an_option_comes_before_its_variable_and_an_empty_variable_is_unset() {
        let set: Environment = |name| match name {
            "BATON_URL" => Some("ws://variable".to_owned()),
            "BATON_API_KEY" => Some(String::new()),
            "BATON_HEADER" => Some("A: variable".to_owned()),
            "BATON_AUTH" => Some("google".to_owned()),
            _ => None,
        };
        let server = context(set).server(&ServerOptions::default()).unwrap();
        assert_eq!((server.url(), server.api_key.as_deref()), ("ws://variable", None));
        assert_eq!(
            (&server.headers[..], server.auth),
            (&[("A".into(), "variable".into())][..], Some(AuthKind::Google))
        );
        let options = ServerOptions {
            url: Some("ws://option".into()),
            api_key: Some("key".into()),
            header: vec![("B".into(), "option".into())],
            auth: Some(AuthKind::None),
            tokens: None,
        };
        let server = context(set).server(&options).unwrap();
        assert_eq!((server.url(), server.api_key.as_deref()), ("ws://option", Some("key")));
        assert_eq!((&server.headers[..], server.auth), (&options.header[..], Some(AuthKind::None)));
    }

    #[test]
    fn a_variable_that_is_no_value_of_its_option_is_a_usage_error() {
        let wrong: [Environment; 2] = [
            |name| (name == "BATON_AUTH").then(|| "magic".to_owned()),
            |name| (name == "BATON_HEADER").then(|| "no colon".to_owned()),
        ];
        for environment in wrong {
            let error = context(environment).server(&ServerOptions::default()).unwrap_err();
            assert!(error.is::<UsageError>() && error.to_string().starts_with("BATON_"), "{error}");
        }
    }
}
