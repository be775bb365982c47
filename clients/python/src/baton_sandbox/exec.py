"""One command: what the connection knows of it, and the handle a caller has."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from dataclasses import dataclass, field
from typing import AsyncIterator, Callable, Optional, Union

from . import protocol
from .errors import BatonError, EndedError, ExecFailedError, OutputGapError, TimeoutError
from .pipe import PART, Chunk, Lost, Pipe, Stdin
from .seam import Bell

ASKED, STARTED, ENDED = "asked", "started", "ended"


@dataclass(frozen=True)
class Result:
    """What a command wrote, and how it ended. A non-zero exit code is a result, not an error."""

    #: Exactly what it wrote, except for what somebody else read from the streams.
    stdout_bytes: bytes = field(repr=False, default=b"")
    stderr_bytes: bytes = field(repr=False, default=b"")
    exit_code: Optional[int] = None
    #: The number of the signal that ended it.
    signal: Optional[int] = None
    #: It was killed because its own time was up.
    timed_out: bool = False
    #: How long it ran in seconds, without the time the sandbox stood still.
    duration: Optional[float] = None
    #: How many bytes were not kept anywhere and are missing here.
    lost: int = 0

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def ending(self) -> str:
        """How it ended, for a person."""
        if self.timed_out:
            return "its time was up"
        if self.signal is not None:
            return f"ended by signal {self.signal}"
        return f"exit code {self.exit_code}"

    def check(self) -> Result:
        """Itself, if the command succeeded; raises ``ExecFailedError`` otherwise."""
        if not self.ok:
            raise ExecFailedError(self)
        return self


class Exec:
    """One command as the connection and its handle share it."""

    def __init__(
        self, exec_id: str, request: Optional[protocol.Request], start: tuple[int, int], look: Callable[[], None]
    ) -> None:
        self.id = exec_id
        #: ``None`` for a command that somebody else started.
        self.request = request
        self.stage = STARTED if request is None else ASKED
        self.end: Union[Result, BatonError, None] = None
        self.bell = Bell()
        self.pipes = {"stdout": Pipe(start[0], self.bell.ring), "stderr": Pipe(start[1], self.bell.ring)}
        self.stdin = Stdin()
        self.is_read = True
        self.kill_wanted = False
        #: Tells the connection to look.
        self.look = look
        self.loop = asyncio.get_running_loop()

    def started(self) -> None:
        if self.stage == ASKED:
            self.stage = STARTED
            self.bell.ring()

    def ended(self, end: Union[Result, BatonError]) -> None:
        """Only the first end counts."""
        if self.stage != ENDED:
            self.stage, self.end = ENDED, end
        self.is_read = False
        for pipe in self.pipes.values():
            pipe.end()
        self.bell.ring()

    def pop(self, stream: str) -> Optional[Chunk]:
        """One item; the connection looks when an acknowledgement is due or when it waited for room."""
        pipe = self.pipes[stream]
        was_flooded = pipe.is_flooded
        chunk = pipe.pop()
        if chunk is not None and (pipe.is_ack_due or was_flooded):
            self.bell.ring()
            self.look()
        return chunk

    async def read(self, stream: str) -> Optional[Chunk]:
        while True:
            chunk = self.pop(stream)
            if chunk is not None or self.pipes[stream].is_over:
                return chunk
            await self.bell.wait()

    def discard(self, stream: str) -> None:
        self.pipes[stream].discard()
        self.look()

    def discard_all(self) -> None:
        for stream in self.pipes:
            self.discard(stream)

    @property
    def is_flooded(self) -> bool:
        return any(pipe.is_flooded for pipe in self.pipes.values())

    def take_ack(self) -> Optional[tuple[int, int]]:
        if any(pipe.is_ack_due for pipe in self.pipes.values()):
            return self.pipes["stdout"].ack(), self.pipes["stderr"].ack()
        return None

    @property
    def received(self) -> tuple[int, int]:
        return self.pipes["stdout"].received, self.pipes["stderr"].received

    def resume(self) -> tuple[int, int]:
        """A new connection knows it: the offsets to name."""
        self.stdin.resend()
        return self.pipes["stdout"].named(), self.pipes["stderr"].named()

    def stdin_ack(self, offset: int) -> None:
        self.stdin.ack(offset)
        self.bell.ring()

    def stdin_over(self) -> None:
        """Nobody takes its stdin any more."""
        self.is_read = False
        self.bell.ring()

    def soon(self, work: Callable[[], None]) -> None:
        """From a finaliser, which may run on any thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work)


