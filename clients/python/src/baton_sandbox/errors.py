"""The errors of this package, by what the caller can do about them."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from .result import Result
    from .protocol import Update


class BatonError(Exception):
    """Every error of this package."""


class NotFoundError(BatonError):
    """The sandbox does not exist, or it was deleted."""


class InUseError(BatonError):
    """Another client is attached to the sandbox and responds."""


class PermissionDeniedError(BatonError):
    """The token or the API key is wrong or missing."""


class CreationError(BatonError):
    """The sandbox could not be created."""


class RestoreError(BatonError):
    """The sandbox could not be restored."""


class CheckpointError(BatonError):
    """The checkpoint failed. The sandbox keeps running."""


class RefusedError(BatonError):
    """The server refused one request. The sandbox keeps running."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class SnapshotError(RefusedError):
    """The snapshot failed. The sandbox keeps running."""


class TimeoutError(BatonError, builtins.TimeoutError):
    """No answer arrived in time."""


class ConnectionError(BatonError, builtins.ConnectionError):
    """The server cannot be reached, or the connection was lost for too long."""


class ProtocolError(BatonError):
    """The server does not speak ``baton.v1``, or violates it."""


class EndedError(BatonError):
    """The session ended normally; the message says why."""

    def __init__(self, message: str, reason: Optional[str] = None) -> None:
        super().__init__(message if reason is None else f"{message} (reason: {reason})")
        #: What happened to the sandbox, such as ``"idle"``, ``"checkpoint"`` or ``"expired"``, if the server said so.
        self.reason = reason


class ExecFailedError(BatonError):
    """A command failed, and ``check=True`` was given."""

    def __init__(self, result: Result) -> None:
        last = result.stderr.strip().splitlines()[-1:]
        super().__init__(": ".join([result.ending, *last]))
        self.result = result


class ExecLostError(BatonError):
    """A command is lost: its outcome is not known."""

    def __init__(self, message: str, *, rolled_back: bool = False) -> None:
        super().__init__(message)
        #: It is lost because the sandbox was rolled back to an older checkpoint.
        self.rolled_back = rolled_back


class OutputGapError(BatonError):
    """Output was dropped because the command had no reader for too long. You can keep reading after it."""

    def __init__(self, stream: str, start: int, end: int) -> None:
        super().__init__(f"bytes {start} to {end} of {stream} were dropped")
        self.stream, self.start, self.end = stream, start, end


class FileError(BatonError):
    """A file could not be read, written or listed; ``code`` is the name of an errno, such as ``"ENOENT"``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AuthError(BatonError):
    """No credentials for the server could be obtained."""


def from_update(update: Update) -> BatonError:
    """The error that an update reports."""
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


def describe(error: Optional[BaseException]) -> str:
    """The message of an error, or its type if it has none."""
    return "" if error is None else str(error) or type(error).__name__
