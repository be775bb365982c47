"""Input of commands that earlier clients started: it continues after what was accepted, and is never cut off."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import ID, Peer, create, scripted_server, start, view

from baton_sandbox import ExecLostError, Sandbox
from baton_sandbox.stdin import WINDOW, StdinBuffer


async def frame(peer: Peer) -> tuple[int, int, bytes]:
    """The number of the command, the offset and the bytes of the next input."""
    while not isinstance(message := await peer.receive(), bytes):
        pass
    return int.from_bytes(message[1:5], "big"), int.from_bytes(message[5:13], "big"), message[13:]


async def test_a_followed_command_gets_input_after_what_it_has_accepted() -> None:
    async with scripted_server() as server:
        attaching = asyncio.ensure_future(Sandbox.attach(server.url, ID, "t0ken"))
        peer = await server.attach(view("cat", 3, stdin=2))
        sandbox = await attaching
        running = await sandbox.follow("cat")
        await running.write_stdin("longer")
        assert await frame(peer) == (3, 2, b"longer")
        await peer.send_event("stdin_ack", exec_id="cat", offset=5)
        # After a reconnect only the part that was not accepted is sent again.
        peer.cut()
        peer = await server.attach(view("cat", 4, stdin=5))
        assert await frame(peer) == (4, 5, b"ger")
        await running.close_stdin()
        assert await peer.receive() == {"event": "stdin", "exec_id": "cat", "data": "", "eof": True, "offset": 8}
        # Restored from before input that it had accepted.
        await peer.send_event("stdin_ack", exec_id="cat", offset=8)
        peer.cut()
        await server.attach(view("cat", 4, stdin=6))
        with pytest.raises(ExecLostError) as lost:
            await running.wait()
        assert lost.value.rolled_back
        await sandbox.close()


async def test_input_that_is_written_before_the_connection_is_back_has_the_right_offset() -> None:
    async with scripted_server() as server:
        attaching = asyncio.ensure_future(Sandbox.attach(server.url, ID, "t0ken"))
        peer = await server.attach(view("cat", 3, stdin=2))
        sandbox = await attaching
        peer.cut()
        while sandbox.info().is_connected:
            await asyncio.sleep(0)
        running = await sandbox.follow("cat")
        await running.write_stdin("later")
        # Another client wrote in the meantime.
        peer = await server.attach(view("cat", 3, stdin=9))
        assert await frame(peer) == (3, 9, b"later")
        await sandbox.close()


async def test_input_comes_after_what_another_client_wrote_during_a_drop() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer, stdin=True)
        await running.write_stdin("ab")
        assert await frame(peer) == (1, 0, b"ab")
        peer.cut()
        peer = await server.attach(view(exec_id, 1, stdin=7))
        await peer.receive_request()
        await running.write_stdin("next")
        assert await frame(peer) == (1, 7, b"next")
        await sandbox.close()


def test_a_buffer_that_starts_later_has_the_same_window() -> None:
    stdin = StdinBuffer()
    stdin.write(memoryview(b"abc"))
    stdin.start_at(10)
    assert stdin.free_space == WINDOW - 3
    assert stdin.next() == (10, b"abc")
    stdin.ack(12)
    stdin.resume(12)
    assert stdin.next() == (12, b"c")
    stdin.close()
    stdin.resume(20)
    assert (stdin.free_space, stdin.next()) == (WINDOW, (20, None))
