"""Raw connections to ports, against a server that speaks their wire and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Any, AsyncIterator, Optional

import pytest
from websockets.asyncio.server import ServerConnection, serve

from baton_sandbox import Connection, ConnectionError, InUseError, NotFoundError, PermissionDeniedError, Port, sync
from baton_sandbox.protocol import Identity

ID = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"


class PortServer:
    """Greets, and sends back everything when it has all of it."""

    def __init__(self) -> None:
        self.url = ""
        #: Refuses that many handshakes with this status first.
        self.refusals: list[tuple[HTTPStatus, str]] = []
        self.paths: list[str] = []
        self.is_resetting = False

    def answer(self, connection: ServerConnection, request: Any) -> Any:
        self.paths.append(request.path)
        assert request.headers["X-Sandbox-Token"] == "t0ken"
        return connection.respond(*self.refusals.pop(0)) if self.refusals else None

    async def handle(self, connection: ServerConnection) -> None:
        await connection.send(b"hello\n")
        heard = b""
        async for message in connection:
            if isinstance(message, str):
                break
            heard += message
            if self.is_resetting:
                await connection.close(1011)
                return
        await connection.send(heard)
        await connection.send("")

    def port(self, number: int = 5432, reconnect_for: Optional[float] = 10) -> Port:
        return Port(self.url, Identity(ID, "t0ken"), number, Connection(reconnect_for=reconnect_for))


@contextlib.asynccontextmanager
async def port_server() -> AsyncIterator[PortServer]:
    server = PortServer()
    async with serve(
        server.handle,
        "127.0.0.1",
        0,
        subprotocols=["baton.v1"],  # type: ignore[list-item]
        process_request=server.answer,
    ) as listener:
        server.url = f"ws://127.0.0.1:{list(listener.sockets)[0].getsockname()[1]}"
        yield server


async def read_all(connection: Any) -> bytes:
    heard = b""
    while data := await connection.read(1000):
        heard += data
    return heard


async def test_bytes_go_both_ways_and_each_direction_ends_by_itself() -> None:
    async with port_server() as server:
        data = bytes(range(251)) * 2000
        async with await server.port().connect() as connection:
            await connection.write(data)
            await connection.write_eof()
            assert await asyncio.wait_for(read_all(connection), 20) == b"hello\n" + data
            assert await connection.read() == b""
        assert server.paths == [f"/sandboxes/{ID}/port-forward/5432"]


async def test_a_reset_is_an_error() -> None:
    async with port_server() as server:
        server.is_resetting = True
        async with await server.port().connect() as connection:
            assert await connection.read() == b"hello\n"
            await connection.write(b"x")
            with pytest.raises(ConnectionError, match="reset"):
                await asyncio.wait_for(connection.read(), 20)


async def test_refusals_have_their_sentence_and_a_sandbox_that_moves_is_waited_for() -> None:
    async with port_server() as server:
        for status, kind in [
            (HTTPStatus.UNAUTHORIZED, PermissionDeniedError),
            (HTTPStatus.NOT_FOUND, NotFoundError),
            (HTTPStatus.CONFLICT, InUseError),
            (HTTPStatus.BAD_GATEWAY, ConnectionError),
        ]:
            server.refusals = [(status, "Because of this.\n")]
            with pytest.raises(kind, match="Because of this."):
                await server.port().connect()
        server.refusals = [(HTTPStatus.SERVICE_UNAVAILABLE, "Not yet.\n")] * 2
        async with await server.port().connect() as connection:
            assert await connection.read() == b"hello\n"
        server.refusals = [(HTTPStatus.SERVICE_UNAVAILABLE, "Not yet.\n")] * 2
        with pytest.raises(ConnectionError, match="Not yet."):
            await server.port(reconnect_for=None).connect()


async def test_a_local_port_leads_inside_while_the_block_runs() -> None:
    async with port_server() as server:
        async with server.port().forward() as number:
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            writer.write(b"bytes")
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 20) == b"hello\nbytes"
            writer.close()
            server.refusals = [(HTTPStatus.BAD_GATEWAY, "Nothing listens.\n")]
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", number)


async def test_without_asyncio_it_is_the_same() -> None:
    def use(port: sync.Port) -> None:
        with port.connect() as connection:
            connection.write(b"bytes")
            connection.write_eof()
            heard = b""
            while data := connection.read():
                heard += data
            assert heard == b"hello\nbytes"
        with port.forward() as number, socket.create_connection(("127.0.0.1", number)) as local:
            local.sendall(b"bytes")
            local.shutdown(socket.SHUT_WR)
            heard = b""
            while data := local.recv(100):
                heard += data
            assert heard == b"hello\nbytes"

    async with port_server() as server:
        await asyncio.wait_for(asyncio.to_thread(use, sync.Port(server.port())), 30)


def test_a_link_has_the_address_and_the_token() -> None:
    port = Port("wss://sandboxes.example/api/", Identity(ID, "t0ken"), 8000, Connection())
    assert port.url == f"https://sandboxes.example/api/sandboxes/{ID}/ports/8000/?sandbox_token=t0ken"
