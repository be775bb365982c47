//! `baton cp` against a scripted server: what is asked for, and what a hostile sandbox cannot do.

use std::{io::Write, path::Path};

use baton_files::tar::{Member, MemberKind, TarWriter};
use baton_protocol::{
    file_work::Work,
    frame::Stream,
    id::ExecId,
    request::{Command, Request},
};

use crate::{
    cli_exec::{names, output},
    pipes::baton,
    script::{Heard, ID, ScriptedPeer, Server, TOKEN, soon},
};

async fn work(peer: &mut ScriptedPeer) -> (ExecId, Work) {
    let Request::Exec(exec) = peer.request_but_ack().await else { panic!("no exec") };
    let Command::File(work) = exec.command else { panic!("a command") };
    (exec.exec_id.unwrap(), work)
}

/// Says no to the question what is there.
async fn nothing_there(peer: &mut ScriptedPeer, number: u32) {
    let (id, work) = work(peer).await;
    assert!(matches!(work, Work::ListFiles { depth: 0, .. }), "{work:?}");
    peer.started(&id, number).await;
    peer.output(Stream::Stderr, number, 0, b"ENOENT: No such file or directory: x\n").await;
    peer.done(&id, 1).await;
}

fn copy(server: &Server, directory: &Path, from: &str, to: &str) -> tokio::process::Child {
    let mut command = baton(&server.url());
    command.env("BATON_TOKEN", TOKEN).current_dir(directory).args(["cp", from, to]).spawn().unwrap()
}

fn member(name: &str, kind: MemberKind, content: &str) -> (Member, Vec<u8>) {
    let size = if kind == MemberKind::File { content.len() as u64 } else { 0 };
    let link = if kind == MemberKind::File { Vec::new() } else { content.into() };
    let member = Member { name: name.into(), kind, mode: 0o6755, size, mtime: (1_600_000_000, 0), link };
    (member, if kind == MemberKind::File { content.into() } else { Vec::new() })
}

fn archive(members: &[(Member, Vec<u8>)]) -> Vec<u8> {
    let mut writer = TarWriter::new(Vec::new());
    for (member, data) in members {
        writer.member(member).unwrap();
        writer.write_all(data).unwrap();
    }
    writer.finish().unwrap()
}

#[tokio::test]
async fn a_hostile_archive_writes_nothing_beside_the_target_and_says_so_on_one_line_each() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    let here = space.path().join("here");
    std::fs::create_dir(&here).unwrap();
    std::fs::write(space.path().join("precious"), "old").unwrap();
    let child = copy(&server, &here, &format!("{ID}:/out"), "copy");
    let mut peer = server.attach(vec![]).await;
    nothing_there(&mut peer, 1).await;
    while let Heard::Request(_) = peer.heard().await {}
    // Where nothing is, nothing comes from.
    let failed = output(child).await;
    assert_eq!((failed.status.code(), names(&here).len()), (Some(1), 0));

    let child = copy(&server, &here, &format!("{ID}:/out"), "copy");
    let mut peer = server.attach(vec![]).await;
    let (id, _) = work(&mut peer).await;
    peer.started(&id, 1).await;
    peer.output(Stream::Stdout, 1, 0, b"{\"name\":\"out\",\"kind\":\"directory\"}\n").await;
    peer.done(&id, 0).await;
    let (id, asked) = work(&mut peer).await;
    assert_eq!(asked, Work::ReadFile { path: "/out".into(), offset: 0, length: None, archive: true });
    peer.started(&id, 2).await;
    let absolute = space.path().join("precious").to_str().unwrap().to_owned();
    let bytes = archive(&[
        member("./", MemberKind::Directory, ""),
        member("../../precious", MemberKind::File, "mine"),
        member(&absolute, MemberKind::File, "mine"),
        member("out", MemberKind::Symlink, "../.."),
        member("out/precious", MemberKind::File, "mine"),
        member("direct", MemberKind::Symlink, &absolute),
        member("hard", MemberKind::HardLink, "../../precious"),
        member("../\x1b]0;owned\x07", MemberKind::File, ""),
        member("good", MemberKind::File, "good"),
    ]);
    peer.output(Stream::Stdout, 2, 0, &bytes).await;
    peer.output(Stream::Stderr, 2, 0, b"EIO: \x1b]0;owned\x07\n").await;
    peer.done(&id, 1).await;
    while let Heard::Request(_) = peer.heard().await {}
    let printed = output(child).await;
    let told = String::from_utf8(printed.stderr).unwrap();
    assert_eq!(printed.status.code(), Some(1), "{told}");
    assert!(!told.contains('\x1b') && !told.contains('\x07'), "{told:?}");
    assert!(told.lines().filter(|line| line.starts_with("baton: left out: ")).count() >= 5, "{told}");
    assert_eq!(std::fs::read(space.path().join("precious")).unwrap(), b"old");
    assert_eq!(names(space.path()), ["here", "precious"]);
    assert_eq!(names(&here), ["copy"]);
    // `out` was refused as a link, so the file below it made a directory of that name.
    assert_eq!(names(&here.join("copy")), ["good", "out"]);
    assert_eq!(names(&here.join("copy/out")), ["precious"]);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(here.join("copy/good")).unwrap());
    assert_eq!(mode & 0o7777, 0o755, "no file runs as another user");
}

