//! How sandboxes end, and how one that nobody is attached to is found and killed.

use std::{collections::BTreeMap, time::Duration};

use baton_client::{
    Connection, EndReason, Error, Exec, Idle, Options, Persistence, Sandbox, SandboxConfig, SandboxId, Token,
};

use super::{Scene, bash, persistent, text};
use crate::fixture::clock;

/// What `clients/suite/testbed.py` gives its servers.
const ADMIN_KEY: &str = "the-admin-key-of-the-test-bed";

/// The error that everything gets once the sandbox has ended.
async fn end_of(sandbox: &Sandbox) -> Error {
    while sandbox.is_connected() {
        clock().sleep(Duration::from_millis(20)).await;
    }
    sandbox.run(bash("true")).await.unwrap_err()
}

fn reason(error: &Error) -> Option<EndReason> {
    match error {
        Error::Ended(ending) => ending.reason,
        other => panic!("{other:?}"),
    }
}

fn with(config: SandboxConfig) -> Options {
    Options { config, ..Options::default() }
}

pub async fn ends_are_told_apart() {
    let scene = Scene::new().await;
    let url = &scene.proxy.url;
    for (persistence, word) in [(Persistence::Yes, "checkpointed"), (Persistence::No, "deleted")] {
        let idle_timeout = Some(Idle::After(Duration::from_secs(1)));
        let config = SandboxConfig { persistent: Some(persistence), idle_timeout, ..SandboxConfig::default() };
        let error = end_of(&Sandbox::create(url, with(config)).await.unwrap()).await;
        assert_eq!(reason(&error), Some(EndReason::Idle));
        let message = error.to_string();
        assert!(message.contains(word) && message.contains("(reason: idle)"), "{message}");
    }
    let config = SandboxConfig { ttl: Some(Duration::from_secs(1)), ..SandboxConfig::default() };
    let expired = Sandbox::create(url, with(config)).await.unwrap();
    assert_eq!(reason(&end_of(&expired).await), Some(EndReason::Expired));
    let sandbox = Sandbox::create(url, persistent()).await.unwrap();
    sandbox.checkpoint().await.unwrap();
    assert_eq!(reason(&end_of(&sandbox).await), Some(EndReason::Checkpoint));
    let sandbox = Sandbox::attach(url, sandbox.id().clone(), sandbox.token().clone()).await.unwrap();
    Sandbox::kill_by_id(url, sandbox.id(), Some(sandbox.token()), Connection::default()).await.unwrap();
    assert_eq!(reason(&end_of(&sandbox).await), Some(EndReason::Operator));
    scene.end().await;
}

/// The ids of a list, and what it says of each: whether it is stored.
async fn listed(url: &str, labels: &BTreeMap<String, String>, key: &str) -> Result<BTreeMap<SandboxId, bool>, Error> {
    let connection = Connection { api_key: Some(key.to_owned()), ..Connection::default() };
    let mut list = Sandbox::list(url, labels.clone(), connection)?;
    let mut found = BTreeMap::new();
    while let Some(one) = list.next().await? {
        assert!(!labels.is_empty() || one.error.is_none(), "{one:?}");
        found.insert(one.id, one.persistent);
    }
    Ok(found)
}

pub async fn sandboxes_are_listed_and_killed_by_id() {
    let scene = Scene::new().await;
    let url = &scene.proxy.url;
    let labels =
        BTreeMap::from([("suite".to_owned(), "rust".to_owned()), ("case".to_owned(), scene.sandbox.id().to_string())]);
    let create = async |persistence| {
        let config =
            SandboxConfig { labels: labels.clone(), persistent: Some(persistence), ..SandboxConfig::default() };
        Sandbox::create(url, with(config)).await.unwrap()
    };
    let (stored, ephemeral) = (create(Persistence::Yes).await, create(Persistence::No).await);
    let mut waiting = ephemeral.exec(Exec::argv(["sleep", "60"])).await.unwrap();
    let both = BTreeMap::from([(stored.id().clone(), true), (ephemeral.id().clone(), false)]);
    assert_eq!(listed(url, &labels, ADMIN_KEY).await.unwrap(), both);
    let all = listed(url, &BTreeMap::new(), ADMIN_KEY).await.unwrap();
    assert!(all.contains_key(scene.sandbox.id()) && both.keys().all(|id| all.contains_key(id)), "{all:?}");
    // With the key, and with the token; the sandboxes have clients, which are told.
    let key = || Connection { api_key: Some(ADMIN_KEY.to_owned()), ..Connection::default() };
    Sandbox::kill_by_id(url, ephemeral.id(), None, key()).await.unwrap();
    assert!(matches!(waiting.wait().await, Err(Error::Ended(_))));
    Sandbox::kill_by_id(url, stored.id(), Some(stored.token()), Connection::default()).await.unwrap();
    assert_eq!(listed(url, &labels, ADMIN_KEY).await.unwrap(), BTreeMap::new());
    assert!(matches!(end_of(&stored).await, Error::Ended(_)));

    let unknown = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
    assert_eq!(Sandbox::kill_by_id(url, &unknown, None, key()).await, Err(Error::NotFound));
    let wrong = Token("wrong".to_owned());
    for token in [None, Some(&wrong)] {
        let refused = Sandbox::kill_by_id(url, scene.sandbox.id(), token, Connection::default()).await;
        assert!(matches!(refused, Err(Error::Permission(_))), "{refused:?}");
    }
    assert!(matches!(listed(url, &labels, "wrong").await, Err(Error::Permission(_))));
    assert!(matches!(listed("ws://127.0.0.1:1", &labels, ADMIN_KEY).await, Err(Error::Connection(_))));
    let still = scene.sandbox.run(bash("echo still here")).await.unwrap();
    assert_eq!(text(&still.stdout), "still here\n");
    scene.end().await;
}
