//! `baton context`: servers by name, as saved in the file of contexts.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::{Value, json};

use super::{
    Cli, Verb,
    context::{CommandContext, UsageError},
    global_options::{OutputFormat, OutputOption},
    saved_contexts::{ContextFile, STORAGE_DETAILS, STORAGE_PLACES, SavedContext, SavedContexts, is_storage_variable},
    screen,
};
use crate::config::{self, Config, Flags};

#[derive(Debug, clap::Subcommand)]
pub enum ContextVerb {
    List(ContextListArgs),
    Show(ContextShowArgs),
    Use(ContextUseArgs),
    Set(ContextSetArgs),
    Rm(ContextRmArgs),
}

/// List contexts
///
/// The selected one is marked with `*`.
#[derive(Clone, Debug, clap::Args)]
#[command(visible_alias = "ls", after_help = "Examples:\n  baton context list\n  baton context list -o name")]
pub struct ContextListArgs {
    #[command(flatten)]
    pub output: OutputOption,
}

/// Show a context
///
/// Keys are not shown.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton context show\n  baton context show prod -o json")]
pub struct ContextShowArgs {
    /// Context name [default: the selected one]
    pub name: Option<String>,
    #[command(flatten)]
    pub output: OutputOption,
}

/// Select the context that counts where none is named
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Example:\n  baton context use prod")]
pub struct ContextUseArgs {
    /// Context name
    pub name: String,
}

/// Create or change a context
///
/// What is not given stays as it was; an empty value removes it. Keys belong to the URL: they are sent to no other
/// server.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton context set prod --url wss://baton.example.com --use\n  \
                  baton context set prod --api-key - < api-key\n  \
                  baton context set prod --storage SANDBOX_METADATA_BUCKET=b --storage SANDBOX_CHECKPOINT_BUCKET=b\n  \
                  baton context set local --from-server --use")]
pub struct ContextSetArgs {
    /// Context name
    pub name: String,
    /// URL of the server
    #[arg(long, global = true)]
    pub url: Option<String>,
    /// API key of the server; `-` reads it from standard input, since other users of this machine can see options
    #[arg(long, global = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Admin key of the server, which lists all sandboxes; `-` reads it from standard input
    #[arg(long, value_name = "KEY")]
    pub admin_key: Option<String>,
    /// Variable of the storage, as `baton serve` reads it; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_storage)]
    pub storage: Vec<(String, String)>,
    /// Take the URL, the keys and the storage from the variables and the options of a `baton serve` on this machine
    #[arg(long)]
    pub from_server: bool,
    /// Select the context
    #[arg(id = "select", long = "use")]
    pub select: bool,
    /// Options of that `baton serve`
    #[arg(last = true, requires = "from_server", value_name = "OPTION")]
    pub server_options: Vec<String>,
}

