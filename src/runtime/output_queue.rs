//! The runtime's end of a link: a slow reader delays its own output and nothing else.
//!
//! Output that does not fit is dropped, and the link reports the affected streams. The agent keeps what is not
//! acknowledged, so that a [replay](baton_protocol::frame::Kind::Replay) can be requested. All other frames of
//! the agent are small and have a capacity of their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use baton_protocol::frame::{Frame, FrameKind, Stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

/// Capacity of a link for frames of output: 8 MiB at most.
pub const OUTPUT_FRAMES: usize = 32;
/// Capacity of a link for other frames.
pub const OTHER_FRAMES: usize = 2048;

/// Streams with missing output in a link, shared by both of its ends.
#[derive(Clone, Debug, Default)]
pub struct Behind(Arc<Missing>);

#[derive(Debug, Default)]
struct Missing {
    streams: Mutex<BTreeSet<(u32, Stream)>>,
    noted: Notify,
}

impl Behind {
    fn note(&self, exec: u32, stream: Stream) {
        self.0.streams.lock().insert((exec, stream));
        self.0.noted.notify_one();
    }

    /// Each stream that fell behind since the last call, once.
    pub fn drain(&self) -> BTreeSet<(u32, Stream)> {
        std::mem::take(&mut self.0.streams.lock())
    }

    /// Waits until a stream falls behind. Cancel safe.
    pub async fn noted(&self) {
        self.0.noted.notified().await;
    }
}

/// The sender of frames for the API.
#[derive(Clone, Debug)]
pub struct OutputQueue {
    frames: mpsc::Sender<Frame>,
    behind: Behind,
}

/// Streams with dropped output, with the number of the replay they had then: nothing of them passes until
/// another replay begins, because bytes would be missing in between.
pub type LeftOut = BTreeMap<(u32, Stream), u64>;

impl OutputQueue {
    pub fn new() -> (Self, mpsc::Receiver<Frame>, Behind) {
        let (frames, received) = mpsc::channel(OUTPUT_FRAMES + OTHER_FRAMES);
        let behind = Behind::default();
        (Self { frames, behind: behind.clone() }, received, behind)
    }

    /// Records that output of this stream was dropped before it got here.
    pub fn note(&self, exec: u32, stream: Stream) {
        self.behind.note(exec, stream);
    }

    pub fn is_closed(&self) -> bool {
        self.frames.is_closed()
    }

    /// Passes a frame on. Waits only for frames other than output, whose capacity a well-behaved agent never
    /// exhausts.
    pub async fn pass(&self, frame: Frame, left_out: &mut LeftOut) {
        let stream = (frame.exec, frame.stream);
        if matches!(frame.kind, FrameKind::Data | FrameKind::Eof) {
            if left_out.get(&stream) == Some(&frame.sequence) {
                return;
            }
            left_out.remove(&stream);
        }
        if frame.kind == FrameKind::Data && self.frames.capacity() <= OTHER_FRAMES {
            left_out.insert(stream, frame.sequence);
            self.behind.note(frame.exec, frame.stream);
            return;
        }
        // An error means that the link has no reader any more.
        let _ = self.frames.send(frame).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn data(exec: u32, offset: u64, replay: u64) -> Frame {
        Frame::new(FrameKind::Data).exec(exec).stream(Stream::Stdout).offset(offset).sequence(replay).payload(*b"x")
    }

    type Ours = (OutputQueue, LeftOut);

    fn pass(ours: &mut Ours, frame: Frame) {
        ours.0.pass(frame, &mut ours.1).now_or_never().expect("it does not wait");
    }

    fn full() -> (Ours, mpsc::Receiver<Frame>, Behind) {
        let (outlet, received, behind) = OutputQueue::new();
        let mut ours = (outlet, LeftOut::new());
        for offset in 0..OUTPUT_FRAMES as u64 {
            pass(&mut ours, data(1, offset, 0));
        }
        assert!(behind.drain().is_empty());
        (ours, received, behind)
    }

    #[test]
    fn output_without_room_is_left_out_and_all_else_passes() {
        let (mut ours, mut received, behind) = full();
        pass(&mut ours, data(1, 32, 0));
        pass(&mut ours, data(2, 0, 0));
        pass(&mut ours, data(2, 1, 0));
        for kind in [FrameKind::Exit, FrameKind::Execs, FrameKind::Pong, FrameKind::StdinAck, FrameKind::Started] {
            pass(&mut ours, Frame::new(kind).exec(2));
        }
        assert_eq!(behind.drain(), BTreeSet::from([(1, Stream::Stdout), (2, Stream::Stdout)]));
        assert!(behind.drain().is_empty() && behind.noted().now_or_never().is_some());
        let got: Vec<_> = std::iter::from_fn(|| received.try_recv().ok()).collect();
        assert_eq!(got.len(), OUTPUT_FRAMES + 5);
        assert!(got[..OUTPUT_FRAMES].iter().all(|frame| frame.exec == 1 && frame.offset < 32));
    }

    #[test]
    fn what_was_left_out_begins_again_only_with_another_replay() {
        let (mut ours, mut received, behind) = full();
        pass(&mut ours, data(1, 32, 0));
        while received.try_recv().is_ok() {}
        // There is capacity again, but an earlier byte is missing, so the end may not be reported either.
        pass(&mut ours, data(1, 33, 0));
        pass(&mut ours, Frame::new(FrameKind::Eof).exec(1).stream(Stream::Stdout).offset(34));
        assert!(received.try_recv().is_err());
        assert_eq!(behind.drain().len(), 1);
        pass(&mut ours, data(1, 32, 7));
        pass(&mut ours, Frame::new(FrameKind::Eof).exec(1).stream(Stream::Stdout).offset(33).sequence(7));
        assert_eq!(received.try_recv().unwrap().offset, 32);
        assert_eq!(received.try_recv().unwrap().kind, FrameKind::Eof);
        assert!(behind.drain().is_empty());
    }

    #[test]
    fn the_end_of_a_stream_that_is_whole_needs_no_room_of_output() {
        let (mut ours, mut received, behind) = full();
        pass(&mut ours, Frame::new(FrameKind::Eof).exec(1).stream(Stream::Stdout).offset(32));
        assert!(behind.drain().is_empty());
        let last = std::iter::from_fn(|| received.try_recv().ok()).last();
        assert_eq!(last.unwrap().kind, FrameKind::Eof);
    }
}
