//! One connection from outside to a port inside a sandbox.

use baton_protocol::frame::{Frame, FrameKind};
use tokio::{
    io::DuplexStream,
    sync::{oneshot, watch},
};

use super::{
    PORT_BUFFER, PortBytes, PortError,
    fate::{Fate, decided},
    relay::AgentEnd,
};

/// Opens the connection, answers, and relays until it ends.
pub async fn run(
    mut end: AgentEnd,
    port: u16,
    mut fate: watch::Receiver<Fate>,
    mut answer: oneshot::Sender<Result<DuplexStream, PortError>>,
) {
    let (number, frames) = (end.number, end.frames.clone());
    let connect = async {
        let asked = Frame::new(FrameKind::Connect).exec(number).offset(port.into());
        frames.send(asked).await.ok()?;
        // Accepted: it always comes with credit.
        end.credit.wait_for(|credit| *credit > 0).await.ok()?;
        let credit = Frame::new(FrameKind::ConnectionCredit).exec(number).offset(end.window.granted());
        frames.send(credit).await.ok()
    };
    let connected = tokio::select! {
        biased;
        fate = decided(&mut fate) => Err(if fate == Fate::ClosedInside { PortError::Refused } else { PortError::NotRunning }),
        connected = connect => connected.ok_or(PortError::NotRunning),
        () = answer.closed() => Err(PortError::TimedOut),
    };
    let reset = Frame::new(FrameKind::ConnectionReset).exec(number);
    if let Err(error) = connected {
        if error != PortError::Refused {
            let _ = frames.send(reset).await;
        }
        let _ = answer.send(Err(error));
        return;
    }
    let (outer, inner) = tokio::io::duplex(PORT_BUFFER);
    if answer.send(Ok(outer)).is_err() {
        let _ = frames.send(reset).await;
        return;
    }
    let is_over = tokio::select! {
        biased;
        fate = decided(&mut fate) => fate == Fate::ClosedInside,
        relayed = end.relay(PortBytes::new(inner)) => relayed.is_ok(),
    };
    if !is_over {
        let _ = frames.send(reset).await;
    }
}
