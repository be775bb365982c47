"""Cut connections: what the client requests after a reconnect, and what its caller sees."""

from __future__ import annotations

import asyncio
import gc
import http
import time
from typing import Any

import pytest
from scripted_server import ID, create, scripted_server, start, view

from baton_sandbox import (
    Again,
    ConnectionError,
    EndedError,
    ExecLostError,
    Lost,
    NotFoundError,
    OutputGapError,
    PermissionDeniedError,
    Progress,
    ProtocolError,
    RefusedError,
    RestoreError,
    Sandbox,
    TimeoutError,
    Update,
)
from baton_sandbox.stdin import WINDOW
from baton_sandbox.stream import ACK_EVERY


async def test_a_command_is_resumed_where_it_was_cut() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        await peer.output(1, 1, 0, b"one")
        await peer.output(2, 1, 0, b"e")
        reader = running.stdout.__aiter__()
        assert await reader.__anext__() == b"one"
        peer.cut()
        peer = await server.attach(view(exec_id, 8))
        assert await peer.receive_request() == {"action": "reconnect", "offsets": {exec_id: {"stdout": 3, "stderr": 1}}}
        await peer.status("EXECUTION_RUNNING", exec_id=exec_id, exec=8)
        await peer.output(1, 8, 2, b"e two")
        await peer.done(exec_id)
        assert await reader.__anext__() == b" two"
        result = await running.wait()
        assert (result.stderr, result.exit_code) == ("e", 0)
        await sandbox.close()


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_command_is_requested_again_only_if_the_sandbox_does_not_know_it(is_known: bool) -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        starting = asyncio.ensure_future(sandbox.exec(["once"]))
        requested = await peer.receive()
        peer.cut()
        peer = await server.attach(*([view(requested["exec_id"], 1)] if is_known else []))
        again = await peer.receive()
        assert again == ({"action": "reconnect", "offsets": {requested["exec_id"]: {"stdout": 0, "stderr": 0}}} if is_known else requested)
        await peer.status("EXECUTION_RUNNING", exec_id=requested["exec_id"], exec=1)
        await peer.done(requested["exec_id"], 3)
        assert (await (await starting).wait()).exit_code == 3
        await sandbox.close()


async def test_a_command_the_sandbox_has_forgotten_ends_with_the_reason() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, _ = await start(sandbox, peer)
        peer.cut()
        await server.attach()
        with pytest.raises(ExecLostError):
            await running.wait()
        await sandbox.close()


async def test_input_is_sent_again_from_where_it_was_taken() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer, stdin=True)
        await running.write_stdin(b"abcdef")
        assert await peer.receive() == bytes([0, 0, 0, 0, 1] + [0] * 8) + b"abcdef"
        await peer.send_event("stdin_ack", exec_id=exec_id, offset=2)
        peer.cut()
        await running.close_stdin()
        peer = await server.attach(view(exec_id, 5, stdin=4))
        assert (await peer.receive())["action"] == "reconnect"
        assert await peer.receive() == bytes([0, 0, 0, 0, 5] + [0] * 7 + [4]) + b"ef"
        eof = {"event": "stdin", "exec_id": exec_id, "data": "", "eof": True, "offset": 6}
        assert await peer.receive() == eof
        # Restored from before input that it had accepted, which the client no longer has.
        peer.cut()
        await server.attach(view(exec_id, 5, stdin=1))
        with pytest.raises(ExecLostError):
            await running.wait()
        await sandbox.close()


async def test_input_written_without_a_connection_waits_and_is_bounded() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer, stdin=True)
        await server.stop_listening()
        await running.write_stdin(b"x" * WINDOW)
        more = asyncio.ensure_future(running.write_stdin(b"y"))
        await asyncio.wait([more], timeout=0.3)
        assert not more.done() and not sandbox.info().is_connected
        await server.listen()
        peer = await server.attach(view(exec_id, 1))
        got = 0
        while got < WINDOW:
            message = await peer.receive()
            got += len(message) - 13 if isinstance(message, bytes) else 0
        await peer.send_event("stdin_ack", exec_id=exec_id, offset=WINDOW)
        assert (await peer.receive())[13:] == b"y"
        await more
        await sandbox.close()


