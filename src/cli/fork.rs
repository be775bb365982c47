//! `baton fork`: copies of a sandbox.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    context::CommandContext,
    global_options::OutputOption,
    sandbox_client::{SandboxOptions, VerbOutput},
    screen,
    token_file::SavedToken,
};

/// Copy a sandbox
///
/// Each copy has its own id and its own token, which is saved here.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton fork 0b9f\n  baton fork --count 3 -o json 0b9f")]
pub struct ForkArgs {
    /// Number of copies
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub count: u32,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
}

pub async fn fork(args: ForkArgs, context: &CommandContext) -> Result<ExitCode> {
    let client = context.sandbox(&args.options)?;
    let tokens = client.server.tokens()?;
    client
        .request(&args.sandbox, args.output.format, async |sandbox, url| {
            let (mut text, mut json) = (String::new(), Vec::new());
            for copy in sandbox.fork(args.count).await? {
                let saved = SavedToken { id: copy.id, token: copy.token, url: url.to_owned() };
                if let Err(error) = tokens.keep(&saved) {
                    // The copies exist: the user can still use them.
                    screen::report(format_args!("baton: {error:#}"));
                }
                text += &format!("{}\n", saved.id);
                json.push(json!({"sandbox_id": saved.id, "sandbox_token": saved.token.0, "url": saved.url}));
            }
            Ok(VerbOutput { text, json: Value::Array(json) })
        })
        .await
}
