"""What the server reported last, and what callers asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional, Sequence, Union

from .errors import BatonError
from .exec import Exec
from .notifier import Notifier
from .protocol import ExecView, IdleTimeout, Identity, Status, Update
from .requests import Request
from .rollback import Rollback


class SandboxState:
    """What the server reported last. It decides nothing: callers wait until a condition on it holds."""

    def __init__(self, identity: Optional[Identity]) -> None:
        self.changed = Notifier()
        #: The number of events so far.
        self.events = 0
        self.status: Optional[Status] = None
        #: The last update of each status, and its number.
        self._latest: dict[Status, tuple[int, Update]] = {}
        self._forked: Optional[tuple[int, Sequence[Identity]]] = None
        self._idle_timeout: Optional[tuple[int, IdleTimeout]] = None
        #: How many sessions have reached RUNNING.
        self.sessions = 0
        #: Whether there is a session that has reached RUNNING.
        self.is_open = False
        self.identity = identity
        self.instance: Optional[str] = None
        #: The commands that the sandbox knew when the session started.
        self.execs: Sequence[ExecView] = ()
        self.rollbacks: list[Rollback] = []
        #: A roll-back was reported, and RUNNING has not followed yet.
        self.is_rolling_back = False
        #: Why the session ended, once it has.
        self.end: Optional[BatonError] = None

    def update(self, update: Update) -> None:
        self.events += 1
        self.status = update.status
        self._latest[update.status] = (self.events, update)
        self.changed.notify()

    def forked(self, copies: Sequence[Identity]) -> None:
        self.events += 1
        self._forked = (self.events, copies)
        self.changed.notify()

    def idle_timeout_changed(self, event: IdleTimeout) -> None:
        self.events += 1
        self._idle_timeout = (self.events, event)
        self.changed.notify()

    def since(self, events: int, *statuses: Status) -> Optional[Update]:
        """The newest update with one of these statuses that came after event number ``events``."""
        found = [self._latest[status] for status in statuses if status in self._latest]
        number, update = max(found, key=lambda item: item[0], default=(0, None))
        return update if number > events else None

    def forked_since(self, events: int) -> Optional[Sequence[Identity]]:
        return self._forked[1] if self._forked and self._forked[0] > events else None

    def idle_timeout_since(self, events: int) -> Optional[IdleTimeout]:
        return self._idle_timeout[1] if self._idle_timeout and self._idle_timeout[0] > events else None


@dataclass(frozen=True)
class Sent:
    """When a request was sent: after which event, and in which session."""

    events: int
    session: int


@dataclass
class PendingRequest:
    """A request to send. ``sent`` is set if the caller waits for an answer."""

    request: Request
    sent: Optional[asyncio.Future[Sent]] = None


class Close:
    """The caller closed the handle."""


Command = Union[Exec, PendingRequest, Close]
