"""The handle of one sandbox."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Mapping, Optional, Sequence, Union

from . import clock, requests
from .errors import BatonError, EndedError, NotFoundError, ProtocolError, RefusedError, from_update
from .exec import REQUESTED, Exec
from .files import Files
from .http_api import Unattached, server_of
from .link import Link, within
from .options import Connection, Input, Limits
from .ports import Ports
from .protocol import Identity, IdleTimeout, Status, Update
from .reference import SandboxRef, View
from .requests import UNSET, Unset
from .result import Result
from .rollback import Rollback
from .running import Running
from .state import Close, PendingRequest, SandboxState, Sent

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ConnectionOptions, ExecOptions, RunCodeOptions


class Sandbox(Files, Ports, Unattached):
    """One sandbox, over one connection that reconnects by itself.

    ``async with`` kills a sandbox that it created, unless it was created with ``keep=True`` or detached.
    A sandbox that was attached is never killed by leaving the block.
    """

    def __init__(self, url: str, link: Link, identity: Identity, *, is_killed_at_exit: bool) -> None:
        self._url = url
        self._link = link
        self._identity = identity
        self._is_killed_at_exit = is_killed_at_exit
        self.commands = Commands(self)

    @classmethod
    async def create(
        cls,
        url: Optional[str] = None,
        *,
        keep: bool = False,
        persistent: Optional[bool] = None,
        idle_timeout: Union[float, str, None, Unset] = UNSET,
        ttl: Union[float, str, None] = None,
        memory: Union[int, str, None] = None,
        cpus: Optional[float] = None,
        pids: Optional[int] = None,
        disk: Union[int, str, None] = None,
        files: Optional[int] = None,
        egress: Union[str, Sequence[str], None] = None,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        labels: Optional[Mapping[str, str]] = None,
        filesystem_snapshot_name: Optional[str] = None,
        from_checkpoint: Optional[str] = None,
        source_token: Optional[str] = None,
        on_incompatible: Optional[str] = None,
        limits: Union[Limits, Mapping[str, Union[int, float, str]], None] = None,
        enable_checkpoint: Optional[bool] = None,
        enable_sandbox_handoff: Optional[bool] = None,
        enable_idle_timeout_auto_checkpoint: Optional[bool] = None,
        connection: Optional[Connection] = None,
        **options: Unpack[ConnectionOptions],
    ) -> Sandbox:
        """Creates a sandbox and waits until it runs.

        :param url: the server's address; without it ``BATON_URL``.
        :param keep: leave the sandbox as it is at the end of ``async with``, instead of killing it.
        :param persistent: store the sandbox, so that it can move between instances and is checkpointed when it is
            idle. By default it is stored if the server has storage. ``async with`` kills persistent sandboxes, too.
        :param idle_timeout: how long it may be idle, which means that no command runs and no client sends a request:
            seconds, a text such as ``"5m"``, or ``None`` for never. By default the server chooses.
        :param ttl: how long it lives at most.
        :param memory: limit of the memory of all its commands: bytes, or a text such as ``"512MiB"``.
        :param cpus: limit of its CPUs, such as ``1.5``.
        :param pids: limit of its processes and threads.
        :param disk: limit of what it writes to files: bytes, or a text such as ``"1GiB"``.
        :param files: limit of the open files of one process.
        :param egress: where its programs may connect to: ``"none"``, ``"any"``, or destinations such as
            ``["index.example.org:443", "*.example.net", "203.0.113.0/24:5432"]``. By default the server chooses.
        :param env: environment variables of all its commands.
        :param cwd: the directory in which its commands start.
        :param labels: names and values by which it can be found on the server.
        :param filesystem_snapshot_name: start from the files of this snapshot.
        :param from_checkpoint: start from this checkpoint of another sandbox, whose token is ``source_token``.
        :param on_incompatible: ``"files"`` restarts on the files of the last checkpoint if its memory cannot be restored.
        :param limits: the five limits as one mapping.
        :param enable_checkpoint: together with ``enable_sandbox_handoff`` and ``enable_idle_timeout_auto_checkpoint`` the
            older, separate switches of ``persistent``.

        All others are options of :class:`Connection`, which can also be given as ``connection``.
        """
        single = {"memory": memory, "cpus": cpus, "pids": pids, "disk": disk, "files": files}
        config = requests.config(
            persistent="auto" if persistent is None else persistent,
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
            network={} if egress is None else {"egress": egress if isinstance(egress, str) else list(egress)},
            limits={**(limits or {}), **{name: value for name, value in single.items() if value is not None}},
        )
        return await cls._open(url, None, config, replace(connection or Connection(), **options), not keep)

    @classmethod
    async def attach(
        cls,
        url: Optional[str],
        id: str,
        token: str,
        *,
        connection: Optional[Connection] = None,
        **options: Unpack[ConnectionOptions],
    ) -> Sandbox:
        """Attaches to an existing sandbox, wherever it is, and waits until it runs.

        Without ``url`` the server is ``BATON_URL``. Options are those of :class:`Connection`.
        """
        return await cls._open(url, Identity(id, token), {}, replace(connection or Connection(), **options), False)

    connect = attach

    @classmethod
    async def _open(
        cls, url: Optional[str], identity: Optional[Identity], config: requests.Request, options: Connection, is_killed_at_exit: bool
    ) -> Sandbox:
        url = server_of(url)
        link = Link(url, identity, config, options)
        state = link.state
        link.start()
        try:
            started = state.changed.until(lambda: True if state.sessions or state.end else None)
            await within(options.start_within, started)
            if state.end is not None:
                raise state.end.with_traceback(None)
            if state.identity is None:
                raise ProtocolError("the sandbox runs, but the server sent no id")
        except BaseException:
            await link.stop()
            raise
        return cls(url, link, state.identity, is_killed_at_exit=is_killed_at_exit)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if self._is_killed_at_exit and self._link.state.end is None:
                await self.kill()
        except BatonError:
            # The error that leaves the block matters more.
            if error is None:
                raise
        finally:
            await self.close()

    @property
    def id(self) -> str:
        return self._identity.sandbox_id

    @property
    def token(self) -> str:
        """Everybody who has it can attach: keep it like a password."""
        return self._identity.sandbox_token

    @property
    def ref(self) -> SandboxRef:
        """The id and the token, with which the sandbox can be attached again."""
        return self._ref(self._identity)

    @property
    def place(self) -> SandboxRef:
        """Deprecated: use ``ref``."""
        return self.ref

    def _ref(self, identity: Identity) -> SandboxRef:
        return SandboxRef(identity.sandbox_id, identity.sandbox_token, self._url, self._link.options)

    @property
    def rollbacks(self) -> Sequence[Rollback]:
        """The times the sandbox was restored from an older checkpoint while this handle was in use."""
        return tuple(self._link.state.rollbacks)

    def info(self) -> View:
        """The current state of the sandbox, as far as the client knows it."""
        state = self._link.state
        status = None if state.status is None else state.status.value
        return View(self.id, status, state.instance, state.is_open, tuple(state.execs), self._identity.persistent)

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
        """Starts a command: a list is a program and its arguments, a string is code in ``language``.

        ``stdin`` is the whole input, or ``True`` to write it with ``write_stdin``. ``pty`` is the columns and rows of a
        terminal, which opens stdin, too. After ``timeout`` seconds of running time the command is killed.
        """
        exec_id = exec_id or clock.new_exec_id()
        is_code = isinstance(command, str)
        whole_input = None if isinstance(stdin, bool) else stdin
        request = requests.exec_(
            exec_id=exec_id,
            argv=None if is_code else list(command),
            language=language if is_code else None,
            code=str(command) if is_code else None,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin is True or pty is not None or whole_input is not None,
            pty=pty,
            timeout=timeout,
        )
        if isinstance(whole_input, str):
            whole_input = whole_input.encode()
        return await self._start(request, None if whole_input is None else bytes(whole_input))

    async def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Unpack[ExecOptions]) -> Result:
        """Runs a command and waits for its end. Options are those of :meth:`exec`."""
        return await (await self.exec(command, **options)).wait(check=check)

    async def run_code(
        self, code: str, language: str = "python", *, check: bool = False, **options: Unpack[RunCodeOptions]
    ) -> Result:
        """Runs code in a new interpreter and waits for its end."""
        return await (await self.exec(code, language=language, **options)).wait(check=check)

    async def follow(self, exec_id: str, *, stdout: int = 0, stderr: int = 0) -> Running:
        """The handle of a command that an earlier client started, with its output from these offsets on."""
        if not any(view.exec_id == exec_id for view in self._link.state.execs):
            raise RefusedError("the sandbox does not know this command", Status.EXECUTION_ERROR.value)
        return await self._run(Exec(exec_id, None, (stdout, stderr), self._link.wake))

    async def _start(self, request: requests.Request, stdin: Optional[bytes] = None) -> Running:
        exec = Exec(request["exec_id"], request, (0, 0), self._link.wake)
        if stdin is not None:
            # The caller owns the bytes, so they may exceed the window.
            exec.stdin.write(memoryview(stdin))
            exec.stdin.close()
        return await self._run(exec)

    async def _run(self, exec: Exec) -> Running:
        running = Running(exec, lambda request: self._link.command(PendingRequest(request)))
        self._link.command(exec)
        answered = exec.changed.until(lambda: True if exec.phase != REQUESTED else None)
        await within(self._link.options.answer_within, answered)
        # Only a command that never started can have failed by now.
        if isinstance(exec.end, BatonError):
            raise exec.end.with_traceback(None)
        return running

    # The sandbox as a whole.

    async def checkpoint(self, *, live: bool = False, keep_running: bool = False) -> str:
        """Saves memory and files, and ends the session; the sandbox can be attached again on any instance.

        Running commands are a reason to refuse, unless ``live`` includes them. With ``keep_running`` the sandbox and
        the session continue. Returns the id of the checkpoint.
        """
        answers = (Status.CHECKPOINTED, Status.CHECKPOINT_ERROR, Status.EXECUTION_IN_PROGRESS_ERROR)
        update = await self._link.request_in_session(
            requests.checkpoint(live=live, keep_running=keep_running),
            lambda state, sent: state.since(sent.events, *answers),
        )
        if update.status is not Status.CHECKPOINTED:
            raise from_update(update)
        if update.checkpoint_id is None:
            raise ProtocolError("the server sent a checkpoint without an id")
        return update.checkpoint_id

    async def snapshot(self, name: str, *, full: bool = False) -> str:
        """Saves the file system under a name, from which new sandboxes can start."""

        def answer(state: SandboxState, sent: Sent) -> Optional[Update]:
            created = state.since(sent.events, Status.FILESYSTEM_SNAPSHOT_CREATED)
            if created is not None and created.snapshot in (None, name):
                return created
            return state.since(sent.events, Status.FILESYSTEM_SNAPSHOT_ERROR)

        update = await self._link.request_in_session(requests.snapshot(name, full=full), answer)
        if update.status is not Status.FILESYSTEM_SNAPSHOT_CREATED:
            raise from_update(update)
        return name

    async def fork(self, count: int = 1) -> list[SandboxRef]:
        """Copies the sandbox, its memory and running commands included. Each copy can be attached."""
        refusals = (Status.ERROR, Status.CHECKPOINT_ERROR, Status.CREATION_ERROR)

        def answer(state: SandboxState, sent: Sent) -> Optional[Sequence[Identity]]:
            copies, refused = state.forked_since(sent.events), state.since(sent.events, *refusals)
            if copies is None and refused is not None:
                raise from_update(refused)
            return copies

        return [self._ref(copy) for copy in await self._link.request_in_session(requests.fork(count), answer)]

    async def set_idle_timeout(self, idle_timeout: Union[float, str, None]) -> Optional[float]:
        """Changes how long the sandbox may be idle: seconds, a text such as ``"5m"``, or ``None`` for never.

        Counts from now. Returns the new value in seconds.
        """

        def answer(state: SandboxState, sent: Sent) -> Optional[IdleTimeout]:
            changed, refused = state.idle_timeout_since(sent.events), state.since(sent.events, Status.ERROR)
            if changed is None and refused is not None:
                raise from_update(refused)
            return changed

        return (await self._link.request_in_session(requests.set_idle_timeout(idle_timeout), answer)).idle_timeout

    async def handoff(self) -> None:
        """Moves the sandbox away from its instance. Returns when it runs again."""

        def answer(state: SandboxState, sent: Sent) -> Optional[bool]:
            if state.sessions > sent.session:
                return True
            refused = state.since(sent.events, Status.ERROR, Status.CHECKPOINT_ERROR)
            if refused is not None:
                raise from_update(refused)
            if state.end is not None:
                raise state.end.with_traceback(None)
            return None

        await self._link.request(requests.handoff(), answer)

    async def kill(self) -> None:
        """Deletes the sandbox and ends the session. A sandbox that no longer exists is not an error."""

        def answer(state: SandboxState, sent: Sent) -> Optional[str]:
            if state.end is not None:
                raise state.end.with_traceback(None)
            refused = state.since(sent.events, Status.KILL_ERROR)
            if refused is not None:
                raise from_update(refused)
            # The request may have been lost with its connection. Sending it twice does no harm.
            return "again" if state.sessions > sent.session else None

        try:
            while await self._link.request(requests.kill_sandbox(), answer) == "again":
                pass
        except (EndedError, NotFoundError):
            return

    async def detach(self) -> SandboxRef:
        """Closes the connection and leaves the sandbox as it is, also at the end of ``async with``."""
        self._is_killed_at_exit = False
        await self.close()
        return self.ref

    async def close(self) -> None:
        """Closes the connection. The sandbox stays as it is, until its idle timeout."""
        state = self._link.state
        try:
            self._link.command(Close())
            await clock.wait_for(state.changed.until(lambda: state.end), 5)
        except (BatonError, asyncio.TimeoutError):
            pass
        await self._link.stop()


class Commands:
    """``sandbox.commands.run("…")``: the same as ``sandbox.run``."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, command: Union[str, Sequence[str]], *, check: bool = False, **options: Unpack[ExecOptions]) -> Result:
        """The same as ``sandbox.run``."""
        return await self._sandbox.run(command, check=check, **options)
