//! Writes frames to the agent: the runtime's own immediately, the API's while the gate is open.

use std::{sync::Arc, time::Duration};

use baton_protocol::frame::{Frame, FrameKind};
use tokio::{
    io::AsyncWriteExt,
    process::ChildStdin,
    sync::{mpsc, watch},
};

use super::{
    channel::{WriterCommand, is_allowed},
    output_queue::OutputQueue,
    runtime_settings::RuntimeSettings,
};
use crate::{
    clock::{Moment, SharedClock},
    metrics::{ExecPipe, Metrics},
};

/// Frames that are already queued are written together, up to about this many bytes.
const BATCH: usize = 64 << 10;

#[derive(Debug)]
pub struct FrameWriter {
    stdin: ChildStdin,
    control: mpsc::UnboundedReceiver<WriterCommand>,
    /// Closed while the container is paused or fenced.
    gate: watch::Receiver<bool>,
    /// The other half of the link, which closes together with this one.
    output: Arc<watch::Sender<Option<OutputQueue>>>,
    link: Option<mpsc::Receiver<Frame>>,
    /// Frames of the network.
    network: mpsc::Receiver<Frame>,
    /// Whose turn it is, so that neither keeps the other waiting.
    is_networks_turn: bool,
    /// When the grace period for a client to attach ends.
    detach_at: Option<Moment>,
    clock: SharedClock,
    detach_grace: Duration,
    metrics: Metrics,
}

impl FrameWriter {
    pub fn new(
        stdin: ChildStdin,
        control: mpsc::UnboundedReceiver<WriterCommand>,
        gate: watch::Receiver<bool>,
        output: Arc<watch::Sender<Option<OutputQueue>>>,
        network: mpsc::Receiver<Frame>,
        clock: SharedClock,
        settings: &RuntimeSettings,
    ) -> Self {
        let (detach_grace, metrics) = (settings.detach_grace, settings.metrics.clone());
        Self {
            stdin,
            control,
            gate,
            output,
            link: None,
            network,
            is_networks_turn: false,
            detach_at: None,
            clock,
            detach_grace,
            metrics,
        }
    }

    pub async fn run(mut self) {
        // The loop, and the link with it, ends with the container or when the channel is dropped.
        while let Some(bytes) = self.next().await {
            if self.stdin.write_all(&bytes).await.is_err() {
                break;
            }
        }
        // First make new links impossible, then close the last one.
        self.control.close();
        self.output.send_replace(None);
    }

    /// The bytes to write next; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let open = *self.gate.borrow_and_update();
            if open
                && std::mem::take(&mut self.is_networks_turn)
                && let Some(bytes) = self.network_batch(None)
            {
                return Some(bytes);
            }
            tokio::select! {
                biased;
                control = self.control.recv() => match control? {
                    WriterCommand::Bytes(bytes) => return Some(bytes),
                    WriterCommand::Begin => self.detach_at = Some(self.clock.now() + self.detach_grace),
                    WriterCommand::End => return None,
                    WriterCommand::Link(link) => {
                        (self.link, self.detach_at) = (Some(link), None);
                        return Some(bytes_of(&Frame::new(FrameKind::Attached)));
                    }
                },
                changed = self.gate.changed() => changed.ok()?,
                frame = next_frame(&mut self.link), if open => match frame {
                    Some(frame) => {
                        let bytes = self.batch(&frame);
                        if !bytes.is_empty() {
                            self.is_networks_turn = true;
                            return Some(bytes);
                        }
                    }
                    None => self.unlink(),
                },
                Some(frame) = self.network.recv(), if open => return self.network_batch(Some(frame)),
                () = at(&self.clock, self.detach_at), if open => {
                    self.detach_at = None;
                    return Some(bytes_of(&Frame::new(FrameKind::Detached)));
                }
            }
        }
    }

    fn batch(&mut self, first: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        let metrics = &self.metrics;
        let mut add = |frame: &Frame| {
            if is_allowed(frame) {
                if frame.kind == FrameKind::Stdin {
                    metrics.exec_moved(ExecPipe::Stdin, frame.payload.len());
                }
                frame.encode(&mut bytes);
            }
            bytes.len() < BATCH
        };
        let mut room = add(first);
        while room && let Some(frame) = self.link.as_mut().and_then(|link| link.try_recv().ok()) {
            room = add(&frame);
        }
        bytes
    }

    /// The frames of the network that wait, `first` before the others; `None` if there are none.
    fn network_batch(&mut self, first: Option<Frame>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut next = first.or_else(|| self.network.try_recv().ok());
        while let Some(frame) = next {
            frame.encode(&mut bytes);
            next = if bytes.len() < BATCH { self.network.try_recv().ok() } else { None };
        }
        (!bytes.is_empty()).then_some(bytes)
    }

    fn unlink(&mut self) {
        self.link = None;
        self.detach_at = Some(self.clock.now() + self.detach_grace);
        // A newer link may already be queued; its output half is not closed.
        self.output.send_if_modified(|output| output.take_if(|output| output.is_closed()).is_some());
    }
}

async fn next_frame(link: &mut Option<mpsc::Receiver<Frame>>) -> Option<Frame> {
    match link {
        Some(link) => link.recv().await,
        None => std::future::pending().await,
    }
}

async fn at(clock: &SharedClock, moment: Option<Moment>) {
    match moment {
        Some(moment) => clock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}
