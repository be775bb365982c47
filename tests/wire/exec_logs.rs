//! What is written into the log, and what must never be.

use std::{
    io,
    sync::{Arc, Mutex},
};

use tracing_subscriber::fmt::MakeWriter;

use crate::{
    test_server::World,
    wire_client::{Client, V1, connect},
};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn no_token_code_input_or_output_is_ever_logged() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    // While there is only one subscriber, tracing asks that of the current thread, so another test would disable the
    // spans that it reaches first.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    // Everything in this test runs on its one thread.
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new().await;
    let mut client = Client::running(&world, r#"{"env":{"SECRET":"env-4711"}}"#).await;
    client.exec("out \"out-4711\"\ncat").await;
    client.hears("EXECUTION_RUNNING out:out-4711").await;
    client.says(r#"{"event":"stdin","data":"in-4711","eof":true}"#).await;
    client.hears("out:in-4711 EXECUTION_DONE").await;
    client.says(r#"{"language":"bash","code":"bad-4711"}"#).await;
    client.hears("EXECUTION_ERROR E").await;
    client.says("junk-4711").await;
    client.hears("ERROR E").await;
    let mut again = client.again(&world, &V1).await;
    client.socket.close(None).await.unwrap();
    again.hears("hello RUNNING").await;
    let path = format!("/attach/{}?sandbox_token=guess-4711", client.id());
    let mut guess = Client::new(connect(&world, &path, &[("x-api-key", "key-4711")]).await.unwrap());
    guess.hears("PERMISSION_DENIAL_ERROR E close:4000").await;
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("a command ended") && text.contains("duration_ms=7"), "{text}");
    assert!(text.contains(client.id().as_str()));
    for secret in [client.token.as_ref().unwrap().as_str(), "4711"] {
        let line = text.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{line:?}");
    }
}
