"""The same sandboxes for programs without ``asyncio``: every call waits until it is done.

    from baton_sandbox.sync import Sandbox

    with Sandbox.create("ws://127.0.0.1:8080") as sandbox:
        print(sandbox.run("uname -a").stdout)

One thread with an event loop serves all of them. May be used from several threads.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, AsyncIterator, Coroutine, Iterator, Optional, Sequence, TypeVar, Union

from . import exec as _exec
from . import sandbox as _sandbox
from .exec import Result
from .files import FileEntry, LocalPath, Source
from .pipe import Chunk
from .sandbox import Input, View

T = TypeVar("T")


class _Loop:
    """The one thread; it is made when it is first needed and ends with the program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: Optional[asyncio.AbstractEventLoop] = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="baton-sandbox", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the call, not only the waiting for it.
            future.cancel()
            raise


_loop = _Loop()


def _iterate(make: Any) -> Iterator[Any]:
    """The items of an async iterator, which is made and used in the loop's thread."""

    async def begin() -> AsyncIterator[Any]:
        iterator: AsyncIterator[Any] = make().__aiter__()
        return iterator

    async def step() -> tuple[bool, Any]:
        try:
            return True, await iterator.__anext__()
        except StopAsyncIteration:
            return False, None

    iterator = _loop.call(begin())
    while True:
        is_there, item = _loop.call(step())
        if not is_there:
            return
        yield item


class OutputStream:
    """One stream of a command's output, to be read once. Iterates over ``bytes``."""

    def __init__(self, stream: _exec.OutputStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        return _iterate(lambda: self._stream)

    def chunks(self) -> Iterator[Chunk]:
        return _iterate(self._stream.chunks)

    def lines(self, encoding: str = "utf-8") -> Iterator[str]:
        return _iterate(lambda: self._stream.lines(encoding))

    def read(self) -> bytes:
        return _loop.call(self._stream.read())

    def discard(self) -> None:
        async def discard() -> None:
            self._stream.discard()

        _loop.call(discard())


class Running:
    """A command that runs: its output, its input, its end."""

    def __init__(self, running: _exec.Running) -> None:
        self._running = running

    @property
    def id(self) -> str:
        return self._running.id

    @property
    def stdout(self) -> OutputStream:
        return OutputStream(self._running.stdout)

    @property
    def stderr(self) -> OutputStream:
        return OutputStream(self._running.stderr)

    def wait(self, *, check: bool = False, timeout: Optional[float] = None) -> Result:
        return _loop.call(self._running.wait(check=check, timeout=timeout))

    def write_stdin(self, data: Input) -> None:
        _loop.call(self._running.write_stdin(data))

    def close_stdin(self) -> None:
        _loop.call(self._running.close_stdin())

    def signal(self, name: str) -> None:
        _loop.call(self._running.signal(name))

    def kill(self) -> None:
        _loop.call(self._running.kill())

    def resize(self, cols: int, rows: int) -> None:
        _loop.call(self._running.resize(cols, rows))


class Place:
    """Where a sandbox can be found again."""

    def __init__(self, place: _sandbox.Place) -> None:
        self._place = place

    @property
    def id(self) -> str:
        return self._place.id

    @property
    def token(self) -> str:
        return self._place.token

    def attach(self) -> Sandbox:
        return Sandbox(_loop.call(self._place.attach()))


class Sandbox:
    """One sandbox; see :class:`baton_sandbox.Sandbox`, whose methods and options these are."""

    def __init__(self, sandbox: _sandbox.Sandbox) -> None:
        self._sandbox = sandbox
        self.commands = Commands(self)

    @classmethod
    def create(cls, url: Optional[str] = None, **options: Any) -> Sandbox:
        return cls(_loop.call(_sandbox.Sandbox.create(url, **options)))

    @classmethod
    def attach(cls, url: Optional[str], id: str, token: str, **options: Any) -> Sandbox:
        return cls(_loop.call(_sandbox.Sandbox.attach(url, id, token, **options)))

    connect = attach

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        _loop.call(self._sandbox.__aexit__(kind, error, trace))

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def token(self) -> str:
        return self._sandbox.token

    @property
    def place(self) -> Place:
        return Place(self._sandbox.place)

    def info(self) -> View:
        return self._sandbox.info()

    def exec(self, command: Union[str, Sequence[str]], **options: Any) -> Running:
        return Running(_loop.call(self._sandbox.exec(command, **options)))

    def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Any) -> Result:
        return _loop.call(self._sandbox.run(command, check=check, **options))

    def run_code(self, code: str, language: str = "python", *, check: bool = False, **options: Any) -> Result:
        return _loop.call(self._sandbox.run_code(code, language, check=check, **options))

    def follow(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Running:
        return Running(_loop.call(self._sandbox.follow(exec_id, stdout=stdout, stderr=stderr)))

    def read_file(self, path: str, **options: Any) -> bytes:
        return _loop.call(self._sandbox.read_file(path, **options))

    def read_text(self, path: str, **options: Any) -> str:
        return _loop.call(self._sandbox.read_text(path, **options))

    def read_stream(self, path: str, **options: Any) -> Iterator[bytes]:
        return _iterate(lambda: self._sandbox.read_stream(path, **options))

    def write_file(self, path: str, data: Source, **options: Any) -> None:
        _loop.call(self._sandbox.write_file(path, data, **options))

    def list_files(self, path: str, **options: Any) -> list[FileEntry]:
        return _loop.call(self._sandbox.list_files(path, **options))

    def upload(self, local: LocalPath, path: str, **options: Any) -> None:
        _loop.call(self._sandbox.upload(local, path, **options))

    def download(self, path: str, local: LocalPath, **options: Any) -> None:
        _loop.call(self._sandbox.download(path, local, **options))

    def checkpoint(self, *, live: bool = False, keep_running: bool = False) -> str:
        return _loop.call(self._sandbox.checkpoint(live=live, keep_running=keep_running))

    def snapshot(self, name: str, *, full: bool = False) -> str:
        return _loop.call(self._sandbox.snapshot(name, full=full))

    def fork(self, count: int = 1) -> list[Place]:
        return [Place(place) for place in _loop.call(self._sandbox.fork(count))]

    def handoff(self) -> None:
        _loop.call(self._sandbox.handoff())

    def kill(self) -> None:
        _loop.call(self._sandbox.kill())

    def close(self) -> None:
        _loop.call(self._sandbox.close())


class Commands:
    """``sandbox.commands.run("…")``: the same as ``sandbox.run``."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Any) -> Result:
        return self._sandbox.run(command, check=check, **options)
