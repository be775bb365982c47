//! The command line: one file per verb, with its arguments and its function.
//!
//! ```text
//!   Cli ──▶ Verb ──▶ get(GetArgs, &CommandContext) ──▶ Backend::Server   over the network
//!                                                  └─▶ Backend::Storage  directly on the storage
//! ```
//!
//! Verbs of clients use a [`server_client`] or a [`sandbox_client`], verbs of operators the [`storage_admin`].
//! [`Backend`](backend::Backend) is the choice of the verbs that can use either.

use std::process::ExitCode;

use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

pub mod admin;
pub mod admin_api;
pub mod backend;
pub mod check;
pub mod checkpoint;
pub mod completions;
pub mod context;
pub mod context_verbs;
mod cp;
mod create;
pub mod delete;
mod descriptors;
#[cfg(feature = "dev")]
pub mod dev;
pub mod edit;
mod edit_fields;
mod edit_outcome;
mod exec;
pub mod explain;
pub mod flags;
mod fork;
pub mod gc;
pub mod get;
pub mod global_options;
pub mod handoff;
mod kill;
mod limit;
pub mod list;
pub mod list_checkpoints;
mod logs;
mod port_forward;
mod private_file;
mod progress_line;
pub mod repair;
pub mod rollback;
pub mod rows;
mod run;
mod runtime_paths;
pub mod sandbox_client;
pub mod sandbox_name;
pub mod saved_contexts;
pub mod screen;
pub mod serve;
pub mod server_client;
mod server_rows;
pub mod show_config;
pub mod snapshot;
pub mod split_serve;
mod start_server;
mod stdio_bridge;
pub mod storage_admin;
mod termination;
mod time_value;
mod token_file;
pub mod verb_groups;
pub mod watch;

use self::{
    context::CommandContext,
    global_options::{OutputOption, ServerOptions},
};

/// The command line as it was given.
#[derive(Debug)]
pub struct Cli {
    pub verb: Verb,
}

/// Stateful code sandboxes that move between instances
#[derive(Debug, Parser)]
#[command(name = "baton", version, arg_required_else_help = true)]
#[command(after_help = "`baton help VERB` and `baton VERB --help` show the options of a verb with examples, \
                  `baton VERB -h` a summary.\n\nExamples:\n  \
                  baton serve                         serve on 127.0.0.1:8080\n  \
                  baton serve --listen 0.0.0.0:80     serve on all addresses\n  \
                  baton run -- python3 -c 'print(1)'  run one command in a new sandbox\n  \
                  id=$(baton create)                  create a sandbox that stays\n  \
                  baton exec -it $id -- bash          run a command in it, on a terminal\n  \
                  baton cp src/. $id:/src             copy files into it\n  \
                  baton --url wss://… list            list the sandboxes of another server\n  \
                  baton config -o json                print all settings, for a program\n  \
                  baton explain LockMissing           explain a reason and how to resolve it")]