async def test_only_what_was_read_is_acknowledged() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        part = b"z" * (ACK_EVERY // 2)
        for i in range(4):
            await peer.output(1, 1, i * len(part), part)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(peer._socket.recv(), 0.2)
        reader = running.stdout.__aiter__()
        for _ in range(2):
            assert await reader.__anext__() == part
        assert await peer.receive() == {"action": "ack", "exec_id": exec_id, "stdout": ACK_EVERY, "stderr": 0}
        # After the handle was garbage collected, output is discarded and acknowledged.
        del running, reader
        gc.collect()
        assert (await peer.receive())["stdout"] == 2 * ACK_EVERY
        await sandbox.close()


async def test_dropped_output_is_reported() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        await peer.output(1, 1, 0, b"ab")
        await peer.send_event("output_gap", exec_id=exec_id, stream="stdout", **{"from": 2, "to": 10})
        await peer.output(1, 1, 10, b"cd")
        reader = running.stdout.__aiter__()
        assert await reader.__anext__() == b"ab"
        with pytest.raises(OutputGapError):
            await reader.__anext__()
        assert await reader.__anext__() == b"cd"
        chunks = running.stdout.chunks()
        await peer.send_event("output_gap", exec_id=exec_id, stream="stdout", **{"from": 12, "to": 13})
        await peer.send_event("output_rewound", exec_id=exec_id, stream="stdout", to=11)
        assert [await chunks.__anext__() for _ in range(2)] == [Lost(12, 13), Again(11)]
        await peer.output(1, 1, 11, b"e")
        del reader, chunks
        await peer.send_event("output_gap", exec_id=exec_id, stream="stderr", **{"from": 0, "to": 5})
        await peer.done(exec_id)
        result = await running.wait()
        assert (result.stdout, result.lost) == ("e", 5)
        await sandbox.close()


async def test_a_restored_command_writes_again_and_its_result_is_right() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        waiting = asyncio.ensure_future(running.wait())
        await peer.output(1, 1, 0, b"abcdef")
        await peer.send_event("output_rewound", exec_id=exec_id, stream="stdout", to=2)
        await peer.output(1, 1, 2, b"CD")
        await peer.done(exec_id)
        assert (await waiting).stdout == "abCD"
        await sandbox.close()


async def test_bytes_that_are_missing_are_an_error() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, _ = await start(sandbox, peer)
        await peer.output(1, 1, 5, b"x")
        with pytest.raises(ProtocolError, match="missing"):
            await running.wait()


async def test_the_affinity_cookie_is_sent_until_the_instance_shuts_down() -> None:
    async with scripted_server() as server:
        server.cookies = ["GAESA=one; Path=/; HttpOnly", "b=2"]
        sandbox, peer = await create(server)
        assert "Cookie" not in peer.headers
        server.cookies = ["GAESA=two"]
        peer.cut()
        peer = await server.attach()
        assert peer.headers["Cookie"] == "GAESA=one; b=2"
        peer.cut()
        peer = await server.attach()
        assert peer.headers["Cookie"] == "GAESA=two; b=2"
        await peer.close(1012)
        peer = await server.attach()
        assert "Cookie" not in peer.headers
        peer.cut()
        peer = await server.attach()
        assert peer.headers["Cookie"] == "GAESA=two"
        await sandbox.close()


async def test_it_never_reconnects_in_a_tight_loop() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        before = server.accepted
        server.answer = lambda connection, request: connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "")
        peer.cut()
        await asyncio.sleep(1.5)
        assert 2 <= server.accepted - before <= 9
        server.answer = lambda connection, request: None
        await server.attach()
        await sandbox.close()


async def test_a_fatal_answer_ends_everything_with_its_type() -> None:
    for status, kind in [("RESTORE_ERROR", RestoreError), ("NOT_FOUND", NotFoundError), ("PERMISSION_DENIAL_ERROR", PermissionDeniedError)]:
        async with scripted_server() as server:
            sandbox, peer = await create(server)
            running, _ = await start(sandbox, peer)
            peer.cut()
            peer = await server.peer()
            await peer.status(status, message="no")
            with pytest.raises(kind):
                await running.wait()
            with pytest.raises(kind):
                await sandbox.run("true")
            await asyncio.sleep(0.5)
            assert server.accepted == 2, "it does not reconnect"


async def test_reconnecting_ends() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, reconnect_for=0.5)
        running, _ = await start(sandbox, peer)
        await server.stop_listening()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(running.wait(), 10)
        await server.listen()
        sandbox, peer = await create(server, reconnect_for=None)
        peer.cut()
        with pytest.raises(ConnectionError):
            await sandbox.run("true")


async def test_a_lost_answer_is_an_error() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        asking = asyncio.ensure_future(sandbox.checkpoint())
        assert (await peer.receive())["action"] == "checkpoint"
        peer.cut()
        with pytest.raises(ConnectionError, match="before the answer"):
            await asking
        await server.attach()
        asking = asyncio.ensure_future(sandbox.run("true"))
        await sandbox.close()
        with pytest.raises(EndedError):
            await asking


async def test_a_kill_is_sent_again_after_a_cut() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        await running.kill()
        assert (await peer.receive())["action"] == "kill_process"
        peer.cut()
        peer = await server.attach(view(exec_id, 1))
        assert (await peer.receive()) == {"action": "kill_process", "exec_id": exec_id}
        await peer.done(exec_id)
        await running.wait()
        killing = asyncio.ensure_future(sandbox.kill())
        assert (await peer.receive_request())["action"] in ("reconnect", "kill_sandbox")
        peer.cut()
        peer = await server.attach()
        while (await peer.receive_request())["action"] != "kill_sandbox":
            pass
        await peer.status("DELETED")
        await peer.close(1000)
        await killing


