//! The options that are accepted before and after the verb.
//!
//! A verb declares the ones it uses: it flattens [`ServerOptions`] or [`OutputOption`] into its arguments. Every other
//! verb refuses them, because an option without an effect is a mistake.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, error::ErrorKind, parser::ValueSource};

const HELP_HEADING: &str = "Global options";

/// The server to use, and how to authenticate to it. Environment variables are read later, by the verbs that use a
/// server ([`CommandContext::server`](super::context::CommandContext::server)): a mistake in one of them must not
/// prevent the other verbs from running.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerOptions {
    /// URL of the server [env: BATON_URL] [default: where the sandbox was created, that of the context, or
    /// ws://127.0.0.1:8080]
    #[arg(long, global = true, help_heading = HELP_HEADING)]
    pub url: Option<String>,
    /// API key of the server; other users of this machine can see options [env: BATON_API_KEY]
    #[arg(long, global = true, help_heading = HELP_HEADING, value_name = "KEY")]
    pub api_key: Option<String>,
    /// HTTP header to add to every request, for a proxy in front of the server; repeatable, all on the same side of
    /// the verb [env: BATON_HEADER]
    #[arg(long, global = true, help_heading = HELP_HEADING, value_name = "NAME: VALUE", value_parser = parse_header)]
    pub header: Vec<(String, String)>,
    /// Credentials for a proxy in front of the server: `google` sends an ID token for its address [env: BATON_AUTH]
    #[arg(long, global = true, help_heading = HELP_HEADING, value_enum, value_name = "KIND")]
    pub auth: Option<AuthKind>,
    /// File with the tokens of the sandboxes created here [env: BATON_TOKENS] [default: baton/tokens.json in
    /// XDG_STATE_HOME or ~/.local/state]
    #[arg(long, global = true, help_heading = HELP_HEADING, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    #[command(flatten)]
    pub context: ContextOption,
}

/// The context to use: a server, its keys and its storage, saved under a name.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ContextOption {
    /// Context to use, as `baton context list` shows them; an empty one is none [env: BATON_CONTEXT] [default: the one
    /// that `baton context use` selected]
    #[arg(id = "context", long = "context", global = true, help_heading = HELP_HEADING, value_name = "NAME")]
    pub name: Option<String>,
}

/// Credentials that are not the server's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthKind {
    Google,
    // So that `--auth "$KIND"` works with an empty variable.
    #[value(alias = "")]
    None,
}

pub fn parse_header(text: &str) -> Result<(String, String), String> {
    match text.split_once(':') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_owned(), value.trim().to_owned())),
        _ => Err("write it as NAME: VALUE".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct OutputOption {
    /// Output format
    #[arg(id = "output", short, long = "output", global = true, help_heading = HELP_HEADING, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: OutputFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    #[default]
    Table,
    Json,
    /// Names alone, one per line.
    Name,
}

/// Hides the global options of `root` from the help of the verbs that do not declare them. They stay known to the
/// parser, so that [`check_declared`] can say what is wrong.
pub fn hide_undeclared(root: Command) -> Command {
    let options: Vec<Arg> = root.get_arguments().filter(|option| option.is_global_set()).cloned().collect();
    root.mut_subcommands(|verb| hide_in(verb, &options))
}

fn hide_in(verb: Command, options: &[Arg]) -> Command {
    let verb = verb.mut_subcommands(|inner| hide_in(inner, options));
    let undeclared: Vec<Arg> = options.iter().filter(|option| !declares(&verb, option)).cloned().collect();
    verb.args(undeclared.into_iter().map(|option| option.hide(true)))
}

/// Whether the verb, or a verb below it, declares the option.
fn declares(verb: &Command, option: &Arg) -> bool {
    let is_it = |argument: &Arg| argument.get_id() == option.get_id() && !argument.is_hide_set();
    verb.get_arguments().any(is_it) || verb.get_subcommands().any(|inner| declares(inner, option))
}

/// Refuses a global option that the verb does not declare, wherever it was given. `root` is the whole command line.
pub fn check_declared(mut root: Command, matches: &ArgMatches) -> Result<(), clap::Error> {
    root.build();
    let (mut verb, mut matches) = (&root, matches);
    while let Some((name, inner)) = matches.subcommand()
        && let Some(command) = verb.find_subcommand(name)
    {
        (verb, matches) = (command, inner);
    }
    let is_given = |option: &&Arg| matches.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
    let mut undeclared = verb.get_arguments().filter(|option| option.is_global_set() && option.is_hide_set());
    let Some(option) = undeclared.find(is_given) else { return Ok(()) };
    let (name, option) = (verb.get_bin_name().unwrap_or_default(), option.get_long().unwrap_or_default());
    let message = format!("`{name}` does not use --{option}");
    Err(verb.clone().error(ErrorKind::UnknownArgument, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_a_name_and_spaces_around_it_do_not_count() {
        assert_eq!(parse_header(" X-Front : door "), Ok(("X-Front".into(), "door".into())));
        assert_eq!(parse_header("A:"), Ok(("A".into(), String::new())));
        assert!(parse_header("A").is_err() && parse_header(": b").is_err());
    }
}
