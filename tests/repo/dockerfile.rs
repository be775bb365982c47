//! The image's recipe is sound, and what a builder is sent is enough to follow it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use baton::config;

use crate::repo_files::{read, root};

/// The instructions of a Dockerfile, continued lines joined.
fn instructions(text: &str) -> Vec<(String, String)> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| line.split_once(' ').unwrap_or((line, "")))
        .map(|(a, b)| (a.to_owned(), b.trim().to_owned()))
        .collect()
}

/// What is wrong with a Dockerfile, in sentences.
fn faults(text: &str) -> Vec<String> {
    const KNOWN: [&str; 10] = ["ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "EXPOSE", "USER", "ENTRYPOINT", "CMD"];
    let (mut stages, mut arguments, mut found) = (vec![], vec![], vec![]);
    for (word, rest) in instructions(text) {
        if !KNOWN.contains(&word.as_str()) {
            found.push(format!("{word} is no instruction used here"));
        }
        if word == "ARG" {
            arguments.push(rest.split('=').next().unwrap().to_owned());
        } else if word == "FROM" {
            let mut words = rest.split_whitespace();
            let base = words.next().unwrap_or_default();
            // An argument, or two in a row: an image and its digest.
            let inner = base.strip_prefix("${").and_then(|name| name.strip_suffix('}'));
            let is_argument = |name: &str| arguments.iter().any(|one| one == name);
            let known = inner.is_some_and(|names| names.split("}${").all(is_argument));
            if !(known || base == "scratch" || stages.iter().any(|stage| stage == base)) {
                found.push(format!("FROM {base} is neither an argument nor a stage"));
            }
            match (words.next(), words.next()) {
                (Some("AS"), Some(stage)) => stages.push(stage.to_owned()),
                _ => found.push(format!("FROM {base} has no name")),
            }
        } else if stages.is_empty() {
            found.push(format!("{word} comes before FROM"));
        }
        if word == "COPY"
            && let Some(from) = rest.split_whitespace().find_map(|word| word.strip_prefix("--from="))
            && !stages[..stages.len() - 1].iter().any(|stage| stage == from)
        {
            found.push(format!("COPY --from={from} is no stage before this one"));
        }
        if word == "RUN"
            && let Some(flag) = rest.split_whitespace().next().filter(|word| word.starts_with("--"))
        {
            found.push(format!("RUN {flag}: not every builder allows or knows it"));
        }
        if word == "COPY" && rest.split_whitespace().filter(|word| !word.starts_with("--")).count() < 2 {
            found.push(format!("COPY {rest} has no target"));
        }
        if ["ENTRYPOINT", "CMD"].contains(&word.as_str()) && serde_json::from_str::<Vec<String>>(&rest).is_err() {
            found.push(format!("{word} {rest} is no list: a shell would stand before the server, and there is none"));
        }
        if word == "ENV" {
            for pair in rest.split_whitespace() {
                match pair.split_once('=') {
                    Some((name, _)) if name == "PATH" || config::find(name).is_some() => {}
                    _ => found.push(format!("ENV {pair} is nothing the server reads")),
                }
            }
        }
    }
    found
}

#[test]
fn the_recipe_of_the_image_is_sound_and_uses_the_scripts_of_this_tree() {
    let text = read("Dockerfile");
    assert_eq!(faults(&text), [""; 0]);
    let scripts = instructions(&text).into_iter().filter(|(word, _)| word == "RUN");
    for (_, command) in scripts {
        for script in command.split_whitespace().filter(|word| word.starts_with("scripts/")) {
            assert!(root().join(script).is_file(), "{script} does not exist");
        }
    }
    assert!(!text.contains(":latest"));
    let bases: Vec<_> =
        instructions(&text).into_iter().filter(|(word, _)| word == "FROM").map(|(_, rest)| rest).collect();
    for base in bases.iter().filter(|base| base.contains("_IMAGE}")) {
        assert!(base.contains("_DIGEST} AS "), "{base} cannot be pinned");
    }
}

#[test]
fn mistakes_in_a_recipe_are_found() {
    for (text, complaint) in [
        ("FROM debian AS a", "neither an argument nor a stage"),
        ("FROM scratch", "has no name"),
        ("RUN x\nFROM scratch AS a", "before FROM"),
        ("FROM scratch AS a\nCOPY --from=b /x /y", "no stage before"),
        ("FROM scratch AS a\nCOPY x", "no target"),
        ("FROM scratch AS a\nRUN --security=insecure x", "not every builder"),
        ("FROM scratch AS a\nCMD baton serve", "is no list"),
        ("FROM scratch AS a\nENV BATON_NONSENSE=1", "nothing the server reads"),
        ("FROM scratch AS a\nMAINTAINER me", "no instruction"),
    ] {
        let found = faults(text);
        assert!(found.len() == 1 && found[0].contains(complaint), "{text}: {found:?}");
    }
}

/// What `.dockerignore` lets through: everything is left out but what is named with a `!`.
fn sent() -> Vec<String> {
    let text = read(".dockerignore");
    let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    assert_eq!(lines.next(), Some("*"), "first everything is left out");
    lines
        .map(|line| line.strip_prefix('!').unwrap_or_else(|| panic!("{line} lets nothing through")).to_owned())
        .collect()
}

fn files_below(path: &Path, found: &mut Vec<PathBuf>) {
    if !path.is_dir() {
        return found.push(path.to_owned());
    }
    for entry in fs::read_dir(path).unwrap() {
        files_below(&entry.unwrap().path(), found);
    }
}

/// A file that a builder is not sent is missing only there, where no test of ours runs.
#[test]
fn what_a_builder_is_sent_is_a_whole_workspace() {
    let context = tempfile::tempdir().unwrap();
    let mut files = vec![];
    sent().iter().for_each(|name| files_below(&root().join(name), &mut files));
    for file in &files {
        let name = file.strip_prefix(root()).unwrap();
        let target = context.path().join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(file, target).unwrap();
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--offline", "--no-deps", "--format-version=1"]).current_dir(context.path());
    let done = cargo.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let names: BTreeSet<_> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    assert!(names.contains("baton") && names.contains("baton-agent"), "{names:?}");
}
