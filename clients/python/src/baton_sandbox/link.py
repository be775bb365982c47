"""The one task behind a sandbox's handle: connects, follows the sandbox, ends for a reason.

::

    connect --> session --> verdict --fatal--> end: everybody who waits is told
       ^                       |
       `--- pause, jittered <--' retry
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Optional

from . import auth, protocol, seam
from .connect import Connection, Cookies, address_of, open_socket
from .errors import BatonError, ConnectionError, EndedError, text_of
from .exec import Exec
from .mirror import Ask, Command, Leave, Mirror
from .protocol import Found
from .session import Session
from .verdict import Verdict

_log = logging.getLogger("baton_sandbox")


class Link:
    def __init__(self, url: str, place: Optional[Found], config: protocol.Request, options: Connection) -> None:
        self.address = address_of(url)
        self.options = options
        #: For a sandbox that does not exist yet.
        self.config = config
        self.mirror = Mirror(place)
        self.execs: dict[str, Exec] = {}
        self.commands: deque[Command] = deque()
        self.cookies = Cookies()
        self._credentials = auth.Credentials(options.auth, self.address)
        self._look = asyncio.Event()
        self._task: Optional[asyncio.Task[None]] = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def look(self) -> None:
        """Some handle read, wrote or let go."""
        self._look.set()

    async def looked_for(self) -> None:
        await self._look.wait()
        self._look.clear()

    def command(self, command: Command) -> None:
        if self.mirror.end is not None:
            raise self.mirror.end
        self.commands.append(command)
        self._look.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        end: BatonError = EndedError("its task stopped")
        try:
            end = await self._follow()
        finally:
            self._end(end)

    async def _follow(self) -> BatonError:
        attempt, give_up = 0, None
        mirror = self.mirror
        while True:
            sessions = mirror.sessions
            verdict = await self._session(give_up)
            if not verdict.is_retry:
                return verdict.error
            mirror.is_open = False
            mirror.bell.ring()
            patience = self.options.reconnect_for
            # Whoever asks for a sandbox wants to hear at once that there is no server; only
            # an instance on its way out asks to come back.
            if patience is None or mirror.place is None or (mirror.sessions == 0 and not verdict.is_elsewhere):
                return verdict.error
            if verdict.is_elsewhere:
                self.cookies.forget()
            if mirror.sessions > sessions:
                attempt, give_up = 0, None
            moment = seam.now()
            give_up = moment + patience if give_up is None else give_up
            if moment >= give_up:
                return verdict.error
            await self._pause(seam.pause(attempt))
            if any(isinstance(command, Leave) for command in self.commands):
                return EndedError("it was closed")
            attempt += 1

    async def _pause(self, span: float) -> None:
        """Ends early only for somebody who wants to leave."""
        until = seam.now() + span
        while seam.now() < until and not any(isinstance(command, Leave) for command in self.commands):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.looked_for(), until - seam.now())

    async def _session(self, give_up: Optional[float]) -> Verdict:
        place = self.mirror.place
        opened = await open_socket(self.address, place, self.cookies, self._credentials, self.options)
        if isinstance(opened, Verdict):
            return opened
        self._look.set()
        try:
            return await Session(self, opened, is_new=place is None, give_up=give_up).run()
        except Exception as error:
            # What nobody thought of ends this connection; the next one may do better.
            _log.exception("a connection failed")
            return Verdict(ConnectionError(f"it failed: {text_of(error)}"), True)

    def _end(self, error: BatonError) -> None:
        if self.mirror.end is None:
            self.mirror.end = error
            self.mirror.is_open = False
        execs = [*self.execs.values(), *(command for command in self.commands if isinstance(command, Exec))]
        for exec in execs:
            exec.ended(error)
        for command in self.commands:
            if isinstance(command, Ask) and command.sent is not None and not command.sent.done():
                command.sent.cancel()
        self.execs.clear()
        self.commands.clear()
        self.mirror.bell.ring()
