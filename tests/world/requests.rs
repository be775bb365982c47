//! Requests under a nonce, and what is left in the store after many moves.

use baton::{
    runtime::{Container, fake::Fault as Broken},
    storage::store::Store,
};
use baton_protocol::{
    id::Nonce,
    metadata::{Answer, Request},
};

use crate::instances::{Instance, Visit, World, persistent};

async fn ask(instance: &Instance, visit: &Visit, request: &Request) -> Answer {
    let nonce: Nonce = instance.tools.clock.nonce();
    instance
        .edit(&visit.id, |spec| {
            spec.requests.insert(nonce.clone(), request.clone());
        })
        .await;
    loop {
        instance.tools.clock.sleep(std::time::Duration::from_millis(100)).await;
        let found = instance.metadata(&visit.id).await.expect("it is there");
        if let Some(answer) = found.status.answers.get(&nonce) {
            return answer.clone();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_requested_checkpoint_is_committed_and_the_sandbox_runs_on() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let Answer::Ok(done) = ask(&one, &visit, &Request::Checkpoint {}).await else { panic!("refused") };
    let lock = world.lock(&visit.id).await.unwrap();
    assert_eq!(lock.head.map(|head| head.checkpoint_id), done.checkpoint_id);
    assert!(lock.lease.is_some() && lock.behind && done.paused_ms.is_some());
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_fails_is_answered_and_not_repeated() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    one.containers.inject("checkpoint", Broken::Fail);
    let answer = ask(&one, &visit, &Request::Checkpoint {}).await;
    assert!(matches!(answer, Answer::Error { ref reason, .. } if reason == "CheckpointFailed"), "{answer:?}");
    assert_eq!(one.container(&visit.id), Container::Running);
    world.after(120).await;
    assert!(world.lock(&visit.id).await.unwrap().head.is_none(), "it was tried again");
    let answer = ask(&one, &visit, &Request::Snapshot { name: "x".parse().unwrap(), full: false }).await;
    assert!(matches!(answer, Answer::Error { .. }));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn metadata_deleted_under_a_running_sandbox_is_made_anew() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let before = one.metadata(&visit.id).await.unwrap().spec;
    let key = format!("sandboxes/{}/metadata.json", visit.id);
    one.store.delete(&key, baton::storage::store::If::Any).await.unwrap();
    world.after(10).await;
    assert_eq!(one.metadata(&visit.id).await.expect("it is there again").spec, before);
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
}
