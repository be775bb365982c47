"""Roll-backs: the client reports each of them, and marks the commands that they affect."""

from __future__ import annotations

import asyncio
import warnings

import pytest
from scripted_server import ID, create, scripted_server, start, view

from baton_sandbox import ExecLostError, Rollback, RolledBackWarning, Sandbox


async def test_a_roll_back_is_reported_and_marks_the_commands_it_affects() -> None:
    async with scripted_server() as server:
        reported: list[Rollback] = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", RolledBackWarning)
            sandbox, peer = await create(server, on_rollback=reported.append)
            kept, kept_id = await start(sandbox, peer)
            lost, _ = await start(sandbox, peer)
            peer.cut()
            peer = await server.attach(view(kept_id, 1), rolled_back="c-1")
            with pytest.raises(ExecLostError) as error:
                await lost.wait()
        assert error.value.rolled_back
        assert (await peer.receive_request())["action"] == "reconnect"
        await peer.done(kept_id)
        assert (await kept.wait()).rolled_back
        assert reported == list(sandbox.rollbacks) == [Rollback("c-1", 1.5)]
        # Commands after the roll-back are not affected.
        running, exec_id = await start(sandbox, peer)
        await peer.done(exec_id)
        assert not (await running.wait()).rolled_back
        await sandbox.close()


async def test_a_command_that_another_restore_rewound_is_marked() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        running, exec_id = await start(sandbox, peer)
        await peer.output(1, 1, 0, b"abcdef")
        await peer.send_event("output_rewound", exec_id=exec_id, stream="stdout", to=2)
        await peer.done(exec_id)
        result = await running.wait()
        assert result.rolled_back and "rolled back" in str(result)
        await sandbox.close()


@pytest.mark.filterwarnings("default::baton_sandbox.RolledBackWarning")
async def test_without_a_callback_it_is_a_warning() -> None:
    async with scripted_server() as server:
        attaching = asyncio.ensure_future(Sandbox.attach(server.url, ID, "t0ken"))
        with pytest.warns(RolledBackWarning, match="checkpoint c-2, which is 1.5 s old"):
            peer = await server.attach(view("x", 1), rolled_back="c-2")
            sandbox = await attaching
        running = await sandbox.follow("x")
        await peer.done("x")
        assert (await running.wait()).rolled_back
        await sandbox.close()


@pytest.mark.filterwarnings("error::baton_sandbox.RolledBackWarning")
async def test_a_warning_that_is_an_error_does_not_break_the_connection() -> None:
    async with scripted_server() as server:
        attaching = asyncio.ensure_future(Sandbox.attach(server.url, ID, "t0ken"))
        await server.attach(rolled_back="c-3")
        sandbox = await attaching
        assert [rollback.checkpoint_id for rollback in sandbox.rollbacks] == ["c-3"]
        await sandbox.close()


async def test_a_roll_back_is_remembered_over_a_drop_before_running() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, on_rollback=lambda rollback: None)
        running, exec_id = await start(sandbox, peer)
        peer.cut()
        peer = await server.peer()
        await peer.send_event("rolled_back", checkpoint_id="c-4", age_ms=1)
        while not sandbox.rollbacks:
            await asyncio.sleep(0)
        peer.cut()
        peer = await server.attach(view(exec_id, 1))
        await peer.done(exec_id)
        assert (await running.wait()).rolled_back and len(sandbox.rollbacks) == 1
        await sandbox.close()


async def test_a_transfer_during_a_roll_back_is_not_trusted() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, on_rollback=lambda rollback: None)
        reading = asyncio.ensure_future(sandbox.read_file("/data"))
        exec_id = (await peer.receive_request())["exec_id"]
        await peer.status("EXECUTION_RUNNING", exec_id=exec_id, exec=1)
        peer.cut()
        peer = await server.attach(view(exec_id, 1), rolled_back="c-5")
        await peer.done(exec_id)
        with pytest.raises(ExecLostError, match="start it again") as error:
            await reading
        assert error.value.rolled_back
        await sandbox.close()
