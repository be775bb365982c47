//! Checkpoints, handoffs and the other ways to leave, as sessions tell them.

use std::time::Duration;

use baton::bus::{DOWNLOAD, EXTRACT, LeaveReason, LifecycleEvent, SNAPSHOT, UPLOAD};
use baton_protocol::{
    event::Progress,
    lock::Claim,
    metadata::{Answer, CompletedRequest, DesiredState},
    reason::Reason,
};

use crate::{
    test_server::{World, checkpoint_id, until},
    wire_client::{Client, V1},
};

const PERSISTENT: &str = r#"{"enable_checkpoint":true}"#;
const MOBILE: &str = r#"{"enable_checkpoint":true,"enable_sandbox_handoff":true}"#;

#[tokio::test]
async fn locks_are_talked_of_with_handoff() {
    let world = World::with_storage().await;
    let mut client = Client::create(&world).await;
    client.says(MOBILE).await;
    client.hears("CREATING LOCK_ACQUIRING LOCK_ACQUIRED sandbox_id RUNNING").await;
    client.says(r#"{"action":"kill_sandbox"}"#).await;
    client.hears("KILLING DELETING LOCK_RELEASING LOCK_RELEASED DELETED KILLED close:1000").await;
}

#[tokio::test]
async fn a_checkpoint_ends_the_session_and_an_attach_brings_it_back() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, PERSISTENT).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINTED").await;
    assert_eq!(client.last.as_ref().unwrap().checkpoint_id, Some(checkpoint_id(client.id())));
    client.hears("close:1000").await;
    let mut again = client.again(&world, &[]).await;
    again.hears("RESTORING RUNNING").await;
    again.says(r#"{"action":"checkpoint"}"#).await;
    again.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
}

