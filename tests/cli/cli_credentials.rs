//! `BATON_AUTH=google`: an ID token for the server, from a metadata server of our own.

use std::{
    os::unix::fs::PermissionsExt,
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use axum::{
    Router,
    extract::{Query, State},
    http::{HeaderMap, StatusCode},
    routing::get,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    process::{Child, Command},
    task::JoinSet,
};

use crate::{
    cli_exec::output,
    pipes::baton,
    script::{ID, ScriptedPeer, Server, TOKEN, view},
};

/// What it was asked, and how it answers.
#[derive(Clone, Default)]
struct Book {
    audiences: Arc<Mutex<Vec<String>>>,
    lasts: Arc<Mutex<Duration>>,
    is_down: Arc<Mutex<bool>>,
}

struct Metadata {
    host: String,
    book: Book,
    _task: JoinSet<()>,
}

impl Metadata {
    /// Its tokens last so long.
    async fn start(lasts: Duration) -> Self {
        let book = Book { lasts: Arc::new(Mutex::new(lasts)), ..Book::default() };
        let path = "/computeMetadata/v1/instance/service-accounts/default/identity";
        let site = Router::new().route(path, get(identity)).with_state(book.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let mut task = JoinSet::new();
        task.spawn(async move { axum::serve(listener, site).await.unwrap() });
        Self { host, book, _task: task }
    }

    fn asked(&self) -> Vec<String> {
        self.book.audiences.lock().unwrap().clone()
    }

    /// `baton` as it is where Google's machines are.
    fn baton(&self, server: &Server, arguments: &[&str]) -> Command {
        let mut command = baton(&server.url());
        command.env("BATON_AUTH", "google").env("GCE_METADATA_HOST", &self.host).env("HOME", "/nonexistent");
        command.env("BATON_TOKEN", TOKEN).env("BATON_TOKENS", "/nonexistent/tokens").env("RUST_LOG", "trace");
        command.args(arguments);
        command
    }
}

async fn identity(
    State(book): State<Book>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Result<String, StatusCode> {
    if headers.get("metadata-flavor").is_none_or(|flavor| flavor != "Google") {
        return Err(StatusCode::FORBIDDEN);
    }
    if *book.is_down.lock().unwrap() {
        return Err(StatusCode::NOT_FOUND);
    }
    let audience = query.into_iter().find(|(name, _)| name == "audience").ok_or(StatusCode::BAD_REQUEST)?.1;
    let number = {
        let mut audiences = book.audiences.lock().unwrap();
        audiences.push(audience.clone());
        audiences.len()
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let end = (now + *book.lasts.lock().unwrap()).as_secs();
    let part = |fields: Value| URL_SAFE_NO_PAD.encode(fields.to_string());
    let claims = json!({"aud": audience, "exp": end, "number": number});
    Ok(format!("{}.{}.c2ln", part(json!({"alg": "none"})), part(claims)))
}

/// What the token of a handshake says.
fn claims(peer: &ScriptedPeer) -> Value {
    let header = peer.headers["authorization"].to_str().unwrap();
    let token = header.strip_prefix("Bearer ").unwrap();
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap()
}

/// A command that runs, as far as its start.
async fn sleeping(metadata: &Metadata, server: &Server) -> (Child, ScriptedPeer, baton_protocol::id::ExecId) {
    let child = metadata.baton(server, &["exec", ID, "--", "sleep", "9"]).spawn().unwrap();
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    (child, peer, id)
}

/// It ends well, and no token is in anything it printed.
async fn ends(mut peer: ScriptedPeer, child: Child, id: &baton_protocol::id::ExecId) {
    let header = peer.headers["authorization"].to_str().unwrap().to_owned();
    peer.done(id, 0).await;
    while let crate::script::Heard::Request(_) = peer.heard().await {}
    let printed = output(child).await;
    assert_eq!(printed.status.code(), Some(0), "{printed:?}");
    let printed = [printed.stdout, printed.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert_eq!(printed, "");
    assert!(!printed.contains(header.split('.').nth(1).unwrap()));
}

#[tokio::test]
async fn a_token_for_the_server_goes_with_every_handshake_and_is_fetched_once() {
    let (metadata, server) = (Metadata::start(Duration::from_secs(3600)).await, Server::start().await);
    let (child, peer, id) = sleeping(&metadata, &server).await;
    let audience = server.url().replace("ws:", "http:");
    assert_eq!(claims(&peer)["aud"], audience);
    peer.cut();
    let mut peer = server.attach(vec![view(&id, 1, 0)]).await;
    assert_eq!((claims(&peer)["aud"].as_str(), &claims(&peer)["number"]), (Some(audience.as_str()), &json!(1)));
    assert!(matches!(peer.request_but_ack().await, baton_protocol::request::Request::Reconnect { .. }));
    ends(peer, child, &id).await;
    assert_eq!(metadata.asked(), [audience]);
}

#[tokio::test]
async fn a_token_that_ends_soon_is_renewed_and_used_while_no_other_can_be_had() {
    let (metadata, server) = (Metadata::start(Duration::from_secs(120)).await, Server::start().await);
    let (child, peer, id) = sleeping(&metadata, &server).await;
    assert_eq!(claims(&peer)["number"], 1);
    peer.cut();
    let peer = server.attach(vec![view(&id, 1, 0)]).await;
    assert_eq!(claims(&peer)["number"], 2);
    *metadata.book.is_down.lock().unwrap() = true;
    peer.cut();
    let peer = server.attach(vec![view(&id, 1, 0)]).await;
    assert_eq!(claims(&peer)["number"], 2, "it is good for two minutes more");
    *metadata.book.is_down.lock().unwrap() = false;
    *metadata.book.lasts.lock().unwrap() = Duration::from_secs(3600);
    peer.cut();
    let peer = server.attach(vec![view(&id, 1, 0)]).await;
    assert_eq!(claims(&peer)["number"], 3);
    peer.cut();
    let peer = server.attach(vec![view(&id, 1, 0)]).await;
    assert_eq!(claims(&peer)["number"], 3);
    ends(peer, child, &id).await;
}

#[tokio::test]
async fn where_there_is_no_token_it_is_said_what_to_do() {
    let (metadata, server) = (Metadata::start(Duration::from_secs(3600)).await, Server::start().await);
    let said = async |command: &mut Command| {
        let printed = output(command.spawn().unwrap()).await;
        (printed.status.code(), String::from_utf8(printed.stderr).unwrap())
    };
    let run = ["run", "--", "true"];
    *metadata.book.is_down.lock().unwrap() = true;
    let (code, text) = said(&mut metadata.baton(&server, &run)).await;
    assert!(code == Some(1) && text.starts_with("baton: no Google ID token can be had here: "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let (code, text) = said(metadata.baton(&server, &run).env("GCE_METADATA_HOST", "127.0.0.1:1")).await;
    assert!(code == Some(1) && text.contains("no Google ID token"), "{text}");
    // A person's own credentials are for other things.
    let space = tempfile::tempdir().unwrap();
    let file = space.path().join("adc.json");
    let person = json!({"type": "authorized_user", "client_id": "a", "client_secret": "5ecret", "refresh_token": "r"});
    std::fs::write(&file, person.to_string()).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let (code, text) = said(metadata.baton(&server, &run).env("GOOGLE_APPLICATION_CREDENTIALS", &file)).await;
    assert!(code == Some(1) && text.contains("service account") && !text.contains("5ecret"), "{text}");
    let (code, text) = said(metadata.baton(&server, &run).env("BATON_AUTH", "magic")).await;
    assert!(code == Some(2) && text.contains("google"), "{text}");
}

#[tokio::test]
async fn a_header_of_ones_own_does_without_google_and_an_empty_variable_is_none() {
    let server = Server::start().await;
    for auth in ["", "none"] {
        let mut command = baton(&server.url());
        command.env("BATON_AUTH", auth).env("BATON_TOKEN", TOKEN).env("HOME", "/nonexistent");
        command.args(["exec", "--header", "Authorization: Bearer mine", "--header", "X-Front: door", ID, "--", "true"]);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let mut peer = server.attach(vec![]).await;
        assert_eq!(peer.headers["authorization"], "Bearer mine");
        assert_eq!(peer.headers["x-front"], "door");
        let id = peer.exec().await;
        peer.started(&id, 1).await;
        peer.done(&id, 0).await;
        while let crate::script::Heard::Request(_) = peer.heard().await {}
        assert_eq!(output(child).await.status.code(), Some(0));
    }
}

#[tokio::test]
async fn questions_over_http_carry_the_token_too() {
    let metadata = Metadata::start(Duration::from_secs(3600)).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = seen.clone();
    let site = Router::new().route(
        "/sandboxes",
        get(move |headers: HeaderMap| {
            kept.lock().unwrap().push(headers["authorization"].to_str().unwrap().to_owned());
            std::future::ready(r#"{"sandboxes":[]}"#)
        }),
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let mut task = JoinSet::new();
    task.spawn(async move { axum::serve(listener, site).await.unwrap() });
    let server = Server::start().await;
    let listed = output(metadata.baton(&server, &["list", "--url", &base]).spawn().unwrap()).await;
    assert_eq!(listed.status.code(), Some(0), "{listed:?}");
    assert_eq!(metadata.asked(), [base]);
    assert!(seen.lock().unwrap()[0].starts_with("Bearer "));
}