class Running:
    """A command that runs: its output, its input, its end.

    Letting go of it leaves the command running; its output is then thrown away.
    """

    def __init__(self, exec: Exec, tell: Callable[[protocol.Request], None]) -> None:
        self._exec = exec
        self._tell = tell
        self._readers = {"stdout": 0, "stderr": 0}
        self._bases: dict[str, int] = {}
        self._collected = {"stdout": bytearray(), "stderr": bytearray()}
        self._lost = 0
        self._writing = asyncio.Lock()

    def __del__(self) -> None:
        exec = self._exec
        exec.soon(exec.discard_all)

    @property
    def id(self) -> str:
        return self._exec.id

    @property
    def stdout(self) -> OutputStream:
        """Read it or wait for the command: unread, it holds the command back."""
        return OutputStream(self, "stdout")

    @property
    def stderr(self) -> OutputStream:
        """Read it or wait for the command: unread, it holds the command back."""
        return OutputStream(self, "stderr")

    async def wait(self, *, check: bool = False, timeout: Optional[float] = None) -> Result:
        """Waits for the end, and collects the output that nobody else reads. May be called again.

        ``check`` raises ``ExecFailedError`` unless the exit code is 0. ``timeout`` bounds the waiting,
        not the command.
        """
        try:
            result = await asyncio.wait_for(self._exec.bell.until(self._look), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the command runs on after {timeout} s") from None
        return result.check() if check else result

    def _look(self) -> Optional[Result]:
        for stream, readers in self._readers.items():
            if not readers:
                self._collect(stream)
        end = self._exec.end
        if end is None:
            return None
        if isinstance(end, BatonError):
            raise end.with_traceback(None)
        return Result(
            stdout_bytes=bytes(self._collected["stdout"]),
            stderr_bytes=bytes(self._collected["stderr"]),
            exit_code=end.exit_code,
            signal=end.signal,
            timed_out=end.timed_out,
            duration=end.duration,
            lost=self._lost,
        )

    def _collect(self, stream: str) -> None:
        into = self._collected[stream]
        base = self._bases.setdefault(stream, self._exec.pipes[stream].taken)
        while True:
            chunk = self._exec.pop(stream)
            if chunk is None:
                return
            if isinstance(chunk, bytes):
                into += chunk
            elif isinstance(chunk, Lost):
                self._lost += chunk.end - chunk.start
            elif not self._lost:
                # With a gap before it the place is not known; then all is kept.
                del into[max(0, chunk.to - base) :]

    async def write_stdin(self, data: Union[bytes, bytearray, memoryview, str]) -> None:
        """Waits while a mebibyte is on its way. Each byte arrives once, also over a reconnect.

        The command must have been started with ``stdin=True``.
        """
        exec = self._exec
        view = memoryview(data.encode() if isinstance(data, str) else bytes(data))
        async with self._writing:
            while view:
                part, view = view[:PART], view[PART:]
                await exec.bell.until(lambda: self._has_room(len(part)))
                exec.stdin.write(part)
                exec.look()

    def _has_room(self, size: int) -> Optional[bool]:
        exec = self._exec
        if not exec.is_read:
            if isinstance(exec.end, BatonError):
                raise exec.end.with_traceback(None)
            raise EndedError("the command reads no more" if exec.end is None else "the command is over")
        if exec.stdin.is_closed:
            raise EndedError("its stdin was closed")
        return True if exec.stdin.room >= size else None

    async def close_stdin(self) -> None:
        """The command reads the end after everything written before."""
        async with self._writing:
            self._exec.stdin.close()
            self._exec.look()

    async def signal(self, name: str) -> None:
        """Sends a signal such as ``"INT"``, at most once: a drop at the wrong moment loses it."""
        self._say(protocol.signal(self.id, name))

    async def kill(self) -> None:
        """Kills its whole process tree. Asked again after a reconnect for as long as it runs."""
        self._exec.kill_wanted = True
        self._say(protocol.kill_process(self.id))

    async def resize(self, cols: int, rows: int) -> None:
        """Its terminal has a new size."""
        self._say(protocol.resize(self.id, max(1, cols), max(1, rows)))

    def _say(self, request: protocol.Request) -> None:
        """To a command that is over nothing is said."""
        if isinstance(self._exec.end, BatonError):
            raise self._exec.end.with_traceback(None)
        if self._exec.end is None:
            self._tell(request)


class OutputStream:
    """One stream of a command's output, to be read once. Iterates over ``bytes``."""

    def __init__(self, running: Running, stream: str) -> None:
        self._running = running
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Bytes(self._running, self._stream)

    def chunks(self) -> AsyncIterator[Chunk]:
        """Bytes, and where some are missing (``Lost``) or come again after a restore (``Again``)."""
        return _Chunks(self._running, self._stream)

    async def lines(self, encoding: str = "utf-8") -> AsyncIterator[str]:
        """Line by line, without their ends."""
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
        """Everything that is still to come."""
        return b"".join([data async for data in self])

    def discard(self) -> None:
        """Throws the rest away, so that it does not hold the command back."""
        self._running._exec.discard(self._stream)


class _Chunks(AsyncIterator[Chunk]):
    """While it lives, ``wait`` leaves the stream to it."""

    def __init__(self, running: Running, stream: str) -> None:
        self._running = running
        self._stream = stream
        running._readers[stream] += 1

    def __del__(self) -> None:
        self._running._exec.soon(self._running_let_go(self._running, self._stream))

    @staticmethod
    def _running_let_go(running: Running, stream: str) -> Callable[[], None]:
        def let_go() -> None:
            running._readers[stream] -= 1
            running._exec.bell.ring()

        return let_go

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
