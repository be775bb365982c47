//! What is written to disk for a sandbox: snapshots, checkpoints that do not fit, and such
//! that restore on lesser machines.

use std::process::Command as Program;

use baton::runtime::{Container, Error, Lifecycle, RuntimeSettings, Shape};

use crate::{
    fixture::{Place, clock, sandbox, start},
    plain_session::{Client, command},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_holds_what_changed_and_the_sandbox_goes_on() {
    let place = Place::new().await;
    let id = sandbox();
    place.containers.create(&id, &start()).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &id);
    let exec = client.exec(command(&["bash", "-c", "echo kept > /srv/note; rm /etc/hostname"]), None).await;
    client.done(exec).await;
    let archive = place.path("layer.tar");
    let taken = place.containers.snapshot(&id, &archive, Shape::Layer).await.unwrap();
    assert_eq!(taken.base_digest, Some(place.containers.facts().rootfs_digest));
    let listed = Program::new("tar").arg("-tf").arg(&archive).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.lines().any(|line| line.ends_with("srv/note")), "{listed}");
    assert!(!listed.contains("usr/bin/python3"), "only what changed: {listed}");
    assert_eq!(place.containers.watch(&id).borrow().container, Container::Running);
    let exec = client.exec(command(&["cat", "/srv/note"]), None).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"kept\n");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_does_not_fit_is_not_begun_and_the_sandbox_goes_on() {
    let place = Place::new().await;
    let id = sandbox();
    place.containers.create(&id, &start()).await.unwrap();
    let small = tempfile::tempdir().unwrap();
    let mounted = Program::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(small.path()).status();
    assert!(mounted.unwrap().success());
    place.containers.pause(&id).await.unwrap();
    let refused = place.containers.checkpoint(&id, &small.path().join("image")).await;
    let unmounted = Program::new("umount").arg("-l").arg(small.path()).status();
    assert!(unmounted.unwrap().success());
    assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
    place.containers.resume(&id).await.unwrap();
    let used = place.path("used");
    std::fs::create_dir(&used).unwrap();
    std::fs::write(used.join("pages.img"), "of another one").unwrap();
    place.containers.pause(&id).await.unwrap();
    assert!(place.containers.checkpoint(&id, &used).await.is_err(), "a directory is never used twice");
    assert_eq!(std::fs::read(used.join("pages.img")).unwrap(), b"of another one");
    place.containers.resume(&id).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &id);
    let exec = client.exec(command(&["echo", "on"]), None).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"on\n");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_of_fewer_cpu_features_does_not_see_the_others_and_moves() {
    let all = Place::new().await.containers.facts().cpu_features;
    let fewer: Vec<_> = all.iter().filter(|feature| *feature != "rdseed").cloned().collect();
    assert!(fewer.len() < all.len(), "this machine has a feature to leave out");
    let place = Place::with(|settings| RuntimeSettings { cpu_features: Some(fewer.clone()), ..settings }).await;
    assert_eq!(place.containers.facts().cpu_features, fewer);
    let (id, start) = (sandbox(), start());
    place.containers.create(&id, &start).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &id);
    let exec = client.exec(command(&["cat", "/proc/cpuinfo"]), None).await;
    let inside = String::from_utf8(client.done(exec).await.stdout.bytes.clone()).unwrap();
    assert!(inside.contains(" sse2 ") && !inside.contains(" rdseed"), "{inside}");
    place.containers.pause(&id).await.unwrap();
    place.containers.checkpoint(&id, &place.path("image")).await.unwrap();
    place.containers.remove(&id).await.unwrap();
    place.containers.restore(&id, &start, &place.path("image")).await.unwrap();
    place.close().await;
}
