"""What the end of a connection means: follow the sandbox, or tell the caller. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .errors import BatonError, ConnectionError, EndedError, InUseError, ProtocolError, RefusedError, of_update
from .protocol import Status, Update

_FINAL = {Status.NOT_FOUND, Status.PERMISSION_DENIAL_ERROR, Status.RESTORE_ERROR, Status.CREATION_ERROR}


@dataclass(frozen=True)
class Verdict:
    """Come back, or not. With a retry the error is for the case that coming back fails for too long."""

    error: BatonError
    is_retry: bool
    is_elsewhere: bool = False


class Heard:
    """What one connection said that matters at its end."""

    def __init__(self) -> None:
        #: It was deleted or given to somebody else; the text of the last update that says so.
        self._deleted: Optional[str] = None
        self._in_use = False
        self._seen: set[Status] = set()
        #: The last error, for a close that explains nothing.
        self.error: Optional[str] = None

    def update(self, update: Update) -> Optional[Verdict]:
        """Some answers are final whatever comes after them."""
        if update.status in _FINAL:
            return Verdict(of_update(update), False)
        self._seen.add(update.status)
        if update.status is Status.DELETED:
            self._deleted = update.message or ""
        return None

    @property
    def is_last(self) -> bool:
        """Only the close is still to come."""
        return self._deleted is not None or Status.IN_USE in self._seen

    def verdict(self, code: Optional[int], cause: str) -> Verdict:
        """The connection is over: closed with a code, or cut."""
        if self._deleted is not None:
            what = "the sandbox was deleted"
            if Status.KILLED in self._seen:
                what = "the sandbox was killed"
            elif Status.CHECKPOINTED in self._seen:
                what = "the sandbox was checkpointed"
            return Verdict(EndedError(f"{what}: {self._deleted}" if self._deleted else what), False)
        if Status.IN_USE in self._seen:
            return Verdict(InUseError("another client is attached to the sandbox"), True)
        if code == 4000 and Status.CHECKPOINT_ERROR in self._seen:
            # The sandbox keeps running; only the session that asked was closed.
            return Verdict(ConnectionError("the session was closed after a failed checkpoint"), True)
        if code == 4000:
            return Verdict(RefusedError(self.error or "the server gave no reason", Status.ERROR.value), False)
        if code == 1012:
            return Verdict(ConnectionError("the instance is shutting down"), True, is_elsewhere=True)
        if code == 1000:
            return Verdict(EndedError("the server closed it"), False)
        if code in (1007, 1009):
            return Verdict(ProtocolError("the server refused what it was sent"), False)
        return Verdict(ConnectionError(cause if code is None else f"closed with code {code}"), True)
