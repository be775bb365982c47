//! `baton snapshot` on a directory: archives go in and come out as they are, and names are given once.

use std::{path::Path, process::Command};

fn baton(data: &Path, words: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("snapshot").args(words).env_clear().env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", data).current_dir(data);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn an_archive_is_imported_listed_exported_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path();
    std::fs::write(data.join("python.tar.gz"), "some bytes").unwrap();
    let run = |words: &[&str]| baton(data, words);
    assert_eq!(run(&["import", "python.tar.gz"]), (true, "python\n".to_owned(), String::new()));
    assert_eq!(
        std::fs::read(data.join("filesystem_snapshots/python/python.tar.gz")).unwrap(),
        b"some bytes",
        "as it was"
    );
    let (again, _, why) = run(&["import", "python.tar.gz"]);
    assert!(!again && why.contains("exists already"), "{why}");
    let (_, listed, _) = run(&["list"]);
    assert!(listed.starts_with("python ") && listed.contains(" 10 archive"), "{listed}");
    assert!(run(&["export", "python", "--to", "out.tar.gz"]).0);
    assert_eq!(std::fs::read(data.join("out.tar.gz")).unwrap(), b"some bytes");
    let (over, _, why) = run(&["export", "python", "--to", "out.tar.gz"]);
    assert!(!over && why.contains("exists already"), "{why}");
    assert!(run(&["delete", "python"]).0);
    assert_eq!(run(&["list"]).1, "");
    for (words, reason) in [
        (["delete", "python"], "no snapshot named python"),
        (["export", "python"], "no finished snapshot"),
        (["import", "nothing.tar"], "cannot be imported"),
        (["import", "python.zip"], "is not a .tar"),
        (["delete", "../x"], "invalid value"),
    ] {
        let (done, _, why) = run(&words);
        assert!(!done && why.contains(reason), "{words:?}: {why}");
    }
}

#[test]
fn a_tenants_snapshot_is_named_with_its_tenant_and_a_bare_name_is_public() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path();
    for (file, bytes) in [("python.tar", "public"), ("of-a.tar", "of team-a")] {
        std::fs::write(data.join(file), bytes).unwrap();
    }
    let run = |words: &[&str]| baton(data, words);
    assert!(run(&["import", "python.tar"]).0);
    assert!(run(&["import", "of-a.tar", "--name", "python", "--tenant", "team-a"]).0);
    let stored = |name: &str| std::fs::read_to_string(data.join("filesystem_snapshots").join(name)).ok();
    assert_eq!(stored("python/python.tar").as_deref(), Some("public"));
    assert_eq!(stored("team-a~python/team-a~python.tar").as_deref(), Some("of team-a"));
    let fields = |listed: String| -> Vec<String> {
        listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(fields(run(&["list"]).1), ["python 6 archive -", "python 9 archive team-a"]);
    assert_eq!(fields(run(&["list", "--tenant", "team-a"]).1), ["python 9 archive team-a"]);
    assert_eq!(fields(run(&["list", "--tenant", "team"]).1), [""; 0]);
    std::fs::remove_file(data.join("python.tar")).unwrap();
    let (done, named, _) = run(&["export", "python", "--tenant", "team-a"]);
    assert_eq!((done, named.as_str()), (true, "python.tar\n"));
    assert_eq!(std::fs::read_to_string(data.join("python.tar")).unwrap(), "of team-a");
    let (done, _, why) = run(&["delete", "python", "--tenant", "team-b"]);
    assert!(!done && why.contains("there is no snapshot named python of the tenant team-b"), "{why}");
    assert!(run(&["delete", "python", "--tenant", "team-a"]).0);
    assert_eq!(fields(run(&["list"]).1), ["python 6 archive -"]);
    for words in [&["list", "--tenant", "Team"][..], &["list", "--tenant", "../x"], &["delete", "team-a~python"]] {
        let (done, _, why) = run(words);
        assert!(!done && why.contains("invalid value"), "{words:?}: {why}");
    }
}