/// Remove contexts
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Example:\n  baton context rm prod")]
pub struct ContextRmArgs {
    /// Context names
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

fn parse_storage(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    if !is_storage_variable(name) {
        let known: Vec<_> = STORAGE_PLACES.iter().chain(&STORAGE_DETAILS).copied().collect();
        return Err(format!("it is not a variable of the storage, which are {}", known.join(", ")));
    }
    Ok((name.to_owned(), value.to_owned()))
}

pub fn context(verb: ContextVerb, context: &CommandContext) -> Result<ExitCode> {
    let contexts = context.contexts().context("there is no place for contexts: set HOME")?;
    match verb {
        ContextVerb::List(args) => list(&contexts, args.output.format),
        ContextVerb::Show(args) => show(&contexts, &args),
        ContextVerb::Use(args) => contexts.edit(|file| Ok(file.select(&args.name)?)),
        ContextVerb::Set(args) => set(&contexts, &args, context),
        ContextVerb::Rm(args) => contexts.edit(|file| {
            for name in &args.names {
                file.remove(name)?;
            }
            Ok(())
        }),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn list(contexts: &SavedContexts, format: OutputFormat) -> Result<()> {
    let file = contexts.read()?;
    screen::print(&match format {
        OutputFormat::Table => table(&file),
        OutputFormat::Json => {
            let views: Vec<_> = file.contexts.iter().map(|(name, saved)| view(&file, name, saved)).collect();
            screen::json(&Value::Array(views))
        }
        OutputFormat::Name => file.contexts.keys().map(|name| format!("{name}\n")).collect(),
    })
}

fn table(file: &ContextFile) -> String {
    let head = ["", "NAME", "URL", "KEYS", "STORAGE"].map(str::to_owned);
    let row = |(name, saved): (&String, &SavedContext)| {
        let keys = [("api", &saved.api_key), ("admin", &saved.admin_key)];
        let keys: Vec<_> = keys.iter().filter(|(_, key)| key.is_some()).map(|(kind, _)| *kind).collect();
        let places = STORAGE_PLACES.iter().filter_map(|place| saved.storage.get(*place));
        let places: std::collections::BTreeSet<_> = places.map(String::as_str).collect();
        let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        let mark = if file.current.as_ref() == Some(name) { "*" } else { "" };
        [
            mark.to_owned(),
            name.clone(),
            or_dash(saved.url.clone().unwrap_or_default()),
            or_dash(keys.join(",")),
            or_dash(places.into_iter().collect::<Vec<_>>().join(",")),
        ]
    };
    let rows: Vec<_> = std::iter::once(head).chain(file.contexts.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    let line = |row: &[String; 5]| {
        let cells: String = widths.iter().zip(row).map(|(width, cell)| format!("{cell:width$}  ")).collect();
        format!("{cells}{}\n", row[4])
    };
    rows.iter().map(line).collect()
}

fn show(contexts: &SavedContexts, args: &ContextShowArgs) -> Result<()> {
    let file = contexts.read()?;
    let name = args.name.as_ref().or(file.current.as_ref());
    let name = name.ok_or_else(|| UsageError("no context is selected: name one".to_owned()))?;
    let view = view(&file, name, file.get(name)?);
    screen::print(&match args.output.format {
        OutputFormat::Table => lines(&view),
        OutputFormat::Json => screen::json(&view),
        OutputFormat::Name => format!("{name}\n"),
    })
}

/// A context without its secrets.
fn view(file: &ContextFile, name: &str, saved: &SavedContext) -> Value {
    let is_secret = |name: &str| config::find(name).is_some_and(|variable| variable.kind.is_secret());
    let hidden = |key: &Option<String>| key.as_ref().map(|_| "(redacted)");
    let shown = |(name, value): (&String, &String)| {
        (name.clone(), Value::String(if is_secret(name) { "(redacted)".to_owned() } else { value.clone() }))
    };
    json!({
        "name": name,
        "selected": file.current.as_deref() == Some(name),
        "url": saved.url,
        "api_key": hidden(&saved.api_key),
        "admin_key": hidden(&saved.admin_key),
        "storage": saved.storage.iter().map(shown).collect::<serde_json::Map<_, _>>(),
    })
}

fn lines(view: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let own = ["name", "selected", "url", "api_key", "admin_key"].into_iter();
    let own = own.filter(|field| !view[*field].is_null()).map(|field| (field.to_owned(), plain(&view[field])));
    let storage = view["storage"].as_object().into_iter().flatten().map(|(name, value)| (name.clone(), plain(value)));
    own.chain(storage).map(|(name, value)| format!("{name:32} {value}\n")).collect()
}

fn set(contexts: &SavedContexts, args: &ContextSetArgs, context: &CommandContext) -> Result<()> {
    if args.name.trim().is_empty() {
        return Err(UsageError("a context needs a name".to_owned()).into());
    }
    let from_server = if args.from_server { Some(of_server(&server_flags(args)?, context)?) } else { None };
    let api_key = args.api_key.as_deref().map(read_key).transpose()?;
    let admin_key = args.admin_key.as_deref().map(read_key).transpose()?;
    let before = contexts.edit(|file| {
        let saved = file.contexts.entry(args.name.clone()).or_default();
        if let Some(server) = from_server {
            *saved = server;
        }
        let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        if let Some(url) = &args.url {
            saved.url = filled(url);
        }
        if let Some(key) = &api_key {
            saved.api_key = filled(key);
        }
        if let Some(key) = &admin_key {
            saved.admin_key = filled(key);
        }
        for (name, value) in &args.storage {
            match filled(value) {
                Some(value) => drop(saved.storage.insert(name.clone(), value)),
                None => drop(saved.storage.remove(name)),
            }
        }
        Ok(if args.select { file.current.replace(args.name.clone()) } else { None })
    })?;
    if let Some(before) = before.filter(|before| *before != args.name) {
        screen::report(format_args!(
            "baton: context {} is selected; `baton context use {before}` goes back",
            args.name
        ));
    }
    Ok(())
}

/// The key that was given; a line of standard input for `-`.
fn read_key(given: &str) -> Result<String> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin().read_line(&mut text).context("the key cannot be read from standard input")?;
    Ok(text.trim().to_owned())
}

fn server_flags(args: &ContextSetArgs) -> Result<Flags> {
    let words = ["baton", "serve"].into_iter().chain(args.server_options.iter().map(String::as_str));
    let parsed = Cli::try_parse_from(words).map_err(|error| UsageError(error.to_string()))?;
    if let Verb::Serve(serve) = parsed.verb {
        return Ok(serve.flags.0);
    }
    Err(UsageError("these are not options of `baton serve`".to_owned()).into())
}

/// How to reach a server with these settings from the same machine.
fn of_server(flags: &Flags, context: &CommandContext) -> Result<SavedContext> {
    let config: Config = context.config(flags)?;
    let value = |name: &'static str| flags.get(name).cloned().or_else(|| context.variable(name));
    let storage = STORAGE_PLACES.iter().chain(&STORAGE_DETAILS);
    Ok(SavedContext {
        url: Some(format!("ws://{}", reachable(config.listen))),
        api_key: config.api_keys.first().map(|key| key.secret.reveal().clone()),
        admin_key: config.admin_key.as_ref().map(|key| key.reveal().clone()),
        storage: storage.filter_map(|name| Some(((*name).to_owned(), value(name)?))).collect(),
    })
}

/// The address that a server which listens on all addresses has for this machine.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip @ (IpAddr::V4(_) | IpAddr::V6(_)) => ip,
    };
    SocketAddr::new(ip, listen.port())
}
