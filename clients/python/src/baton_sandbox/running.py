"""The handle of a running command: its output, its input, its end."""

from __future__ import annotations

import asyncio
import codecs
from dataclasses import replace
from typing import AsyncIterator, Callable, Optional

from . import clock, requests
from .errors import BatonError, EndedError, OutputGapError, TimeoutError
from .exec import Exec
from .options import Input
from .result import Result
from .stdin import PART
from .stream import Chunk, Lost


class Running:
    """A running command: its output, its input, its end.

    When the handle is garbage collected, the command keeps running and its output is discarded.
    """

    def __init__(self, exec: Exec, send: Callable[[requests.Request], None]) -> None:
        self._exec = exec
        self._send_request = send
        self._readers = {"stdout": 0, "stderr": 0}
        #: The offset at which collecting a stream began.
        self._bases: dict[str, int] = {}
        self._collected = {"stdout": bytearray(), "stderr": bytearray()}
        self._lost = 0
        self._writing = asyncio.Lock()

    def __del__(self) -> None:
        exec = self._exec
        exec.call_soon(exec.discard_all)

    @property
    def id(self) -> str:
        return self._exec.id

    @property
    def stdout(self) -> OutputStream:
        """Read it, or call ``wait``: a command whose output is not read eventually blocks."""
        return OutputStream(self, "stdout")

    @property
    def stderr(self) -> OutputStream:
        """Read it, or call ``wait``: a command whose output is not read eventually blocks."""
        return OutputStream(self, "stderr")

    async def wait(self, *, check: bool = False, timeout: Optional[float] = None) -> Result:
        """Waits for the end and collects the output that has no other reader. May be called again.

        ``check`` raises ``ExecFailedError`` unless the exit code is 0. ``timeout`` limits the waiting,
        not the command.
        """
        try:
            result = await clock.wait_for(self._exec.changed.until(self._result), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the command is still running after {timeout} s") from None
        return result.check() if check else result

    def _result(self) -> Optional[Result]:
        for stream, readers in self._readers.items():
            if not readers:
                self._collect(stream)
        end = self._exec.end
        if end is None:
            return None
        if isinstance(end, BatonError):
            raise end.with_traceback(None)
        return replace(
            end,
            stdout_bytes=bytes(self._collected["stdout"]),
            stderr_bytes=bytes(self._collected["stderr"]),
            lost=self._lost,
            rolled_back=self._exec.rolled_back,
        )

    def _collect(self, stream: str) -> None:
        into = self._collected[stream]
        base = self._bases.setdefault(stream, self._exec.streams[stream].taken)
        while True:
            chunk = self._exec.pop(stream)
            if chunk is None:
                return
            if isinstance(chunk, bytes):
                into += chunk
            elif isinstance(chunk, Lost):
                self._lost += chunk.end - chunk.start
            elif not self._lost:
                # After a gap the position is not known, and everything is kept.
                del into[max(0, chunk.to - base) :]

    async def write_stdin(self, data: Input) -> None:
        """Writes to the command, and waits while a mebibyte is unacknowledged. Each byte arrives once, also after a reconnect.

        The command must have been started with ``stdin=True``.
        """
        exec = self._exec
        view = memoryview(data.encode() if isinstance(data, str) else bytes(data))
        async with self._writing:
            while view:
                part, view = view[:PART], view[PART:]
                await exec.changed.until(lambda: self._has_space(len(part)))
                exec.stdin.write(part)
                exec.wake()

    def _has_space(self, size: int) -> Optional[bool]:
        exec = self._exec
        if not exec.is_reading:
            if isinstance(exec.end, BatonError):
                raise exec.end.with_traceback(None)
            raise EndedError("the command no longer reads its stdin" if exec.end is None else "the command has ended")
        if exec.stdin.is_closed:
            raise EndedError("its stdin was closed")
        return True if exec.stdin.free_space >= size else None

    async def close_stdin(self) -> None:
        """Ends the input, after everything that was written before."""
        async with self._writing:
            self._exec.stdin.close()
            self._exec.wake()

    async def signal(self, name: str) -> None:
        """Sends a signal such as ``"INT"``, at most once: a dropped connection can lose it."""
        self._send(requests.signal(self.id, name))

    async def kill(self) -> None:
        """Kills the command and all its descendants. Sent again after a reconnect for as long as the command runs."""
        self._exec.kill_requested = True
        self._send(requests.kill_process(self.id))

    async def resize(self, cols: int, rows: int) -> None:
        """Changes the size of its terminal."""
        self._send(requests.resize(self.id, max(1, cols), max(1, rows)))

    def _send(self, request: requests.Request) -> None:
        """Sends nothing to a command that has ended."""
        if isinstance(self._exec.end, BatonError):
            raise self._exec.end.with_traceback(None)
        if self._exec.end is None:
            self._send_request(request)


class OutputStream:
    """One output stream of a command, which can be read once. Iterates over ``bytes``."""

    def __init__(self, running: Running, stream: str) -> None:
        self._running = running
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Bytes(self._running, self._stream)

    def chunks(self) -> AsyncIterator[Chunk]:
        """Bytes, and where some are missing (``Lost``) or follow again after a roll-back (``Again``)."""
        return _Chunks(self._running, self._stream)

    async def lines(self, encoding: str = "utf-8") -> AsyncIterator[str]:
        """The lines, without their line ends."""
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        rest = ""
        async for data in self:
            *lines, rest = (rest + decoder.decode(data)).split("\n")
            for line in lines:
                yield line
        rest += decoder.decode(b"", final=True)
        if rest:
            yield rest

    async def read(self) -> bytes:
        """Everything until the end of the stream."""
        return b"".join([data async for data in self])

    def discard(self) -> None:
        """Discards the rest, so that the command never waits for a reader."""
        self._running._exec.discard(self._stream)


class _Chunks(AsyncIterator[Chunk]):
    """While it exists, ``wait`` does not collect the stream."""

    def __init__(self, running: Running, stream: str) -> None:
        self._running = running
        self._stream = stream
        running._readers[stream] += 1

    def __del__(self) -> None:
        self._running._exec.call_soon(self._release(self._running, self._stream))

    @staticmethod
    def _release(running: Running, stream: str) -> Callable[[], None]:
        def release() -> None:
            running._readers[stream] -= 1
            running._exec.changed.notify()

        return release

    async def __anext__(self) -> Chunk:
        exec = self._running._exec
        chunk = await exec.read(self._stream)
        if chunk is not None:
            return chunk
        if isinstance(exec.end, BatonError):
            raise exec.end.with_traceback(None)
        raise StopAsyncIteration


class _Bytes(AsyncIterator[bytes]):
    def __init__(self, running: Running, stream: str) -> None:
        self._chunks = _Chunks(running, stream)
        self._stream = stream

    async def __anext__(self) -> bytes:
        while True:
            chunk = await self._chunks.__anext__()
            if isinstance(chunk, bytes):
                return chunk
            if isinstance(chunk, Lost):
                raise OutputGapError(self._stream, chunk.start, chunk.end)
