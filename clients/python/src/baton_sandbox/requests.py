"""The requests of ``baton.v1``. No I/O here."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Mapping, Optional, Sequence, Union

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import FileOptions


class Unset(Enum):
    """An argument that was not given, where ``None`` is a value."""

    UNSET = 0


UNSET = Unset.UNSET
Request = dict[str, Any]


def _given(**fields: Any) -> Request:
    """Leaves out what was not given: the server has its own defaults."""
    return {name: value for name, value in fields.items() if value is not None and value is not False and value != {}}


def config(
    *,
    idle_timeout: Union[float, str, None, Unset] = UNSET,
    persistent: Union[bool, str, None] = None,
    enable_checkpoint: Optional[bool] = None,
    enable_sandbox_handoff: Optional[bool] = None,
    enable_idle_timeout_auto_checkpoint: Optional[bool] = None,
    **fields: Any,
) -> Request:
    request = _given(**fields)
    flags = {
        "persistent": persistent,
        "enable_checkpoint": enable_checkpoint,
        "enable_sandbox_handoff": enable_sandbox_handoff,
        "enable_idle_timeout_auto_checkpoint": enable_idle_timeout_auto_checkpoint,
    }
    # `False` is a value here, because none of these is off by default in every case.
    request.update({name: value for name, value in flags.items() if value is not None})
    if idle_timeout is not UNSET:
        # `None` is a value here: never.
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
    request = _given(exec_id=exec_id, env=dict(env or {}), cwd=cwd, user=user, stdin=stdin, timeout=timeout)
    request["action"] = "exec"
    if argv is not None:
        request["argv"] = list(argv)
    else:
        request["language"], request["code"] = language, code
    if pty is not None:
        request["pty"] = {"cols": pty[0], "rows": pty[1]}
    return request


def read_file(
    exec_id: str, path: str, *, offset: int = 0, length: Optional[int] = None, archive: bool = False, **options: Unpack[FileOptions]
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
    **options: Unpack[FileOptions],
) -> Request:
    return _file("write_file", exec_id, path, options, mode=mode, mtime_ms=mtime_ms, size=size, archive=archive)


def list_files(exec_id: str, path: str, *, depth: int = 1, **options: Unpack[FileOptions]) -> Request:
    return _file("list_files", exec_id, path, options, depth=depth)


def remove_file(exec_id: str, path: str, *, recursive: bool = False, **options: Unpack[FileOptions]) -> Request:
    return _file("remove_file", exec_id, path, options, recursive=recursive)


def rename_file(exec_id: str, path: str, to: str, **options: Unpack[FileOptions]) -> Request:
    return _file("rename_file", exec_id, path, options, to=to)


def make_directory(
    exec_id: str, path: str, *, parents: bool = False, mode: Optional[int] = None, **options: Unpack[FileOptions]
) -> Request:
    return _file("make_directory", exec_id, path, options, parents=parents, mode=mode)


def watch_files(exec_id: str, path: str, *, recursive: bool = False, **options: Unpack[FileOptions]) -> Request:
    return _file("watch_files", exec_id, path, options, recursive=recursive)


def _file(action: str, exec_id: str, path: str, options: FileOptions, **fields: Any) -> Request:
    unknown = set(options) - {"user", "cwd", "timeout"}
    if unknown:
        raise TypeError(f"{action} has no option {', '.join(sorted(unknown))}")
    request: Request = {"action": action, "exec_id": exec_id, "path": path}
    # Zero is a value here, such as the size of an empty file.
    request.update({name: value for name, value in {**fields, **options}.items() if value is not None and value is not False})
    return request


def stdin(exec_id: str, data: str = "", *, offset: Optional[int] = None, eof: bool = False, encoding: Optional[str] = None) -> Request:
    request = {"event": "stdin", "exec_id": exec_id, "data": data, **_given(eof=eof, encoding=encoding)}
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
    return {"action": "checkpoint", **_given(live=live, keep_running=keep_running)}


def snapshot(name: str, *, full: bool = False) -> Request:
    return {"action": "snapshot_filesystem", "name": name, **_given(full=full)}


def fork(count: int) -> Request:
    return {"action": "fork", "count": count}


def handoff() -> Request:
    return {"action": "handoff"}


def set_idle_timeout(idle_timeout: Union[float, str, None]) -> Request:
    return {"action": "set_idle_timeout", "idle_timeout": idle_timeout}


def kill_sandbox() -> Request:
    return {"action": "kill_sandbox"}


def reconnect(offsets: Mapping[str, tuple[int, int]], peek: bool = False) -> Request:
    """With ``peek`` the output stays available to the next client."""
    named = {exec_id: {"stdout": out, "stderr": err} for exec_id, (out, err) in offsets.items()}
    return {"action": "reconnect", **_given(offsets=named, peek=peek or None)}


def ack(exec_id: str, stdout: int, stderr: int) -> Request:
    return {"action": "ack", "exec_id": exec_id, "stdout": stdout, "stderr": stderr}
