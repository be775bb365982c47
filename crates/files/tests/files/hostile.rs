//! Archives of a stranger, who wants to write somewhere else.

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

use baton_files::{Trust, tar::Kind};

use crate::tree::{archive, look, member, unpack};

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
        member("../outside/passwd", Kind::File, "mine"),
        member(&absolute, Kind::File, "mine"),
        member("a/../../outside/new", Kind::File, "mine"),
        member("..", Kind::Directory, ""),
        member("../outside/sub", Kind::Directory, ""),
        member("a/../../outside/link", Kind::Symlink, "x"),
        member("good", Kind::File, "good"),
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
            member("evil", Kind::Symlink, &scene.outside()),
            member("evil/passwd", Kind::File, "mine"),
            member("evil/sub/", Kind::Directory, ""),
            member("before/passwd", Kind::File, "mine"),
            member("before/", Kind::Directory, ""),
            member("up", Kind::Symlink, ".."),
            member("up/outside/passwd", Kind::File, "mine"),
            member("file", Kind::Symlink, &format!("{}/passwd", scene.outside())),
            member("file", Kind::File, "mine"),
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
        member("absolute", Kind::Symlink, "/etc/passwd"),
        member("up", Kind::Symlink, "../outside"),
        member("dot", Kind::Symlink, "."),
        // Through `dot` this would be above.
        member("dressed", Kind::Symlink, "dot/../outside"),
        member("a/b/deep", Kind::Symlink, "../../dot"),
        member("a/b/deeper", Kind::Symlink, "../../../outside"),
        // A link that is fine where it is, under another name higher up.
        member("a/b/fine", Kind::Symlink, "../../good"),
        member("moved", Kind::HardLink, "a/b/fine"),
        member("good", Kind::File, "good"),
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
        member("one", Kind::HardLink, &format!("{}/passwd", scene.outside())),
        member("two", Kind::HardLink, "../outside/passwd"),
        member("three", Kind::HardLink, "before/passwd"),
        member("four", Kind::HardLink, "before"),
        member("five", Kind::HardLink, ""),
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
    let (mut tool, data) = member("tool", Kind::File, "x");
    tool.mode = 0o6755;
    let (mut place, none) = member("place/", Kind::Directory, "");
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
        member("a/b", Kind::File, "1"),
        member("a", Kind::File, "2"),
        member("a", Kind::Symlink, "x"),
        member("a/b/c", Kind::File, "3"),
        member("a/b", Kind::Directory, ""),
        member("z", Kind::File, "z"),
    ]);
    let (done, faults) = unpack(&bytes, &scene.target(), Trust::Stranger);
    assert_eq!(done.unwrap().faults, 4, "{faults:?}");
    let names: Vec<String> = look(&scene.target()).into_keys().collect();
    assert_eq!(names, ["a", "a/b", "z"], "nothing is left behind");
}

#[test]
fn what_is_no_archive_or_only_half_of_one_is_an_error() {
    let scene = Scene::new();
    let whole = archive(&[member("a", Kind::File, &"x".repeat(2000)), member("b", Kind::File, "b")]);
    for bytes in [&b"hello"[..], &[b'x'; 2048][..], &whole[..700], &whole[..3000]] {
        let (done, _) = unpack(bytes, &scene.target(), Trust::Stranger);
        assert_eq!(done.unwrap_err().code, "EINVAL");
    }
    assert!(look(&scene.target()).into_keys().all(|name| name == "a"), "no half file has a name");
    assert!(unpack(b"", Path::new(&scene.target()), Trust::Stranger).0.is_ok(), "nothing is an empty archive");
}
