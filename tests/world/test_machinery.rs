//! The server links no test machinery. A build of the package `baton` alone is the product, a build of the whole
//! workspace is a development build; `cargo tree` says what each consists of.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

struct Package {
    name: String,
    features: Vec<String>,
}

/// What cargo links into a build of these packages, test targets aside.
fn linked(selection: &[&str]) -> Vec<Package> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--offline", "--edges=normal", "--prefix=none", "--format={p}|{f}"]);
    cargo.args(selection).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines = lines.lines().filter_map(|line| line.trim_end_matches(" (*)").split_once('|'));
    lines
        .map(|(package, features)| Package {
            name: package.split(' ').next().unwrap().to_owned(),
            features: features.split(',').map(str::to_owned).collect(),
        })
        .collect()
}

fn has_feature(packages: &[Package], name: &str, feature: &str) -> bool {
    let mut found = packages.iter().filter(|package| package.name == name).peekable();
    assert!(found.peek().is_some(), "{name} is not linked");
    found.any(|package| package.features.iter().any(|is| is == feature))
}

#[test]
fn the_server_links_no_test_machinery() {
    let linked = linked(&["--package=baton"]);
    for name in ["baton-fake-gcs", "baton-testkit"] {
        assert!(!linked.iter().any(|package| package.name == name), "the server links {name}");
    }
    assert!(!has_feature(&linked, "tokio", "test-util"), "the server links tokio with `test-util`");
    assert!(has_feature(&linked, "baton", "otel"));
}

#[test]
fn a_build_of_the_workspace_has_the_commands_for_development() {
    assert!(has_feature(&linked(&["--workspace"]), "baton", "dev"));
}

/// With `--workspace` the features of the test machinery would be part of them.
#[test]
fn what_is_shipped_is_a_build_of_the_package_alone() {
    let mut count = 0;
    for file in ["Makefile", "Dockerfile", "scripts/image-tree"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        for line in text.lines().filter(|line| line.contains("cargo build")) {
            assert!(line.ends_with(" --bin baton") || line.ends_with(" --bin baton)"), "{file}: {line}");
            assert!(!line.contains("--workspace") && !line.contains("--features"), "{file}: {line}");
            count += 1;
        }
    }
    assert_eq!(count, 3, "not every build was found");
}
