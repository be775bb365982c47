//! The page of the command line has every verb, and what it says of flags is so.

use std::{collections::BTreeSet, fs, path::Path};

use baton::cli::Cli;
use clap::{Command, CommandFactory};

fn read(page: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap()
}

fn verbs() -> Vec<Command> {
    let mut command = Cli::command();
    command.build();
    command.get_subcommands().filter(|verb| verb.get_name() != "help" && !verb.is_hide_set()).cloned().collect()
}

/// Its name, and the others that its help shows.
fn names(verb: &Command) -> Vec<String> {
    std::iter::once(verb.get_name()).chain(verb.get_visible_aliases()).map(str::to_owned).collect()
}

/// What stands between backticks and begins with `baton `, word by word.
fn mentioned(page: &str) -> Vec<Vec<String>> {
    let text = read(page);
    let quoted = text.split('`').skip(1).step_by(2).filter_map(|quoted| quoted.strip_prefix("baton "));
    quoted.map(|words| words.split_whitespace().map(str::to_owned).collect()).collect()
}

#[test]
fn every_verb_is_on_the_page_and_the_page_names_no_other() {
    let there: BTreeSet<_> = verbs().iter().flat_map(names).collect();
    let named: BTreeSet<_> = mentioned("docs/command-line.md").into_iter().map(|mut words| words.remove(0)).collect();
    // Stands for any of them.
    let named: BTreeSet<_> = named.into_iter().filter(|name| name != "VERB").collect();
    assert_eq!(named, there);
}

#[test]
fn every_flag_that_a_page_names_with_its_verb_exists() {
    let verbs = verbs();
    let mut count = 0;
    for page in ["docs/command-line.md", "docs/operate.md", "docs/deploy.md", "docs/snapshots.md", "README.md"] {
        for words in mentioned(page).iter().filter(|words| words[0] != "VERB") {
            let verb = verbs.iter().find(|verb| names(verb).contains(&words[0]));
            let verb = verb.unwrap_or_else(|| panic!("{page}: there is no verb {}", words[0]));
            let inner = words.get(1).and_then(|word| verb.find_subcommand(word)).unwrap_or(verb);
            // What comes after is another program's.
            let own = words.iter().take_while(|word| *word != "--");
            for flag in own.filter_map(|word| word.trim_start_matches('[').trim_end_matches(']').strip_prefix("--")) {
                let is_there = inner.get_arguments().any(|argument| argument.get_long() == Some(flag));
                assert!(is_there, "{page}: baton {} has no --{flag}", words.join(" "));
                count += 1;
            }
        }
    }
    assert!(count >= 5, "only {count} flags were found");
}

#[test]
fn the_help_of_every_verb_says_what_it_does_with_an_example() {
    fn check(verb: &Command) {
        let name = verb.get_name();
        assert!(verb.get_about().is_some(), "{name} says nothing");
        if verb.has_subcommands() {
            return verb.get_subcommands().filter(|inner| inner.get_name() != "help").for_each(check);
        }
        let help = verb.clone().render_long_help().to_string();
        assert!(help.contains("Example"), "{name} shows no example:\n{help}");
    }
    verbs().iter().for_each(check);
}
