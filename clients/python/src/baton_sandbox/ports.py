"""Ports inside a sandbox: a link for a browser, raw connections, and local ports that lead there."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import AsyncIterator, Union

from websockets.exceptions import ConnectionClosed, InvalidStatus

from . import auth, clock
from .connect import Cookies, Socket, normalize_url, open_socket_at
from .errors import BatonError, ConnectionError, InUseError, NotFoundError, PermissionDeniedError, ProtocolError
from .link import Link
from .options import Connection
from .protocol import Identity
from .retry_policy import RetryPolicy, fatal, lost

#: How much one message carries.
PIECE = 64 << 10


def _explain(error: InvalidStatus) -> RetryPolicy:
    """What a response other than a WebSocket means."""
    code = error.response.status_code
    said = (error.response.body or b"").decode(errors="replace").strip() or f"HTTP {code}"
    if code in (401, 403):
        return fatal(PermissionDeniedError(said))
    if code == 404:
        return fatal(NotFoundError(said))
    if code == 409:
        return fatal(InUseError(said))
    if code == 502:
        return fatal(ConnectionError(said))
    return lost(said) if code == 429 or code >= 500 else fatal(ProtocolError(f"{said} instead of a WebSocket"))


class PortConnection:
    """A TCP connection to a port in a sandbox. Each direction can end by itself.

    When it is reset, as when the sandbox moves, reading and writing raise ``ConnectionError``. Leaving
    ``async with`` closes it.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._left = b""
        self._has_ended = False

    async def read(self, size: int = -1) -> bytes:
        """The next bytes, at most ``size``; ``b""`` at the end."""
        if not self._left and not self._has_ended:
            try:
                message = await self._socket.recv()
            except ConnectionClosed as error:
                raise ConnectionError("the connection to the port was reset") from error
            self._has_ended = isinstance(message, str)
            self._left = b"" if isinstance(message, str) else message
        size = len(self._left) if size < 0 else size
        piece, self._left = self._left[:size], self._left[size:]
        return piece

    async def write(self, data: Union[bytes, bytearray, memoryview]) -> None:
        """Sends all of it; waits while the other side does not read."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE):
            await self._send(bytes(view[start : start + PIECE]))

    async def write_eof(self) -> None:
        """Ends this direction; the other one goes on."""
        await self._send("")

    async def _send(self, message: Union[bytes, str]) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            raise ConnectionError("the connection to the port was reset") from error

    async def close(self) -> None:
        """Closes both directions; one that had not ended is reset."""
        await self._socket.close()

    async def __aenter__(self) -> PortConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Port:
    """A port in a sandbox. Using it needs no session: it works while another client is attached, too."""

    def __init__(self, address: str, identity: Identity, port: int, connection: Connection) -> None:
        self._address = normalize_url(address)
        self._identity = identity
        self._port = port
        # Restoring a sandbox may take longer than a handshake.
        self._options = replace(connection, connect_within=connection.start_within)
        self._credentials = auth.Credentials(connection.auth, self._address)
        self._cookies = Cookies()

    @property
    def url(self) -> str:
        """A link for a browser. It contains the token, which the first request replaces by a cookie."""
        base = f"http{self._address[len('ws') :]}"
        sandbox = self._identity
        return f"{base}/sandboxes/{sandbox.sandbox_id}/ports/{self._port}/?sandbox_token={sandbox.sandbox_token}"

    async def connect(self) -> PortConnection:
        """Opens a TCP connection to the port.

        A sandbox that is stored or on another instance comes first. While that is not possible the attempt is
        repeated, for as long as ``reconnect_for`` says.
        """
        path = f"/sandboxes/{self._identity.sandbox_id}/port-forward/{self._port}"
        patience = self._options.reconnect_for
        deadline = None if patience is None else clock.now() + patience
        attempt = 0
        while True:
            opened = await open_socket_at(
                path, self._address, self._identity, self._cookies, self._credentials, self._options, _explain
            )
            if not isinstance(opened, RetryPolicy):
                return PortConnection(opened)
            if not opened.is_retry or deadline is None or clock.now() >= deadline:
                raise opened.error
            await asyncio.sleep(clock.backoff(attempt))
            attempt += 1

    @contextlib.asynccontextmanager
    async def forward(self, local: int = 0, host: str = "127.0.0.1") -> AsyncIterator[int]:
        """Listens on a local port while the block runs, and yields its number: it leads to the port in the sandbox."""
        open_connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            open_connections.add(task)
            task.add_done_callback(open_connections.discard)
            with contextlib.suppress(BatonError, OSError, asyncio.CancelledError):
                async with await self.connect() as inside:
                    await _join(reader, writer, inside)
                writer.close()
                return
            # The local program sees a reset connection, as without the sandbox in between.
            writer.transport.abort()

        server = await asyncio.start_server(accept, host, local)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in open_connections:
                task.cancel()
            await asyncio.gather(*open_connections, return_exceptions=True)
            await server.wait_closed()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inside: PortConnection) -> None:
    """Carries both directions to their ends. Raises if one of them breaks."""

    async def out() -> None:
        while data := await reader.read(PIECE):
            await inside.write(data)
        await inside.write_eof()

    async def back() -> None:
        while data := await inside.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    tasks = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Ports:
    """The part of a sandbox that is about its ports."""

    _link: Link
    _identity: Identity

    def url(self, port: int) -> str:
        """A link to a web server in the sandbox, for a browser. It contains the token: see :attr:`Port.url`."""
        return self.port(port).url

    def port(self, port: int) -> Port:
        """A port in the sandbox."""
        return Port(self._link.address, self._identity, port, self._link.options)
