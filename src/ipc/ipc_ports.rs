//! Connections to ports inside sandboxes, and which ports there are: one connection to the reconciler half each.
//!
//! After the answer every message is a piece of the connection's bytes, and an empty one the end of that direction. A
//! socket that closes without it resets the connection.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use baton_protocol::id::SandboxId;
use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Handshake, IpcStream, ipc_socket, packed, unpacked, wire};
use crate::{
    clock::SharedClock,
    network::{NetworkView, PORT_BUFFER, PortBytes, PortError, PortLinks, PortStream},
};

/// Timeout for an answer; the other half has a shorter one of its own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a connection that has nothing to read is checked for an owner who dropped it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The longest message of a connection.
const PIECE: usize = 64 << 10;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortCall {
    Connect { id: SandboxId, port: u16 },
    View { id: SandboxId },
}

/// Answers one call, and carries the connection that it opens until `stop`.
pub async fn serve(
    ports: &dyn PortLinks,
    call: PortCall,
    mut wire: IpcStream,
    clock: &SharedClock,
    stop: &CancellationToken,
) -> io::Result<()> {
    match call {
        PortCall::View { id } => wire.send(packed(&ports.view(&id).await)?).await,
        PortCall::Connect { id, port } => {
            let connected = ports.connect(&id, port).await;
            wire.send(packed(&connected.as_ref().map(|_| ()).map_err(|error| *error))?).await?;
            if let Ok(stream) = connected {
                tokio::select! {
                    () = carry(wire, stream, clock) => {}
                    () = stop.cancelled() => {}
                }
            }
            Ok(())
        }
    }
}

/// Carries a connection until both directions have ended, or one side has reset it.
async fn carry(wire: IpcStream, stream: PortStream, clock: &SharedClock) {
    let (mut sink, mut pieces) = wire.split();
    let (mut reader, mut writer) = tokio::io::split(PortBytes::new(stream));
    let to_stream = async {
        loop {
            tokio::select! {
                piece = pieces.next() => match piece {
                    Some(Ok(piece)) if piece.is_empty() => return writer.shutdown().await,
                    Some(Ok(piece)) => writer.write_all(&piece).await?,
                    Some(Err(error)) => return Err(error),
                    None => return Err(io::ErrorKind::ConnectionReset.into()),
                },
                // Fails once the other end of the stream is dropped, which goes unnoticed after it was shut down.
                () = clock.sleep(CHECK_INTERVAL) => drop(writer.write(&[]).await?),
            }
        }
    };
    let from_stream = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(PIECE);
            let read = reader.read_buf(&mut buffer).await?;
            while buffer.len() > PIECE {
                sink.send(buffer.split_to(PIECE).freeze()).await?;
            }
            if read == 0 {
                return sink.send(Bytes::new()).await;
            }
            sink.send(buffer.split().freeze()).await?;
        }
    };
    // An error needs no answer: the other side learns of it when both ends are dropped.
    let _ = tokio::try_join!(to_stream, from_stream);
}

/// The ports of the sandboxes of the reconciler half.
#[derive(Debug)]
pub struct RemotePorts {
    path: PathBuf,
    clock: SharedClock,
    tasks: TaskTracker,
}

impl RemotePorts {
    pub fn new(path: PathBuf, clock: SharedClock, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Self { path, clock, tasks })
    }

    async fn call<T: DeserializeOwned>(&self, call: PortCall) -> Result<(T, IpcStream), PortError> {
        let asked = async {
            let stream = ipc_socket::dial(&self.path).await.map_err(io::Error::other)?;
            let mut wire = wire(stream);
            wire.send(packed(&Handshake::Port(call))?).await?;
            let answer = wire.next().await.ok_or(io::ErrorKind::UnexpectedEof)?;
            let answer: Result<T, PortError> = unpacked(answer)?;
            io::Result::Ok(answer.map(|answer| (answer, wire)))
        };
        match self.clock.timeout(ANSWER_TIMEOUT, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a port could not be asked for");
                Err(PortError::TimedOut)
            }
            Err(_) => Err(PortError::TimedOut),
        }
    }
}

#[async_trait]
impl PortLinks for RemotePorts {
    async fn connect(&self, id: &SandboxId, port: u16) -> Result<PortStream, PortError> {
        let ((), wire) = self.call(PortCall::Connect { id: id.clone(), port }).await?;
        let (ours, theirs) = tokio::io::duplex(PORT_BUFFER);
        let clock = self.clock.clone();
        self.tasks.spawn(async move { carry(wire, theirs, &clock).await });
        Ok(ours)
    }

    async fn view(&self, id: &SandboxId) -> Result<NetworkView, PortError> {
        self.call(PortCall::View { id: id.clone() }).await.map(|(view, _)| view)
    }
}
