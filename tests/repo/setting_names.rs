//! The name of a setting is spelled once: in the table. Messages refer to the table's constants.

use baton::config;

use crate::{
    repo_files::{read, rust_files},
    rust_source,
};

/// The only place that spells the names.
const TABLE: &str = "src/config/variables/";

/// The settings that string literals of this source spell. `NAME=value` is left out, which is an example of a command,
/// and so is `{NAME}`, which is a constant.
fn spelled(source: &str) -> Vec<&'static str> {
    const EXEMPT: [char; 3] = ['=', '{', '}'];
    let is_inside = |c: char| c.is_ascii_alphanumeric() || c == '_' || EXEMPT.contains(&c);
    let strings = rust_source::strings(source);
    let words = strings.iter().flat_map(|text| text.split(|c| !is_inside(c)));
    let names = words.filter(|word| !word.contains(EXEMPT));
    names.filter_map(|word| config::find(word).map(|variable| variable.name)).collect()
}

#[test]
fn no_message_spells_the_name_of_a_setting() {
    let files = rust_files("src").into_iter().filter(|path| !path.starts_with(TABLE) && !path.ends_with("/tests.rs"));
    let found: Vec<_> = files
        .flat_map(|path| spelled(&read(&path)).into_iter().map(move |name| format!("{path} spells {name}")))
        .collect();
    assert!(found.is_empty(), "use the constants of {TABLE}:\n{}", found.join("\n"));
}

#[test]
fn a_name_in_a_literal_is_found_and_one_in_an_example_comment_or_test_is_not() {
    for text in [r#"f("set BATON_LISTEN, please")"#, r##"f(r#"PORT"#)"##, r#"#[error("{0}: BATON_LOG")]"#] {
        assert_eq!(spelled(text).len(), 1, "{text}");
    }
    for text in [
        "// BATON_LISTEN",
        r#"f("BATON_LISTEN=x baton serve")"#,
        r#"f("BATON_LISTENS and {LISTEN} or {PORT}")"#,
        r#"#[cfg(test)] mod tests { const A: &str = "BATON_LISTEN"; }"#,
    ] {
        assert_eq!(spelled(text), [""; 0], "{text}");
    }
}
