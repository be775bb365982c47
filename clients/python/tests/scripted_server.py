"""A server that sends exactly what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, AsyncIterator, Callable, Optional

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from baton_sandbox import Running, Sandbox

ID = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"
#: Seconds to wait for the client.
TIME_LIMIT = 30


class Peer:
    """One connection, from the server's side."""

    def __init__(self, socket: ServerConnection) -> None:
        self._socket = socket
        assert socket.request is not None
        self.path, self.headers = socket.request.path, socket.request.headers
        #: What ``gone`` received until the end.
        self.received: list[Any] = []

    async def send_event(self, event: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"event": event, **fields}))

    async def status(self, status: str, **fields: Any) -> None:
        await self.send_event("status_update", status=f"SANDBOX_{status}", **fields)

    async def output(self, stream: int, exec: int, offset: int, data: bytes) -> None:
        await self._socket.send(bytes([stream]) + exec.to_bytes(4, "big") + offset.to_bytes(8, "big") + data)

    async def receive(self) -> Any:
        """The next message: an object, or the bytes of a frame."""
        message = await asyncio.wait_for(self._socket.recv(), TIME_LIMIT)
        return message if isinstance(message, bytes) else json.loads(message)

    async def receive_request(self) -> Any:
        """The next message that is not an acknowledgement."""
        while True:
            request = await self.receive()
            if isinstance(request, bytes) or request.get("action") != "ack":
                return request

    async def exec(self, number: int = 1) -> str:
        """Receives the request for a command, and starts it."""
        request = await self.receive_request()
        assert request["action"] == "exec", request
        await self.status("EXECUTION_RUNNING", exec_id=request["exec_id"], exec=number)
        return str(request["exec_id"])

    async def done(self, exec_id: str, exit_code: int = 0) -> None:
        await self.status("EXECUTION_DONE", exec_id=exec_id, exit_code=exit_code, duration_ms=1)

    async def close(self, code: int) -> None:
        await self._socket.close(code)

    def cut(self) -> None:
        self._socket.transport.abort()

    async def gone(self) -> None:
        """Waits until the client has left."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.received.append(await asyncio.wait_for(self._socket.recv(), TIME_LIMIT))


def view(exec_id: str, number: int, stdin: int = 0) -> dict[str, Any]:
    kept = {"from": 0, "to": 0}
    return {"exec_id": exec_id, "exec": number, "running": True, "stdin": stdin, "stdout": kept, "stderr": kept}


class ScriptedServer:
    def __init__(self) -> None:
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._server: Optional[Server] = None
        self._port = 0
        self.accepted = 0
        #: Responds instead of a WebSocket handshake, or before it.
        self.answer: Callable[[ServerConnection, Any], Any] = lambda connection, request: None
        self.cookies: list[str] = []

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}"

    async def listen(self) -> None:
        def before(connection: ServerConnection, request: Any) -> Any:
            self.accepted += 1
            return self.answer(connection, request)

        def after(connection: ServerConnection, request: Any, response: Any) -> None:
            for cookie in self.cookies:
                response.headers["Set-Cookie"] = cookie

        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self._port,
            subprotocols=["baton.v1"],  # type: ignore[list-item]
            process_request=before,
            process_response=after,
            ping_interval=None,
            max_size=None,
        )
        self._port = list(self._server.sockets)[0].getsockname()[1]

    async def _serve(self, socket: ServerConnection) -> None:
        await self._peers.put(Peer(socket))
        await socket.wait_closed()

    async def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def peer(self) -> Peer:
        return await asyncio.wait_for(self._peers.get(), TIME_LIMIT)

    async def create(self) -> Peer:
        peer = await self.peer()
        assert peer.path == "/create"
        await peer.send_event("hello", protocol=1, max_frame=1 << 20, max_execs=64, instance="inst-1")
        await peer.status("CREATING")
        peer.config = await peer.receive()  # type: ignore[attr-defined]
        await peer.send_event("sandbox_id", sandbox_id=ID, sandbox_token="t0ken")
        await peer.status("RUNNING")
        return peer

    async def attach(self, *views: dict[str, Any], rolled_back: Optional[str] = None) -> Peer:
        peer = await self.peer()
        assert peer.path == f"/attach/{ID}"
        assert peer.headers["X-Sandbox-Token"] == "t0ken"
        if rolled_back is not None:
            await peer.send_event("rolled_back", checkpoint_id=rolled_back, age_ms=1500)
        await peer.status("RUNNING", execs=list(views))
        return peer


@contextlib.asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    await server.listen()
    try:
        yield server
    finally:
        await server.stop_listening()


async def create(server: ScriptedServer, **options: Any) -> tuple[Sandbox, Peer]:
    sandbox, peer = await asyncio.gather(Sandbox.create(server.url, **options), server.create())
    return sandbox, peer


async def start(sandbox: Sandbox, peer: Peer, **options: Any) -> tuple[Running, str]:
    running, exec_id = await asyncio.gather(sandbox.exec(["x"], **options), peer.exec())
    return running, exec_id