#[tokio::test]
async fn a_file_is_sent_with_mode_time_and_size_to_where_it_belongs() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    std::fs::write(space.path().join("run.sh"), "#!/bin/sh\n").unwrap();
    for (to, is_directory, path) in
        [("/data/", true, "/data/run.sh"), ("/data", true, "/data/run.sh"), ("/data/new", false, "/data/new")]
    {
        let child = copy(&server, space.path(), "run.sh", &format!("{ID}:{to}"));
        let mut peer = server.attach(vec![]).await;
        let mut number = 1;
        if !to.ends_with('/') {
            if is_directory {
                let (id, asked) = work(&mut peer).await;
                assert_eq!(asked, Work::ListFiles { path: format!("{to}/."), depth: 0 });
                peer.started(&id, 1).await;
                peer.output(Stream::Stdout, 1, 0, b"{\"name\":\"data\",\"kind\":\"directory\"}\n").await;
                peer.done(&id, 0).await;
            } else {
                nothing_there(&mut peer, 1).await;
            }
            number = 2;
        }
        let (id, asked) = work(&mut peer).await;
        let Work::WriteFile { path: asked, mode: Some(_), mtime_ms: Some(_), size: Some(10), archive: false } = asked
        else {
            panic!("{asked:?}")
        };
        assert_eq!(asked, path);
        peer.started(&id, number).await;
        let (offset, bytes) = loop {
            match peer.heard().await {
                Heard::Binary(bytes) => break (0, bytes.slice(13..)),
                Heard::Request(Request::Ack { .. }) => {}
                Heard::Request(other) => panic!("{other:?}"),
                Heard::Gone => panic!("it left"),
            }
        };
        assert_eq!((offset, &bytes[..]), (0, &b"#!/bin/sh\n"[..]));
        peer.done(&id, 0).await;
        while let Heard::Request(_) = peer.heard().await {}
        let printed = output(child).await;
        assert_eq!((printed.status.code(), printed.stderr.len()), (Some(0), 0), "{to}");
    }
}

#[tokio::test]
async fn two_sides_here_or_two_there_are_refused_before_anything_is_asked() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    let there = format!("{ID}:/a");
    for (from, to) in [("a", "b"), (there.as_str(), there.as_str()), ("-", "-"), (&ID[..9], "x:")] {
        let printed = soon(copy(&server, space.path(), from, to).wait_with_output()).await.unwrap();
        assert_eq!(printed.status.code(), Some(1), "{from} {to}");
    }
}
