"""The streams of one command between the connection and its reader or writer: in order, once, bounded.

::

    acked <= taken <= received        offsets in an output stream
             `- queue -'
    acked <= sent <= end              offsets in the command's stdin
    `---- chunks ----'

The server sends at most a window past what was acknowledged, and only what the reader took is
acknowledged: a slow reader slows the command down, not the connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Optional, Union

#: An acknowledgement goes out after this much.
ACK_EVERY = 256 << 10
#: More than any window the server grants: past this the socket is not read until the reader caught up.
FLOOD = 4 << 20
#: So much stdin may be on its way; a writer waits for room.
WINDOW = 1 << 20
#: The largest part of stdin sent at once.
PART = 256 << 10


@dataclass(frozen=True)
class Lost:
    """The bytes from ``start`` to ``end`` were not kept anywhere: nobody listened for too long."""

    start: int
    end: int


@dataclass(frozen=True)
class Again:
    """The sandbox went back to an older checkpoint: what follows are the bytes from ``to`` on, again."""

    to: int


Chunk = Union[bytes, Lost, Again]


class Hole(Exception):
    """Bytes between what came and this frame are missing, and nobody said so."""


class Pipe:
    """One stream of output."""

    def __init__(self, start: int, notify: Callable[[], None]) -> None:
        self._queue: deque[tuple[Chunk, int, int]] = deque()
        self._notify = notify
        self._rewinds = 0
        self.buffered = 0
        self.received = self.taken = self.acked = start
        self.is_discarded = False
        self.is_ended = False

    def push(self, offset: int, data: bytes) -> None:
        """What was there before is simply left out; repeated bytes are dropped."""
        if offset > self.received:
            raise Hole
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
        # An item from before a rewind moves the reader, but not what counts for the server.
        if rewinds == self._rewinds:
            self.taken = end
        return chunk

    def discard(self) -> None:
        """Nobody will read it: the command must not wait for that."""
        self.is_discarded = True
        self._queue.clear()
        self.buffered = 0
        self.taken = self.received
        self._notify()

    def end(self) -> None:
        """No more will come."""
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

    def named(self) -> int:
        """After a reconnect the server counts from what was named to it."""
        self.acked = self.received
        return self.received

    @property
    def is_flooded(self) -> bool:
        return self.buffered > FLOOD


class Stdin:
    """What was written to a command and not yet taken by it, so that it can be sent again."""

    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self.acked = self._sent = self._end = 0
        self._eof_sent = False
        self.is_closed = False

    @property
    def room(self) -> int:
        return WINDOW - (self._end - self.acked)

    def write(self, data: memoryview) -> None:
        self._chunks.append(data)
        self._end += len(data)

    def close(self) -> None:
        self.is_closed = True

    def next(self) -> Optional[tuple[int, Optional[memoryview]]]:
        """The next thing to send: an offset and bytes, or an offset and ``None`` for the end."""
        if self._sent < self._end:
            if self._sent - self.acked >= WINDOW:
                return None
            skip = self._sent - self.acked
            for chunk in self._chunks:
                if skip < len(chunk):
                    offset, part = self._sent, chunk[skip : skip + PART]
                    self._sent += len(part)
                    return offset, part
                skip -= len(chunk)
        if self.is_closed and not self._eof_sent:
            self._eof_sent = True
            return self._end, None
        return None

    def ack(self, offset: int) -> None:
        """Everything below ``offset`` was taken."""
        left = max(0, min(offset, self._end) - self.acked)
        self.acked += left
        self._sent = max(self._sent, self.acked)
        while left:
            chunk = self._chunks.popleft()
            if len(chunk) > left:
                self._chunks.appendleft(chunk[left:])
                break
            left -= len(chunk)

    @property
    def is_under_way(self) -> bool:
        """Something was sent of which nothing was heard."""
        return self._sent > self.acked or self._eof_sent

    def resend(self) -> None:
        """A new connection: what was not taken goes again, and so does the end."""
        self._sent = self.acked
        self._eof_sent = False
