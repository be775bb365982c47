"""One handshake: address, headers, credentials, affinity cookie."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, Sequence, Union
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError

from . import auth, protocol
from .errors import BatonError, ConnectionError, ProtocolError, TimeoutError, of_http, text_of
from .protocol import Found, Update
from .verdict import Verdict

#: Frames of the server stay under 1 MiB.
MAX_MESSAGE = 16 << 20


@dataclass(frozen=True)
class Connection:
    """How to reach the server, and how patiently. Times are in seconds."""

    #: Sent as ``X-API-Key``.
    api_key: Optional[str] = field(default=None, repr=False)
    #: Sent with every handshake, as for a proxy in front of the server.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: ``"google"``, or a function that gives further headers before each handshake.
    auth: auth.Auth = field(default=None, repr=False)
    #: After a drop: for how long to try again. ``None`` never tries.
    reconnect_for: Optional[float] = 300
    #: One handshake may take so long.
    connect_within: float = 15
    #: From the call of create or attach to a running sandbox.
    start_within: float = 120
    #: A checkpoint, snapshot, fork, handoff or kill may take so long.
    answer_within: float = 600
    #: The server pings every ten seconds: after so much silence it is gone.
    silence: float = 30
    #: Called with every update, as it comes.
    on_status: Optional[Callable[[Update], Any]] = None


class Socket(ClientConnection):
    """Remembers when it last heard anything, a ping included."""

    heard_at = 0.0

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        super().data_received(data)


def address_of(url: str) -> str:
    """The server's address, without what comes after its own path."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    scheme = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}.get(scheme, "")
    if not mark or not scheme:
        raise ConnectionError(f"the address `{url}` must begin with ws:// or wss://")
    parts = urlsplit(f"{scheme}://{rest}")
    if not parts.hostname or parts.query or parts.fragment or any(c.isspace() for c in rest):
        raise ConnectionError(f"`{url}` is not the address of a server")
    return f"{scheme}://{rest}"


class Cookies:
    """What load balancers gave us to find the same instance again."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def take(self, headers: Sequence[str]) -> None:
        """Values of later handshakes replace earlier ones."""
        for header in headers:
            name, mark, value = header.partition(";")[0].partition("=")
            if mark:
                self._values[name.strip()] = value.strip()

    def forget(self) -> None:
        self._values.clear()

    def header(self) -> Optional[str]:
        return "; ".join(f"{name}={value}" for name, value in self._values.items()) or None


async def open_socket(
    address: str, place: Optional[Found], cookies: Cookies, credentials: auth.Credentials, options: Connection
) -> Union[Socket, Verdict]:
    """Opens a WebSocket: to the place, or to a new one."""
    path = "/create" if place is None else f"/attach/{place.sandbox_id}"
    try:
        headers = {**options.headers, **await credentials.headers()}
        further = {
            "X-API-Key": options.api_key,
            "X-Sandbox-Token": None if place is None else place.sandbox_token,
            "Cookie": cookies.header(),
        }
        headers.update({name: value for name, value in further.items() if value is not None})
        socket = await connect(
            address + path,
            additional_headers=headers,
            subprotocols=[protocol.SUBPROTOCOL],  # type: ignore[list-item]
            create_connection=Socket,
            compression=None,
            max_size=MAX_MESSAGE,
            ping_interval=None,
            open_timeout=options.connect_within,
            close_timeout=1,
        )
    except InvalidStatus as error:
        kind, is_retry = of_http(error.response.status_code)
        return Verdict(kind, is_retry)
    except (NegotiationError, InvalidURI) as error:
        return Verdict(ProtocolError(str(error)), False)
    except asyncio.TimeoutError:
        return Verdict(TimeoutError(f"no connection within {options.connect_within} s"), True)
    except (OSError, EOFError, InvalidHandshake) as error:
        return Verdict(ConnectionError(text_of(error)), True)
    except BatonError as error:
        return Verdict(error, True)
    assert isinstance(socket, Socket)
    if socket.subprotocol != protocol.SUBPROTOCOL:
        await socket.close()
        return Verdict(ProtocolError("the server did not choose it"), False)
    if socket.response is not None:
        cookies.take(socket.response.headers.get_all("Set-Cookie"))
    return socket
