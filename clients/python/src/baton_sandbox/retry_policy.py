"""What the end of a connection means: reconnect, or return the error to the caller. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .errors import (
    BatonError,
    ConnectionError,
    EndedError,
    InUseError,
    PermissionDeniedError,
    ProtocolError,
    RefusedError,
    from_update,
)
from .protocol import Status, Update

_FINAL = {Status.NOT_FOUND, Status.PERMISSION_DENIAL_ERROR, Status.RESTORE_ERROR, Status.CREATION_ERROR}


@dataclass(frozen=True)
class RetryPolicy:
    """Whether to reconnect. With ``is_retry`` the error is raised only if reconnecting fails for too long."""

    error: BatonError
    is_retry: bool
    #: The instance is shutting down: the next connection should reach another one.
    is_elsewhere: bool = False


def fatal(error: BatonError) -> RetryPolicy:
    return RetryPolicy(error, False)


def lost(text: str) -> RetryPolicy:
    return RetryPolicy(ConnectionError(text), True)


class ConnectionSummary:
    """What a connection reported that matters at its end."""

    def __init__(self) -> None:
        #: The message of DELETED, once it came.
        self._deleted: Optional[str] = None
        self._reason: Optional[str] = None
        self._seen: set[Status] = set()
        #: The last error, for a close frame without an explanation.
        self.error: Optional[str] = None

    def update(self, update: Update) -> Optional[RetryPolicy]:
        """Some updates are final, whatever follows them."""
        if update.status in _FINAL:
            return fatal(from_update(update))
        self._seen.add(update.status)
        if update.status is Status.DELETED:
            self._deleted, self._reason = update.message or "", update.reason
        return None

    @property
    def is_last(self) -> bool:
        """Whether only the close frame is still to come."""
        return self._deleted is not None or Status.IN_USE in self._seen

    def policy(self, code: Optional[int], cause: str) -> RetryPolicy:
        """The connection is over: closed with a code, or cut."""
        if self._deleted is not None:
            what = "the sandbox was deleted"
            if Status.KILLED in self._seen:
                what = "the sandbox was killed"
            elif Status.CHECKPOINTED in self._seen:
                what = "the sandbox was checkpointed"
            return fatal(EndedError(f"{what}: {self._deleted}" if self._deleted else what, self._reason))
        if Status.IN_USE in self._seen:
            return RetryPolicy(InUseError("another client is attached to the sandbox"), True)
        if code == 4000 and Status.CHECKPOINT_ERROR in self._seen:
            # The sandbox keeps running; only the session that asked was closed.
            return lost("the session was closed after a failed checkpoint")
        if code == 4000:
            return fatal(RefusedError(self.error or "the server gave no reason", Status.ERROR.value))
        if code == 1012:
            return RetryPolicy(ConnectionError("the instance is shutting down"), True, is_elsewhere=True)
        if code == 1000:
            return fatal(EndedError("the server closed the session"))
        if code in (1007, 1009):
            return fatal(ProtocolError("the server rejected a message of this client"))
        return lost(cause if code is None else f"closed with code {code}")


def from_http(code: int) -> RetryPolicy:
    """What an HTTP response instead of a WebSocket means."""
    if code == 401:
        return fatal(PermissionDeniedError("the server requires an API key (HTTP 401)"))
    if code == 403:
        return fatal(PermissionDeniedError("HTTP 403"))
    if code in (408, 425, 429) or not 400 <= code <= 499:
        return lost(f"HTTP {code}")
    return fatal(ProtocolError(f"HTTP {code} instead of a WebSocket"))
