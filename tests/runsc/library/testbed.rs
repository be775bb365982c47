//! The testbed of `clients/suite`, from Rust: a line of JSON there, a line back.

use std::{path::Path, process::Stdio};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::{fixture::piece, servers::is_proof};

fn suite(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/suite").join(name)
}

pub fn cases() -> Value {
    serde_json::from_slice(&std::fs::read(suite("cases.json")).unwrap()).unwrap()
}

/// How much of something this run is about.
pub fn size(of: &str) -> u64 {
    cases()["sizes"][if is_proof() { "proof" } else { "quick" }][of].as_u64().unwrap()
}

pub struct Testbed {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

pub struct Proxy {
    number: u64,
    pub url: String,
}

impl Testbed {
    /// With server `a`.
    pub async fn start() -> Self {
        let mut command = Command::new("python3");
        command.arg(suite("testbed.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env("BATON_BIN", env!("CARGO_BIN_EXE_baton"));
        command.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_AGENT", piece("BATON_AGENT"));
        command.env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS"));
        let mut child = command.spawn().expect("the test bed needs Python");
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()).lines());
        let mut testbed = Self { child, orders, answers };
        testbed.server("a").await;
        testbed
    }

    async fn act(&mut self, order: Value) -> Value {
        let orders = self.orders.as_mut().unwrap();
        orders.write_all(format!("{order}\n").as_bytes()).await.unwrap();
        let answer = self.answers.next_line().await.unwrap().expect("the test bed runs");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer.get("error").is_none(), "{order}: {answer}");
        answer
    }

    pub async fn server(&mut self, name: &str) {
        self.act(json!({"do": "server", "name": name})).await;
    }

    /// SIGTERM, until it has ended.
    pub async fn terminate(&mut self, name: &str) {
        self.act(json!({"do": "signal", "name": name, "signal": "TERM"})).await;
    }

    /// Kills a server without warning and starts it again, where connections then go.
    pub async fn crash(&mut self, name: &str, proxy: &Proxy) {
        self.act(json!({"do": "signal", "name": name, "signal": "KILL"})).await;
        self.server(name).await;
        self.network(proxy, json!({"to": name})).await;
    }

    pub async fn proxy(&mut self, to: &str) -> Proxy {
        let made = self.act(json!({"do": "proxy", "to": to})).await;
        let address = made["address"].as_str().unwrap();
        Proxy { number: made["proxy"].as_u64().unwrap(), url: format!("ws://{address}") }
    }

    /// Connections so far, and how many of them were cut.
    pub async fn network(&mut self, proxy: &Proxy, mut network: Value) -> (u64, u64) {
        network["do"] = "network".into();
        network["proxy"] = proxy.number.into();
        let told = self.act(network).await;
        (told["connections"].as_u64().unwrap(), told["cut"].as_u64().unwrap())
    }

    pub async fn end(mut self) {
        drop(self.orders.take());
        assert!(self.child.wait().await.unwrap().success());
    }
}

impl Drop for Testbed {
    /// It ends its servers when nobody gives it orders any more; that is waited for also after a surprise.
    fn drop(&mut self) {
        drop(self.orders.take());
        for _ in 0..3_000 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.child.start_kill();
    }
}
