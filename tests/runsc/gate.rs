//! A way to the store that can fall silent: connections stay open, and nothing comes through.

use std::net::SocketAddr;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

#[derive(Debug)]
pub struct Gate {
    pub url: String,
    closed: watch::Sender<bool>,
    _task: JoinSet<()>,
}

impl Gate {
    /// To the server behind `url`.
    pub async fn to(url: &str) -> Self {
        let target: SocketAddr = url.trim_start_matches("http://").parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let closed = watch::Sender::new(false);
        let state = closed.subscribe();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(pass(client, target, state.clone()));
            }
        });
        Self { url, closed, _task: task }
    }

    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    pub fn open(&self) {
        self.closed.send_replace(false);
    }
}

async fn pass(mut client: TcpStream, target: SocketAddr, mut closed: watch::Receiver<bool>) {
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => return,
        _ = closed.wait_for(|closed| *closed) => {}
    }
    // Silent, not refused: whoever waits has to give up by itself.
    let _ = closed.wait_for(|closed| !*closed).await;
}
