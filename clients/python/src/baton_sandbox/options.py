"""The options of sandboxes, commands, files and connections, typed so that editors can complete them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, TypedDict, Union

from .auth import Auth
from .protocol import EgressDenied, Update
from .rollback import Rollback

#: Bytes or text for the stdin of a command.
Input = Union[bytes, bytearray, memoryview, str]


class Limits(TypedDict, total=False):
    """The most a sandbox may use. The server has its own defaults for the rest."""

    #: Of all its commands together: bytes, or a text such as ``"512MiB"``.
    memory: Union[int, str]
    cpus: float
    #: Processes and threads at one time.
    pids: int
    #: Written to its files: bytes, or a text such as ``"1GiB"``.
    disk: Union[int, str]
    #: Open files of one process.
    files: int


@dataclass(frozen=True)
class Connection:
    """How to reach the server, and how long to wait for it. Times are in seconds."""

    #: Sent as ``X-API-Key``.
    api_key: Optional[str] = field(default=None, repr=False)
    #: Sent with every handshake, for example for a proxy in front of the server.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: ``"google"``, or a function that returns further headers before each handshake.
    auth: Auth = field(default=None, repr=False)
    #: How long to try to reconnect after a drop. ``None`` never tries.
    reconnect_for: Optional[float] = 300
    #: The time limit of one handshake.
    connect_within: float = 15
    #: From the call of create or attach to a running sandbox.
    start_within: float = 120
    #: The time limit of a checkpoint, snapshot, fork, handoff or kill.
    answer_within: float = 600
    #: The server pings every ten seconds: after this much silence the connection counts as dead.
    silence: float = 30
    #: Called with every status update.
    on_status: Optional[Callable[[Update], Any]] = None
    #: Called when the sandbox was restored from an older checkpoint; without it a ``RolledBackWarning`` is issued.
    on_rollback: Optional[Callable[[Rollback], Any]] = None
    #: Called when the network policy of the sandbox refused a connection; without it a warning is logged.
    on_egress_denied: Optional[Callable[[EgressDenied], Any]] = None


class ConnectionOptions(TypedDict, total=False):
    """The fields of :class:`Connection`, as keyword arguments."""

    api_key: Optional[str]
    headers: Mapping[str, str]
    auth: Auth
    reconnect_for: Optional[float]
    connect_within: float
    start_within: float
    answer_within: float
    silence: float
    on_status: Optional[Callable[[Update], Any]]
    on_rollback: Optional[Callable[[Rollback], Any]]
    on_egress_denied: Optional[Callable[[EgressDenied], Any]]


class RunCodeOptions(TypedDict, total=False):
    """The keyword arguments of ``Sandbox.exec``, except ``language``."""

    exec_id: Optional[str]
    env: Optional[Mapping[str, str]]
    cwd: Optional[str]
    user: Optional[str]
    stdin: Union[bool, Input]
    pty: Optional[tuple[int, int]]
    timeout: Union[float, str, None]


class ExecOptions(RunCodeOptions, total=False):
    """The keyword arguments of ``Sandbox.exec``."""

    language: str


class FileOptions(TypedDict, total=False):
    """The keyword arguments of everything that works on files of a sandbox."""

    #: The user inside the sandbox to work as.
    user: Optional[str]
    #: The directory that relative paths start from.
    cwd: Optional[str]
    timeout: Union[float, str, None]


class ReadOptions(FileOptions, total=False):
    """The keyword arguments of ``Sandbox.read_file``."""

    offset: int
    length: Optional[int]
