"""Input that was written to a command and not yet accepted by it, so that it can be sent again.

::

    acked <= sent <= reached <= end        offsets in the command's stdin
    `--------- chunks ----------'
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Optional

#: The maximum number of unacknowledged bytes; a writer waits for free space.
WINDOW = 1 << 20
#: The largest part sent at once.
PART = 256 << 10


class StdinConflict(Exception):
    """Input cannot continue on a new connection."""

    def __init__(self, message: str, *, rolled_back: bool) -> None:
        super().__init__(message)
        self.rolled_back = rolled_back


class StdinBuffer:
    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self.acked = self._sent = self._end = 0
        #: The highest offset sent so far, on any connection.
        self._reached = 0
        #: The CRC-32 of everything below ``acked``; ``None`` if the server does not tell that of earlier clients.
        self._crc32: Optional[int] = 0
        self._eof_sent = False
        self.is_closed = False

    @property
    def free_space(self) -> int:
        return WINDOW - (self._end - self.acked)

    def write(self, data: memoryview) -> None:
        self._chunks.append(data)
        self._end += len(data)

    def close(self) -> None:
        self.is_closed = True

    def next(self) -> Optional[tuple[int, Optional[memoryview]]]:
        """The next part to send: an offset and bytes, or an offset and ``None`` for the end."""
        if self._sent < self._end:
            if self._sent - self.acked >= WINDOW:
                return None
            skip = self._sent - self.acked
            for chunk in self._chunks:
                if skip < len(chunk):
                    offset, part = self._sent, chunk[skip : skip + PART]
                    self._sent += len(part)
                    self._reached = max(self._reached, self._sent)
                    return offset, part
                skip -= len(chunk)
        if self.is_closed and not self._eof_sent:
            self._eof_sent = True
            return self._end, None
        return None

    def ack(self, offset: int) -> None:
        """Everything below ``offset`` was accepted."""
        left = max(0, min(offset, self._end) - self.acked)
        self.acked += left
        self._sent = max(self._sent, self.acked)
        self._reached = max(self._reached, self.acked)
        while left:
            chunk = self._chunks.popleft()
            if self._crc32 is not None:
                self._crc32 = zlib.crc32(chunk[:left], self._crc32)
            if len(chunk) > left:
                self._chunks.appendleft(chunk[left:])
                break
            left -= len(chunk)

    @property
    def is_in_flight(self) -> bool:
        """Whether something was sent and not acknowledged yet."""
        return self._sent > self.acked or self._eof_sent

    def resume(self, accepted: int, crc32: Optional[int] = None) -> None:
        """Prepares for a new connection, on which the command has accepted ``accepted`` bytes with this CRC-32.

        The rest is sent again. Bytes that were never sent from here are another client's; what was not sent yet comes
        after them.
        """
        interleaved = StdinConflict(
            "another client wrote input while the connection was down; it is not known whether the last input from here arrived",
            rolled_back=False,
        )
        if accepted < self.acked:
            raise StdinConflict("the sandbox was rolled back to before input that the command had accepted", rolled_back=True)
        if accepted <= self._reached:
            self.ack(accepted)
            if None not in (self._crc32, crc32) and self._crc32 != crc32:
                raise interleaved
        elif self.acked < self._reached:
            raise interleaved
        else:
            self._end += accepted - self.acked
            self.acked = self._reached = accepted
        self._crc32 = crc32
        self._sent = self.acked
        self._eof_sent = False
