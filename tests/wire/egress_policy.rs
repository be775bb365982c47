//! The network policy of a sandbox on the wire: what a client may ask for, what is stored, and what clients hear.

use baton::bus::LifecycleEvent;
use baton_protocol::event::Event;

use crate::{
    test_server::{Plan, World},
    wire_client::{Client, Said, connect},
};

/// A server that allows sandboxes only names below example.org.
async fn world() -> World {
    let change = |settings: &mut baton::api::ApiSettings| settings.egress_max = "*.example.org:443".parse().unwrap();
    World::with(Plan { has_storage: false, can_snapshot: false, change }).await
}

async fn stored(world: &World, client: &Client) -> String {
    let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
    serde_json::to_string(&spec.network).unwrap()
}

#[tokio::test]
async fn what_a_client_asks_for_is_stored() {
    let world = world().await;
    let config = r#"{"network":{"egress":["a.example.org:443"]}}"#;
    let client = Client::running(&world, config).await;
    assert_eq!(stored(&world, &client).await, r#"{"egress":["a.example.org:443"]}"#);
    let mut client = Client::new(connect(&world, "/create?details=1&egress=none", &[]).await.unwrap());
    while client.word().await != "RUNNING" {}
    assert_eq!(stored(&world, &client).await, r#"{"egress":"none"}"#);
}

#[tokio::test]
async fn more_than_the_server_allows_is_refused_with_both() {
    let world = world().await;
    for (asked, named) in [(r#""any""#, "any"), (r#"["a.example.org:443","b.example.org"]"#, "b.example.org")] {
        let mut client = Client::create(&world).await;
        client.hears("CREATING").await;
        client.says(&format!(r#"{{"network":{{"egress":{asked}}}}}"#)).await;
        client.hears("CREATION_ERROR E close:4000").await;
        let message = client.message();
        assert!(message.contains(named) && message.contains("*.example.org:443"), "{message}");
        assert!(message.contains("BATON_EGRESS_MAX"), "{message}");
    }
    assert_eq!(world.count(), 0, "nothing was created");
}

#[tokio::test]
async fn a_malformed_policy_is_refused_and_names_what_is_wrong() {
    let world = World::new().await;
    for (network, named) in [
        ("7", "`network` must be an object"),
        (r#"{"egress":"all"}"#, "`network.egress`"),
        (r#"{"egress":["https://a.example"]}"#, "`https://a.example` is not a destination"),
        (r#"{"ingress":"any"}"#, "`network.ingress`"),
    ] {
        let mut client = Client::create(&world).await;
        client.hears("CREATING").await;
        client.says(&format!(r#"{{"network":{network}}}"#)).await;
        client.hears("CREATION_ERROR E close:4000").await;
        assert!(client.message().contains(named), "{}", client.message());
    }
}

#[tokio::test]
async fn a_client_of_v1_hears_what_was_refused_and_a_plain_one_does_not() {
    let world = World::new().await;
    let mut plain = Client::running(&world, "{}").await;
    let mut v1 = Client::running_v1(&world, "{}").await;
    for id in [plain.id().clone(), v1.id().clone()] {
        let (host, why) = ("b.example".to_owned(), "policy".to_owned());
        world.bus.post(&id, LifecycleEvent::EgressDenied { host, port: Some(443), why });
    }
    let denied = Event::EgressDenied { host: "b.example".into(), port: Some(443), reason: "policy".into() };
    let Said::Event(heard) = v1.next().await else { panic!("no event") };
    assert_eq!(heard, denied);
    plain.exec("out \"x\"").await;
    plain.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
}
