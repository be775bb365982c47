//! Log messages are constant: a line in a log leads to its place in the code, and what varies is a field.

use crate::{
    repo_files::{read, rust_files},
    rust_source::code_with_strings,
};

const LEVELS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];

/// The arguments of every `tracing` event, one text for each argument.
fn events(code: &[String]) -> Vec<Vec<String>> {
    let starts =
        (2..code.len()).filter(|at| code[at - 1] == "!" && code[*at] == "(" && LEVELS.contains(&code[at - 2].as_str()));
    starts.map(|start| arguments(&code[start + 1..])).collect()
}

/// The arguments up to the parenthesis that closes the call.
fn arguments(code: &[String]) -> Vec<String> {
    let (mut found, mut depth) = (vec![String::new()], 0);
    for token in code {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => break,
            ")" | "]" | "}" => depth -= 1,
            "," if depth == 0 => {
                found.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(argument) = found.last_mut() {
            argument.push_str(token);
        }
    }
    found.retain(|argument| !argument.is_empty());
    found
}

/// What is wrong with an event, if anything.
fn violation(arguments: &[String]) -> Option<String> {
    let is_text = |argument: &String| argument.starts_with('"');
    match arguments.iter().position(is_text) {
        None => Some(format!("has no message: {}", arguments.join(", "))),
        Some(at) if at + 1 < arguments.len() => Some(format!("has arguments after its message {}", arguments[at])),
        Some(at) if arguments[at].contains('{') => Some(format!("interpolates in its message {}", arguments[at])),
        Some(_) => None,
    }
}

#[test]
fn every_log_message_is_a_constant_text() {
    let mut found = Vec::new();
    let mut count = 0;
    for path in ["src", "crates"].into_iter().flat_map(rust_files).filter(|path| !path.contains("/tests")) {
        let events = events(&code_with_strings(&read(&path)));
        count += events.len();
        found
            .extend(events.iter().filter_map(|event| violation(event)).map(|why| format!("{path}: a log event {why}")));
    }
    assert!(count > 50, "only {count} events were found");
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn interpolated_and_missing_messages_are_found() {
    let of = |source: &str| {
        let events = events(&code_with_strings(source));
        events.iter().map(|event| violation(event).is_some()).collect::<Vec<_>>()
    };
    assert_eq!(of(r#"info!(%id, took = ?f(1, 2), "done");"#), [false]);
    assert_eq!(of(r#"tracing::warn!("the lock of {id} is gone");"#), [true]);
    assert_eq!(of(r#"tracing::warn!("the lock of {} is gone", id);"#), [true]);
    assert_eq!(of(r#"error!(%error); debug!(text = "a {}", "b"); info!("a", b)"#), [true, false, true]);
    assert_eq!(of("// info!(\"{a}\")\nprintln!(\"{b}\");"), [true; 0]);
}
