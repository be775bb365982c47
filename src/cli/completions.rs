//! `baton completions`: a script for a shell, and the values that it asks for while the user types.

use std::{collections::BTreeSet, process::ExitCode, time::Duration};

use baton_protocol::reason::Reason;
use clap::Command;
use clap_complete::Shell;

use super::{
    Cli,
    admin_api::AdminApi,
    backend::Backend,
    context::CommandContext,
    global_options::{ContextOption, ServerOptions},
    screen,
};

/// How long a shell waits for the ids of sandboxes.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The hidden verb that the scripts call.
const VERB: &str = "complete-values";

/// Print a completion script for a shell
///
/// The scripts for bash, zsh and fish also complete the ids of sandboxes, reasons and contexts.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  source <(baton completions bash)\n  \
                  baton completions zsh > ~/.zfunc/_baton\n  \
                  baton completions fish > ~/.config/fish/completions/baton.fish")]
pub struct CompletionsArgs {
    /// Shell
    pub shell: Shell,
}

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command_for_completion(), "baton", &mut script);
    let script = String::from_utf8_lossy(&script);
    screen::print(&with_values(args.shell, &script))?;
    Ok(ExitCode::SUCCESS)
}

/// Wraps the function of the script: values come first, then what the script knows by itself.
fn with_values(shell: Shell, script: &str) -> String {
    match shell {
        Shell::Bash => format!(
            "{script}
_baton_values() {{
    local found
    mapfile -t found < <(baton {VERB} -- \"${{COMP_WORDS[@]:1:COMP_CWORD}}\" 2>/dev/null)
    if ((${{#found[@]}})); then
        COMPREPLY=(\"${{found[@]}}\")
    else
        _baton \"$@\"
    fi
}}
complete -F _baton_values -o nosort -o bashdefault -o default baton
"
        ),
        Shell::Zsh => {
            // The end of the script runs or registers the function, which is wrapped here.
            let script =
                script.rsplit_once("\nif [ \"$funcstack[1]\" = \"_baton\" ]").map_or(script, |(start, _)| start);
            let script = script.replacen("\n_baton() {", "\n_baton_words() {", 1);
            format!(
                "{script}
_baton() {{
    local -a found
    found=(${{(f)\"$(baton {VERB} -- \"${{(@)words[2,CURRENT]}}\" 2>/dev/null)\"}})
    if (( $#found )); then
        compadd -- $found
    else
        _baton_words \"$@\"
    fi
}}
if [ \"$funcstack[1]\" = \"_baton\" ]; then
    _baton \"$@\"
else
    compdef _baton baton
fi
"
            )
        }
        Shell::Fish => format!(
            "{script}
complete -c baton -f -a \"(baton {VERB} -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)\"
"
        ),
        Shell::Elvish | Shell::PowerShell | _ => script.to_owned(),
    }
}

/// Print the values that may stand at the end of a command line, for completion scripts
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Example:\n  baton complete-values -- get 0b")]
pub struct CompleteValuesArgs {
    /// The words after `baton`, up to and including the one that is typed
    #[arg(last = true)]
    pub words: Vec<String>,
}

/// What can stand somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueSort {
    Sandbox,
    Reason,
    Context,
}

pub async fn complete_values(args: CompleteValuesArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let typed = args.words.last().cloned().unwrap_or_default();
    let before = args.words.split_last().map_or(&[][..], |(_, before)| before);
    let values = match sort_of(&Cli::command_for_completion(), before, &typed) {
        None => return Ok(ExitCode::SUCCESS),
        Some(ValueSort::Reason) => Reason::ALL.iter().map(|reason| reason.name().to_owned()).collect(),
        Some(ValueSort::Context) => {
            let file = context.contexts().map(|contexts| contexts.read()).transpose()?.unwrap_or_default();
            file.contexts.into_keys().collect()
        }
        Some(ValueSort::Sandbox) => sandboxes(before, context).await,
    };
    let bare =
        |value: &str| !typed.is_empty() && value.strip_prefix("sandbox-").is_some_and(|id| id.starts_with(&typed));
    let found = values.into_iter().filter_map(|value| {
        let lower = value.to_lowercase();
        match () {
            () if lower.starts_with(&typed.to_lowercase()) => Some(value),
            // A shell only accepts what begins with what was typed.
            () if bare(&value) => value.strip_prefix("sandbox-").map(str::to_owned),
            () => None,
        }
    });
    screen::print(&found.map(|value| value + "\n").collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// What the next word is, after these words. `None` if the script knows more.
fn sort_of(root: &Command, before: &[String], typed: &str) -> Option<ValueSort> {
    if typed.starts_with('-') {
        return None;
    }
    let (mut verb, mut positional, mut option) = (root, 0, None);
    for word in before {
        if word == "--" {
            return None;
        }
        if let Some(name) = word.strip_prefix('-') {
            let long = name.strip_prefix('-');
            let known = verb.get_arguments().chain(root.get_arguments()).find(|argument| match long {
                Some(long) => argument.get_long() == Some(long),
                None => argument.get_short().is_some_and(|short| name.ends_with(short)),
            });
            option = known.filter(|argument| argument.get_action().takes_values());
        } else if option.take().is_none() {
            match verb.find_subcommand(word).filter(|_| positional == 0) {
                Some(inner) => verb = inner,
                None => positional += 1,
            }
        }
    }
    if let Some(option) = option {
        return (option.get_id() == "context").then_some(ValueSort::Context);
    }
    let mut all = verb.get_positionals();
    let argument = all.nth(positional).or_else(|| verb.get_positionals().last().filter(|last| is_repeated(last)))?;
    match (verb.get_name(), argument.get_id().as_str()) {
        (_, "sandbox" | "sandboxes") => Some(ValueSort::Sandbox),
        ("explain", _) => Some(ValueSort::Reason),
        ("show" | "use" | "set" | "rm", "name" | "names") => Some(ValueSort::Context),
        _ => None,
    }
}

fn is_repeated(argument: &clap::Arg) -> bool {
    matches!(argument.get_action(), clap::ArgAction::Append)
}

/// The sandboxes whose tokens are saved here, and those that a server or the storage lists in time.
async fn sandboxes(before: &[String], context: &CommandContext) -> Vec<String> {
    let named = before.iter().position(|word| word == "--context").and_then(|at| before.get(at + 1)).cloned();
    let options = ServerOptions { context: ContextOption { name: named }, ..ServerOptions::default() };
    let mut found = BTreeSet::new();
    if let Ok(ids) = context.server(&options).and_then(|server| server.tokens()?.ids()) {
        found.extend(ids);
    }
    let listed = async {
        anyhow::Ok(match context.backend(&options, None)? {
            Backend::Server(server) | Backend::Both(server, _) => AdminApi::new(&server, server.url())?.ids().await?,
            Backend::Storage(storage) => storage.records.survey().await?.into_keys().collect(),
        })
    };
    if let Ok(Ok(ids)) = context.clock.timeout(TIMEOUT, listed).await {
        found.extend(ids);
    }
    found.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sort(line: &str) -> Option<ValueSort> {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let typed = words.pop().unwrap();
        sort_of(&Cli::command_for_completion(), &words, &typed)
    }

    #[test]
    fn ids_reasons_and_contexts_are_completed_where_they_stand() {
        for line in ["get ", "get 0b", "exec -it ", "exec --timeout 5 ", "kill a ", "--url x get ", "logs -f 0"] {
            assert_eq!(sort(line), Some(ValueSort::Sandbox), "{line}");
        }
        for line in ["snapshot create numpy ", "delete --no-wait s", "edit "] {
            assert_eq!(sort(line), Some(ValueSort::Sandbox), "{line}");
        }
        assert_eq!(sort("explain Lock"), Some(ValueSort::Reason));
        for line in ["context use ", "context rm a ", "--context ", "get --context l"] {
            assert_eq!(sort(line), Some(ValueSort::Context), "{line}");
        }
        for line in ["", "ge", "get -", "exec 0b ", "exec 0b -- ", "context ", "get --url ", "snapshot create "] {
            assert_eq!(sort(line), None, "{line}");
        }
    }
}
