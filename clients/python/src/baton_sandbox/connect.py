"""One handshake: address, headers, credentials, affinity cookie."""

from __future__ import annotations

import asyncio
from typing import Callable, Optional, Sequence, Union
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError

from . import auth, protocol
from .errors import BatonError, ConnectionError, ProtocolError, TimeoutError, describe
from .options import Connection
from .protocol import Identity
from .retry_policy import RetryPolicy, fatal, from_http, lost

#: Frames of the server stay under 1 MiB.
MAX_MESSAGE = 16 << 20


class Socket(ClientConnection):
    """A WebSocket that remembers when it last received anything, pings included."""

    received_at = 0.0

    def data_received(self, data: bytes) -> None:
        self.received_at = self.loop.time()
        super().data_received(data)


def normalize_url(url: str) -> str:
    """The server's address with the scheme ``ws`` or ``wss``, and without a slash at the end."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    scheme = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}.get(scheme, "")
    if not mark or not scheme:
        raise ConnectionError(f"the address `{url}` must begin with ws:// or wss://")
    parts = urlsplit(f"{scheme}://{rest}")
    if not parts.hostname or parts.query or parts.fragment or any(c.isspace() for c in rest):
        raise ConnectionError(f"`{url}` is not the address of a server")
    return f"{scheme}://{rest}"


class Cookies:
    """Cookies of a load balancer, sent back so that the next connection reaches the same instance."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def store(self, headers: Sequence[str]) -> None:
        """Values of later handshakes replace earlier ones."""
        for header in headers:
            name, mark, value = header.partition(";")[0].partition("=")
            if mark:
                self._values[name.strip()] = value.strip()

    def clear(self) -> None:
        self._values.clear()

    def header(self) -> Optional[str]:
        return "; ".join(f"{name}={value}" for name, value in self._values.items()) or None


async def open_socket(
    address: str, identity: Optional[Identity], cookies: Cookies, credentials: auth.Credentials, options: Connection
) -> Union[Socket, RetryPolicy]:
    """Opens a WebSocket to an existing sandbox, or to create one."""
    return await open_socket_at(
        "/create" if identity is None else f"/attach/{identity.sandbox_id}",
        address,
        identity,
        cookies,
        credentials,
        options,
    )


async def open_socket_at(
    path: str,
    address: str,
    identity: Optional[Identity],
    cookies: Cookies,
    credentials: auth.Credentials,
    options: Connection,
    explain: Callable[[InvalidStatus], RetryPolicy] = lambda error: from_http(error.response.status_code),
) -> Union[Socket, RetryPolicy]:
    """Opens a WebSocket at any path of the server. ``explain`` says what another response means."""
    try:
        headers = {**options.headers, **await credentials.headers()}
        further = {
            "X-API-Key": options.api_key,
            "X-Sandbox-Token": None if identity is None else identity.sandbox_token,
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
        return explain(error)
    except (NegotiationError, InvalidURI) as error:
        return fatal(ProtocolError(str(error)))
    except asyncio.TimeoutError:
        return RetryPolicy(TimeoutError(f"no connection within {options.connect_within} s"), True)
    except (OSError, EOFError, InvalidHandshake) as error:
        return lost(describe(error))
    except BatonError as error:
        return RetryPolicy(error, True)
    assert isinstance(socket, Socket)
    if socket.subprotocol != protocol.SUBPROTOCOL:
        await socket.close()
        return fatal(ProtocolError(f"the server did not accept the subprotocol {protocol.SUBPROTOCOL}"))
    if socket.response is not None:
        cookies.store(socket.response.headers.get_all("Set-Cookie"))
    return socket
