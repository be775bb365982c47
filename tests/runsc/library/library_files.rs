//! Files and directories, in and out.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    time::{Duration, SystemTime},
};

use baton_client::{Error, FileKind, FileMode, Transfer};
use bytes::Bytes;
use serde_json::json;

use super::{Scene, bash, cuts, testbed::size, text};
use crate::transfer::bytes;

fn code<T>(failed: Result<T, Error>) -> String {
    match failed {
        Err(Error::File { code, .. }) => code,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it worked"),
    }
}

pub async fn files_go_in_and_out() {
    let scene = Scene::new().await;
    let (sandbox, here) = (&scene.sandbox, tempfile::tempdir().unwrap());
    let how = Transfer::default();
    let pieces = |parts: Vec<Result<Bytes, Error>>| futures::stream::iter(parts);
    let mode = FileMode { mode: Some(0o640), ..FileMode::default() };
    let note = vec![Ok(Bytes::from_static("é\n".as_bytes()))];
    sandbox.write_stream("/data/new/note.txt", mode, pieces(note), &how).await.unwrap();
    assert_eq!(sandbox.read_file("/data/new/note.txt").await.unwrap(), "é\n".as_bytes());
    let relative = Transfer { cwd: Some("/data/new".into()), ..Transfer::default() };
    let mut reading = sandbox.read_stream("note.txt", &relative).await.unwrap();
    assert_eq!(reading.next().await.unwrap().unwrap(), "é\n".as_bytes());
    assert_eq!(reading.next().await.unwrap(), None);
    assert_eq!(sandbox.run(bash("stat -c %a /data/new/note.txt")).await.unwrap().stdout, b"640\n");
    sandbox.write_file("/data/empty", "").await.unwrap();
    let entries = sandbox.list_files("/data", 2).await.unwrap();
    let files: Vec<_> = entries.iter().filter(|entry| entry.kind == FileKind::File).collect();
    let seen: Vec<_> = files.iter().map(|entry| (entry.name.as_str(), entry.size)).collect();
    assert_eq!(seen, [("empty", 0), ("new/note.txt", 3)]);

    let parts = ["0", "1", "2"].map(|part| Ok(Bytes::from(part))).to_vec();
    sandbox.write_stream("/data/pieces", FileMode::default(), pieces(parts), &how).await.unwrap();
    assert_eq!(sandbox.read_file("/data/pieces").await.unwrap(), b"012");
    assert_eq!(code(sandbox.read_file("/no/such").await), "ENOENT");
    assert_eq!(code(sandbox.read_file("/data").await), "EISDIR");
    code(sandbox.write_file("/data", "x").await);
    let half = vec![Ok(Bytes::from_static(b"half")), Err(Error::Ended("the disk is gone".into()))];
    let failed = sandbox.write_stream("/data/half", FileMode::default(), pieces(half), &how).await;
    assert_eq!(failed, Err(Error::Ended("the disk is gone".into())));
    assert_eq!(code(sandbox.read_file("/data/half").await), "ENOENT");

    let local = here.path().join("up");
    fs::write(&local, "up and down").unwrap();
    fs::set_permissions(&local, fs::Permissions::from_mode(0o750)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    fs::File::options().append(true).open(&local).unwrap().set_modified(then).unwrap();
    sandbox.upload(&local, "/data/up").await.unwrap();
    let down = here.path().join("deep/down");
    sandbox.download("/data/up", &down).await.unwrap();
    let about = fs::metadata(&down).unwrap();
    assert_eq!((about.mode() & 0o777, about.mtime(), about.len()), (0o750, 1_700_000_000, 11));
    scene.end().await;
}

fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        crate::transfer::look(root).into_iter().map(|(path, ..)| path.to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

pub async fn a_directory_goes_in_and_out() {
    let scene = Scene::new().await;
    let (sandbox, here) = (&scene.sandbox, tempfile::tempdir().unwrap());
    let (source, target, long) = (here.path().join("source"), here.path().join("target"), "n".repeat(120));
    fs::create_dir_all(source.join("sub")).unwrap();
    for (name, content) in [("a.txt", "a.txt"), (&format!("sub/{long}"), &long), ("sub/empty", "")] {
        fs::write(source.join(name), content).unwrap();
    }
    symlink("sub/empty", source.join("link")).unwrap();
    fs::set_permissions(source.join("a.txt"), fs::Permissions::from_mode(0o755)).unwrap();
    sandbox.upload(&source, "/in").await.unwrap();
    let look = "cd /in; find . -type f -o -type l | sort; stat -c %a a.txt; readlink link";
    let found = sandbox.run(bash(look)).await.unwrap().stdout;
    let found: Vec<_> = text(&found).split_whitespace().collect();
    assert_eq!(found, ["./a.txt", "./link", "./sub/empty", &format!("./sub/{long}"), "755", "sub/empty"]);
    sandbox.run(bash("cd /in; ln -s /etc/passwd out; mkfifo pipe; echo more > more")).await.unwrap();
    code(sandbox.download("/in", &target).await);
    // What could be trusted is there, and nothing else.
    assert_eq!(names(&target), ["a.txt", "link", "more", "sub", "sub/empty", &format!("sub/{long}")]);
    assert_eq!(fs::read_to_string(target.join("sub").join(&long)).unwrap(), long);
    assert_eq!(fs::read_link(target.join("link")).unwrap(), Path::new("sub/empty"));
    scene.end().await;
}

pub async fn files_are_exact_over_cuts() {
    let mut scene = Scene::new().await;
    let here = tempfile::tempdir().unwrap();
    let (large, count) = (size("file"), size("file_cuts"));
    let (local, back) = (here.path().join("local"), here.path().join("back"));
    fs::write(&local, bytes(large)).unwrap();
    let Scene { testbed, proxy, sandbox } = &mut scene;
    let cutting = async {
        for _ in 0..count {
            crate::fixture::clock().sleep(Duration::from_millis(150)).await;
            testbed.network(proxy, json!({"cut": true})).await;
        }
    };
    let (sent, ()) = tokio::join!(sandbox.upload(&local, "/big"), cutting);
    sent.unwrap();
    testbed.network(proxy, json!({"cuts": cuts(large, count), "cut": true})).await;
    sandbox.download("/big", &back).await.unwrap();
    let same = std::process::Command::new("cmp").arg("-s").arg(&local).arg(&back).status().unwrap();
    assert!(same.success(), "every byte is as it was");
    let (_, cut) = testbed.network(proxy, json!({})).await;
    assert!(cut + 2 >= count, "it was hardly cut: {cut}");
    scene.end().await;
}
