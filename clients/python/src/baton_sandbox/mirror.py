"""What the server said last, and what callers want of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional, Sequence, Union

from . import protocol
from .errors import BatonError
from .exec import Exec
from .protocol import ExecView, Found, Status, Update
from .seam import Bell


class Mirror:
    """What the server said last. Nothing is decided here: callers wait until a claim about it holds."""

    def __init__(self, place: Optional[Found]) -> None:
        self.bell = Bell()
        #: Counts everything heard.
        self.heard = 0
        self.status: Optional[Status] = None
        #: The last update of each status, and its number.
        self._latest: dict[Status, tuple[int, Update]] = {}
        self._forked: Optional[tuple[int, Sequence[Found]]] = None
        #: How many sessions came as far as RUNNING.
        self.sessions = 0
        #: There is a session, and it came as far as RUNNING.
        self.is_open = False
        self.place = place
        self.instance: Optional[str] = None
        #: The commands the sandbox knew when the session began.
        self.execs: Sequence[ExecView] = ()
        #: Nothing more will come.
        self.end: Optional[BatonError] = None

    def update(self, update: Update) -> None:
        self.heard += 1
        self.status = update.status
        self._latest[update.status] = (self.heard, update)
        self.bell.ring()

    def forked(self, copies: Sequence[Found]) -> None:
        self.heard += 1
        self._forked = (self.heard, copies)
        self.bell.ring()

    def since(self, heard: int, *statuses: Status) -> Optional[Update]:
        """The newest update with one of these statuses that came after number ``heard``."""
        found = [self._latest[status] for status in statuses if status in self._latest]
        number, update = max(found, key=lambda item: item[0], default=(0, None))
        return update if number > heard else None

    def forked_since(self, heard: int) -> Optional[Sequence[Found]]:
        return self._forked[1] if self._forked and self._forked[0] > heard else None


@dataclass(frozen=True)
class Sent:
    """When a request went out: what had been heard, and in which session."""

    heard: int
    session: int


@dataclass
class Ask:
    """A request somebody waits on, or one without an answer."""

    request: protocol.Request
    sent: Optional[asyncio.Future[Sent]] = None


class Leave:
    """The handle was closed."""


Command = Union[Exec, Ask, Leave]
