"""One output stream of a command, between the connection and its reader: in order, once, bounded.

::

    acked <= taken <= received        offsets in the stream
             `- queue -'

The server sends at most a window past what was acknowledged, and only what the reader took is
acknowledged: a slow reader slows the command down, not the connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Optional, Union

#: An acknowledgement is sent after this many bytes.
ACK_EVERY = 256 << 10
#: More than any window the server grants: above this the socket is not read until the reader has caught up.
MAX_BUFFERED = 4 << 20


@dataclass(frozen=True)
class Lost:
    """The bytes from ``start`` to ``end`` were dropped: the command had no reader for too long."""

    start: int
    end: int


@dataclass(frozen=True)
class Again:
    """The sandbox was rolled back to an older checkpoint: the bytes from ``to`` on follow again."""

    to: int


Chunk = Union[bytes, Lost, Again]


class MissingBytes(Exception):
    """The server skipped bytes without reporting a gap."""


class StreamBuffer:
    def __init__(self, start: int, notify: Callable[[], None]) -> None:
        self._queue: deque[tuple[Chunk, int, int]] = deque()
        self._notify = notify
        self._rewinds = 0
        self.buffered = 0
        self.received = self.taken = self.acked = start
        self.is_discarded = False
        self.is_ended = False

    def push(self, offset: int, data: bytes) -> None:
        """Adds the new part of ``data``; repeated bytes are dropped."""
        if offset > self.received:
            raise MissingBytes
        known = self.received - offset
        if known >= len(data):
            return
        if known:
            data = data[known:]
        self.received += len(data)
        self._put(data, len(data))

    def gap(self, to: int) -> None:
        if to > self.received:
            lost = Lost(self.received, to)
            self.received = to
            self._put(lost, 0)

    def rewind(self, to: int) -> None:
        if to < self.received:
            self._rewinds += 1
            self.received = to
            self.taken = min(self.taken, to)
            self.acked = min(self.acked, to)
            self._put(Again(to), 0)

    def _put(self, chunk: Chunk, size: int) -> None:
        if self.is_discarded or self.is_ended:
            self.taken = self.received
        else:
            self.buffered += size
            self._queue.append((chunk, self.received, self._rewinds))
        self._notify()

    def pop(self) -> Optional[Chunk]:
        if not self._queue:
            return None
        chunk, end, rewinds = self._queue.popleft()
        if isinstance(chunk, bytes):
            self.buffered -= len(chunk)
        # An item from before a rewind moves the reader, but must not be acknowledged.
        if rewinds == self._rewinds:
            self.taken = end
        return chunk

    def discard(self) -> None:
        """Drops the output from now on, so that the command never waits for a reader."""
        self.is_discarded = True
        self._queue.clear()
        self.buffered = 0
        self.taken = self.received
        self._notify()

    def end(self) -> None:
        """No more output will come."""
        self.is_ended = True
        self._notify()

    @property
    def is_over(self) -> bool:
        return not self._queue and (self.is_ended or self.is_discarded)

    @property
    def is_ack_due(self) -> bool:
        return self.taken >= self.acked + ACK_EVERY

    def ack(self) -> int:
        """The offset to acknowledge now."""
        self.acked = max(self.acked, self.taken)
        return self.acked

    def resume_offset(self) -> int:
        """The offset to name in a reconnect; the server counts its window from there."""
        self.acked = self.received
        return self.received

    @property
    def is_full(self) -> bool:
        return self.buffered > MAX_BUFFERED
