//! The commands of README.md do what the page shows, against a real server and the default root file system.
//!
//! A block marked `console` is a session: a line that begins with `$ ` is typed, the lines after it are what is printed.
//! `…` in these stands for what differs from run to run, such as an id.

use std::{env, path::Path, process::Stdio, time::Duration};

use tokio::process::Command;

use crate::{fixture::clock, servers::Machine};

/// Precedes the exit code of each command in what a session prints.
const MARK: char = '\u{1e}';

/// What is typed, and what is printed then.
#[derive(Debug, PartialEq)]
struct Step {
    typed: String,
    printed: String,
}

/// The code blocks of a page: the word behind the fence, and the text.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let parts = page.split("```").skip(1).step_by(2);
    parts.map(|block| block.split_once('\n').expect("a fence has a line of its own")).collect()
}

fn steps(session: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = vec![];
    for line in session.lines() {
        match (line.strip_prefix("$ "), steps.last_mut()) {
            (Some(typed), _) => steps.push(Step { typed: typed.to_owned(), printed: String::new() }),
            (None, Some(step)) => step.printed += &format!("{line}\n"),
            (None, None) => panic!("a session begins with a command, not with {line}"),
        }
    }
    steps
}

/// Whether a text is the shown one, with something in place of each `…`.
fn is_shown(shown: &str, text: &str) -> bool {
    let Some((before, after)) = shown.split_once('…') else { return shown == text };
    let Some(rest) = text.strip_prefix(before) else { return false };
    let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8());
    ends.map(|at| &rest[at..]).any(|rest| is_shown(after, rest))
}

/// Types all steps at one prompt, in a directory of its own; what each printed, and its exit code.
async fn session(home: &Path, url: &str, steps: &[Step]) -> Vec<(String, i32)> {
    let script: String = steps.iter().map(|step| format!("{}\nprintf '{MARK}%d{MARK}' $?\n", step.typed)).collect();
    let mut bash = Command::new("bash");
    let baton = Path::new(env!("CARGO_BIN_EXE_baton")).parent().unwrap();
    bash.arg("-c").arg(format!("exec 2>&1\n{script}")).current_dir(home).env_clear().kill_on_drop(true);
    bash.env("PATH", format!("{}:/usr/bin:/bin", baton.display())).env("HOME", home);
    bash.env("BATON_URL", url).stdin(Stdio::null());
    let output = clock().timeout(Duration::from_secs(120), bash.output()).await.expect("the session ends").unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let mut parts = output.split(MARK);
    let mut found = vec![];
    while let (Some(printed), Some(code)) = (parts.next(), parts.next()) {
        found.push((printed.to_owned(), code.parse().unwrap()));
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_the_readme_prints_what_the_page_shows() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut all = vec![];
    for (kind, text) in blocks(&page) {
        match kind {
            "console" => all.extend(steps(text)),
            // The suites of the client libraries run these, and compare the output below them.
            "python" | "ts" | "text" => {}
            _ => assert!(text.lines().all(|line| line.starts_with("make ")), "nothing runs this block:\n{text}"),
        }
    }
    assert!(all.len() > 8, "only {} commands were found", all.len());
    let machine = Machine::with_a_directory().await;
    let server = machine.server("one").await;
    let home = machine.directory.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let found = session(&home, &format!("ws://{}", server.address), &all).await;
    assert_eq!(found.len(), all.len(), "{found:?}");
    for (step, (printed, code)) in all.iter().zip(found) {
        let Step { typed, printed: shown } = step;
        assert!(
            code == 0 && is_shown(shown, &printed),
            "{typed}\nprints, with exit code {code}:\n{printed}\nshown:\n{shown}"
        );
    }
    server.stop().await;
}

#[test]
fn a_page_is_read_and_compared_as_it_is_shown() {
    let page = "text\n```console\n$ a\n1\n2\n$ b\n```\ntext\n```\nmake run\n```\n";
    assert_eq!(blocks(page), [("console", "$ a\n1\n2\n$ b\n"), ("", "make run\n")]);
    let step = |typed: &str, printed: &str| Step { typed: typed.into(), printed: printed.into() };
    assert_eq!(steps(blocks(page)[0].1), [step("a", "1\n2\n"), step("b", "")]);
    assert!(is_shown("x…\n", "x65738\n") && is_shown("a…b…c", "a1b2b3c") && is_shown("", ""));
    assert!(!is_shown("x…\n", "y65738\n") && !is_shown("x…\n", "x\n") && !is_shown("42\n", "42\n\n"));
}