struct RootArgs {
    /// Declared here so that they are accepted before the verb. Clap copies their values to the verb.
    #[command(flatten)]
    _server: ServerOptions,
    #[command(flatten)]
    _output: OutputOption,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run a server until SIGTERM or Ctrl-C
    ///
    /// An option takes precedence over its variable. With storage configured, sandboxes outlive the server.
    Serve(ServeArgs),
    /// Run the API half of a server, without privileges
    ///
    /// `baton reconciler` on the same machine runs the sandboxes.
    Api(ServeArgs),
    /// Run the sandbox half of a server, for `baton api`
    ///
    /// Runs the sandboxes of a `baton api` on the same machine.
    Reconciler(ServeArgs),
    Run(run::RunArgs),
    Create(create::CreateArgs),
    Exec(exec::ExecArgs),
    #[command(visible_alias = "attach")]
    Shell(exec::ShellArgs),
    Cp(cp::CpArgs),
    Logs(logs::LogsArgs),
    PortForward(port_forward::PortForwardArgs),
    List(list::ListArgs),
    Get(get::GetArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Handoff(handoff::HandoffArgs),
    Fork(fork::ForkArgs),
    Kill(kill::KillArgs),
    Config(show_config::ConfigArgs),
    Watch(watch::WatchArgs),
    Checkpoints(list_checkpoints::CheckpointsArgs),
    Rollback(rollback::RollbackArgs),
    Delete(delete::DeleteArgs),
    Edit(edit::EditArgs),
    Repair(repair::RepairArgs),
    Gc(gc::GcArgs),
    Explain(explain::ExplainArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    CompleteValues(completions::CompleteValuesArgs),
    /// Choose the server that the other verbs use
    ///
    /// A context is a server under a name: its URL, its keys and its storage. Options and variables take precedence
    /// over the selected context. Contexts are saved in baton/contexts.json in XDG_CONFIG_HOME or ~/.config, which only
    /// you can read. `make run` saves and selects one named `local`.
    Context {
        #[command(subcommand)]
        verb: context_verbs::ContextVerb,
    },
    /// Create and manage filesystem snapshots
    Snapshot {
        #[command(subcommand)]
        verb: snapshot::SnapshotVerb,
    },
    /// Tools for development and tests
    #[cfg(feature = "dev")]
    Dev {
        #[command(subcommand)]
        verb: dev::Dev,
    },
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton serve --max-sandboxes 8 --drain 5s\n  \
                  baton serve --checkpoint-and-restore-path /var/lib/baton\n  \
                  SANDBOX_METADATA_BUCKET=b SANDBOX_CHECKPOINT_BUCKET=b baton serve")]
pub struct ServeArgs {
    #[command(flatten)]
    pub flags: flags::Given,
}

impl CommandFactory for Cli {
    fn command() -> Command {
        let root = global_options::hide_undeclared(RootArgs::command());
        let template = verb_groups::template(&root);
        root.help_template(template)
    }

    fn command_for_update() -> Command {
        Self::command()
    }
}

impl FromArgMatches for Cli {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        global_options::check_declared(Self::command(), matches)?;
        let RootArgs { verb, .. } = RootArgs::from_arg_matches(matches)?;
        Ok(Self { verb })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Parser for Cli {}

impl Cli {
    /// The command line without the global options that verbs do not declare: a shell would offer them although they
    /// are hidden.
    pub fn command_for_completion() -> Command {
        RootArgs::command().mut_args(|option| option.global(false))
    }
}

impl Verb {
    /// Runs the verb and returns the exit code.
    pub fn run(self, context: &CommandContext) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => start_server::start(&args, serve::serve),
            Self::Api(args) => start_server::start(&args, split_serve::api),
            Self::Reconciler(args) => start_server::start(&args, split_serve::reconciler),
            Self::Run(args) => block_on(run::run(args, context)),
            Self::Create(args) => block_on(create::create(args, context)),
            Self::Exec(args) => block_on(exec::exec(args, context)),
            Self::Shell(args) => block_on(exec::shell(args, context)),
            Self::Cp(args) => block_on(cp::cp(args, context)),
            Self::Logs(args) => block_on(logs::logs(args, context)),
            Self::PortForward(args) => block_on(port_forward::port_forward(args, context)),
            Self::List(args) => block_on(list::list(args, context)),
            Self::Get(args) => block_on(get::get(args, context)),
            Self::Checkpoint(args) => block_on(checkpoint::checkpoint(args, context)),
            Self::Handoff(args) => block_on(handoff::handoff(args, context)),
            Self::Fork(args) => block_on(fork::fork(args, context)),
            Self::Kill(args) => block_on(kill::kill(args, context)),
            Self::Watch(args) => block_on(watch::watch(args, context)),
            Self::Checkpoints(args) => block_on(list_checkpoints::checkpoints(args, context)),
            Self::Rollback(args) => block_on(rollback::rollback(args, context)),
            Self::Delete(args) => block_on(delete::delete(args, context)),
            Self::Edit(args) => block_on(edit::edit(args, context)),
            Self::Repair(args) => block_on(repair::repair(args, context)),
            Self::Gc(args) => block_on(gc::gc(args, context)),
            Self::Snapshot { verb } => block_on(snapshot::snapshot(verb, context)),
            #[cfg(feature = "dev")]
            Self::Dev { verb } => block_on(async { dev::run(verb).await.map(|()| ExitCode::SUCCESS) }),
            Self::Config(args) => show_config::run(&args),
            Self::Explain(args) => explain::explain(&args),
            Self::Completions(args) => completions::completions(&args),
            Self::CompleteValues(args) => block_on(completions::complete_values(args, context)),
            Self::Context { verb } => context_verbs::context(verb, context),
        }
    }
}

fn block_on(verb: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    rustls::crypto::ring::default_provider().install_default().ok();
    let runtime = tokio::runtime::Runtime::new()?;
    let code = runtime.block_on(verb);
    // A read, a write or a store that hangs must not delay the exit.
    runtime.shutdown_background();
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_is_in_one_group_of_the_help() {
        let mut command = Cli::command();
        command.build();
        let mut grouped: Vec<_> = verb_groups::GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let shown = command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let mut verbs: Vec<_> = shown.map(Command::get_name).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn flags_of_serve_arrive_under_the_names_of_their_variables() {
        let cli = Cli::try_parse_from(["baton", "serve", "--listen", "127.0.0.1:0", "--port=9"]).unwrap();
        let Verb::Serve(serve) = cli.verb else { panic!("not serve") };
        let flags: Vec<_> = serve.flags.0.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(flags, [("BATON_LISTEN", "127.0.0.1:0"), ("PORT", "9")]);
    }

    #[test]
    fn help_of_serve_names_every_variable() {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut("serve").unwrap().render_long_help().to_string();
        for variable in crate::config::all().filter(|variable| variable.flag().is_some()) {
            assert!(help.contains(variable.name), "{} is not in the help", variable.name);
        }
    }
}
