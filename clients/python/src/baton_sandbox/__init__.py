"""Sandboxes from Python: create or attach, run commands, move, over one WebSocket that mends itself.

A dropped connection is taken up again where it was: commands go on, and each byte of their output
and input arrives once. What cannot be taken up ends with a typed error.
"""

from .connect import Connection
from .errors import (
    AuthError,
    BatonError,
    CheckpointError,
    ConnectionError,
    CreationError,
    EndedError,
    ExecFailedError,
    ExecLostError,
    FileError,
    InUseError,
    NotFoundError,
    OutputGapError,
    PermissionDeniedError,
    ProtocolError,
    RefusedError,
    RestoreError,
    SnapshotError,
    TimeoutError,
)
from .exec import OutputStream, Result, Running
from .files import FileEntry
from .pipe import Again, Lost
from .protocol import ExecView, Progress, Status, Update
from .sandbox import Place, Sandbox, View

__all__ = [
    "Again",
    "AuthError",
    "BatonError",
    "CheckpointError",
    "Connection",
    "ConnectionError",
    "CreationError",
    "EndedError",
    "ExecFailedError",
    "ExecLostError",
    "ExecView",
    "FileEntry",
    "FileError",
    "InUseError",
    "Lost",
    "NotFoundError",
    "OutputGapError",
    "OutputStream",
    "PermissionDeniedError",
    "Place",
    "Progress",
    "ProtocolError",
    "RefusedError",
    "RestoreError",
    "Result",
    "Running",
    "Sandbox",
    "SnapshotError",
    "Status",
    "TimeoutError",
    "Update",
    "View",
]
__version__ = "0.1.0"
