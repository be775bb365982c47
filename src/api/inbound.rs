//! Memory for messages and bodies that clients are still sending: one budget for all of them.
//!
//! A stream that exceeds its free share takes the rest from the budget, and is not read while the budget is used up.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::PollSemaphore;

use super::frame_scanner::FrameScanner;
use crate::clock::SharedClock;

/// How much every stream may hold without taking from the budget.
pub const FREE_BYTES: u64 = 16 << 10;
/// How much is taken from the budget at a time.
const RESERVE_STEP: u32 = 64 << 10;
/// Timeout for the rest of a message that takes memory from the budget.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The memory that all clients share.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Semaphore>);

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(Semaphore::new(usize::try_from(bytes).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS))))
    }

    pub fn reservation(&self) -> Reservation {
        Reservation { budget: PollSemaphore::new(self.0.clone()), held: None }
    }
}

/// What one stream holds of the budget, until it is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: PollSemaphore,
    held: Option<OwnedSemaphorePermit>,
}

impl Reservation {
    fn held(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.num_permits() as u64)
    }

    /// Resolves when the reservation is enough for a stream that holds `bytes` in total. Gives back any excess.
    fn poll_resize(&mut self, context: &mut Context<'_>, bytes: u64) -> Poll<()> {
        let steps = bytes.saturating_sub(FREE_BYTES).div_ceil(RESERVE_STEP.into());
        let needed = steps * u64::from(RESERVE_STEP);
        let excess = usize::try_from(self.held().saturating_sub(needed)).unwrap_or(0);
        drop(self.held.as_mut().and_then(|held| held.split(excess)));
        while self.held() < needed {
            let more = ready!(self.budget.poll_acquire_many(context, RESERVE_STEP));
            match (&mut self.held, more) {
                (Some(held), Some(more)) => held.merge(more),
                (held, more) => *held = more,
            }
        }
        Poll::Ready(())
    }

    /// See [`Self::poll_resize`]. Cancel safe.
    pub async fn resize(&mut self, bytes: u64) {
        std::future::poll_fn(|context| self.poll_resize(context, bytes)).await;
    }
}

/// State shared between a session and its stream.
#[derive(Debug)]
pub struct Gauge {
    longest: AtomicU64,
    is_paused: AtomicBool,
    is_waiting: AtomicBool,
}

impl Gauge {
    /// Sets the message length above which the stream is not read any further.
    pub fn set_longest(&self, bytes: u64) {
        self.longest.store(bytes, Ordering::Relaxed);
        self.is_paused.store(false, Ordering::Relaxed);
    }

    /// Whether a message exceeds that length.
    pub fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    /// Whether the stream waits because others use up the budget.
    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::Relaxed)
    }
}

/// A message that took memory from the budget was not complete in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message was not complete within {}", humantime::format_duration(MESSAGE_TIMEOUT))]
pub struct MessageTimeout;

/// The bytes of a WebSocket, read only as far as there is memory for them.
pub struct Metered<S> {
    stream: S,
    scanner: FrameScanner,
    reservation: Reservation,
    gauge: Arc<Gauge>,
    clock: SharedClock,
    overdue: Option<BoxFuture<'static, ()>>,
}

impl<S> std::fmt::Debug for Metered<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metered").field("scanner", &self.scanner).field("gauge", &self.gauge).finish_non_exhaustive()
    }
}

impl<S> Metered<S> {
    pub fn new(stream: S, budget: &Budget, longest: u64, clock: SharedClock) -> Self {
        let gauge = Gauge {
            longest: AtomicU64::new(longest),
            is_paused: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
        };
        Self {
            stream,
            scanner: FrameScanner::default(),
            reservation: budget.reservation(),
            gauge: Arc::new(gauge),
            clock,
            overdue: None,
        }
    }

    pub fn gauge(&self) -> Arc<Gauge> {
        self.gauge.clone()
    }

