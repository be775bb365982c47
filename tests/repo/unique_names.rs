//! Types and files can be found by name alone: a public type name occurs once in the workspace, and so does a file name.

use std::collections::BTreeMap;

use crate::{
    repo_files::{read, rust_files},
    rust_source,
};

/// Each module has its own error and the alias that goes with it.
const ONE_PER_MODULE: [&str; 2] = ["Error", "Result"];
/// Two builds of one type: with and without the feature `otel`.
const ALTERNATIVES: [&str; 2] = ["Exporter", "Started"];
/// Names that cargo and rustc prescribe, and the tests of a module beside it.
const EVERYWHERE: [&str; 4] = ["lib.rs", "main.rs", "mod.rs", "tests.rs"];

/// By name, where it occurs.
type Places = BTreeMap<String, Vec<String>>;

/// The names of the types that `code` declares `pub` or `pub(…)`.
fn public_types(code: &[String]) -> Vec<&str> {
    let mut found = Vec::new();
    for at in (0..code.len()).filter(|at| code[*at] == "pub") {
        let mut rest = &code[at + 1..];
        if rest.first().is_some_and(|token| token == "(") {
            let end = rest.iter().position(|token| token == ")").map_or(rest.len(), |end| end + 1);
            rest = &rest[end..];
        }
        if let [kind, name, ..] = rest
            && ["struct", "enum", "trait", "type", "union"].contains(&kind.as_str())
            // The name is a macro's argument.
            && name != "$"
        {
            found.push(name.as_str());
        }
    }
    found
}

fn types() -> Places {
    let mut places = Places::new();
    for path in ["src", "crates"].into_iter().flat_map(rust_files) {
        for name in public_types(&rust_source::code(&read(&path))) {
            places.entry(name.to_owned()).or_default().push(path.clone());
        }
    }
    places
}

fn files() -> Places {
    let mut places = Places::new();
    // fuzz/fuzz_targets is left out: its files have the names of the targets.
    for path in ["src", "crates", "tests", "benches", "examples", "fuzz/src"].into_iter().flat_map(rust_files) {
        let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
        places.entry(name).or_default().push(path);
    }
    places
}

/// What breaks the rule, in sentences.
fn violations(places: &Places, excepted: &[&str]) -> Vec<String> {
    let repeated = places.iter().filter(|(name, at)| at.len() > 1 && !excepted.contains(&name.as_str()));
    repeated.map(|(name, at)| format!("{name} occurs {} times: {}", at.len(), at.join(", "))).collect()
}

#[test]
fn a_public_type_name_occurs_once_in_the_workspace() {
    let found = violations(&types(), &[ONE_PER_MODULE, ALTERNATIVES].concat());
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_file_name_occurs_once_in_the_workspace() {
    let found = violations(&files(), &EVERYWHERE);
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn public_types_are_found_however_they_are_declared() {
    let text = r#"
        pub struct One<T>(T);
        pub(crate) enum Two {}
        pub(in crate::api) trait Three { type Item; }
        pub type Four = u8;
        struct Private;
        pub fn function() { let text = "pub struct Quoted;"; }
        macro_rules! name { ($type:ident) => { pub struct $type; pub enum Five {} } }
        #[cfg(test)]
        mod tests { pub struct OfATest; }
    "#;
    assert_eq!(public_types(&rust_source::code(text)), ["One", "Two", "Three", "Four", "Five"]);
}

#[test]
fn a_repeated_name_is_reported() {
    let at = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    let places = Places::from([
        ("Error".to_owned(), at(&["a.rs", "b.rs"])),
        ("Link".to_owned(), at(&["a.rs", "b.rs"])),
        ("Once".to_owned(), at(&["a.rs"])),
    ]);
    assert_eq!(violations(&places, &["Error"]), ["Link occurs 2 times: a.rs, b.rs"]);
}
