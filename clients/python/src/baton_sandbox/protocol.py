"""The events of ``baton.v1`` and its binary frame. No I/O here; ``requests`` has what a client sends."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, Optional, Sequence, Union

SUBPROTOCOL = "baton.v1"
VERSION = 1

STDIN, STDOUT, STDERR = 0, 1, 2
OUTPUTS = {STDOUT: "stdout", STDERR: "stderr"}


class Status(str, Enum):
    """The status of a sandbox, or of one of its commands."""

    CREATING = "SANDBOX_CREATING"
    RUNNING = "SANDBOX_RUNNING"
    NOT_FOUND = "SANDBOX_NOT_FOUND"
    IN_USE = "SANDBOX_IN_USE"
    CREATION_ERROR = "SANDBOX_CREATION_ERROR"
    EXECUTION_RUNNING = "SANDBOX_EXECUTION_RUNNING"
    EXECUTION_DONE = "SANDBOX_EXECUTION_DONE"
    EXECUTION_ERROR = "SANDBOX_EXECUTION_ERROR"
    EXECUTION_IN_PROGRESS_ERROR = "SANDBOX_EXECUTION_IN_PROGRESS_ERROR"
    EXECUTION_UNSUPPORTED_LANGUAGE_ERROR = "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR"
    EXECUTION_FORCE_KILLED = "SANDBOX_EXECUTION_FORCE_KILLED"
    EXECUTION_FORCE_KILL_ERROR = "SANDBOX_EXECUTION_FORCE_KILL_ERROR"
    STDIN_ERROR = "SANDBOX_STDIN_ERROR"
    CHECKPOINTING = "SANDBOX_CHECKPOINTING"
    CHECKPOINTED = "SANDBOX_CHECKPOINTED"
    CHECKPOINT_ERROR = "SANDBOX_CHECKPOINT_ERROR"
    RESTORING = "SANDBOX_RESTORING"
    RESTORE_ERROR = "SANDBOX_RESTORE_ERROR"
    FILESYSTEM_SNAPSHOT_CREATING = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING"
    FILESYSTEM_SNAPSHOT_CREATED = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"
    FILESYSTEM_SNAPSHOT_ERROR = "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR"
    DELETING = "SANDBOX_DELETING"
    DELETED = "SANDBOX_DELETED"
    KILLING = "SANDBOX_KILLING"
    KILLED = "SANDBOX_KILLED"
    KILL_ERROR = "SANDBOX_KILL_ERROR"
    LOCK_ACQUIRING = "SANDBOX_LOCK_ACQUIRING"
    LOCK_ACQUIRED = "SANDBOX_LOCK_ACQUIRED"
    LOCK_RELEASE_REQUESTED = "SANDBOX_LOCK_RELEASE_REQUESTED"
    LOCK_RENEWAL_ERROR = "SANDBOX_LOCK_RENEWAL_ERROR"
    LOCK_RELEASING = "SANDBOX_LOCK_RELEASING"
    LOCK_RELEASED = "SANDBOX_LOCK_RELEASED"
    PAUSED = "SANDBOX_PAUSED"
    PERMISSION_DENIAL_ERROR = "SANDBOX_PERMISSION_DENIAL_ERROR"
    ERROR = "SANDBOX_ERROR"


# Events.


@dataclass(frozen=True)
class ByteRange:
    """The bytes of a stream that can still be read."""

    start: int
    end: int


@dataclass(frozen=True)
class ExecView:
    """A command as the sandbox knows it."""

    exec_id: str
    exec: int
    running: bool
    stdin: int
    stdout: ByteRange
    stderr: ByteRange
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    #: The CRC-32 of the accepted bytes of stdin, if the sandbox tells.
    stdin_crc32: Optional[int] = None


@dataclass(frozen=True)
class Progress:
    """Bytes transferred so far, and bytes in total: 0 if the total is not known."""

    done: int
    total: int


@dataclass(frozen=True)
class Update:
    """A status and its details."""

    status: Status
    message: Optional[str] = None
    #: Why a sandbox was checkpointed or deleted, such as ``"idle"``.
    reason: Optional[str] = None
    exec_id: Optional[str] = None
    exec: Optional[int] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    timed_out: bool = False
    duration_ms: Optional[int] = None
    checkpoint_id: Optional[str] = None
    #: How long the sandbox was paused for a snapshot, or for a checkpoint after which it keeps running.
    paused_ms: Optional[int] = None
    snapshot: Optional[str] = None
    #: ``files``, with RUNNING: the sandbox was restarted on the files of its last checkpoint.
    boot: Optional[str] = None
    #: With repeated CREATING, RESTORING, CHECKPOINTING and FILESYSTEM_SNAPSHOT_CREATING.
    progress: Optional[Progress] = None
    execs: Optional[Sequence[ExecView]] = None


@dataclass(frozen=True)
class Identity:
    """What a client needs to attach to a sandbox."""

    sandbox_id: str
    sandbox_token: str = field(repr=False)
    #: Whether the sandbox is stored; ``None`` if the server does not say.
    persistent: Optional[bool] = None


@dataclass(frozen=True)
class ErrorText:
    """An ``error`` event: a message for people."""

    message: str


@dataclass(frozen=True)
class TextOutput:
    """Output in the plain dialect."""

    stream: str
    data: str


@dataclass(frozen=True)
class Hello:
    protocol: int
    max_frame: int
    max_execs: int
    instance: str


@dataclass(frozen=True)
class StdinAck:
    exec_id: str
    offset: int


@dataclass(frozen=True)
class OutputGap:
    exec_id: str
    stream: str
    start: int
    end: int


@dataclass(frozen=True)
class OutputRewound:
    exec_id: str
    stream: str
    to: int


@dataclass(frozen=True)
class RolledBack:
    checkpoint_id: str
    age_ms: int


@dataclass(frozen=True)
class EgressDenied:
    """The network policy of the sandbox does not allow a connection, or a name. Only a few of many are reported."""

    host: str
    #: ``None`` if a program only asked for the name.
    port: Optional[int]
    #: ``"policy"`` of the sandbox, ``"ceiling"`` of the server, or what the address is, such as ``"private"``.
    reason: str


@dataclass(frozen=True)
class IdleTimeout:
    """The new idle timeout in seconds; ``None`` for never."""

    idle_timeout: Optional[float]


@dataclass(frozen=True)
class Forked:
    sandboxes: Sequence[Identity]


Event = Union[Update, Identity, ErrorText, TextOutput, Hello, StdinAck, OutputGap, OutputRewound, RolledBack, EgressDenied, IdleTimeout, Forked]


def parse(text: Union[str, bytes]) -> Optional[Event]:
    """An event, or ``None`` for one that this version does not know."""
    try:
        fields = json.loads(text)
        return _READERS[fields["event"]](fields)
    except (KeyError, TypeError, ValueError):
        return None


def _update(fields: dict[str, Any]) -> Update:
    views, progress = fields.get("execs"), fields.get("progress")
    return Update(
        status=Status(fields["status"]),
        message=fields.get("message"),
        reason=fields.get("reason"),
        exec_id=fields.get("exec_id"),
        exec=fields.get("exec"),
        exit_code=fields.get("exit_code"),
        signal=fields.get("signal"),
        timed_out=bool(fields.get("timed_out", False)),
        duration_ms=fields.get("duration_ms"),
        checkpoint_id=fields.get("checkpoint_id"),
        paused_ms=fields.get("paused_ms"),
        snapshot=fields.get("snapshot"),
        boot=fields.get("boot"),
        progress=None if progress is None else Progress(progress["done"], progress["total"]),
        execs=None if views is None else tuple(_view(view) for view in views),
    )


def _view(fields: dict[str, Any]) -> ExecView:
    return ExecView(
        exec_id=fields["exec_id"],
        exec=fields["exec"],
        running=fields["running"],
        stdin=fields["stdin"],
        stdout=ByteRange(fields["stdout"]["from"], fields["stdout"]["to"]),
        stderr=ByteRange(fields["stderr"]["from"], fields["stderr"]["to"]),
        exit_code=fields.get("exit_code"),
        signal=fields.get("signal"),
        stdin_crc32=fields.get("stdin_crc32"),
    )


def _identity(fields: dict[str, Any]) -> Identity:
    return Identity(fields["sandbox_id"], fields["sandbox_token"], fields.get("persistent"))


_READERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "status_update": _update,
    "sandbox_id": _identity,
    "error": lambda f: ErrorText(f["message"]),
    "stdout": lambda f: TextOutput("stdout", f["data"]),
    "stderr": lambda f: TextOutput("stderr", f["data"]),
    "hello": lambda f: Hello(f["protocol"], f["max_frame"], f["max_execs"], f["instance"]),
    "stdin_ack": lambda f: StdinAck(f["exec_id"], f["offset"]),
    "output_gap": lambda f: OutputGap(f["exec_id"], f["stream"], f["from"], f["to"]),
    "output_rewound": lambda f: OutputRewound(f["exec_id"], f["stream"], f["to"]),
    "rolled_back": lambda f: RolledBack(f["checkpoint_id"], f["age_ms"]),
    "egress_denied": lambda f: EgressDenied(f["host"], f.get("port"), f["reason"]),
    "idle_timeout": lambda f: IdleTimeout(f["idle_timeout"]),
    "forked": lambda f: Forked(tuple(_identity(copy) for copy in f["sandboxes"])),
}


# The binary frame: stream, number of the command, offset, then the bytes.

_HEADER = struct.Struct(">BIQ")
HEADER = _HEADER.size


def encode_chunk(stream: int, exec: int, offset: int, payload: Union[bytes, memoryview]) -> bytes:
    return b"".join((_HEADER.pack(stream, exec, offset), payload))


def decode_chunk(frame: bytes) -> tuple[int, int, int, bytes]:
    """Raises ``ValueError`` if the message is not such a frame."""
    if len(frame) < HEADER:
        raise ValueError(f"a binary message is at least {HEADER} bytes long")
    stream, exec, offset = _HEADER.unpack_from(frame)
    if stream not in (STDIN, STDOUT, STDERR):
        raise ValueError("the first byte of a binary message is 0 (stdin), 1 (stdout) or 2 (stderr)")
    return stream, exec, offset, frame[HEADER:]
