//! A sandbox that another instance has, or wants: signs of life, and a newcomer that is told that it is in use.

use std::time::{Duration, Instant};

use baton::{
    bus::LifecycleEvent,
    storage::{lease::lease_rules::Identity, records::StoreKind},
};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Claim,
    metadata::{PlainWords, Spec},
    reason::Reason,
};

use crate::{
    test_server::{World, until},
    wire_client::{Client, V1, connect},
};

const MOVABLE: &str = r#"{"enable_checkpoint": true, "enable_sandbox_handoff": true}"#;

async fn spec(world: &World, id: &SandboxId) -> Spec {
    world.records.find(id).await.unwrap().unwrap().spec
}

/// A sandbox that is another instance's: its lease, and its placement.
async fn elsewhere(world: &World) -> (SandboxId, String, InstanceId) {
    let client = Client::running(world, MOVABLE).await;
    let (id, token) = (client.id().clone(), client.token());
    client.cut();
    until(async || !world.bus.presence(&id).attached).await;
    world.leave(&id, baton::bus::LeaveReason::HandedOff, true);
    world.set(|script| script.start_waits = true);
    let holder = InstanceId::from_bits([7; 16]);
    let who = Identity { me: holder.clone(), predecessor: None };
    let mut lock = world.records.lock_file(&id, StoreKind::Durable, &who).unwrap();
    lock.read().await.unwrap();
    lock.acquire(true).await.unwrap();
    (id, token, holder)
}

/// As the server of the documents makes it.
async fn of_the_documents(world: &World, id: &SandboxId) {
    let change = |spec: &mut Spec| spec.plain.replace(PlainWords::Documents) != Some(PlainWords::Documents);
    world.records.edit(id, &change).await.unwrap();
}

#[tokio::test]
async fn a_client_that_reads_gives_a_sign_of_life_and_notices_nothing_of_it() {
    for headers in [&[][..], &V1] {
        let world = World::new().await;
        let mut client = match headers {
            [] => Client::running(&world, "{}").await,
            _ => Client::running_v1(&world, "{}").await,
        };
        let id = client.id().clone();
        let number = world.bus.probe(&id);
        let mut words = vec![];
        tokio::select! {
            () = until(async || world.bus.is_alive(&id, number)) => {}
            word = client.word() => words.push(word),
        }
        assert_eq!(words, [""; 0]);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_gives_no_sign_of_life_until_it_does() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let id = client.id().clone();
    let number = world.bus.probe(&id);
    // Whatever else is said to the server is no pong.
    client.exec("out \"x\"").await;
    until(async || world.agent().lock().unwrap().starts().len() == 1).await;
    assert!(!world.bus.is_alive(&id, number));
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    let reading = async { drop(client.next().await) };
    tokio::select! {
        () = until(async || world.bus.is_alive(&id, number)) => {}
        () = reading => panic!("nothing more is said"),
    }
}

#[tokio::test]
async fn a_newcomer_hears_that_it_is_in_use_half_a_second_late_and_its_request_is_given_back() {
    let world = World::with_storage().await;
    let (id, token, holder) = elsewhere(&world).await;
    of_the_documents(&world, &id).await;
    let mut newcomer = Client::attached(&world, &id, &token).await;
    newcomer.hears("RESTORING").await;
    let asked = spec(&world, &id).await;
    assert_eq!((asked.placement.as_ref(), asked.claim.unwrap().kind), (Some(&world.instance), Claim::Ask));
    world.bus.post(&id, LifecycleEvent::Acquiring);
    let begun = Instant::now();
    world.bus.post(&id, LifecycleEvent::Failed { reason: Reason::InUse, message: String::new() });
    newcomer.hears("IN_USE close:1011").await;
    assert!(begun.elapsed() >= Duration::from_millis(500), "a refusal that clients answer at once comes late");
    assert!(!newcomer.message().is_empty());
    let given = spec(&world, &id).await;
    assert_eq!((given.placement.as_ref(), given.open_order()), (Some(&holder), None));
    until(async || !world.bus.presence(&id).attached).await;
}

#[tokio::test]
async fn a_newcomer_says_in_the_metadata_whether_it_asks_or_preempts() {
    let world = World::with_storage().await;
    let (id, token, _) = elsewhere(&world).await;
    let path = format!("/attach/{id}?sandbox_token={token}");
    let kind = async |headers: &[(&'static str, &str)], first: &str| {
        let mut client = Client::new(connect(&world, &path, headers).await.unwrap());
        client.hears(first).await;
        let kind = spec(&world, &id).await.claim.unwrap().kind;
        client.cut();
        until(async || !world.bus.presence(&id).attached).await;
        kind
    };
    assert_eq!(kind(&[], "RESTORING").await, Claim::Preempt, "it was made by a client of the predecessor");
    of_the_documents(&world, &id).await;
    assert_eq!(kind(&[], "RESTORING").await, Claim::Ask);
    assert_eq!(kind(&V1, "hello RESTORING").await, Claim::Preempt);
}

#[tokio::test]
async fn who_loses_the_sandbox_hears_to_which_instance() {
    let world = World::with_storage().await;
    let mut client = Client::running_v1(&world, MOVABLE).await;
    let by = InstanceId::from_bits([7; 16]);
    world.bus.post(client.id(), LifecycleEvent::ReleaseRequested { by: by.clone(), claim: Claim::Preempt });
    client.hears("LOCK_RELEASE_REQUESTED").await;
    assert!(client.message().contains(by.as_str()), "{}", client.message());
}