    /// Resolves when `more` bytes may be read.
    fn poll_room(&mut self, context: &mut Context<'_>, more: u64) -> Poll<io::Result<()>> {
        let received = self.scanner.received();
        if received > self.gauge.longest.load(Ordering::Relaxed) {
            // The session polls again after it raises the limit.
            self.gauge.is_paused.store(true, Ordering::Relaxed);
            return Poll::Pending;
        }
        let resized = self.reservation.poll_resize(context, received + more);
        self.gauge.is_waiting.store(resized.is_pending(), Ordering::Relaxed);
        if received <= FREE_BYTES {
            self.overdue = None;
        } else {
            let clock = &self.clock;
            let overdue = self.overdue.get_or_insert_with(|| {
                let clock = clock.clone();
                async move { clock.sleep(MESSAGE_TIMEOUT).await }.boxed()
            });
            if overdue.poll_unpin(context).is_ready() {
                return Poll::Ready(Err(io::Error::other(MessageTimeout)));
            }
        }
        resized.map(Ok)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_room(context, buffer.remaining() as u64))?;
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.scanner.feed(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::testkit::TestClock;

    const LONG: u64 = 1 << 20;

    /// A text frame that announces a payload of `LONG` bytes, without the payload.
    fn head() -> Vec<u8> {
        let mut head = vec![0x81, 127];
        head.extend(LONG.to_be_bytes());
        head
    }

    fn streams(budget: &Budget, longest: u64) -> (tokio::io::DuplexStream, Metered<tokio::io::DuplexStream>) {
        let (client, server) = tokio::io::duplex(2 << 20);
        (client, Metered::new(server, budget, longest, Arc::new(TestClock::new(1))))
    }

    /// Counts the bytes that can be read until no more arrive.
    async fn read(stream: &mut Metered<tokio::io::DuplexStream>) -> io::Result<u64> {
        let (mut total, mut buffer) = (0, [0; 16 << 10]);
        while let Some(read) = stream.read(&mut buffer).now_or_never() {
            total += read? as u64;
            // Otherwise Tokio's cooperative budget would make the read pending.
            tokio::task::yield_now().await;
        }
        Ok(total)
    }

    #[tokio::test(start_paused = true)]
    async fn messages_share_the_budget_and_go_on_when_one_is_whole() {
        let budget = Budget::new(LONG + LONG / 2);
        let ((mut one, mut first), (mut two, mut second)) = (streams(&budget, 2 * LONG), streams(&budget, 2 * LONG));
        for client in [&mut one, &mut two] {
            client.write_all(&head()).await.unwrap();
            client.write_all(&vec![b'x'; LONG as usize - 1]).await.unwrap();
        }
        assert_eq!(read(&mut first).await.unwrap(), 10 + LONG - 1);
        assert!(!first.gauge().is_waiting());
        let partly = read(&mut second).await.unwrap();
        assert!(partly < LONG && second.gauge().is_waiting(), "{partly}");
        one.write_all(b"x").await.unwrap();
        assert_eq!(read(&mut first).await.unwrap(), 1);
        assert!(read(&mut second).await.unwrap() + partly > LONG);
        drop((first, second));
        assert_eq!(budget.0.available_permits() as u64, LONG + LONG / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_takes_memory_from_others_has_to_become_whole() {
        let budget = Budget::new(2 * LONG);
        let (mut client, mut stream) = streams(&budget, 2 * LONG);
        client.write_all(&head()).await.unwrap();
        client.write_all(&[b'x'; 100_000]).await.unwrap();
        read(&mut stream).await.unwrap();
        let error = stream.read(&mut [0; 100]).await.unwrap_err();
        assert!(error.get_ref().is_some_and(|error| error.is::<MessageTimeout>()), "{error}");
        // A message that fits into the free share has no timeout.
        let (mut client, mut stream) = streams(&budget, 2 * LONG);
        client.write_all(&head()).await.unwrap();
        let clock: SharedClock = Arc::new(TestClock::new(1));
        assert!(read(&mut stream).await.is_ok());
        assert!(clock.timeout(10 * MESSAGE_TIMEOUT, stream.read(&mut [0; 100])).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_longer_than_allowed_is_read_on_once_it_is_allowed() {
        let budget = Budget::new(2 * LONG);
        let (mut client, mut stream) = streams(&budget, 30_000);
        client.write_all(&head()).await.unwrap();
        client.write_all(&vec![b'x'; LONG as usize]).await.unwrap();
        assert!(read(&mut stream).await.unwrap() < 60_000);
        assert!(stream.gauge().is_paused());
        stream.gauge().set_longest(LONG);
        assert!(read(&mut stream).await.unwrap() > LONG - 60_000 && !stream.gauge().is_paused());
    }
}
