"""Sandboxes from Python: run commands and move files over one WebSocket that reconnects by itself.

A dropped connection is resumed where it stopped: commands keep running, and each byte of their output
and input arrives once. What cannot be resumed ends with a typed error.
"""

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
from .file_results import FileEntry
from .http_api import SandboxSummary
from .options import Connection, Limits
from .ports import Port, PortConnection
from .protocol import EgressDenied, ExecView, Progress, Status, Update
from .reference import SandboxRef, View
from .result import Result
from .rollback import Rollback, RolledBackWarning
from .running import OutputStream, Running
from .sandbox import Sandbox
from .stream import Again, Lost
from .watch import FileChange, FileWatch

#: Deprecated: use ``SandboxRef``.
Place = SandboxRef

__all__ = [
    "Again",
    "AuthError",
    "BatonError",
    "CheckpointError",
    "Connection",
    "ConnectionError",
    "CreationError",
    "EgressDenied",
    "EndedError",
    "ExecFailedError",
    "ExecLostError",
    "ExecView",
    "FileChange",
    "FileEntry",
    "FileError",
    "FileWatch",
    "InUseError",
    "Limits",
    "Lost",
    "NotFoundError",
    "OutputGapError",
    "OutputStream",
    "PermissionDeniedError",
    "Place",
    "Port",
    "PortConnection",
    "Progress",
    "ProtocolError",
    "RefusedError",
    "RestoreError",
    "Result",
    "Rollback",
    "RolledBackWarning",
    "Running",
    "Sandbox",
    "SandboxRef",
    "SandboxSummary",
    "SnapshotError",
    "Status",
    "TimeoutError",
    "Update",
    "View",
]
__version__ = "0.1.0"
