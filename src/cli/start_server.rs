//! Starts a server: reads its settings, initializes the logs, and reports why it ended.

use std::process::ExitCode;

use super::{ServeArgs, screen};
use crate::{
    config::{self, Config, variables::K_SERVICE},
    telemetry,
};

/// Runs a server and reports why it ended, in the format of its platform.
pub fn start<F>(args: &ServeArgs, server: impl FnOnce(Config) -> F) -> anyhow::Result<ExitCode>
where
    F: Future<Output = anyhow::Result<()>>,
{
    // Checked before the settings are read: one of them may be the error.
    let on_cloud_run = config::process_environment(K_SERVICE.name).is_some_and(|name| !name.trim().is_empty());
    if !on_cloud_run {
        return serve(args, server);
    }
    // One log entry, not one per line.
    std::panic::set_hook(Box::new(|panic| screen::report(telemetry::last_words(&panic.to_string()))));
    serve(args, server).or_else(|error| {
        screen::report(telemetry::last_words(&format!("{error:#}")));
        Ok(ExitCode::FAILURE)
    })
}

/// Initializes everything that a server needs before it starts.
fn serve<F>(args: &ServeArgs, server: impl FnOnce(Config) -> F) -> anyhow::Result<ExitCode>
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
