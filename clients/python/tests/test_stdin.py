"""Input of commands that earlier clients started: it continues after what was accepted, and is never cut off."""

from __future__ import annotations

import asyncio
import zlib
from typing import Optional

import pytest
from scripted_server import ID, Peer, create, scripted_server, start, view

from baton_sandbox import ExecLostError, Sandbox
from baton_sandbox.stdin import WINDOW, StdinBuffer, StdinConflict


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
        await peer.send_event("stdin_ack", exec_id=exec_id, offset=2)
        peer.cut()
        while sandbox.info().is_connected:
            await asyncio.sleep(0)
        # Written while there is no connection: it was never sent, so the seven bytes are another client's.
        await running.write_stdin("later")
        peer = await server.attach(view(exec_id, 1, stdin=7))
        assert await frame(peer) == (1, 7, b"later")
        await running.write_stdin("last")
        assert await frame(peer) == (1, 12, b"last")
        await running.close_stdin()
        assert await peer.receive() == {"event": "stdin", "exec_id": exec_id, "data": "", "eof": True, "offset": 16}
        await sandbox.close()


@pytest.mark.parametrize(("accepted", "crc32", "rolled_back"), [(4, None, True), (9, None, False), (7, zlib.crc32(b"12345XY"), False)])
async def test_a_command_is_lost_rather_than_its_input(accepted: int, crc32: Optional[int], rolled_back: bool) -> None:
    """Of eight bytes sent, five were acknowledged; then the sandbox has accepted fewer, more than were sent, or others."""
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer, stdin=True)
        await running.write_stdin("12345678")
        await frame(peer)
        await peer.send_event("stdin_ack", exec_id=exec_id, offset=5)
        peer.cut()
        crc = {} if crc32 is None else {"stdin_crc32": crc32}
        await server.attach({**view(exec_id, 1, stdin=accepted), **crc})
        with pytest.raises(ExecLostError, match="rolled back to before" if rolled_back else "another client wrote") as lost:
            await running.wait()
        assert lost.value.rolled_back == rolled_back
        with pytest.raises(ExecLostError):
            await running.write_stdin("x")
        await sandbox.close()


def test_bytes_of_another_client_are_not_taken_for_those_in_flight() -> None:
    stdin = StdinBuffer()
    stdin.write(memoryview(b"ab"))
    stdin.write(memoryview(b"cdef"))
    stdin.next()
    stdin.next()
    stdin.ack(1)
    stdin.resume(3, zlib.crc32(b"abc"))
    assert stdin.next() == (3, b"def")
    with pytest.raises(StdinConflict):
        stdin.resume(4, zlib.crc32(b"abcX"))


def test_a_buffer_that_starts_later_has_the_same_window() -> None:
    stdin = StdinBuffer()
    stdin.write(memoryview(b"abc"))
    stdin.resume(10)
    assert stdin.free_space == WINDOW - 3
    assert stdin.next() == (10, b"abc")
    stdin.ack(12)
    stdin.resume(12)
    assert stdin.next() == (12, b"c")
    stdin.close()
    stdin.ack(13)
    stdin.resume(20)
    assert (stdin.free_space, stdin.next()) == (WINDOW, (20, None))
