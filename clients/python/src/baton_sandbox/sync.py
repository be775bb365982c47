"""The same sandboxes for programs without ``asyncio``: every call blocks until it is done.

    from baton_sandbox.sync import Sandbox

    with Sandbox.create("ws://127.0.0.1:8080") as sandbox:
        print(sandbox.run("uname -a"))

One thread with an event loop serves all of them. They may be used from several threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Optional, Sequence, TypeVar

from . import ports as _ports
from . import reference as _reference
from . import running as _running
from . import sandbox as _sandbox
from . import watch as _watch
from .reference import View
from .rollback import Rollback
from .watch import FileChange

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    P = ParamSpec("P")

A = TypeVar("A")
B = TypeVar("B")
S = TypeVar("S")
T = TypeVar("T")


class _Loop:
    """The event loop in its thread, which starts with the first call and ends with the program."""

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
            # Ctrl-C cancels the call, not only the waiting for it.
            future.cancel()
            raise


_loop = _Loop()


def _iterate(make: Callable[[], AsyncIterable[T]]) -> Iterator[T]:
    """The items of an async iterator, which is created and used in the thread of the loop."""

    async def begin() -> AsyncIterator[T]:
        return make().__aiter__()

    async def step() -> list[T]:
        try:
            return [await iterator.__anext__()]
        except StopAsyncIteration:
            return []

    iterator = _loop.call(begin())
    while True:
        items = _loop.call(step())
        if not items:
            return
        yield items[0]


# The methods below have the signatures and the documentation of the async ones.


def _blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _loop.call(method(self._inner, *args, **kwargs))

    return call


def _blocking_as(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, S]], convert: Callable[[S], T]
) -> Callable[Concatenate[Any, P], T]:
    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return convert(_loop.call(method(self._inner, *args, **kwargs)))

    return call


def _iterating(method: Callable[Concatenate[A, P], AsyncIterable[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(lambda: method(self._inner, *args, **kwargs))

    return call


def _opening(method: Callable[P, Coroutine[Any, Any, _sandbox.Sandbox]]) -> Callable[P, Sandbox]:
    def call(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> Sandbox:
        opened: Sandbox = cls(_loop.call(method(*args, **kwargs)))
        return opened

    # The function behind the class method, so that both have the parameter `cls`.
    functools.update_wrapper(call, method.__func__)  # type: ignore[attr-defined]
    return classmethod(call)  # type: ignore[return-value]


def _of_class(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    def call(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _loop.call(method(*args, **kwargs))

    functools.update_wrapper(call, method.__func__)  # type: ignore[attr-defined]
    return classmethod(call)  # type: ignore[return-value]


def _iterating_of_class(method: Callable[P, AsyncIterable[T]]) -> Callable[P, Iterator[T]]:
    def call(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(lambda: method(*args, **kwargs))

    functools.update_wrapper(call, method.__func__)  # type: ignore[attr-defined]
    return classmethod(call)  # type: ignore[return-value]


class OutputStream:
    """One output stream of a command, which can be read once. Iterates over ``bytes``."""

    def __init__(self, stream: _running.OutputStream) -> None:
        self._inner = stream

    def __iter__(self) -> Iterator[bytes]:
        return _iterate(lambda: self._inner)

    chunks = _iterating(_running.OutputStream.chunks)
    lines = _iterating(_running.OutputStream.lines)
    read = _blocking(_running.OutputStream.read)

    def discard(self) -> None:
        """Discards the rest, so that the command never waits for a reader."""

        async def discard() -> None:
            self._inner.discard()

        _loop.call(discard())


class Running:
    """A running command: its output, its input, its end."""

    def __init__(self, running: _running.Running) -> None:
        self._inner = running

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def stdout(self) -> OutputStream:
        """Read it, or call ``wait``: a command whose output is not read eventually blocks."""
        return OutputStream(self._inner.stdout)

    @property
    def stderr(self) -> OutputStream:
        """Read it, or call ``wait``: a command whose output is not read eventually blocks."""
        return OutputStream(self._inner.stderr)

    wait = _blocking(_running.Running.wait)
    write_stdin = _blocking(_running.Running.write_stdin)
    close_stdin = _blocking(_running.Running.close_stdin)
    signal = _blocking(_running.Running.signal)
    kill = _blocking(_running.Running.kill)
    resize = _blocking(_running.Running.resize)


class FileWatch:
    """The changes below a watched path. Ends with ``close``, ``with``, or when the watched path is removed."""

    def __init__(self, watch: _watch.FileWatch) -> None:
        self._inner = watch

    def __iter__(self) -> Iterator[FileChange]:
        return _iterate(lambda: self._inner)

    close = _blocking(_watch.FileWatch.close)

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


class SandboxRef:
    """A sandbox that can be attached: its id, its token and the server."""

    def __init__(self, ref: _reference.SandboxRef) -> None:
        self._inner = ref

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def token(self) -> str:
        return self._inner.token

    attach = _blocking_as(_reference.SandboxRef.attach, lambda opened: Sandbox(opened))


#: Deprecated: use ``SandboxRef``.
Place = SandboxRef


class Commands:
    """``sandbox.commands.run("…")``: the same as ``sandbox.run``."""

    def __init__(self, commands: _sandbox.Commands) -> None:
        self._inner = commands

    run = _blocking(_sandbox.Commands.run)


class PortConnection:
    """A TCP connection to a port in a sandbox. Each direction can end by itself."""

    def __init__(self, connection: _ports.PortConnection) -> None:
        self._inner = connection

    read = _blocking(_ports.PortConnection.read)
    write = _blocking(_ports.PortConnection.write)
    write_eof = _blocking(_ports.PortConnection.write_eof)
    close = _blocking(_ports.PortConnection.close)

    def __enter__(self) -> PortConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Port:
    """A port in a sandbox. Using it needs no session: it works while another client is attached, too."""

    def __init__(self, port: _ports.Port) -> None:
        self._inner = port

    @property
    def url(self) -> str:
        """A link for a browser. It contains the token, which the first request replaces by a cookie."""
        return self._inner.url

    connect = _blocking_as(_ports.Port.connect, PortConnection)

    @contextlib.contextmanager
    def forward(self, local: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
        """Listens on a local port while the block runs, and yields its number: it leads to the port in the sandbox."""
        forward = self._inner.forward(local, host)
        number = _loop.call(forward.__aenter__())
        try:
            yield number
        finally:
            _loop.call(forward.__aexit__(None, None, None))


class Sandbox:
    """One sandbox, over one connection that reconnects by itself.

    ``with`` kills a sandbox that it created, unless it was created with ``keep=True`` or detached.
    A sandbox that was attached is never killed by leaving the block.
    """

    def __init__(self, sandbox: _sandbox.Sandbox) -> None:
        self._inner = sandbox
        self.commands = Commands(sandbox.commands)

    create = _opening(_sandbox.Sandbox.create)
    attach = _opening(_sandbox.Sandbox.attach)
    connect = attach
    list = _iterating_of_class(_sandbox.Sandbox.list)
    kill_by_id = _of_class(_sandbox.Sandbox.kill_by_id)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        _loop.call(self._inner.__aexit__(kind, error, trace))

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def token(self) -> str:
        """Everybody who has it can attach: keep it like a password."""
        return self._inner.token

    @property
    def ref(self) -> SandboxRef:
        """The id and the token, with which the sandbox can be attached again."""
        return SandboxRef(self._inner.ref)

    @property
    def place(self) -> SandboxRef:
        """Deprecated: use ``ref``."""
        return self.ref

    @property
    def rollbacks(self) -> Sequence[Rollback]:
        """The times the sandbox was restored from an older checkpoint while this handle was in use."""
        return self._inner.rollbacks

    def info(self) -> View:
        """The current state of the sandbox, as far as the client knows it."""
        return self._inner.info()

    def url(self, port: int) -> str:
        """A link to a web server in the sandbox, for a browser. It contains the token: see :attr:`Port.url`."""
        return self._inner.url(port)

    def port(self, port: int) -> Port:
        """A port in the sandbox."""
        return Port(self._inner.port(port))

    exec = _blocking_as(_sandbox.Sandbox.exec, Running)
    run = _blocking(_sandbox.Sandbox.run)
    run_code = _blocking(_sandbox.Sandbox.run_code)
    follow = _blocking_as(_sandbox.Sandbox.follow, Running)

    read_file = _blocking(_sandbox.Sandbox.read_file)
    read_text = _blocking(_sandbox.Sandbox.read_text)
    read_stream = _iterating(_sandbox.Sandbox.read_stream)
    write_file = _blocking(_sandbox.Sandbox.write_file)
    list_files = _blocking(_sandbox.Sandbox.list_files)
    stat_file = _blocking(_sandbox.Sandbox.stat_file)
    file_exists = _blocking(_sandbox.Sandbox.file_exists)
    remove_file = _blocking(_sandbox.Sandbox.remove_file)
    rename_file = _blocking(_sandbox.Sandbox.rename_file)
    make_directory = _blocking(_sandbox.Sandbox.make_directory)
    watch_files = _blocking_as(_sandbox.Sandbox.watch_files, FileWatch)
    upload = _blocking(_sandbox.Sandbox.upload)
    download = _blocking(_sandbox.Sandbox.download)

    checkpoint = _blocking(_sandbox.Sandbox.checkpoint)
    snapshot = _blocking(_sandbox.Sandbox.snapshot)
    fork = _blocking_as(_sandbox.Sandbox.fork, lambda refs: [SandboxRef(ref) for ref in refs])
    set_idle_timeout = _blocking(_sandbox.Sandbox.set_idle_timeout)
    handoff = _blocking(_sandbox.Sandbox.handoff)
    kill = _blocking(_sandbox.Sandbox.kill)
    detach = _blocking_as(_sandbox.Sandbox.detach, SandboxRef)
    close = _blocking(_sandbox.Sandbox.close)
