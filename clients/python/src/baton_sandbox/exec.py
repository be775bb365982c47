"""One command, as the connection and its handle share it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Callable, Optional, Union

from .errors import BatonError
from .notifier import Notifier
from .requests import Request
from .result import Result
from .stdin import StdinBuffer
from .stream import Chunk, StreamBuffer

REQUESTED, STARTED, ENDED = "requested", "started", "ended"


class Exec:
    def __init__(self, exec_id: str, request: Optional[Request], start: tuple[int, int], wake: Callable[[], None]) -> None:
        self.id = exec_id
        #: ``None`` for a command that an earlier client started.
        self.request = request
        self.phase = STARTED if request is None else REQUESTED
        self.end: Union[Result, BatonError, None] = None
        self.changed = Notifier()
        self.streams = {
            "stdout": StreamBuffer(start[0], self.changed.notify),
            "stderr": StreamBuffer(start[1], self.changed.notify),
        }
        self.stdin = StdinBuffer()
        #: Whether the command still reads its stdin.
        self.is_reading = True
        self.kill_requested = False
        #: The sandbox was rolled back while the command ran.
        self.rolled_back = False
        #: Wakes the connection.
        self.wake = wake
        self.loop = asyncio.get_running_loop()

    def started(self) -> None:
        if self.phase == REQUESTED:
            self.phase = STARTED
            self.changed.notify()

    def ended(self, end: Union[Result, BatonError]) -> None:
        """Only the first end counts."""
        if self.phase != ENDED:
            self.phase, self.end = ENDED, end
        self.is_reading = False
        for stream in self.streams.values():
            stream.end()
        self.changed.notify()

    def pop(self, stream: str) -> Optional[Chunk]:
        """Takes one chunk, and wakes the connection if an acknowledgement is due or if it waits for free space."""
        buffer = self.streams[stream]
        was_full = buffer.is_full
        chunk = buffer.pop()
        if chunk is not None and (buffer.is_ack_due or was_full):
            self.changed.notify()
            self.wake()
        return chunk

    async def read(self, stream: str) -> Optional[Chunk]:
        while True:
            chunk = self.pop(stream)
            if chunk is not None or self.streams[stream].is_over:
                return chunk
            await self.changed.wait()

    def discard(self, stream: str) -> None:
        self.streams[stream].discard()
        self.wake()

    def discard_all(self) -> None:
        for stream in self.streams:
            self.discard(stream)

    @property
    def is_full(self) -> bool:
        return any(stream.is_full for stream in self.streams.values())

    def take_ack(self) -> Optional[tuple[int, int]]:
        if any(stream.is_ack_due for stream in self.streams.values()):
            return self.streams["stdout"].ack(), self.streams["stderr"].ack()
        return None

    @property
    def received(self) -> tuple[int, int]:
        return self.streams["stdout"].received, self.streams["stderr"].received

    def resume_offsets(self) -> tuple[int, int]:
        """The offsets to name in a reconnect."""
        return self.streams["stdout"].resume_offset(), self.streams["stderr"].resume_offset()

    def stdin_ack(self, offset: int) -> None:
        self.stdin.ack(offset)
        self.changed.notify()

    def stdin_resume(self, accepted: int, crc32: Optional[int] = None) -> None:
        self.stdin.resume(accepted, crc32)
        self.changed.notify()

    def stdin_over(self) -> None:
        """The command no longer reads its stdin."""
        self.is_reading = False
        self.changed.notify()

    def call_soon(self, work: Callable[[], None]) -> None:
        """For finalizers, which may run on any thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work)
