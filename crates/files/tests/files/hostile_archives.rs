//! Archives of a stranger, who wants to write somewhere else.

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

use baton_files::{Trust, tar::MemberKind};

use crate::tree_fixture::{archive, look, member, unpack};

/// A place to unpack in, with something outside that must stay as it is.
struct Scene {
    space: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let space = tempfile::tempdir().unwrap();
        fs::create_dir(space.path().join("outside")).unwrap();
        fs::write(space.path().join("outside/passwd"), "root").unwrap();
        fs::create_dir(space.path().join("target")).unwrap();
        Self { space }
    }

    fn target(&self) -> std::path::PathBuf {
        self.space.path().join("target")
    }

    fn outside(&self) -> String {
        self.space.path().join("outside").to_str().unwrap().to_owned()
    }

    /// Nothing but what was there before is outside.
    fn is_untouched(&self) -> bool {
        let found: Vec<String> =
            look(self.space.path()).into_keys().filter(|name| !name.starts_with("target")).collect();
        let passwd = self.space.path().join("outside/passwd");
        found == ["outside", "outside/passwd"]
            && fs::read(&passwd).unwrap() == b"root"
            && fs::metadata(&passwd).unwrap().nlink() == 1
    }
}

#[test]
fn names_that_lead_out_are_left_out_and_the_rest_is_unpacked() {
    let scene = Scene::new();
    let absolute = format!("{}/passwd", scene.outside());
    let bytes = archive(&[
        member("../outside/passwd", MemberKind::File, "mine"),
        member(&absolute, MemberKind::File, "mine"),
        member("a/../../outside/new", MemberKind::File, "mine"),
        member("..", MemberKind::Directory, ""),
        member("../outside/sub", MemberKind::Directory, ""),
        member("a/../../outside/link", MemberKind::Symlink, "x"),
        member("good", MemberKind::File, "good"),
    ]);
    for trust in [Trust::Stranger, Trust::Known] {
        let (done, faults) = unpack(&bytes, &scene.target(), trust);
        assert_eq!((done.unwrap().faults, faults.len()), (6, 6));
        assert!(scene.is_untouched());
        assert_eq!(look(&scene.target()).into_keys().collect::<Vec<_>>(), ["good"]);
    }
}

#[test]
fn a_link_is_never_followed_also_not_one_that_was_there_before() {
    for trust in [Trust::Stranger, Trust::Known] {
        let scene = Scene::new();
        symlink(scene.outside(), scene.target().join("before")).unwrap();
        let bytes = archive(&[
            member("evil", MemberKind::Symlink, &scene.outside()),
            member("evil/passwd", MemberKind::File, "mine"),
            member("evil/sub/", MemberKind::Directory, ""),
            member("before/passwd", MemberKind::File, "mine"),
            member("before/", MemberKind::Directory, ""),
            member("up", MemberKind::Symlink, ".."),
            member("up/outside/passwd", MemberKind::File, "mine"),
            member("file", MemberKind::Symlink, &format!("{}/passwd", scene.outside())),
            member("file", MemberKind::File, "mine"),
        ]);
        unpack(&bytes, &scene.target(), trust).0.unwrap();
        assert!(scene.is_untouched(), "{trust:?}");
        assert!(fs::symlink_metadata(scene.target().join("file")).unwrap().is_file());
        assert!(fs::symlink_metadata(scene.target().join("before")).unwrap().is_symlink());
    }
}

