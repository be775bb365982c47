//! What every verb gets besides its own arguments: the environment, the clock, and the context that completes the
//! environment ([`SavedContext`]).

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::Result;
use clap::ValueEnum;

use super::{
    backend::Backend,
    global_options::{AuthKind, ContextOption, ServerOptions, parse_header},
    sandbox_client::{SandboxClient, SandboxOptions},
    saved_contexts::{STORAGE_PLACES, SavedContext, SavedContexts},
    screen,
    server_client::ServerClient,
    storage_admin::StorageAdmin,
};
use crate::{
    clock::{SharedClock, SystemClock},
    config::{
        self, Config, Flags,
        variables::{GCS_ENDPOINT, STORAGE_EMULATOR_HOST},
    },
};

/// Returns the value of an environment variable.
pub type Environment = fn(&str) -> Option<String>;

/// A context that completes the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveContext {
    pub saved: SavedContext,
    /// An option names it, so that it takes precedence over variables.
    pub is_explicit: bool,
}

/// An endpoint alone is no storage.
fn is_endpoint(name: &str) -> bool {
    [GCS_ENDPOINT.name, STORAGE_EMULATOR_HOST.name].contains(&name)
}

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
    screen::report(format_args!("baton: {error:#}"));
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

    /// The settings of a server in this environment; a context has no part in them.
    pub fn config(&self, flags: &Flags) -> Result<Config> {
        Ok(Config::read(flags, self.environment)?)
    }

    /// The file of contexts; `None` if there is no home directory.
    pub fn contexts(&self) -> Option<SavedContexts> {
        Some(SavedContexts::at(self.directory("XDG_CONFIG_HOME", ".config")?.join("baton/contexts.json")))
    }

    /// The context that `option`, `BATON_CONTEXT` or `baton context use` names. `url` is the server that an option
    /// names. A server that is named otherwise and is not the context's own has nothing of it.
    pub fn active_context(&self, option: &ContextOption, url: Option<&str>) -> Result<Option<ActiveContext>> {
        let is_explicit = option.name.is_some();
        let named = option.name.clone().or_else(|| self.variable("BATON_CONTEXT"));
        let file = match (self.contexts(), &named) {
            (Some(contexts), _) => contexts.read()?,
            (None, Some(name)) if !name.is_empty() => {
                return Err(UsageError(format!(
                    "there is no place for contexts, and so no context `{}`: set HOME",
                    baton_files::plain(name)
                ))
                .into());
            }
            (None, _) => return Ok(None),
        };
        let Some(name) = named.or_else(|| file.current.clone()).filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let saved = file.get(&name)?.clone();
        let variable = self.variable("BATON_URL").filter(|_| !is_explicit);
        let elsewhere = url.or(variable.as_deref()).is_some_and(|url| !saved.is_at(url));
        Ok((!elsewhere).then_some(ActiveContext { saved, is_explicit }))
    }

    /// The server that the options name. An option takes precedence over its variable, and a variable over a context
    /// that no option names.
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
        let active = self.active_context(&options.context, options.url.as_deref())?;
        let explicit = active.as_ref().filter(|active| active.is_explicit).map(|active| &active.saved);
        let url = options.url.clone().or_else(|| explicit.and_then(|saved| saved.url.clone()));
        // The key of the environment is not for the server of a context that an option names.
        let is_for_the_variable = explicit.is_none_or(|saved| saved.api_key.is_none() && saved.admin_key.is_none());
        let api_key = || self.variable("BATON_API_KEY").filter(|_| is_for_the_variable);
        Ok(ServerClient {
            url: url.or_else(|| self.variable("BATON_URL")),
            api_key: options.api_key.clone().or_else(api_key),
            headers,
            auth,
            token_file: options.tokens.clone().or_else(|| self.token_file()),
            context: active.map(|active| active.saved),
        })
    }

    fn token_file(&self) -> Option<PathBuf> {
        self.variable("BATON_TOKENS")
            .map(PathBuf::from)
            .or_else(|| Some(self.directory("XDG_STATE_HOME", ".local/state")?.join("baton/tokens.json")))
    }

    /// A directory of the user; `None` if there is no home directory either.
    fn directory(&self, variable: &str, below_home: &str) -> Option<PathBuf> {
        let path = |name: &str| self.variable(name).map(PathBuf::from);
        let named = path(variable).filter(|path| path.is_absolute());
        named.or_else(|| Some(path("HOME")?.join(below_home)))
    }

    /// The server of an existing sandbox, with the token that the options name.
    pub fn sandbox(&self, options: &SandboxOptions) -> Result<SandboxClient> {
        let server = self.server(&options.server)?;
        Ok(SandboxClient::new(self.clock.clone(), server, options.token.clone()))
    }

    /// The storage that the environment or a context configures.
    pub fn storage(&self, option: &ContextOption) -> Result<StorageAdmin> {
        StorageAdmin::open(&self.storage_config(option, &Flags::new())?, &self.clock)
    }

    /// The settings of the storage. Flags and variables that say where it is take the place of all that a context says.
    pub fn storage_config(&self, option: &ContextOption, flags: &Flags) -> Result<Config> {
        let Some(active) = self.active_context(option, None)?.filter(|active| active.saved.has_storage()) else {
            return self.config(flags);
        };
        let is_flag = flags.keys().any(|name| STORAGE_PLACES.contains(name));
        if is_flag || (self.has_storage_variables() && !active.is_explicit) {
            return self.config(flags);
        }
        let lookup = |name: &str| {
            let saved = active.saved.storage.get(name).cloned();
            match self.variable(name) {
                _ if STORAGE_PLACES.contains(&name) => saved,
                Some(set) if !active.is_explicit => Some(set),
                set => saved.or(set),
            }
        };
        Ok(Config::read(flags, lookup)?)
    }

    /// Whether the environment or a context says where the storage is.
    pub fn has_storage(&self, option: &ContextOption) -> Result<bool> {
        let active = self.active_context(option, None)?;
        Ok(self.has_storage_variables() || active.is_some_and(|active| active.saved.has_storage()))
    }

    /// Whether the environment says where the storage is.
    pub fn has_storage_variables(&self) -> bool {
        STORAGE_PLACES.into_iter().filter(|name| !is_endpoint(name)).any(|name| self.variable(name).is_some())
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
            ..ServerOptions::default()
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
