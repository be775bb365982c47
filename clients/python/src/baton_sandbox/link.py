"""The background task of a sandbox's handle: connects, reconnects, and ends with a reason.

::

    connect --> session --> retry policy --fatal--> end: every waiting caller gets the error
       ^                         |
       `----- backoff <----------' retry
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Awaitable, Callable, Optional, TypeVar

from . import auth, clock, rollback
from .connect import Cookies, normalize_url, open_socket
from .errors import BatonError, ConnectionError, EndedError, TimeoutError, describe
from .exec import Exec
from .options import Connection
from .protocol import EgressDenied, Identity, RolledBack
from .requests import Request
from .retry_policy import RetryPolicy, lost
from .session import Session
from .state import Close, Command, PendingRequest, SandboxState, Sent

_log = logging.getLogger("baton_sandbox")
T = TypeVar("T")
#: Looks for the answer to a request in the state. Raises if the request was refused.
FindAnswer = Callable[[SandboxState, Sent], Optional[T]]


class Link:
    def __init__(self, url: str, identity: Optional[Identity], config: Request, options: Connection) -> None:
        self.address = normalize_url(url)
        self.options = options
        #: Sent first if the sandbox does not exist yet.
        self.config = config
        self.state = SandboxState(identity)
        self.execs: dict[str, Exec] = {}
        self.commands: deque[Command] = deque()
        self.cookies = Cookies()
        self._credentials = auth.Credentials(options.auth, self.address)
        self._wakeup = asyncio.Event()
        self._task: Optional[asyncio.Task[None]] = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """There may be something to send."""
        self._wakeup.set()

    async def woken(self) -> None:
        await self._wakeup.wait()
        self._wakeup.clear()

    def command(self, command: Command) -> None:
        if self.state.end is not None:
            raise self.state.end
        self.commands.append(command)
        self._wakeup.set()

    async def request(self, request: Request, find: FindAnswer[T]) -> T:
        """Sends a request and waits for its answer, which may arrive in a later session."""
        state = self.state

        async def answer() -> T:
            pending = PendingRequest(request, asyncio.get_running_loop().create_future())
            self.command(pending)
            assert pending.sent is not None
            await asyncio.wait([pending.sent])
            if pending.sent.cancelled():
                raise state.end or EndedError("the connection was closed")
            sent = pending.sent.result()
            return await state.changed.until(lambda: find(state, sent))

        return await within(self.options.answer_within, answer())

    async def request_in_session(self, request: Request, find: FindAnswer[T]) -> T:
        """Sends a request whose answer arrives in the same session or never."""

        def find_now(state: SandboxState, sent: Sent) -> Optional[T]:
            found = find(state, sent)
            if found is None and state.end is not None:
                raise state.end.with_traceback(None)
            if found is None and (not state.is_open or state.sessions > sent.session):
                raise ConnectionError("the connection broke before the answer arrived")
            return found

        return await self.request(request, find_now)

    def rolled_back(self, event: RolledBack) -> None:
        found = rollback.Rollback(event.checkpoint_id, event.age_ms / 1000)
        self.state.rollbacks.append(found)
        self.state.is_rolling_back = True
        rollback.report(found, self.options.on_rollback)

    def egress_denied(self, event: EgressDenied) -> None:
        if self.options.on_egress_denied is not None:
            self.options.on_egress_denied(event)
        else:
            port = "" if event.port is None else f":{event.port}"
            _log.warning("the sandbox may not reach %s%s (%s)", event.host, port, event.reason)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        end: BatonError = EndedError("the connection's task was cancelled")
        try:
            end = await self._keep_connected()
        finally:
            self._end(end)

    async def _keep_connected(self) -> BatonError:
        attempt, deadline = 0, None
        state = self.state
        while True:
            sessions = state.sessions
            policy = await self._session(deadline)
            if not policy.is_retry:
                return policy.error
            state.is_open = False
            state.changed.notify()
            reconnect_for = self.options.reconnect_for
            # A first connection that fails is reported at once, unless the instance is shutting down and asks the
            # client to connect again.
            if reconnect_for is None or state.identity is None or (state.sessions == 0 and not policy.is_elsewhere):
                return policy.error
            if policy.is_elsewhere:
                self.cookies.clear()
            if state.sessions > sessions:
                attempt, deadline = 0, None
            now = clock.now()
            deadline = now + reconnect_for if deadline is None else deadline
            if now >= deadline:
                return policy.error
            await self._pause(clock.backoff(attempt))
            if self._is_closing:
                return EndedError("the connection was closed")
            attempt += 1

    @property
    def _is_closing(self) -> bool:
        return any(isinstance(command, Close) for command in self.commands)

    async def _pause(self, span: float) -> None:
        """Ends early only if the caller closes the handle."""
        until = clock.now() + span
        while clock.now() < until and not self._is_closing:
            with contextlib.suppress(asyncio.TimeoutError):
                await clock.wait_for(self.woken(), until - clock.now())

    async def _session(self, deadline: Optional[float]) -> RetryPolicy:
        identity = self.state.identity
        opened = await open_socket(self.address, identity, self.cookies, self._credentials, self.options)
        if isinstance(opened, RetryPolicy):
            return opened
        self._wakeup.set()
        try:
            return await Session(self, opened, is_new=identity is None, deadline=deadline).run()
        except Exception as error:
            # An unexpected error ends this connection only; the next one may succeed.
            _log.exception("a connection failed")
            return lost(f"the connection failed: {describe(error)}")

    def _end(self, error: BatonError) -> None:
        if self.state.end is None:
            self.state.end = error
            self.state.is_open = False
        execs = [*self.execs.values(), *(command for command in self.commands if isinstance(command, Exec))]
        for exec in execs:
            exec.ended(error)
        for command in self.commands:
            if isinstance(command, PendingRequest) and command.sent is not None and not command.sent.done():
                command.sent.cancel()
        self.execs.clear()
        self.commands.clear()
        self.state.changed.notify()


async def within(span: float, work: Awaitable[T]) -> T:
    try:
        return await clock.wait_for(work, span)
    except asyncio.TimeoutError:
        raise TimeoutError(f"no answer within {span} s") from None
