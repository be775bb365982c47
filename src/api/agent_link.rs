//! A session's end of the link to the agent: frames wait in a queue, so that the session does not have to.

use std::collections::{BTreeSet, VecDeque};

use baton_protocol::frame::{Frame, Stream};

use crate::runtime::FrameLink;

#[derive(Debug)]
pub enum LinkEvent {
    Frame(Frame),
    /// Frames were passed on, or output was skipped.
    Sent,
    /// The container has ended.
    Closed,
}

#[derive(Debug, Default)]
pub struct AgentLink {
    link: Option<FrameLink>,
    outbox: VecDeque<Frame>,
    buffered: usize,
}

impl AgentLink {
    pub fn open(&mut self, link: FrameLink) {
        *self = Self { link: Some(link), ..Self::default() };
    }

    /// Drops everything that is lost with the container.
    pub fn close(&mut self) {
        *self = Self::default();
    }

    pub fn is_open(&self) -> bool {
        self.link.is_some()
    }

    pub fn send(&mut self, frame: Frame) {
        if self.link.is_some() {
            self.buffered += frame.payload.len();
            self.outbox.push_back(frame);
        }
    }

    /// Bytes of payload that the sandbox has not taken yet.
    pub fn buffered(&self) -> usize {
        self.buffered
    }

    /// Whether no frame from the agent is waiting here.
    pub fn is_drained(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.from_agent.is_empty())
    }

    /// Streams that had output skipped since the last call.
    pub fn take_behind(&self) -> BTreeSet<(u32, Stream)> {
        self.link.as_ref().map(|link| link.behind.drain()).unwrap_or_default()
    }

    /// A frame that has arrived already.
    pub fn try_next(&mut self) -> Option<Frame> {
        self.link.as_mut()?.from_agent.try_recv().ok()
    }

    /// Passes on queued frames, and with `is_listening` also waits for the agent. Waits forever if there is no link. Cancel
    /// safe.
    pub async fn next_event(&mut self, is_listening: bool) -> LinkEvent {
        let Some(FrameLink { to_agent, from_agent, behind }) = &mut self.link else {
            return std::future::pending().await;
        };
        // Frames from the agent are bounded by its credit, so they cannot starve the queue.
        let permit = tokio::select! {
            biased;
            frame = from_agent.recv(), if is_listening => return frame.map_or(LinkEvent::Closed, LinkEvent::Frame),
            () = behind.noted() => return LinkEvent::Sent,
            permit = to_agent.reserve(), if !self.outbox.is_empty() => permit,
            else => return std::future::pending().await,
        };
        let Ok(permit) = permit else {
            // The container has ended.
            return LinkEvent::Closed;
        };
        let mut permit = Some(permit);
        while let Some(slot) = permit.take() {
            let Some(frame) = self.outbox.pop_front() else { break };
            self.buffered -= frame.payload.len();
            slot.send(frame);
            permit = to_agent.try_reserve().ok();
        }
        LinkEvent::Sent
    }
}