async def test_forks_and_snapshots_are_requested_and_answered() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        forking = asyncio.ensure_future(sandbox.fork(2))
        assert await peer.receive() == {"action": "fork", "count": 2}
        copies = [{"sandbox_id": f"{ID[:-1]}{i}", "sandbox_token": f"t{i}"} for i in range(2)]
        await peer.send_event("forked", sandboxes=copies)
        assert [(ref.id, ref.token) for ref in await forking] == [(f"{ID[:-1]}{i}", f"t{i}") for i in range(2)]
        making = asyncio.ensure_future(sandbox.snapshot("py"))
        assert await peer.receive() == {"action": "snapshot_filesystem", "name": "py"}
        await peer.status("FILESYSTEM_SNAPSHOT_CREATED", snapshot="py")
        assert await making == "py"
        making = asyncio.ensure_future(sandbox.snapshot("py"))
        await peer.receive()
        await peer.status("FILESYSTEM_SNAPSHOT_ERROR", message="not here")
        with pytest.raises(RefusedError, match="not here"):
            await making
        await sandbox.close()


async def test_what_the_caller_gives_is_sent() -> None:
    async with scripted_server() as server:
        updates: list[Update] = []

        def on_status(update: Update) -> None:
            updates.append(update)
            raise RuntimeError("an error in the callback")

        async def bearer() -> dict[str, str]:
            return {"Authorization": "Bearer abc"}

        options: dict[str, Any] = {"api_key": "k3y", "headers": {"X-Front": "door"}, "auth": bearer, "on_status": on_status}
        sandbox, peer = await create(server, idle_timeout=None, labels={"a": "b"}, **options)
        assert peer.config == {"persistent": "auto", "idle_timeout": None, "labels": {"a": "b"}}  # type: ignore[attr-defined]
        sent = [peer.headers[name] for name in ("X-API-Key", "X-Front", "Authorization")]
        assert sent == ["k3y", "door", "Bearer abc"]
        assert [update.status.value for update in updates] == ["SANDBOX_CREATING", "SANDBOX_RUNNING"]
        assert "t0ken" not in repr(sandbox.ref) and "k3y" not in repr(sandbox.ref)
        await sandbox.close()


async def test_progress_is_reported() -> None:
    async with scripted_server() as server:
        updates: list[Update] = []
        attaching = asyncio.ensure_future(Sandbox.attach(server.url, ID, "t0ken", on_status=updates.append))
        peer = await server.peer()
        await peer.status("RESTORING")
        await peer.status("RESTORING", progress={"done": 3, "total": 8})
        await peer.status("RUNNING", execs=[])
        sandbox = await attaching
        saving = asyncio.ensure_future(sandbox.checkpoint(keep_running=True))
        await peer.receive()
        await peer.status("CHECKPOINTING")
        await peer.status("CHECKPOINTING", progress={"done": 5, "total": 0})
        await peer.status("CHECKPOINTED", checkpoint_id="c-1", paused_ms=41)
        assert await saving == "c-1"
        assert [(update.status.value[8:], update.progress) for update in updates] == [
            ("RESTORING", None),
            ("RESTORING", Progress(3, 8)),
            ("RUNNING", None),
            ("CHECKPOINTING", None),
            ("CHECKPOINTING", Progress(5, 0)),
            ("CHECKPOINTED", None),
        ]
        assert updates[-1].paused_ms == 41
        await sandbox.close()


async def test_a_server_that_is_not_compatible_is_an_error() -> None:
    async with scripted_server() as server:
        for code, kind in [(401, PermissionDeniedError), (404, ProtocolError), (503, ConnectionError)]:
            server.answer = lambda connection, request, code=code: connection.respond(http.HTTPStatus(code), "")
            with pytest.raises(kind):
                await Sandbox.create(server.url)
        server.answer = lambda connection, request: request.headers.pop("Sec-WebSocket-Protocol") and None
        with pytest.raises(ProtocolError):
            await Sandbox.create(server.url)
        server.answer = lambda connection, request: None
        with pytest.raises(TimeoutError):
            await Sandbox.create(server.url, start_within=0.3)


def test_a_program_ends_without_closing_its_sandbox() -> None:
    """Cancelled while it reconnects: no cancellation is swallowed, which `asyncio.wait_for` does before Python 3.12."""

    async def main() -> None:
        async with scripted_server() as server:
            await create(server)

    begun = time.monotonic()
    for _ in range(5):
        asyncio.run(main())
    assert time.monotonic() - begun < 20
