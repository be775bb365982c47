"""What create sends, who ends a sandbox, how results read, and that editors know every option."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ID, Peer, create, scripted_server, start

from baton_sandbox import Connection, ExecFailedError, Place, Result, Sandbox, SandboxRef, options, sync

SOURCE = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"persistent": "auto"}),
        ({"persistent": True}, {"persistent": True}),
        ({"persistent": False}, {"persistent": False}),
        ({"enable_checkpoint": False}, {"persistent": "auto", "enable_checkpoint": False}),
        (
            {"enable_checkpoint": True, "enable_sandbox_handoff": False, "enable_idle_timeout_auto_checkpoint": False},
            {"persistent": "auto", "enable_checkpoint": True, "enable_sandbox_handoff": False, "enable_idle_timeout_auto_checkpoint": False},
        ),
        (
            {"memory": "512MiB", "cpus": 1.5, "pids": 256, "disk": "1GiB", "files": 1024},
            {"persistent": "auto", "limits": {"memory": "512MiB", "cpus": 1.5, "pids": 256, "disk": "1GiB", "files": 1024}},
        ),
        ({"memory": 1, "limits": {"memory": 2, "cpus": 3}}, {"persistent": "auto", "limits": {"memory": 1, "cpus": 3}}),
    ],
)
async def test_create_sends_what_was_given(given: dict[str, Any], sent: dict[str, Any]) -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, **given)
        assert peer.config == sent  # type: ignore[attr-defined]
        await sandbox.close()


async def deleted(peer: Peer) -> None:
    assert await peer.receive_request() == {"action": "kill_sandbox"}
    await peer.status("DELETED")
    await peer.status("KILLED")
    await peer.close(1000)


@pytest.mark.parametrize("given", [{}, {"persistent": True}, {"enable_checkpoint": True}])
async def test_the_block_kills_what_it_created(given: dict[str, Any]) -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, **given)
        async with sandbox:
            killed = asyncio.ensure_future(deleted(peer))
        await killed


async def test_the_block_keeps_what_was_kept_detached_or_attached() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server, keep=True)
        async with sandbox:
            pass
        await peer.gone()
        assert peer.received == []
        sandbox, peer = await create(server)
        async with sandbox:
            ref = await sandbox.detach()
        assert (ref.id, ref.token) == (ID, "t0ken")
        await peer.gone()
        assert peer.received == []
        attaching = asyncio.ensure_future(ref.attach())
        peer = await server.attach()
        async with await attaching:
            pass
        await peer.gone()
        assert peer.received == []


async def test_a_sandbox_that_was_checkpointed_is_kept() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        async with sandbox:
            saving = asyncio.ensure_future(sandbox.checkpoint())
            await peer.receive_request()
            await peer.status("CHECKPOINTED", checkpoint_id="c-1")
            await peer.close(1000)
            assert await saving == "c-1"
            await peer.gone()
        assert peer.received == []


def test_a_result_reads_well() -> None:
    result = Result(b"hello\n", b"oh\nno\n", exit_code=3)
    assert str(result) == "exit code 3\nstdout: hello\nstderr:\noh\nno"
    assert repr(result) == "Result(exit_code=3, stdout='hello\\n', stderr='oh\\nno\\n')"
    assert str(Result(exit_code=0)) == "exit code 0"
    assert str(Result(signal=9, timed_out=True, lost=5, rolled_back=True)) == (
        "timed out; 5 bytes of output lost; rolled back to an older checkpoint"
    )
    assert str(Result(signal=15)) == "killed by signal 15"
    long = str(Result(b"x" * 9000 + b"end", exit_code=0))
    assert len(long) < 2100 and "… 7003 characters …" in long and long.endswith("end")
    with pytest.raises(ExecFailedError, match="^exit code 3: no$"):
        result.check()


def test_the_typed_options_are_the_real_ones() -> None:
    assert set(options.ConnectionOptions.__annotations__) == {field.name for field in dataclasses.fields(Connection)}
    keywords = {name for name, one in inspect.signature(Sandbox.exec).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert set(options.ExecOptions.__annotations__) == keywords
    assert set(options.Limits.__annotations__) <= set(inspect.signature(Sandbox.create).parameters)
    assert Place is SandboxRef and sync.Place is sync.SandboxRef


async def test_an_unknown_option_is_an_error() -> None:
    async with scripted_server() as server:
        for wrong in (Sandbox.create(server.url, memroy=1), Sandbox.attach(server.url, ID, "t", api=1)):  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="unexpected keyword"):
                await wrong
        sandbox, peer = await create(server)
        for wrong in (sandbox.run("x", cdw="/"), sandbox.run_code("x", shell=1), sandbox.read_text("/x", usr="y")):  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="cdw|shell|usr"):
                await wrong
        running, exec_id = await start(sandbox, peer, cwd="/", user="nobody", timeout=3)
        await peer.done(exec_id)
        await running.wait()
        await sandbox.close()


def test_a_type_checker_knows_every_option(tmp_path: Path) -> None:
    right = """
from typing import Iterator, List
from baton_sandbox import Result, Rollback, Sandbox, SandboxRef, sync

def report(rollback: Rollback) -> None: ...

async def main() -> None:
    async with await Sandbox.create("ws://x", memory="1GiB", cpus=2, keep=True, persistent=None, on_rollback=report) as sandbox:
        result: Result = await sandbox.run(["x"], check=True, cwd="/", stdin=b"x", pty=(80, 24))
        await sandbox.commands.run("x", env={"A": "b"}, timeout="3s")
        await sandbox.run_code("1", "python", user="nobody")
        await sandbox.read_text("/x", offset=1, user="nobody")
        ref: SandboxRef = await sandbox.detach()

with sync.Sandbox.create("ws://x", limits={"memory": 1}, silence=3) as sandbox:
    done: Result = sandbox.run("x", check=True, cwd="/")
    lines: Iterator[str] = sandbox.exec("x").stdout.lines()
    copies: List[sync.SandboxRef] = sandbox.fork(2)
    again: sync.Sandbox = copies[0].attach(api_key="k")
"""
    wrong = """
from baton_sandbox import Sandbox, sync
async def main() -> None:
    sandbox = await Sandbox.create(memroy=1)
    await sandbox.run("x", cdw="/")
    await sandbox.run_code("x", timeout=[])
    await sandbox.download("/x", "x", usr="y")
    await Sandbox.attach("x", "y", "z", silence="long")
sync.Sandbox.create(memroy=1)
sync.Sandbox.create().commands.run("x", cdw="/")
"""
    for name, text, errors in (("right.py", right, 0), ("wrong.py", wrong, 7)):
        (tmp_path / name).write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), name]
        done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(SOURCE)}, capture_output=True, text=True, check=False)
        assert done.stdout.count(" error: ") == errors, done.stdout + done.stderr
