//! What the client sends over HTTP to list and kill sandboxes, and what it makes of the responses.

use baton_client::{Auth, Connection, Error, Sandbox, SandboxSummary};

use crate::script::{ID, Server, TOKEN, sandbox_id, soon, token};

fn id(number: u32) -> String {
    format!("sandbox-{number:08x}-6f0e-4b1c-9d3e-0123456789ab")
}

fn with_key() -> Connection {
    Connection { api_key: Some("k3y".into()), ..Connection::default() }
}

#[tokio::test]
async fn the_list_is_requested_page_by_page_and_filtered_by_every_label() {
    let server = Server::start().await;
    let labels = [("tier".into(), "free".into()), ("team".into(), "a&b".into())].into();
    let auth = Auth::source(|| async { Ok(vec![("Authorization".to_owned(), "Bearer x".to_owned())]) });
    let connection = Connection { auth: Some(auth), ..with_key() };
    let mut list = Sandbox::list(&server.url(), labels, connection).unwrap();
    let first = format!(
        r#"{{"sandboxes":[
            {{"sandbox_id":"{}","phase":"running","reason":"Created","message":null,"unresponsive":null,"instance":null,
              "labels":{{"team":"a&b","tier":"free"}},"created":"2026-11-18T20:00:00Z","age_seconds":7,"persistent":true,
              "tenant":"blue","a_field_of":"a newer server"}},
            {{"sandbox_id":"{}","phase":"running","labels":{{"team":"a&b"}}}}],"next":"{}"}}"#,
        id(1),
        id(2),
        id(2)
    );
    let (found, head) = tokio::join!(soon(list.next()), server.answer("200 OK", &first));
    let found = found.unwrap().unwrap();
    assert_eq!((found.id.as_str(), found.phase.as_deref()), (id(1).as_str(), Some("running")));
    assert_eq!((found.reason.as_str(), found.age_seconds, found.persistent), ("Created", Some(7), true));
    assert_eq!(found.tenant.as_deref(), Some("blue"));
    assert!(head.starts_with("GET /sandboxes?label=team%3Da%26b HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("x-api-key: k3y\r\n") && head.contains("authorization: Bearer x\r\n"), "{head}");

    // A page in which no sandbox has the labels, and then the last one.
    let empty = format!(r#"{{"sandboxes":[],"next":"{}"}}"#, id(3));
    let last = format!(
        r#"{{"sandboxes":[{{"sandbox_id":"{}","labels":{{"team":"a&b","tier":"free"}}}}],"next":null}}"#,
        id(4)
    );
    let (found, heads) = tokio::join!(soon(list.next()), async {
        [server.answer("200 OK", &empty).await, server.answer("200 OK", &last).await]
    });
    assert_eq!(found.unwrap().unwrap().id.as_str(), id(4));
    for (head, after) in heads.iter().zip([id(2), id(3)]) {
        assert!(head.contains(&format!("&after={after} ")), "{head}");
    }
    assert_eq!(soon(list.next()).await, Ok(None::<SandboxSummary>));
}

#[tokio::test]
async fn a_sandbox_is_killed_by_its_id() {
    let server = Server::start().await;
    let url = server.url();
    let kill = async |status: &str, body: &str| {
        let (id, token) = (sandbox_id(), token());
        let killing = Sandbox::kill_by_id(&url, &id, Some(&token), with_key());
        tokio::join!(soon(killing), server.answer(status, body))
    };
    assert_eq!(kill("202 Accepted", "{}").await.0, Ok(()));
    let (killed, head) = kill("204 No Content", "").await;
    assert_eq!(killed, Ok(()));
    assert!(head.starts_with(&format!("DELETE /sandboxes/{ID}?wait=30 HTTP/1.1\r\n")), "{head}");
    assert!(head.contains("x-api-key: k3y\r\n") && head.contains(&format!("x-sandbox-token: {TOKEN}\r\n")), "{head}");
    assert_eq!(kill("404 Not Found", "").await.0, Err(Error::NotFound));
    let Err(Error::Permission(text)) = kill("403 Forbidden", "").await.0 else { panic!() };
    assert_eq!(text, "the token or the key does not match the sandbox (HTTP 403)");
    let Err(Error::Permission(text)) = kill("401 Unauthorized", "").await.0 else { panic!() };
    assert!(text.contains("key") && text.contains("401"), "{text}");
    let busy = kill("503 Service Unavailable", r#"{"message":"Storage does not answer."}"#).await.0;
    assert_eq!(busy, Err(Error::Connection("Storage does not answer.".into())));
    // A key is for one server: a redirect is not followed.
    assert!(matches!(kill("302 Found\r\nLocation: http://127.0.0.1:1/", "").await.0, Err(Error::Protocol(_))));
}

#[tokio::test]
async fn a_list_that_cannot_be_had_says_why() {
    let server = Server::start().await;
    let mut list = Sandbox::list(&server.url(), Default::default(), Connection::default()).unwrap();
    let (refused, _) = tokio::join!(soon(list.next()), server.answer("403 Forbidden", ""));
    let Err(Error::Permission(text)) = refused else { panic!("{refused:?}") };
    assert!(text.contains("admin key"), "{text}");
    let (refused, _) = tokio::join!(soon(list.next()), server.answer("200 OK", r#"{"message":"Server is running"}"#));
    assert!(matches!(refused, Err(Error::Protocol(_))), "{refused:?}");
    assert!(matches!(Sandbox::list("ftp://x", Default::default(), Connection::default()), Err(Error::Connection(_))));
    let mut nowhere = Sandbox::list("ws://127.0.0.1:1", Default::default(), Connection::default()).unwrap();
    assert!(matches!(soon(nowhere.next()).await, Err(Error::Connection(_))));
}
