"""Input that was written to a command and not yet accepted by it, so that it can be sent again.

::

    acked <= sent <= end              offsets in the command's stdin
    `---- chunks ----'
"""

from __future__ import annotations

from collections import deque
from typing import Optional

#: The maximum number of unacknowledged bytes; a writer waits for free space.
WINDOW = 1 << 20
#: The largest part sent at once.
PART = 256 << 10


class StdinBuffer:
    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self.acked = self._sent = self._end = 0
        self._eof_sent = False
        self.is_closed = False

    def start_at(self, accepted: int) -> None:
        """The command accepted this many bytes from earlier clients; input of this client comes after them.

        To be called before anything is sent.
        """
        self.acked += accepted
        self._sent += accepted
        self._end += accepted

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
        while left:
            chunk = self._chunks.popleft()
            if len(chunk) > left:
                self._chunks.appendleft(chunk[left:])
                break
            left -= len(chunk)

    @property
    def is_in_flight(self) -> bool:
        """Whether something was sent and not acknowledged yet."""
        return self._sent > self.acked or self._eof_sent

    def resume(self, accepted: int) -> None:
        """Prepares for a new connection, on which the command has accepted ``accepted`` bytes.

        If that is more than this client wrote, another client wrote input in the meantime; what this
        client writes next comes after it.
        """
        self.ack(accepted)
        if accepted > self._end:
            self.acked = self._end = accepted
        self._sent = self.acked
        self._eof_sent = False
