"""What is known of a sandbox, and how to attach to it again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Optional, Sequence

from .options import Connection
from .protocol import ExecView

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ConnectionOptions
    from .sandbox import Sandbox


@dataclass(frozen=True)
class View:
    """The current state of a sandbox, as far as the client knows it."""

    id: str
    status: Optional[str]
    #: The instance that runs it.
    instance: Optional[str]
    #: Whether there is a connection right now. You need not check it: requests wait for a connection.
    is_connected: bool
    #: The commands that the sandbox knew when the connection started.
    execs: Sequence[ExecView]
    #: Whether the sandbox is stored; ``None`` if the client attached to it, or if the server does not say.
    persistent: Optional[bool] = None


@dataclass(frozen=True)
class SandboxRef:
    """A sandbox that can be attached: its id, its token and the server."""

    id: str
    token: str = field(repr=False)
    _url: str = field(repr=False, compare=False, default="")
    _connection: Connection = field(repr=False, compare=False, default_factory=Connection)

    async def attach(self, **options: Unpack[ConnectionOptions]) -> Sandbox:
        """Attaches to the sandbox, with the connection options of the sandbox that the reference comes from."""
        from .sandbox import Sandbox

        return await Sandbox.attach(self._url, self.id, self.token, connection=replace(self._connection, **options))
