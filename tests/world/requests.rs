//! Requests under a nonce, and what is left in the store after many moves.

use baton::{runtime::Container, storage::store::Store};
use baton_protocol::{
    id::Nonce,
    metadata::{Answer, SpecRequest},
};
use baton_testkit::ActionFault as Broken;

use crate::instances::{Instance, Visit, World, movable, persistent};

async fn ask(instance: &Instance, visit: &Visit, request: &SpecRequest) -> Answer {
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
    let Answer::Ok(done) = ask(&one, &visit, &SpecRequest::Checkpoint {}).await else { panic!("refused") };
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
    let answer = ask(&one, &visit, &SpecRequest::Checkpoint {}).await;
    assert!(matches!(answer, Answer::Error { ref reason, .. } if reason == "CheckpointFailed"), "{answer:?}");
    assert_eq!(one.container(&visit.id), Container::Running);
    world.after(120).await;
    assert!(world.lock(&visit.id).await.unwrap().head.is_none(), "it was tried again");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_asker_is_gone_is_removed_ten_minutes_after_its_answer() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one
        .create(|spec| {
            persistent(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    ask(&one, &visit, &SpecRequest::Checkpoint {}).await;
    world.after(9 * 60).await;
    assert_eq!(one.metadata(&visit.id).await.unwrap().spec.requests.len(), 1);
    world.after(2 * 60).await;
    assert_eq!(one.metadata(&visit.id).await.unwrap().spec.requests.len(), 0);
    assert_eq!(world.lock(&visit.id).await.unwrap().head.unwrap().seq, 1, "it was done once");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_answer_was_lost_with_its_instance_is_answered_by_the_next() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let (id, nonce) = (visit.id.clone(), world.clock.nonce());
    one.edit(&id, |spec| drop(spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {}))).await;
    // The commit is applied; then nothing reaches the store any more, and the instance dies.
    while world.lock(&id).await.unwrap().head.is_none() {
        tokio::task::yield_now().await;
        if world.lock(&id).await.unwrap().head.is_some() {
            break;
        }
        world.clock.sleep(std::time::Duration::from_millis(1)).await;
    }
    one.store.cut(true);
    let one = one.die().await;
    two.attach(&id).await.until_running().await;
    world.after(20).await;
    let answers = two.metadata(&id).await.unwrap().status.answers;
    assert!(matches!(answers.get(&nonce), Some(Answer::Ok(_))), "{answers:?}");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn metadata_deleted_under_a_running_sandbox_is_recreated() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let before = one.metadata(&visit.id).await.unwrap().spec;
    let key = format!("sandboxes/{}/metadata.json", visit.id);
    one.store.delete(&key, baton::storage::store::Precondition::Any).await.unwrap();
    world.after(10).await;
    assert_eq!(one.metadata(&visit.id).await.expect("it is there again").spec, before);
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
}