#[test]
fn of_a_stranger_no_link_leads_out_however_it_is_dressed() {
    let scene = Scene::new();
    let bytes = archive(&[
        member("absolute", MemberKind::Symlink, "/etc/passwd"),
        member("up", MemberKind::Symlink, "../outside"),
        member("dot", MemberKind::Symlink, "."),
        // Through `dot` this would be above.
        member("dressed", MemberKind::Symlink, "dot/../outside"),
        member("a/b/deep", MemberKind::Symlink, "../../dot"),
        member("a/b/deeper", MemberKind::Symlink, "../../../outside"),
        // A link that is fine where it is, under another name higher up.
        member("a/b/fine", MemberKind::Symlink, "../../good"),
        member("moved", MemberKind::HardLink, "a/b/fine"),
        member("good", MemberKind::File, "good"),
    ]);
    let (done, faults) = unpack(&bytes, &scene.target(), Trust::Stranger);
    assert_eq!((done.unwrap().faults, faults.len()), (5, 5), "{faults:?}");
    assert!(scene.is_untouched());
    let top = fs::canonicalize(scene.target()).unwrap();
    let links: Vec<String> =
        look(&scene.target()).into_iter().filter(|(_, thing)| thing.kind == "link").map(|(name, _)| name).collect();
    assert_eq!(links, ["a/b/deep", "a/b/fine", "dot"]);
    for link in links {
        assert!(fs::canonicalize(scene.target().join(link)).unwrap().starts_with(&top));
    }
}

#[test]
fn a_hard_link_is_only_to_a_file_inside() {
    let scene = Scene::new();
    symlink(scene.outside(), scene.target().join("before")).unwrap();
    let bytes = archive(&[
        member("one", MemberKind::HardLink, &format!("{}/passwd", scene.outside())),
        member("two", MemberKind::HardLink, "../outside/passwd"),
        member("three", MemberKind::HardLink, "before/passwd"),
        member("four", MemberKind::HardLink, "before"),
        member("five", MemberKind::HardLink, ""),
    ]);
    for trust in [Trust::Stranger, Trust::Known] {
        let (done, _) = unpack(&bytes, &scene.target(), trust);
        assert_eq!(done.unwrap().faults, 5);
        assert!(scene.is_untouched());
    }
}

#[test]
fn of_a_stranger_no_file_runs_as_another_user() {
    let scene = Scene::new();
    let (mut tool, data) = member("tool", MemberKind::File, "x");
    tool.mode = 0o6755;
    let (mut place, none) = member("place/", MemberKind::Directory, "");
    place.mode = 0o7777;
    let bytes = archive(&[(tool, data), (place, none)]);
    unpack(&bytes, &scene.target(), Trust::Stranger).0.unwrap();
    let mode = |name: &str| fs::metadata(scene.target().join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("tool"), mode("place")), (0o755, 0o777));
}

#[test]
fn a_directory_does_not_become_a_file_nor_a_file_a_directory() {
    let scene = Scene::new();
    let bytes = archive(&[
        member("a/b", MemberKind::File, "1"),
        member("a", MemberKind::File, "2"),
        member("a", MemberKind::Symlink, "x"),
        member("a/b/c", MemberKind::File, "3"),
        member("a/b", MemberKind::Directory, ""),
        member("z", MemberKind::File, "z"),
    ]);
    let (done, faults) = unpack(&bytes, &scene.target(), Trust::Stranger);
    assert_eq!(done.unwrap().faults, 4, "{faults:?}");
    let names: Vec<String> = look(&scene.target()).into_keys().collect();
    assert_eq!(names, ["a", "a/b", "z"], "nothing is left behind");
}

#[test]
fn what_is_no_archive_or_only_half_of_one_is_an_error() {
    let scene = Scene::new();
    let whole = archive(&[member("a", MemberKind::File, &"x".repeat(2000)), member("b", MemberKind::File, "b")]);
    for bytes in [&b"hello"[..], &[b'x'; 2048][..], &whole[..700], &whole[..3000]] {
        let (done, _) = unpack(bytes, &scene.target(), Trust::Stranger);
        assert_eq!(done.unwrap_err().code, "EINVAL");
    }
    assert!(look(&scene.target()).into_keys().all(|name| name == "a"), "no half file has a name");
    assert!(unpack(b"", Path::new(&scene.target()), Trust::Stranger).0.is_ok(), "nothing is an empty archive");
}
