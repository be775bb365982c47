//! What `make run` and `manifests/local` start servers with, run in a tree of their own beside stand-ins for what they
//! would build and start; and which root file systems there are to choose from.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use baton::config::{Config, Flags};
use baton_protocol::limits::Bounds;
use tempfile::TempDir;

use crate::repo_files::{read, root};

/// Writes down how it was started, once per start.
const SERVER: &str = "#!/bin/bash\nenv >\"$PLACE/started-$1-$$\"\n";
const NOTHING: &str = "#!/bin/bash\n";

/// A tree with these programs.
fn tree(programs: &[(&str, &str)]) -> TempDir {
    let place = tempfile::tempdir().unwrap();
    for (path, text) in programs {
        let path = place.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    place
}

/// The environments in which a script started servers, with these variables set before.
fn started(script: &str, set: &[(&str, &str)]) -> Vec<BTreeMap<String, String>> {
    let text = read(script);
    let programs =
        [(script, &text[..]), ("scripts/setup", NOTHING), ("bin/cargo", NOTHING), ("target/debug/baton", SERVER)];
    let place = tree(&programs);
    let mut run = Command::new(place.path().join(script));
    run.env_clear().envs(set.iter().copied()).env("PLACE", place.path()).env("HOME", place.path());
    run.env("PATH", format!("{}:/usr/bin:/bin", place.path().join("bin").display()));
    run.env("CARGO_TARGET_DIR", place.path().join("target")).stdin(Stdio::null());
    let done = run.output().unwrap();
    assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
    let files = fs::read_dir(place.path()).unwrap().flatten();
    let is_server =
        |name: &str| ["started-serve-", "started-api-", "started-reconciler-"].iter().any(|is| name.starts_with(is));
    let servers = files.filter(|file| is_server(&file.file_name().to_string_lossy()));
    let environment = |text: String| {
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    servers.map(|file| environment(fs::read_to_string(file.path()).unwrap())).collect()
}

fn limits(environment: &BTreeMap<String, String>) -> Bounds {
    Config::read(&Flags::new(), |name| environment.get(name).cloned()).unwrap().limits
}

fn is_limited(bounds: &Bounds) -> bool {
    [&bounds.default, &bounds.ceiling].iter().all(|limits| {
        limits.memory.is_some() && limits.disk.is_some() && limits.pids.is_some() && limits.files.is_some()
    })
}

#[test]
fn make_install_puts_the_optimised_program_on_the_path() {
    let makefile = read("Makefile");
    let place = tree(&[
        ("Makefile", &makefile),
        ("bin/cargo", NOTHING),
        ("target/release/baton", "#!/bin/bash\necho installed\n"),
    ]);
    let path = |name: &str| place.path().join(name).display().to_string();
    for (prefix, below) in [(None, "usr/local"), (Some("PREFIX=/opt/baton"), "opt/baton")] {
        let mut make = Command::new("make");
        make.arg("install").args(prefix).arg(format!("DESTDIR={}", path("root"))).current_dir(place.path());
        make.env_clear().env("PATH", format!("{}:/usr/bin:/bin", path("bin"))).env("HOME", place.path());
        let made = make.env("CARGO_TARGET_DIR", path("target")).stdin(Stdio::null()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let installed = Command::new(path(&format!("root/{below}/bin/baton"))).output().unwrap();
        assert_eq!(installed.stdout, b"installed\n");
    }
}

#[test]
fn make_run_limits_what_a_sandbox_may_have_unless_told_otherwise() {
    let started = |set: &[(&str, &str)]| {
        let servers = started("scripts/run", set);
        assert_eq!(servers.len(), 1);
        limits(&servers[0])
    };
    assert!(is_limited(&started(&[])));
    assert_eq!(started(&[("BATON_LIMITS", "pids=64")]), Bounds::parse("pids=64").unwrap());
    assert_eq!(started(&[("BATON_LIMITS", "")]), Bounds::default(), "who wants none has none");
}

#[test]
fn servers_on_one_machine_have_limits_and_one_key_to_sign_with() {
    let servers = started("manifests/local", &[]);
    assert_eq!(servers.len(), 2);
    let key = |server: &BTreeMap<String, String>| {
        let keys = Config::read(&Flags::new(), |name| server.get(name).cloned()).unwrap().hmac_keys;
        assert_eq!(keys.len(), 1, "one key of a good length");
        keys[0].clone()
    };
    assert!(servers.iter().all(|server| is_limited(&limits(server))));
    assert_eq!(key(&servers[0]), key(&servers[1]), "each starts from what the other has stored");
}

/// How a script of this tree ended, and what it wrote to stdout and stderr.
fn ended(script: &str, words: &[&str]) -> (bool, String, String) {
    let done = Command::new(root().join(script)).args(words).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (done.status.success(), text(done.stdout), text(done.stderr))
}

#[test]
fn every_root_file_system_has_a_recipe_of_its_own_and_no_other_is_made() {
    const MAKE: &str = "scripts/rootfs/make";
    let digests: BTreeSet<_> = ["minimal", "base", "data"]
        .map(|recipe| {
            let (is_good, digest, complaint) = ended(MAKE, &["--digest", recipe]);
            assert!(is_good && digest.trim().len() == 64, "{recipe}: {digest}{complaint}");
            digest
        })
        .into();
    assert_eq!(digests.len(), 3);
    for (script, words) in [(MAKE, ["--digest", "large"]), ("scripts/setup", ["--rootfs", "large"])] {
        let (is_good, _, complaint) = ended(script, &words);
        assert!(!is_good && complaint.contains("minimal, base and data"), "{script}: {complaint}");
    }
}

#[test]
fn every_wheel_of_the_root_file_system_for_data_is_pinned_by_its_digest() {
    let list = read("scripts/rootfs/data.txt");
    let wheels: Vec<_> = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    for wheel in &wheels {
        let (named, digest) = wheel.split_once(" --hash=sha256:").unwrap_or_else(|| panic!("{wheel} has no digest"));
        assert!(named.contains("==") && digest.len() == 64, "{wheel}");
    }
    let names: Vec<_> = wheels.iter().map(|wheel| wheel.split("==").next().unwrap()).collect();
    for name in ["numpy", "pandas", "matplotlib", "scipy", "scikit-learn", "pillow", "requests", "ipython"] {
        assert!(names.contains(&name), "{name} is missing");
    }
}
