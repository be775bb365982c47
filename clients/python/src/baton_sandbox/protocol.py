"""The words of ``baton.v1``: requests out, events in, and the binary frame. No I/O here."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, Mapping, Optional, Sequence, Union

SUBPROTOCOL = "baton.v1"
VERSION = 1

STDIN, STDOUT, STDERR = 0, 1, 2
OUTPUTS = {STDOUT: "stdout", STDERR: "stderr"}


class Status(str, Enum):
    """What a sandbox says of itself."""

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
class Kept:
    """Which bytes of a stream can still be had."""

    start: int
    end: int


@dataclass(frozen=True)
class ExecView:
    """A command as the sandbox knows it."""

    exec_id: str
    exec: int
    running: bool
    stdin: int
    stdout: Kept
    stderr: Kept
    exit_code: Optional[int] = None
    signal: Optional[int] = None


@dataclass(frozen=True)
class Progress:
    """Bytes done, and bytes in all: 0 if nobody knows."""

    done: int
    total: int


@dataclass(frozen=True)
class Update:
    """A status and whatever belongs to it."""

    status: Status
    message: Optional[str] = None
    exec_id: Optional[str] = None
    exec: Optional[int] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    timed_out: bool = False
    duration_ms: Optional[int] = None
    checkpoint_id: Optional[str] = None
    #: For how long the sandbox stood still, with a snapshot or a checkpoint after which it runs on.
    paused_ms: Optional[int] = None
    snapshot: Optional[str] = None
    #: ``files``, with RUNNING: it was started anew on the files of its last checkpoint.
    boot: Optional[str] = None
    #: How far it has come, with CREATING, RESTORING, CHECKPOINTING and FILESYSTEM_SNAPSHOT_CREATING said again.
    progress: Optional[Progress] = None
    execs: Optional[Sequence[ExecView]] = None


@dataclass(frozen=True)
class Found:
    """How to come back to the sandbox."""

    sandbox_id: str
    sandbox_token: str = field(repr=False)


@dataclass(frozen=True)
class Said:
    """An ``error`` event: for a person."""

    message: str


@dataclass(frozen=True)
class Text:
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
class Gap:
    exec_id: str
    stream: str
    start: int
    end: int


@dataclass(frozen=True)
class Rewound:
    exec_id: str
    stream: str
    to: int


@dataclass(frozen=True)
class RolledBack:
    checkpoint_id: str
    age_ms: int


@dataclass(frozen=True)
class Forked:
    sandboxes: Sequence[Found]


Event = Union[Update, Found, Said, Text, Hello, StdinAck, Gap, Rewound, RolledBack, Forked]


def parse(text: Union[str, bytes]) -> Optional[Event]:
    """An event, or ``None`` for what a newer server says and this version does not know."""
    try:
        fields = json.loads(text)
        return _READERS[fields["event"]](fields)
    except (KeyError, TypeError, ValueError):
        return None


def _update(fields: dict[str, Any]) -> Update:
    views, moved = fields.get("execs"), fields.get("progress")
    return Update(
        status=Status(fields["status"]),
        message=fields.get("message"),
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
        progress=None if moved is None else Progress(moved["done"], moved["total"]),
        execs=None if views is None else tuple(_view(view) for view in views),
    )


def _view(fields: dict[str, Any]) -> ExecView:
    return ExecView(
        exec_id=fields["exec_id"],
        exec=fields["exec"],
        running=fields["running"],
        stdin=fields["stdin"],
        stdout=Kept(fields["stdout"]["from"], fields["stdout"]["to"]),
        stderr=Kept(fields["stderr"]["from"], fields["stderr"]["to"]),
        exit_code=fields.get("exit_code"),
        signal=fields.get("signal"),
    )


def _found(fields: dict[str, Any]) -> Found:
    return Found(fields["sandbox_id"], fields["sandbox_token"])


_READERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "status_update": _update,
    "sandbox_id": _found,
    "error": lambda f: Said(f["message"]),
    "stdout": lambda f: Text("stdout", f["data"]),
    "stderr": lambda f: Text("stderr", f["data"]),
    "hello": lambda f: Hello(f["protocol"], f["max_frame"], f["max_execs"], f["instance"]),
    "stdin_ack": lambda f: StdinAck(f["exec_id"], f["offset"]),
    "output_gap": lambda f: Gap(f["exec_id"], f["stream"], f["from"], f["to"]),
    "output_rewound": lambda f: Rewound(f["exec_id"], f["stream"], f["to"]),
    "rolled_back": lambda f: RolledBack(f["checkpoint_id"], f["age_ms"]),
    "forked": lambda f: Forked(tuple(_found(copy) for copy in f["sandboxes"])),
}


# Requests.


class Unset(Enum):
    """Left to the server; ``None`` means something of its own."""

    UNSET = 0


UNSET = Unset.UNSET
Request = dict[str, Any]


def _only(**fields: Any) -> Request:
    """Without what was not given: the server's defaults are its own."""
    return {name: value for name, value in fields.items() if value is not None and value is not False and value != {}}


