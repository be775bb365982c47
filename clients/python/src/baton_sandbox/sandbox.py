"""The handle of one sandbox."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Awaitable, Callable, Mapping, Optional, Sequence, TypeVar, Union

from . import protocol, seam
from .connect import Connection
from .errors import BatonError, ConnectionError, EndedError, NotFoundError, ProtocolError, RefusedError, TimeoutError, of_update
from .exec import ASKED, Exec, Result, Running
from .files import Files
from .link import Link
from .mirror import Ask, Leave, Mirror, Sent
from .protocol import UNSET, ExecView, Found, Status, Unset

T = TypeVar("T")
Input = Union[bytes, bytearray, memoryview, str]


@dataclass(frozen=True)
class View:
    """What is known of a sandbox just now."""

    id: str
    status: Optional[str]
    #: The instance it is on.
    instance: Optional[str]
    #: Whether there is a connection just now. Nobody needs to look: requests wait for one.
    is_connected: bool
    #: The commands it knew when the connection began.
    execs: Sequence[ExecView]


@dataclass(frozen=True)
class Place:
    """Where a sandbox can be found again."""

    id: str
    token: str = field(repr=False)
    _url: str = field(repr=False, compare=False, default="")
    _connection: Connection = field(repr=False, compare=False, default_factory=Connection)

    async def attach(self) -> Sandbox:
        return await Sandbox.attach(self._url, self.id, self.token, connection=self._connection)


class Sandbox(Files):
    """One sandbox, over one connection that mends itself.

    Closing it leaves the sandbox as it is, until its idle time is over; ``kill`` deletes it.
    ``async with`` closes at the end, and kills a sandbox it created unless that can be attached again.
    """

    def __init__(self, url: str, link: Link, place: Found, *, is_kept: bool) -> None:
        self._url = url
        self._link = link
        self._place = place
        self._is_kept = is_kept
        self.commands = Commands(self)

    @classmethod
    async def create(
        cls,
        url: Optional[str] = None,
        *,
        idle_timeout: Union[float, str, None, Unset] = UNSET,
        enable_checkpoint: bool = False,
        enable_sandbox_handoff: Optional[bool] = None,
        enable_idle_timeout_auto_checkpoint: Optional[bool] = None,
        filesystem_snapshot_name: Optional[str] = None,
        labels: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        ttl: Union[float, str, None] = None,
        on_incompatible: Optional[str] = None,
        from_checkpoint: Optional[str] = None,
        source_token: Optional[str] = None,
        limits: Optional[Mapping[str, Union[int, float, str]]] = None,
        connection: Optional[Connection] = None,
        **options: Any,
    ) -> Sandbox:
        """A new sandbox, running. Without ``url`` the one in ``BATON_URL``.

        ``idle_timeout`` is in seconds, a text such as ``"5m"``, or ``None`` for never. With ``enable_checkpoint`` it is
        stored: it can move between instances and is checkpointed at its idle end, unless ``enable_sandbox_handoff`` or
        ``enable_idle_timeout_auto_checkpoint`` is ``False``. ``limits`` has any of
        ``memory`` and ``disk`` (bytes, or a text such as ``"512MiB"``), ``cpus``, ``pids`` and ``files``. Further options
        are those of :class:`Connection`: ``api_key``, ``headers``, ``auth``, ``on_status`` and so on.
        """
        config = protocol.config(
            idle_timeout=idle_timeout,
            enable_checkpoint=enable_checkpoint,
            enable_sandbox_handoff=enable_sandbox_handoff,
            enable_idle_timeout_auto_checkpoint=enable_idle_timeout_auto_checkpoint,
            filesystem_snapshot_name=filesystem_snapshot_name,
            labels=dict(labels or {}),
            env=dict(env or {}),
            cwd=cwd,
            ttl=ttl,
            on_incompatible=on_incompatible,
            from_checkpoint=from_checkpoint,
            source_token=source_token,
            limits=dict(limits or {}),
        )
        connection = replace(connection or Connection(), **options)
        return await cls._open(url, None, config, connection, is_kept=bool(enable_checkpoint or enable_sandbox_handoff))

    @classmethod
    async def attach(
        cls, url: Optional[str], id: str, token: str, *, connection: Optional[Connection] = None, **options: Any
    ) -> Sandbox:
        """An existing one, wherever it is, running. Options are those of :class:`Connection`."""
        connection = replace(connection or Connection(), **options)
        return await cls._open(url, Found(id, token), {}, connection, is_kept=True)

    connect = attach

    @classmethod
    async def _open(
        cls, url: Optional[str], place: Optional[Found], config: protocol.Request, options: Connection, *, is_kept: bool
    ) -> Sandbox:
        url = url or os.environ.get("BATON_URL")
        if not url:
            raise ConnectionError("no address: give one, or set BATON_URL")
        link = Link(url, place, config, options)
        mirror = link.mirror
        link.start()
        try:
            started = mirror.bell.until(lambda: True if mirror.sessions or mirror.end else None)
            await _within(options.start_within, started)
            if mirror.end is not None:
                raise mirror.end.with_traceback(None)
            if mirror.place is None:
                raise ProtocolError("the sandbox runs and has no id")
        except BaseException:
            await link.stop()
            raise
        return cls(url, link, mirror.place, is_kept=is_kept)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if not self._is_kept and self._link.mirror.end is None:
                await self.kill()
        except BatonError:
            # The error that leads out of the block is worth more.
            if error is None:
                raise
        finally:
            await self.close()

    @property
    def id(self) -> str:
        return self._place.sandbox_id

    @property
    def token(self) -> str:
        """Whoever has it may attach: keep it like a password."""
        return self._place.sandbox_token

    @property
    def place(self) -> Place:
        return self._at(self._place)

    def _at(self, found: Found) -> Place:
        return Place(found.sandbox_id, found.sandbox_token, self._url, self._link.options)

    def info(self) -> View:
        mirror = self._link.mirror
        status = None if mirror.status is None else mirror.status.value
        return View(self.id, status, mirror.instance, mirror.is_open, tuple(mirror.execs))

    # Commands.

    async def exec(
        self,
        command: Union[str, Sequence[str]],
        *,
        language: str = "bash",
        exec_id: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        stdin: Union[bool, Input] = False,
        pty: Optional[tuple[int, int]] = None,
        timeout: Union[float, str, None] = None,
    ) -> Running:
        """Starts a command: a list is a program and its arguments, a text is code for ``language``.

        ``stdin`` keeps it open for ``write_stdin``, or is all of it. ``pty`` is columns and rows of a
        terminal, which opens stdin too. After ``timeout`` seconds of running it is killed.
        """
        exec_id = exec_id or seam.exec_id()
        is_text = isinstance(command, str)
        all_of_it = None if isinstance(stdin, bool) else stdin
        request = protocol.exec_(
            exec_id=exec_id,
            argv=None if is_text else list(command),
            language=language if is_text else None,
            code=str(command) if is_text else None,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin is True or pty is not None or all_of_it is not None,
            pty=pty,
            timeout=timeout,
        )
        if isinstance(all_of_it, str):
            all_of_it = all_of_it.encode()
        return await self._start(request, None if all_of_it is None else bytes(all_of_it))

    async def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Any) -> Result:
        """Runs a command to its end; options are those of :meth:`exec`."""
        return await (await self.exec(command, **options)).wait(check=check)

    async def run_code(self, code: str, language: str = "python", *, check: bool = False, **options: Any) -> Result:
        """Runs code to its end, in an interpreter of its own."""
        return await (await self.exec(code, language=language, **options)).wait(check=check)

    async def follow(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Running:
        """Follows a command that runs already, or has ended unread, from these offsets on."""
        if not any(view.exec_id == exec_id for view in self._link.mirror.execs):
            raise RefusedError("the sandbox knows no such command", Status.EXECUTION_ERROR.value)
        return await self._run(Exec(exec_id, None, (stdout, stderr), self._link.look))

    async def _start(self, request: protocol.Request, stdin: Optional[bytes] = None) -> Running:
        exec = Exec(request["exec_id"], request, (0, 0), self._link.look)
        if stdin is not None:
            # The bytes are the caller's: they need no room here, and are sent as the command takes them.
            exec.stdin.write(memoryview(stdin))
            exec.stdin.close()
        return await self._run(exec)

    async def _run(self, exec: Exec) -> Running:
        running = Running(exec, lambda request: self._link.command(Ask(request)))
        self._link.command(exec)
        answered = exec.bell.until(lambda: True if exec.stage != ASKED else None)
        await _within(self._link.options.answer_within, answered)
        # Only a command that never started has ended with an error here.
        if isinstance(exec.end, BatonError):
            raise exec.end.with_traceback(None)
        return running

    # The sandbox as a whole.

    async def checkpoint(self, *, live: bool = False, keep_running: bool = False) -> str:
        """Saves memory and files; the session ends, and the sandbox can be attached again anywhere.

        ``live`` takes running commands along; without it they are a reason to refuse. With
        ``keep_running`` the sandbox goes on here. Returns the checkpoint's id.
        """
        answers = (Status.CHECKPOINTED, Status.CHECKPOINT_ERROR, Status.EXECUTION_IN_PROGRESS_ERROR)
        update = await self._ask(
            protocol.checkpoint(live=live, keep_running=keep_running),
            lambda mirror, sent: mirror.since(sent.heard, *answers),
        )
        if update.status is not Status.CHECKPOINTED:
            raise of_update(update)
        if update.checkpoint_id is None:
            raise ProtocolError("a checkpoint without an id")
        return update.checkpoint_id

    async def snapshot(self, name: str, *, full: bool = False) -> str:
        """Keeps the file system under a name, for new sandboxes to start from."""

        def answer(mirror: Mirror, sent: Sent) -> Optional[protocol.Update]:
            made = mirror.since(sent.heard, Status.FILESYSTEM_SNAPSHOT_CREATED)
            if made is not None and made.snapshot in (None, name):
                return made
            return mirror.since(sent.heard, Status.FILESYSTEM_SNAPSHOT_ERROR)

        update = await self._ask(protocol.snapshot(name, full=full), answer)
        if update.status is not Status.FILESYSTEM_SNAPSHOT_CREATED:
            raise of_update(update)
        return name

    async def fork(self, count: int = 1) -> list[Place]:
        """Copies of this sandbox, each to be attached."""
        refusals = (Status.ERROR, Status.CHECKPOINT_ERROR, Status.CREATION_ERROR)

        def answer(mirror: Mirror, sent: Sent) -> Optional[Sequence[Found]]:
            copies, refused = mirror.forked_since(sent.heard), mirror.since(sent.heard, *refusals)
            if copies is None and refused is not None:
                raise of_update(refused)
            return copies

        return [self._at(found) for found in await self._ask(protocol.fork(count), answer)]

    async def handoff(self) -> None:
        """Leaves the instance it is on, and is running again, wherever that is, when this returns."""

        def answer(mirror: Mirror, sent: Sent) -> Optional[bool]:
            if mirror.sessions > sent.session:
                return True
            refused = mirror.since(sent.heard, Status.ERROR, Status.CHECKPOINT_ERROR)
            if refused is not None:
                raise of_update(refused)
            if mirror.end is not None:
                raise mirror.end.with_traceback(None)
            return None

        await self._wait(protocol.handoff(), answer)

    async def kill(self) -> None:
        """Ends and deletes the sandbox, and this session with it. One that is gone already is no error."""

        def answer(mirror: Mirror, sent: Sent) -> Optional[str]:
            if mirror.end is not None:
                raise mirror.end.with_traceback(None)
            refused = mirror.since(sent.heard, Status.KILL_ERROR)
            if refused is not None:
                raise of_update(refused)
            # The request may be lost with its connection. To ask twice does no harm.
            return "again" if mirror.sessions > sent.session else None

        try:
            while await self._wait(protocol.kill_sandbox(), answer) == "again":
                pass
        except (EndedError, NotFoundError):
            return

    async def close(self) -> None:
        """Closes the connection politely and leaves the sandbox as it is."""
        mirror = self._link.mirror
        try:
            self._link.command(Leave())
            await asyncio.wait_for(mirror.bell.until(lambda: mirror.end), 5)
        except (BatonError, asyncio.TimeoutError):
            pass
        await self._link.stop()

    async def _ask(self, request: protocol.Request, answer: Callable[[Mirror, Sent], Optional[T]]) -> T:
        """An answer that only the session can bring in which the question was asked."""

        def look(mirror: Mirror, sent: Sent) -> Optional[T]:
            found = answer(mirror, sent)
            if found is None and mirror.end is not None:
                raise mirror.end.with_traceback(None)
            if found is None and (not mirror.is_open or mirror.sessions > sent.session):
                raise ConnectionError("it broke before the answer came")
            return found

        return await self._wait(request, look)

    async def _wait(self, request: protocol.Request, answer: Callable[[Mirror, Sent], Optional[T]]) -> T:
        """Sends a request, then waits until something can be said about it."""
        mirror = self._link.mirror

        async def answered() -> T:
            ask = Ask(request, asyncio.get_running_loop().create_future())
            self._link.command(ask)
            assert ask.sent is not None
            await asyncio.wait([ask.sent])
            if ask.sent.cancelled():
                raise mirror.end or EndedError("its task stopped")
            sent = ask.sent.result()
            return await mirror.bell.until(lambda: answer(mirror, sent))

        return await _within(self._link.options.answer_within, answered())


class Commands:
    """``sandbox.commands.run("…")``: the same as ``sandbox.run``."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Any) -> Result:
        return await self._sandbox.run(command, check=check, **options)


async def _within(span: float, work: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(work, span)
    except asyncio.TimeoutError:
        raise TimeoutError(f"no answer within {span} s") from None
