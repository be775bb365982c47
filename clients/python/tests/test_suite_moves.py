"""The suite that every client library runs: checkpoints, moves and roll-backs."""

from __future__ import annotations

import asyncio

import pytest
from suite import PERSISTENT, TICK, ticks
from testbed import Proxy, Testbed

from baton_sandbox import (
    Again,
    CheckpointError,
    CreationError,
    EndedError,
    ExecLostError,
    Rollback,
    RolledBackWarning,
    Sandbox,
    SnapshotError,
    Update,
)

async def test_a_command_outlives_sigterm_of_its_server(testbed: Testbed) -> None:
    await asyncio.gather(testbed.do("server", name="old"), testbed.do("server", name="new"))
    proxy = await testbed.proxy("old")
    updates: list[Update] = []
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT, on_status=updates.append)
    running = await sandbox.exec(TICK.format(count=40))
    before = sandbox.info().instance
    async for line in running.stdout.lines():
        if line == "line 5":
            break
    await proxy.network(to="new")
    await testbed.do("signal", name="old", signal="TERM")
    result = await running.wait()
    assert result.exit_code == 7
    assert result.stdout == "".join(ticks(40).splitlines(keepends=True)[-len(result.stdout.splitlines()) :])
    assert len(result.stdout.splitlines()) >= 10, "a good part of it came after the move"
    assert sandbox.info().instance != before
    assert "SANDBOX_CHECKPOINTED" in [update.status.value for update in updates]
    await sandbox.kill()


async def test_a_command_outlives_a_handoff(testbed: Testbed) -> None:
    await testbed.do("server", name="other")
    proxy = await testbed.proxy("a")
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT)
    running = await sandbox.exec(TICK.format(count=40))
    waiting = asyncio.ensure_future(running.wait())
    before = sandbox.info().instance
    await proxy.network(to="other")
    await sandbox.handoff()
    assert sandbox.info().instance != before
    result = await waiting
    assert (result.stdout, result.exit_code) == (ticks(40), 7)
    await sandbox.kill()
    await testbed.do("signal", name="other", signal="TERM")


async def test_a_checkpoint_is_attached_again_with_its_running_command(proxy: Proxy) -> None:
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT)
    running = await sandbox.exec("echo kept > /tmp/note; " + TICK.format(count=20), exec_id="tick")
    async for _ in running.stdout:
        break
    checkpoint = await sandbox.checkpoint(live=True)
    assert checkpoint.startswith(sandbox.id)
    with pytest.raises(EndedError):
        await running.wait()
    again = await Sandbox.connect(proxy.url, sandbox.id, sandbox.token)
    assert [view.exec_id for view in again.info().execs] == ["tick"]
    result = await (await again.follow("tick")).wait()
    assert (result.stdout, result.exit_code) == (ticks(20), 7)
    assert (await again.run("cat /tmp/note")).stdout == "kept\n"
    assert await again.checkpoint(keep_running=True) != checkpoint
    assert (await again.run("echo on")).ok
    await again.kill()


async def test_a_checkpoint_that_is_refused_leaves_the_command_running(proxy: Proxy) -> None:
    async with await Sandbox.create(proxy.url, **PERSISTENT) as sandbox:
        running = await sandbox.exec(TICK.format(count=10))
        with pytest.raises(CheckpointError, match="in progress"):
            await sandbox.checkpoint()
        assert (await running.wait()).stdout == ticks(10)
        await sandbox.kill()


async def test_a_roll_back_is_loud(testbed: Testbed) -> None:
    await testbed.do("server", name="crashing")
    proxy = await testbed.proxy("crashing")
    reported: list[Rollback] = []
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT, on_rollback=reported.append)
    running = await sandbox.exec(TICK.format(count=40))
    output, chunks = b"", running.stdout.chunks()

    async def read(until: bytes) -> None:
        nonlocal output
        while until not in output:
            chunk = await chunks.__anext__()
            if isinstance(chunk, Again):
                output = output[: chunk.to]
            else:
                assert isinstance(chunk, bytes)
                output += chunk

    async def crash() -> None:
        await testbed.do("signal", name="crashing", signal="KILL")
        await testbed.do("server", name="crashing")
        await proxy.network(to="crashing")

    await read(b"line 5\n")
    checkpoint = await sandbox.checkpoint(live=True, keep_running=True)
    later = await sandbox.exec("sleep 60")
    await read(b"line 25\n")
    await crash()
    with pytest.raises(ExecLostError) as lost:
        await later.wait()
    assert lost.value.rolled_back
    await read(b"line 40\n")
    result = await running.wait()
    assert (output.decode(), result.exit_code, result.rolled_back) == (ticks(40), 7, True)
    assert "rolled back" in str(result)
    assert sandbox.rollbacks == tuple(reported)
    assert [(rollback.checkpoint_id, rollback.age > 0) for rollback in reported] == [(checkpoint, True)]
    assert not (await sandbox.run("echo after")).rolled_back
    # Without a callback it is a warning.
    ref = await sandbox.detach()
    await crash()
    with pytest.warns(RolledBackWarning, match=checkpoint):
        sandbox = await Sandbox.attach(proxy.url, ref.id, ref.token)
    assert [rollback.checkpoint_id for rollback in sandbox.rollbacks] == [checkpoint]
    await sandbox.kill()


async def test_a_snapshot_starts_another_sandbox(proxy: Proxy, sandbox: Sandbox) -> None:
    name = f"suite-{sandbox.id[-12:]}"
    await sandbox.write_file("/opt/tool.py", "print('from the snapshot')")
    running = await sandbox.exec(TICK.format(count=10))
    assert await sandbox.snapshot(name) == name
    assert (await running.wait()).stdout == ticks(10)
    with pytest.raises(SnapshotError):
        await sandbox.snapshot(name)
    async with await Sandbox.create(proxy.url, filesystem_snapshot_name=name) as other:
        assert (await other.run("python3 /opt/tool.py")).stdout == "from the snapshot\n"
    with pytest.raises(CreationError):
        await Sandbox.create(proxy.url, filesystem_snapshot_name=f"{name}-not")


async def test_a_fork_goes_on_where_its_source_was(proxy: Proxy) -> None:
    async with await Sandbox.create(proxy.url, **PERSISTENT) as source:
        running = await source.exec("echo kept > /tmp/note; " + TICK.format(count=30), exec_id="tick")
        async for _ in running.stdout:
            break
        places = await source.fork(2)
        assert len({place.id for place in places} | {source.id}) == 3
        copies = await asyncio.gather(*(place.attach() for place in places))
        for number, copy in enumerate(copies):
            assert (await (await copy.follow("tick")).wait()).stdout == ticks(30)
            await copy.run(f"echo copy {number} >> /tmp/note")
        assert (await running.wait()).exit_code == 7
        assert await source.read_text("/tmp/note") == "kept\n"
        for number, copy in enumerate(copies):
            assert await copy.read_text("/tmp/note") == f"kept\ncopy {number}\n"
            await copy.kill()
        await source.kill()
