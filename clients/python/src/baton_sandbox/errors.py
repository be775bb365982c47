"""What can go wrong, by what the caller can do about it."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from .exec import Result
    from .protocol import Update


class BatonError(Exception):
    """Every error of this package."""


class NotFoundError(BatonError):
    """The sandbox never was, or it was deleted."""


class InUseError(BatonError):
    """Somebody else is attached to the sandbox, and alive."""


class PermissionDeniedError(BatonError):
    """The token or the API key does not open this."""


class CreationError(BatonError):
    """The sandbox could not be created."""


class RestoreError(BatonError):
    """The sandbox could not be restored."""


class CheckpointError(BatonError):
    """No checkpoint was made. The sandbox goes on as it was."""


class RefusedError(BatonError):
    """The server's no to one request. The sandbox goes on as it was."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class SnapshotError(RefusedError):
    """No snapshot was made. The sandbox goes on as it was."""


class TimeoutError(BatonError, builtins.TimeoutError):
    """No answer came in time."""


class ConnectionError(BatonError, builtins.ConnectionError):
    """The server cannot be reached, or not any more."""


class ProtocolError(BatonError):
    """The other side does not speak ``baton.v1``, or not well."""


class EndedError(BatonError):
    """The session is over as it should be; the text says why."""


class ExecFailedError(BatonError):
    """A command did not succeed, and ``check=True`` asked to hear of it so."""

    def __init__(self, result: Result) -> None:
        last = result.stderr.strip().splitlines()[-1:]
        super().__init__(": ".join([result.ending, *last]))
        self.result = result


class ExecLostError(BatonError):
    """A command is gone, and nobody knows how it ended."""


class OutputGapError(BatonError):
    """Bytes of a command's output were not kept: nobody listened for too long. Reading can go on after it."""

    def __init__(self, stream: str, start: int, end: int) -> None:
        super().__init__(f"bytes {start} to {end} of {stream} were not kept")
        self.stream, self.start, self.end = stream, start, end


class FileError(BatonError):
    """A file could not be read, written or listed; ``code`` is the name of an errno, such as ``"ENOENT"``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AuthError(BatonError):
    """No credentials for the server could be had."""


def of_update(update: Update) -> BatonError:
    """The error an update stands for."""
    status = update.status
    message = update.message or status.value
    kind = _KINDS.get(status.value)
    if kind is not None:
        return kind(message)
    if status.value == "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR":
        return SnapshotError(message, status.value)
    return RefusedError(message, status.value)


_KINDS: dict[str, type[BatonError]] = {
    "SANDBOX_NOT_FOUND": NotFoundError,
    "SANDBOX_IN_USE": InUseError,
    "SANDBOX_PERMISSION_DENIAL_ERROR": PermissionDeniedError,
    "SANDBOX_CREATION_ERROR": CreationError,
    "SANDBOX_RESTORE_ERROR": RestoreError,
    "SANDBOX_CHECKPOINT_ERROR": CheckpointError,
    "SANDBOX_EXECUTION_IN_PROGRESS_ERROR": CheckpointError,
}


def of_http(code: int) -> tuple[BatonError, bool]:
    """What an HTTP answer instead of a WebSocket means, and whether another try is worth it."""
    if code == 401:
        return PermissionDeniedError("the server wants an API key (HTTP 401)"), False
    if code == 403:
        return PermissionDeniedError("HTTP 403"), False
    if code in (408, 425, 429) or not 400 <= code <= 499:
        return ConnectionError(f"HTTP {code}"), True
    return ProtocolError(f"HTTP {code} instead of a WebSocket"), False


def text_of(error: Optional[BaseException]) -> str:
    """A sentence also for errors that carry none."""
    return "" if error is None else str(error) or type(error).__name__
