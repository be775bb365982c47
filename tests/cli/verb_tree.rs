//! Global options and help, for every verb that clap knows: a new verb is covered without a change here.

use baton::cli::Cli;
use clap::{Arg, Command, CommandFactory, Parser, error::ErrorKind};

use crate::{cli_exec::output, pipes::baton, script::ID};

/// Values that are tried for positional arguments until a verb accepts them.
const POSITIONALS: [&str; 4] = [ID, "bash", "numpy", "80"];

/// A verb without subverbs, and the words that name it.
struct Leaf {
    path: Vec<String>,
    command: Command,
}

impl Leaf {
    fn name(&self) -> String {
        self.path.join(" ")
    }

    /// Values for the required positional arguments.
    fn positionals(&self) -> Vec<&'static str> {
        let count = self.command.get_positionals().filter(|argument| argument.is_required_set()).count();
        let candidates = POSITIONALS.iter().map(|value| vec![*value; count]);
        let is_accepted = |values: &Vec<&str>| Cli::try_parse_from(self.words(&[], &[], values)).is_ok();
        candidates.into_iter().find(is_accepted).unwrap_or_else(|| panic!("no arguments fit `baton {}`", self.name()))
    }

    /// `baton BEFORE VERB AFTER POSITIONALS`.
    fn words(&self, before: &[&str], after: &[&str], positionals: &[&str]) -> Vec<String> {
        let path: Vec<_> = self.path.iter().map(String::as_str).collect();
        [&["baton"][..], before, &path, after, positionals].concat().into_iter().map(str::to_owned).collect()
    }
}

fn built() -> Command {
    let mut root = Cli::command();
    root.build();
    root
}

/// Every verb and subverb, with those that only have subverbs if `with_branches`.
fn verbs(with_branches: bool) -> Vec<Leaf> {
    fn collect(command: &Command, path: &[String], with_branches: bool, found: &mut Vec<Leaf>) {
        for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
            let path = [path, &[inner.get_name().to_owned()]].concat();
            if with_branches || !inner.has_subcommands() {
                found.push(Leaf { path: path.clone(), command: inner.clone() });
            }
            collect(inner, &path, with_branches, found);
        }
    }
    let mut found = Vec::new();
    collect(&built(), &[], with_branches, &mut found);
    found
}

/// Every option that is accepted before the verb, with a value that differs from its default. It need not be marked
/// as global: one that lost the mark would only be taken on one side.
fn global_options() -> Vec<(Arg, &'static str)> {
    let value = |option: &Arg| match option.get_id().as_str() {
        "output" => "json",
        "auth" => "google",
        "header" => "X-Front: door",
        _ => "given",
    };
    let root = built();
    let options = root.get_arguments().filter(|option| !["help", "version"].contains(&option.get_id().as_str()));
    let options: Vec<_> = options.map(|option| (option.clone(), value(option))).collect();
    for named in ["url", "api_key", "output"] {
        assert!(options.iter().any(|(option, _)| option.get_id() == named), "--{named} is not global");
    }
    options
}

#[test]
fn a_global_option_means_the_same_before_and_after_every_verb_that_uses_it_and_others_refuse_it() {
    let (mut used, mut refused) = (0, 0);
    for leaf in verbs(false) {
        let positionals = leaf.positionals();
        let without = format!("{:?}", Cli::try_parse_from(leaf.words(&[], &[], &positionals)).unwrap());
        for (option, value) in global_options() {
            let (id, long) = (option.get_id(), format!("--{}", option.get_long().unwrap()));
            let declared = leaf.command.get_arguments().any(|known| known.get_id() == id && !known.is_hide_set());
            let spellings =
                [Some(long.clone()), option.get_short().map(|short| format!("-{short}"))].into_iter().flatten();
            for spelling in spellings {
                let given = [spelling.as_str(), value];
                let parsed = [leaf.words(&given, &[], &positionals), leaf.words(&[], &given, &positionals)]
                    .map(|words| Cli::try_parse_from(words).map(|cli| format!("{cli:?}")));
                match parsed {
                    [Ok(before), Ok(after)] => {
                        assert!(declared, "baton {} accepts {long} and does not use it", leaf.name());
                        assert_eq!(before, after, "baton {}: {long}", leaf.name());
                        assert_ne!(before, without, "baton {} ignores {long}", leaf.name());
                        used += 1;
                    }
                    [Err(before), Err(after)] => {
                        assert!(!declared, "baton {} refuses {long}: {before}", leaf.name());
                        for error in [before, after] {
                            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::UnknownArgument, 2));
                            let sentence = format!("`baton {}` does not use {long}", leaf.name());
                            assert!(error.to_string().contains(&sentence), "{error}");
                        }
                        refused += 1;
                    }
                    one => panic!("baton {} takes {long} on one side only: {one:?}", leaf.name()),
                }
            }
        }
    }
    assert!(used > 60 && refused > 60, "{used} used, {refused} refused");
}

#[tokio::test]
async fn help_is_reachable_for_every_verb_and_subverb() {
    let print = async |words: &[&str]| {
        let printed = output(baton("ws://127.0.0.1:1").args(words).spawn().unwrap()).await;
        assert_eq!(printed.status.code(), Some(0), "{words:?}: {printed:?}");
        String::from_utf8(printed.stdout).unwrap()
    };
    for leaf in verbs(true) {
        let path: Vec<_> = leaf.path.iter().map(String::as_str).collect();
        // The lines of the terminal may break elsewhere.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let summary = leaf.command.get_about().unwrap_or_else(|| panic!("{} has no summary", leaf.name())).to_string();
        assert_eq!(summary.lines().count(), 1, "{}: {summary}", leaf.name());
        let long = print(&[&path[..], &["--help"]].concat()).await;
        let by_verb = print(&[&["help"][..], &path].concat()).await;
        let short = print(&[&path[..], &["-h"]].concat()).await;
        let usage = format!("Usage: baton {}", leaf.name());
        for help in [&long, &by_verb, &short] {
            assert!(words(help).starts_with(&summary) && help.contains(&usage), "{}: {help}", leaf.name());
        }
        assert_eq!(long, by_verb);
        if let Some(about) = leaf.command.get_long_about() {
            let about = words(&about.to_string());
            assert!(words(&long).contains(&about) && !words(&short).contains(&about), "{}", leaf.name());
        }
    }
}

#[tokio::test]
async fn baton_alone_shows_its_verbs_in_groups_whatever_the_environment() {
    let printed = output(baton("ws://127.0.0.1:1").spawn().unwrap()).await;
    assert_eq!(printed.status.code(), Some(2));
    let help = String::from_utf8(printed.stderr).unwrap();
    for (title, names) in baton::cli::verb_groups::GROUPS {
        let group = help.split(&format!("{title}:\n")).nth(1).unwrap_or_else(|| panic!("no {title}: {help}"));
        let group = group.split("\n\n").next().unwrap();
        let listed: Vec<_> = group.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(listed, names, "{help}");
    }
    assert!(help.contains("Global options:\n") && help.contains("BATON_URL"), "{help}");
}
