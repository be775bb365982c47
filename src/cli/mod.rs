//! The command line: one file per verb.

use clap::{Parser, Subcommand};

pub mod admin;
pub mod check;
pub mod checkpoint;
pub mod checkpoints;
pub mod completions;
pub mod config;
mod cp;
mod create;
pub mod delete;
mod descriptors;
pub mod dev;
pub mod edit;
mod exec;
pub mod explain;
pub mod flags;
pub mod gc;
pub mod get;
pub mod handoff;
mod limit;
pub mod list;
mod logs;
mod progress;
pub mod repair;
pub mod rollback;
pub mod rows;
mod run;
mod runtime_paths;
pub mod screen;
pub mod serve;
mod server_args;
mod server_requests;
pub mod server_verbs;
pub mod snapshot;
pub mod split_serve;
mod stdio_bridge;
pub mod storage_admin;
mod termination;
mod token_file;
mod view;
pub mod watch;

/// Stateful code sandboxes that move between instances.
#[derive(Debug, Parser)]
#[command(name = "baton", version, arg_required_else_help = true)]
#[command(after_help = "Examples:\n  baton serve                      serve on 127.0.0.1:8080\n  \
                  baton serve --listen 0.0.0.0:80  serve on all addresses\n  \
                  baton run -- python3 -c 'print(1)'  one command in a fresh sandbox\n  \
                  id=$(baton create)               a sandbox that stays\n  \
                  baton exec -it $id -- bash       a command in it, on a terminal\n  \
                  baton cp src/. $id:/src          files into it, and out of it the other way round\n  \
                  baton config -o json             what is in force, for a program\n  \
                  baton explain LockMissing        what a reason means, and what to do\n  \
                  baton dev fake-gcs               a Cloud Storage in memory, to try several servers with one bucket")]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve sandboxes until SIGTERM or Ctrl-C.
    Serve(Serve),
    /// Serve clients alone, without any privilege; `baton reconciler` beside it runs the sandboxes.
    Api(Serve),
    /// Run sandboxes alone, for a `baton api` on the same machine.
    Reconciler(Serve),
    #[command(flatten)]
    Wire(Box<server_verbs::Wire>),
    /// Print every setting, its value and where it comes from.
    Config(config::Args),
    /// Watch phases change.
    Watch(watch::Args),
    /// List the checkpoints of a sandbox.
    Checkpoints(checkpoints::Args),
    /// Make an older checkpoint the one that counts.
    Rollback(rollback::Args),
    /// Delete a sandbox for good.
    Delete(delete::Args),
    /// Change what is wanted of a sandbox.
    Edit(edit::Args),
    /// Make a lost lock or lost metadata anew.
    Repair(repair::Args),
    /// One sweep, now, without a server.
    Gc(gc::Args),
    /// Say what a reason in a status means, and what to do about it.
    Explain(explain::Args),
    /// Print a script that completes baton's verbs and flags in a shell.
    Completions(completions::Args),
    /// Make and look after filesystem snapshots.
    Snapshot {
        #[command(subcommand)]
        verb: snapshot::Verb,
    },
    /// Things for trying out and for tests.
    Dev {
        #[command(subcommand)]
        verb: dev::Dev,
    },
}

/// A flag comes before its variable. With storage set, sandboxes outlive this server.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton serve --max-sandboxes 8 --drain 5s\n  \
                  baton serve --checkpoint-and-restore-path /var/lib/baton\n  \
                  SANDBOX_METADATA_BUCKET=b SANDBOX_CHECKPOINT_BUCKET=b baton serve")]
pub struct Serve {
    #[command(flatten)]
    pub flags: flags::Given,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
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
