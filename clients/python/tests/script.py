"""A server that says what a test tells it to, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, AsyncIterator, Callable, Optional

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

ID = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"
PATIENCE = 10


class Peer:
    """One connection, from the server's side."""

    def __init__(self, socket: ServerConnection) -> None:
        self._socket = socket
        assert socket.request is not None
        self.path, self.headers = socket.request.path, socket.request.headers

    async def say(self, event: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"event": event, **fields}))

    async def status(self, status: str, **fields: Any) -> None:
        await self.say("status_update", status=f"SANDBOX_{status}", **fields)

    async def output(self, stream: int, exec: int, offset: int, data: bytes) -> None:
        await self._socket.send(bytes([stream]) + exec.to_bytes(4, "big") + offset.to_bytes(8, "big") + data)

    async def hear(self) -> Any:
        """The next request: an object, or the bytes of a frame."""
        message = await asyncio.wait_for(self._socket.recv(), PATIENCE)
        return message if isinstance(message, bytes) else json.loads(message)

    async def hear_but_ack(self) -> Any:
        while True:
            request = await self.hear()
            if isinstance(request, bytes) or request.get("action") != "ack":
                return request

    async def exec(self, number: int = 1) -> str:
        """Hears a command asked for, and starts it."""
        request = await self.hear_but_ack()
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
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.wait_for(self._socket.recv(), PATIENCE)


def view(exec_id: str, number: int, stdin: int = 0) -> dict[str, Any]:
    kept = {"from": 0, "to": 0}
    return {"exec_id": exec_id, "exec": number, "running": True, "stdin": stdin, "stdout": kept, "stderr": kept}


class Script:
    def __init__(self) -> None:
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._server: Optional[Server] = None
        self._port = 0
        self.accepted = 0
        #: Answers instead of a WebSocket, or before it.
        self.answer: Callable[[ServerConnection, Any], Any] = lambda connection, request: None
        self.cookies: list[str] = []

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}"

    async def open(self) -> None:
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

    async def shut(self) -> None:
        """Nobody is let in any more."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def peer(self) -> Peer:
        return await asyncio.wait_for(self._peers.get(), PATIENCE)

    async def create(self) -> Peer:
        peer = await self.peer()
        assert peer.path == "/create"
        await peer.say("hello", protocol=1, max_frame=1 << 20, max_execs=64, instance="inst-1")
        await peer.status("CREATING")
        peer.config = await peer.hear()  # type: ignore[attr-defined]
        await peer.say("sandbox_id", sandbox_id=ID, sandbox_token="t0ken")
        await peer.status("RUNNING")
        return peer

    async def attach(self, *views: dict[str, Any]) -> Peer:
        peer = await self.peer()
        assert peer.path == f"/attach/{ID}"
        assert peer.headers["X-Sandbox-Token"] == "t0ken"
        await peer.status("RUNNING", execs=list(views))
        return peer


@contextlib.asynccontextmanager
async def script() -> AsyncIterator[Script]:
    script = Script()
    await script.open()
    try:
        yield script
    finally:
        await script.shut()
