"""Removing, renaming and watching files, and the idle timeout of a running sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted_server import create, scripted_server
from testbed import Proxy

from baton_sandbox import FileChange, FileError, ProtocolError, RefusedError, Sandbox

WATCH = Path(__file__).parents[3] / "crates" / "protocol" / "fixtures" / "files" / "watch.jsonl"


async def test_files_are_removed_and_renamed(sandbox: Sandbox) -> None:
    await sandbox.make_directory("/data/new/deep")
    await sandbox.make_directory("/data/new/deep")
    with pytest.raises(FileError) as failed:
        await sandbox.make_directory("/data/other/deep", parents=False)
    assert failed.value.code == "ENOENT"
    await sandbox.write_file("/data/new/a", "a", mode=0o640)
    entry = await sandbox.stat_file("/data/new/a")
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("a", "file", 1, 0o640)
    await sandbox.rename_file("a", "deep/b", cwd="/data/new")
    assert not await sandbox.file_exists("/data/new/a") and await sandbox.file_exists("/data/new/deep/b")
    assert not await sandbox.file_exists("/data/new/deep/b/c")
    with pytest.raises(FileError) as failed:
        await sandbox.remove_file("/data/new")
    assert failed.value.code == "ENOTEMPTY"
    await sandbox.remove_file("/data/new", recursive=True)
    with pytest.raises(FileError) as failed:
        await sandbox.stat_file("/data/new")
    assert failed.value.code == "ENOENT"


async def test_changes_are_watched_over_a_drop(proxy: Proxy, sandbox: Sandbox) -> None:
    await sandbox.make_directory("/data")
    with pytest.raises(FileError):
        await sandbox.watch_files("/no/such/directory")
    async with await sandbox.watch_files("/data", recursive=True) as watch:
        changes = watch.__aiter__()
        await sandbox.run("touch /data/a")
        assert await changes.__anext__() == FileChange("create", "a")
        await proxy.network(cut=True)
        await sandbox.rename_file("/data/a", "/data/b")
        async for change in changes:
            if change.type == "rename":
                assert change == FileChange("rename", "a", "b")
                break
    assert [change async for change in changes if change.type not in ("write", "chmod")] == []
    # A watch ends with its directory.
    watch = await sandbox.watch_files("/data")
    await sandbox.remove_file("/data", recursive=True)
    assert FileChange("remove", "b") in [change async for change in watch]


async def test_the_idle_timeout_changes(sandbox: Sandbox) -> None:
    assert await sandbox.set_idle_timeout(600) == 600
    assert await sandbox.set_idle_timeout("2m") == 120
    assert await sandbox.set_idle_timeout(None) is None
    with pytest.raises(RefusedError):
        await sandbox.set_idle_timeout("soon")


async def test_a_watch_reports_every_line_and_every_gap() -> None:
    async with scripted_server() as server:
        sandbox, peer = await create(server)
        starting = asyncio.ensure_future(sandbox.watch_files("/data"))
        exec_id = (await peer.receive_request())["exec_id"]
        await peer.status("EXECUTION_RUNNING", exec_id=exec_id, exec=1)
        lines = WATCH.read_bytes()
        half = len(lines) // 2
        await peer.output(1, 1, 0, lines[:half])
        watch = await starting
        await peer.output(1, 1, half, lines[half:])
        end = len(lines) + 10
        await peer.send_event("output_gap", exec_id=exec_id, stream="stdout", **{"from": len(lines), "to": end})
        await peer.output(1, 1, end, b'half a line"}\n{"type":"create","name":"c"}\n')
        await peer.done(exec_id)
        changes = [change async for change in watch]
        assert changes == [
            FileChange("create", "a"),
            FileChange("write", "a"),
            FileChange("chmod", "a"),
            FileChange("rename", "a", "b"),
            FileChange("remove", "b"),
            FileChange("overflow", ""),
            FileChange("overflow", ""),
            FileChange("create", "c"),
        ]
        starting = asyncio.ensure_future(sandbox.watch_files("/data"))
        exec_id = (await peer.receive_request())["exec_id"]
        await peer.status("EXECUTION_RUNNING", exec_id=exec_id, exec=2)
        await peer.output(1, 2, 0, b'{"type":"ready"}\n')
        with pytest.raises(ProtocolError, match="malformed"):
            await starting
        await sandbox.close()
