//! The pages say what is: the table of settings is the one in the code, and the names exist.

use std::{env, fs, path::PathBuf};

use baton::config;

use crate::repo_files::{read, root};

/// Read by clients, scripts and tests, not by the server.
const OUTSIDE_THE_SERVER: &[&str] = &[
    "BATON_API_KEY",
    "BATON_AUTH",
    "BATON_BENCH_ROWS",
    "BATON_BIN",
    "BATON_CONTEXT",
    "BATON_FORKED_FROM",
    "BATON_GCSFUSE",
    "BATON_HEADER",
    "BATON_SEEDS",
    "BATON_TIER",
    "BATON_ROOTFS_RECIPE",
    "BATON_TEST_ROOTFS",
    "BATON_TEST_SHAPE",
    "BATON_TEST_GCS_BUCKET",
    "BATON_TOKEN",
    "BATON_TOKENS",
    "BATON_URL",
    "BATON_WRITE_DOCS",
];

fn pages() -> Vec<PathBuf> {
    let mut found = vec![];
    for folder in ["", "docs", "docs/adr", "manifests"] {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        found.extend(
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    found
}

/// Words of capitals and underscores that look like settings.
fn settings_named(text: &str) -> Vec<&str> {
    text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
        .filter(|word| ["BATON_", "SANDBOX_METADATA_", "SANDBOX_LOCK_B"].iter().any(|start| word.starts_with(start)))
        .filter(|word| !word.ends_with('_'))
        .collect()
}

#[test]
fn the_page_of_settings_is_made_from_the_table() {
    let page = root().join("docs/configuration.md");
    if env::var_os("BATON_WRITE_DOCS").is_some() {
        fs::write(&page, config::document()).unwrap();
    }
    let written = fs::read_to_string(&page).unwrap_or_default();
    assert!(written == config::document(), "docs/configuration.md is not what the table says: run `make docs`");
}

#[test]
fn every_setting_that_a_page_or_a_script_names_exists() {
    let mut files = pages();
    files.extend(
        [
            "Makefile",
            "scripts/setup",
            "scripts/test",
            "scripts/run",
            "scripts/demo",
            "scripts/recording",
            "scripts/book",
        ]
        .map(|path| root().join(path)),
    );
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for name in settings_named(&text) {
            let known = config::find(name).is_some() || OUTSIDE_THE_SERVER.contains(&name);
            assert!(known, "{} names {name}, which nothing reads", file.display());
        }
    }
}

#[test]
fn the_readme_shows_the_way_to_the_settings() {
    assert!(read("README.md").contains("(docs/configuration.md)"));
}

#[test]
fn every_target_that_a_page_names_is_in_the_makefile() {
    let makefile = read("Makefile");
    for file in pages() {
        let text = fs::read_to_string(&file).unwrap();
        for piece in text.split("`make ").skip(1) {
            let target = piece.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next().unwrap();
            assert!(makefile.contains(&format!("\n{target}: ")), "{} names `make {target}`", file.display());
        }
    }
}

#[test]
fn a_setting_in_a_text_is_recognised() {
    let text = "set `BATON_HOLD=15s`, SANDBOX_METADATA_BUCKET, not `BATON_` or SANDBOX_RUNNING";
    assert_eq!(settings_named(text), ["BATON_HOLD", "SANDBOX_METADATA_BUCKET"]);
}
