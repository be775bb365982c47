//! Parses the command line and runs the verb.

use std::process::ExitCode;

use baton::{
    cli::{self, Cli, Verb},
    config::{self, Config},
    telemetry,
};
use clap::Parser;

fn main() -> ExitCode {
    // These become small processes of their own, before anything else is initialized.
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next().as_deref().and_then(|verb| verb.to_str()) {
        Some("guard") => return baton::guard::main(),
        Some(baton::runtime::spawn::VERB) => return baton::runtime::spawn::die_with(arguments),
        Some(baton::runtime::archive::VERB) => return baton::runtime::archive::main(arguments),
        Some(_) | None => {}
    }
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            cli::screen::say(format_args!("baton: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.verb {
        Verb::Wire(verb) => verb.run(),
        Verb::Config(args) => cli::config::run(&args),
        Verb::Watch(args) => cli::watch::run(args),
        Verb::Checkpoints(args) => cli::checkpoints::run(args),
        Verb::Rollback(args) => cli::rollback::run(args),
        Verb::Delete(args) => cli::delete::run(args),
        Verb::Edit(args) => cli::edit::run(args),
        Verb::Repair(args) => cli::repair::run(args),
        Verb::Gc(args) => cli::gc::run(args),
        Verb::Explain(args) => cli::explain::run(&args),
        Verb::Completions(args) => cli::completions::run(&args),
        Verb::Snapshot { verb } => cli::snapshot::main(verb),
        Verb::Dev { verb } => tokio::runtime::Runtime::new()?.block_on(cli::dev::run(verb)).map(|()| ExitCode::SUCCESS),
        Verb::Serve(args) => start(&args, cli::serve::serve),
        Verb::Api(args) => start(&args, cli::split_serve::api),
        Verb::Reconciler(args) => start(&args, cli::split_serve::reconciler),
    }
}

/// Runs a server and reports why it ended, in the format of its platform.
fn start<F>(args: &cli::Serve, server: impl FnOnce(Config) -> F) -> anyhow::Result<ExitCode>
where
    F: Future<Output = anyhow::Result<()>>,
{
    // Checked before the settings are read: one of them may be the error.
    let on_cloud_run = config::process_environment("K_SERVICE").is_some_and(|name| !name.trim().is_empty());
    if !on_cloud_run {
        return serve(args, server);
    }
    // One log entry, not one per line.
    std::panic::set_hook(Box::new(|panic| eprintln!("{}", telemetry::last_words(&panic.to_string()))));
    serve(args, server).or_else(|error| {
        eprintln!("{}", telemetry::last_words(&format!("{error:#}")));
        Ok(ExitCode::FAILURE)
    })
}

/// Initializes everything that a server needs before it starts.
fn serve<F>(args: &cli::Serve, server: impl FnOnce(Config) -> F) -> anyhow::Result<ExitCode>
where
    F: Future<Output = anyhow::Result<()>>,
{
    rustls::crypto::ring::default_provider().install_default().ok();
    let config = Config::read(&args.flags.0, config::process_environment)?;
    let style = match config.on_cloud_run {
        true => telemetry::Style::CloudLogging { project: config.project.clone() },
        false => telemetry::Style::Plain,
    };
    telemetry::init(&config.log, style)?;
    reuse_buffers();
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(server(config)).map(|()| ExitCode::SUCCESS)
}

/// Output passes through buffers of up to half a mebibyte. The allocator returns blocks of that size
/// to the kernel at once, page by page, until a larger one has been freed.
fn reuse_buffers() {
    std::hint::black_box(Vec::<u8>::with_capacity(1 << 20));
}