#[tokio::test]
async fn a_checkpoint_during_a_command_is_refused_unless_live() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, PERSISTENT).await;
    client.exec("cat").await;
    client.hears("EXECUTION_RUNNING").await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING EXECUTION_IN_PROGRESS_ERROR").await;
    assert_eq!(client.message(), "Cannot checkpoint while an execution is in progress.");
    client.hears("E").await;
    client.says(r#"{"event":"stdin","data":"on"}"#).await;
    client.hears("out:on").await;
    client.says(r#"{"action":"checkpoint","live":true}"#).await;
    client.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
    let mut again = client.again(&world, &[]).await;
    again.says(r#"{"action":"reconnect"}"#).await;
    again.hears("RESTORING RUNNING EXECUTION_RUNNING").await;
    again.says(r#"{"event":"stdin","data":" and on","eof":true}"#).await;
    assert!(again.stdout().await.ends_with(" and on"));
}

#[tokio::test]
async fn a_failed_checkpoint_leaves_it_running() {
    let world = World::with_storage().await;
    world.set(|script| script.checkpoint_fails = true);
    let mut client = Client::running(&world, PERSISTENT).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINT_ERROR E close:4000").await;
    assert_eq!(client.message(), "There is no space left.");
    let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
    assert_eq!(spec.desired_state, DesiredState::Running);
    let mut again = client.again(&world, &[]).await;
    again.hears("RUNNING").await;
    // Somebody else's wish that fails is told once, and the session stays.
    for _ in 0..3 {
        world.bus.post(again.id(), LifecycleEvent::Checkpointing { why: LeaveReason::Waiter });
        let (reason, message) = (Reason::NoSpace, "no".into());
        world.bus.post(again.id(), LifecycleEvent::CheckpointFailed { why: LeaveReason::Waiter, reason, message });
    }
    again.hears("CHECKPOINTING CHECKPOINT_ERROR E").await;
    again.exec("out \"on\"").await;
    again.hears("EXECUTION_RUNNING out:on EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_sandbox_made_without_cannot_be_checkpointed() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, "{}").await;
    client.says(r#"{"action":"handoff"}"#).await;
    client.hears("ERROR E").await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINT_ERROR E close:4000").await;
    let mut again = client.again(&world, &[]).await;
    again.hears("RUNNING").await;
}

#[tokio::test]
async fn while_it_leaves_nothing_is_taken_and_a_newcomer_gets_it_back() {
    let world = World::with_storage().await;
    world.set(|script| script.checkpoint_waits = true);
    let mut client = Client::running(&world, PERSISTENT).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING").await;
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_ERROR E").await;
    let mut again = client.again(&world, &[]).await;
    client.cut();
    // The double holds the link open while it checkpoints; the newcomer waits on the same socket.
    again.exec("out \"later\"").await;
    let desired = async || world.records.find(again.id()).await.unwrap().unwrap().spec.desired_state;
    until(async || desired().await == DesiredState::Running).await;
    world.set(|script| script.checkpoint_waits = false);
    let mut words = vec![again.word().await];
    while words.last().unwrap() != "EXECUTION_DONE" {
        words.push(again.word().await);
    }
    // Either the begun action ended first, or the sandbox answered before it began.
    let restored = ["RESTORING", "RUNNING", "EXECUTION_RUNNING", "out:later", "EXECUTION_DONE"];
    assert!(words == restored || words == restored[1..], "{words:?}");
}

#[tokio::test]
async fn a_deletion_overtakes_a_checkpoint() {
    let world = World::with_storage().await;
    world.set(|script| script.checkpoint_waits = true);
    let mut client = Client::running(&world, PERSISTENT).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING").await;
    client.says(r#"{"action":"kill_sandbox"}"#).await;
    client.hears("KILLING").await;
    world.leave(client.id(), LeaveReason::Deleted, false);
    client.hears("DELETING DELETED KILLED close:1000").await;
}

#[tokio::test]
async fn a_client_that_hands_off_is_left_to_follow() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, MOBILE).await;
    client.says(r#"{"action":"handoff"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINTED close:1012").await;
    let mut client = Client::running(&world, MOBILE).await;
    world.bus.post(client.id(), LifecycleEvent::ReleaseRequested { by: world.instance.clone(), claim: Claim::Preempt });
    world.bus.post(client.id(), LifecycleEvent::Checkpointing { why: LeaveReason::Waiter });
    world.leave(client.id(), LeaveReason::Waiter, true);
    client.hears("LOCK_RELEASE_REQUESTED CHECKPOINTING DELETING LOCK_RELEASING LOCK_RELEASED DELETED").await;
    client.hears("CHECKPOINTED close:1000").await;
}

#[tokio::test]
async fn a_pause_and_a_lost_lease_are_named_in_v1_alone() {
    let world = World::with_storage().await;
    let mut plain = Client::running(&world, MOBILE).await;
    let mut v1 = Client::running_v1(&world, MOBILE).await;
    for client in [&plain, &v1] {
        world.bus.post(client.id(), LifecycleEvent::Fenced { message: "Storage does not answer.".into() });
        world.bus.post(client.id(), LifecycleEvent::Unfenced);
        world.bus.post(client.id(), LifecycleEvent::LeaseLost { message: "Another server took it.".into() });
    }
    plain.hears("close:1012").await;
    v1.hears("PAUSED RUNNING LOCK_RENEWAL_ERROR E close:1012").await;
}

#[tokio::test]
async fn an_attach_that_cannot_be_served_says_so() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, MOBILE).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    while client.word().await != "close:1000" {}
    world.set(|script| script.start_fails = Some("The checkpoint is damaged."));
    let mut again = client.again(&world, &[]).await;
    again.hears("RESTORING LOCK_ACQUIRING LOCK_ACQUIRED RESTORE_ERROR E close:4000").await;
    world.set(|script| script.start_waits = true);
    let mut again = client.again(&world, &V1).await;
    again.hears("hello RESTORING").await;
    world.bus.post(client.id(), LifecycleEvent::Acquiring);
    again.hears("LOCK_ACQUIRING").await;
    world.clock.skip(Duration::from_secs(60));
    // The client answers the ping that became due, and stays.
    let mut waiting = Box::pin(again.word());
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut waiting).await.is_err());
    world.clock.skip(Duration::from_secs(61));
    assert_eq!(waiting.await, "RESTORE_ERROR");
    again.hears("E close:4000").await;
}

#[tokio::test]
async fn requests_are_answered_under_their_nonce() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, PERSISTENT).await;
    client.says(r#"{"action":"snapshot_filesystem","name":"../x"}"#).await;
    client.hears("FILESYSTEM_SNAPSHOT_CREATING FILESYSTEM_SNAPSHOT_ERROR E").await;
    for (message, begun, answer, words) in [
        (
            r#"{"action":"snapshot_filesystem","name":"a"}"#,
            "FILESYSTEM_SNAPSHOT_CREATING",
            true,
            "FILESYSTEM_SNAPSHOT_CREATED",
        ),
        (
            r#"{"action":"snapshot_filesystem","name":"a"}"#,
            "FILESYSTEM_SNAPSHOT_CREATING",
            false,
            "FILESYSTEM_SNAPSHOT_ERROR E",
        ),
        (r#"{"action":"checkpoint","keep_running":true}"#, "CHECKPOINTING", true, "CHECKPOINTED"),
        (r#"{"action":"checkpoint","keep_running":true}"#, "CHECKPOINTING", false, "CHECKPOINT_ERROR E"),
    ] {
        client.says(message).await;
        client.hears(begun).await;
        let spec = async || world.records.find(client.id()).await.unwrap().unwrap().spec;
        until(async || !spec().await.requests.is_empty()).await;
        let nonce = spec().await.requests.keys().next().unwrap().clone();
        let reply = if answer {
            Answer::Ok(CompletedRequest {
                checkpoint_id: Some(checkpoint_id(client.id())),
                ..CompletedRequest::default()
            })
        } else {
            Answer::Error { reason: "NoSpace".into(), message: "no".into() }
        };
        let told = |status: &mut baton_protocol::metadata::SandboxStatus,
                    _: &mut baton_protocol::metadata::Committed| {
            status.answers.insert(nonce.clone(), reply.clone());
        };
        world.records.report(client.id(), 1, &told).await.unwrap();
        client.hears(words).await;
        let spec = async || world.records.find(client.id()).await.unwrap().unwrap().spec;
        until(async || spec().await.requests.is_empty()).await;
    }
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.says(r#"{"action":"snapshot_filesystem","name":"a"}"#).await;
    client.hears("FILESYSTEM_SNAPSHOT_CREATING FILESYSTEM_SNAPSHOT_ERROR").await;
    assert_eq!(client.message(), "Filesystem snapshot is not enabled on the server.");
}

#[tokio::test]
async fn how_far_long_work_is_reaches_v1_clients_alone() {
    let world = World::with_storage().await;
    let moved = |what: &str| LifecycleEvent::Progress { what: what.to_owned(), done: 3, total: 8 };
    let all = [SNAPSHOT, UPLOAD, DOWNLOAD, EXTRACT].map(moved);
    let is_told = |client: &Client| client.last.as_ref().unwrap().progress == Some(Progress { done: 3, total: 8 });
    for is_v1 in [true, false] {
        let mut client = match is_v1 {
            true => Client::running_v1(&world, PERSISTENT).await,
            false => Client::running(&world, PERSISTENT).await,
        };
        let id = client.id().clone();
        let post = || all.iter().for_each(|passing| world.bus.post(&id, passing.clone()));
        // Nobody here has asked for anything.
        let mut shown = world.front_board.follow(&id);
        post();
        for _ in &all {
            shown.next().await;
        }
        client.says(r#"{"action":"snapshot_filesystem","name":"a"}"#).await;
        client.hears("FILESYSTEM_SNAPSHOT_CREATING").await;
        assert!(!is_told(&client));
        until(async || !world.records.find(&id).await.unwrap().unwrap().spec.requests.is_empty()).await;
        post();
        if is_v1 {
            client.hears("FILESYSTEM_SNAPSHOT_CREATING").await;
            assert!(is_told(&client));
        }
        if is_v1 {
            // A fork begins without a word.
            client.says(r#"{"action":"fork","count":1}"#).await;
            let wishes = async || world.records.find(&id).await.unwrap().unwrap().spec.requests.len();
            until(async || wishes().await == 2).await;
            post();
            client.hears("FILESYSTEM_SNAPSHOT_CREATING CHECKPOINTING").await;
            assert!(is_told(&client));
        }
        world.set(|script| script.checkpoint_waits = true);
        client.says(r#"{"action":"checkpoint"}"#).await;
        client.hears("CHECKPOINTING").await;
        post();
        if is_v1 {
            // The snapshot is not made yet either.
            client.hears("FILESYSTEM_SNAPSHOT_CREATING CHECKPOINTING").await;
            assert!(is_told(&client));
        }
        world.set(|script| script.checkpoint_waits = false);
        let steps = if is_v1 { "DELETING LOCK_RELEASING LOCK_RELEASED DELETED " } else { "" };
        client.hears(&format!("{steps}CHECKPOINTED close:1000")).await;
        world.set(|script| script.start_waits = true);
        let mut again = client.again(&world, if is_v1 { &V1 } else { &[] }).await;
        again.hears(if is_v1 { "hello RESTORING" } else { "RESTORING" }).await;
        // Before that nobody follows.
        until(async || world.bus.presence(&id).attached).await;
        post();
        if is_v1 {
            again.hears("RESTORING RESTORING").await;
            assert!(is_told(&again));
        }
        world.set(|script| script.start_waits = false);
        world.bus.wake(&id);
        again.hears(if is_v1 { "LOCK_ACQUIRING LOCK_ACQUIRED RUNNING" } else { "RUNNING" }).await;
    }
}