def config(
    *,
    idle_timeout: Union[float, str, None, Unset] = UNSET,
    enable_sandbox_handoff: Optional[bool] = None,
    enable_idle_timeout_auto_checkpoint: Optional[bool] = None,
    **fields: Any,
) -> Request:
    request = _only(**fields)
    # These two are implied by `enable_checkpoint`, so `False` is a value.
    if enable_sandbox_handoff is not None:
        request["enable_sandbox_handoff"] = enable_sandbox_handoff
    if enable_idle_timeout_auto_checkpoint is not None:
        request["enable_idle_timeout_auto_checkpoint"] = enable_idle_timeout_auto_checkpoint
    if idle_timeout is not UNSET:
        # Here `None` is a value: never.
        request["idle_timeout"] = idle_timeout
    return request


def exec_(
    *,
    exec_id: str,
    argv: Optional[Sequence[str]] = None,
    language: Optional[str] = None,
    code: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[str] = None,
    user: Optional[str] = None,
    stdin: bool = False,
    pty: Optional[tuple[int, int]] = None,
    timeout: Union[float, str, None] = None,
) -> Request:
    request = _only(exec_id=exec_id, env=dict(env or {}), cwd=cwd, user=user, stdin=stdin, timeout=timeout)
    request["action"] = "exec"
    if argv is not None:
        request["argv"] = list(argv)
    else:
        request["language"], request["code"] = language, code
    if pty is not None:
        request["pty"] = {"cols": pty[0], "rows": pty[1]}
    return request


def read_file(
    exec_id: str, path: str, *, offset: int = 0, length: Optional[int] = None, archive: bool = False, **options: Any
) -> Request:
    return _file("read_file", exec_id, path, options, offset=offset or None, length=length, archive=archive)


def write_file(
    exec_id: str,
    path: str,
    *,
    mode: Optional[int] = None,
    mtime_ms: Optional[int] = None,
    size: Optional[int] = None,
    archive: bool = False,
    **options: Any,
) -> Request:
    return _file("write_file", exec_id, path, options, mode=mode, mtime_ms=mtime_ms, size=size, archive=archive)


def list_files(exec_id: str, path: str, *, depth: int = 1, **options: Any) -> Request:
    return _file("list_files", exec_id, path, options, depth=depth)


def _file(action: str, exec_id: str, path: str, options: dict[str, Any], **fields: Any) -> Request:
    unknown = set(options) - {"user", "cwd", "timeout"}
    if unknown:
        raise TypeError(f"{action} has no option {', '.join(sorted(unknown))}")
    request: Request = {"action": action, "exec_id": exec_id, "path": path}
    # A nought is a value here, such as an empty file's size.
    request.update({name: value for name, value in {**fields, **options}.items() if value is not None and value is not False})
    return request


def stdin(exec_id: str, data: str = "", *, offset: Optional[int] = None, eof: bool = False, encoding: Optional[str] = None) -> Request:
    request = {"event": "stdin", "exec_id": exec_id, "data": data, **_only(eof=eof, encoding=encoding)}
    if offset is not None:
        request["offset"] = offset
    return request


def kill_process(exec_id: str) -> Request:
    return {"action": "kill_process", "exec_id": exec_id}


def signal(exec_id: str, name: str) -> Request:
    return {"action": "signal", "exec_id": exec_id, "signal": name}


def resize(exec_id: str, cols: int, rows: int) -> Request:
    return {"action": "resize", "exec_id": exec_id, "cols": cols, "rows": rows}


def checkpoint(*, live: bool = False, keep_running: bool = False) -> Request:
    return {"action": "checkpoint", **_only(live=live, keep_running=keep_running)}


def snapshot(name: str, *, full: bool = False) -> Request:
    return {"action": "snapshot_filesystem", "name": name, **_only(full=full)}


def fork(count: int) -> Request:
    return {"action": "fork", "count": count}


def handoff() -> Request:
    return {"action": "handoff"}


def kill_sandbox() -> Request:
    return {"action": "kill_sandbox"}


def reconnect(offsets: Mapping[str, tuple[int, int]], peek: bool = False) -> Request:
    """With `peek` output is looked at and not taken."""
    named = {exec_id: {"stdout": out, "stderr": err} for exec_id, (out, err) in offsets.items()}
    return {"action": "reconnect", **_only(offsets=named, peek=peek or None)}


def ack(exec_id: str, stdout: int, stderr: int) -> Request:
    return {"action": "ack", "exec_id": exec_id, "stdout": stdout, "stderr": stderr}


# The binary frame: stream, number of the command, offset, then the bytes.

_HEADER = struct.Struct(">BIQ")
HEADER = _HEADER.size


def encode_chunk(stream: int, exec: int, offset: int, payload: Union[bytes, memoryview]) -> bytes:
    return b"".join((_HEADER.pack(stream, exec, offset), payload))


def decode_chunk(frame: bytes) -> tuple[int, int, int, bytes]:
    """Raises ``ValueError`` for what is no such frame."""
    if len(frame) < HEADER:
        raise ValueError(f"a binary message is at least {HEADER} bytes long")
    stream, exec, offset = _HEADER.unpack_from(frame)
    if stream not in (STDIN, STDOUT, STDERR):
        raise ValueError("the first byte of a binary message is 0 (stdin), 1 (stdout) or 2 (stderr)")
    return stream, exec, offset, frame[HEADER:]
