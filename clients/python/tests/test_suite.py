"""The suite that every client library runs: real servers, real sandboxes, a bad network."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, AsyncIterator

import pytest
from stage import CASES, SIZES, Proxy, Stage

from baton_sandbox import (
    BatonError,
    CheckpointError,
    ConnectionError,
    CreationError,
    EndedError,
    ExecFailedError,
    FileError,
    InUseError,
    NotFoundError,
    PermissionDeniedError,
    RefusedError,
    Sandbox,
    SnapshotError,
    Update,
)

#: Writes so many bytes that no two places look alike, then their digest to stderr.
FLOOD = """
import hashlib, sys
left, number, digest = {size}, 0, hashlib.sha256()
while left:
    part = b"".join(hashlib.sha256(b"%d" % (number + i)).digest() * 64 for i in range(32))[:left]
    number, left = number + 32, left - len(part)
    digest.update(part)
    sys.stdout.buffer.write(part)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"""
TICK = "for i in $(seq 1 {count}); do echo line $i; sleep 0.05; done; exit 7"
PERSISTENT = {"enable_checkpoint": True, "enable_sandbox_handoff": True}


def ticks(count: int) -> str:
    return "".join(f"line {i}\n" for i in range(1, count + 1))


def cuts(size: int, count: int) -> list[int]:
    """Each connection ends a little later than the one before."""
    return [size // (count + 2) + i * 997 for i in range(count)]


def command_of(case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    options = dict(case.get("options", {}))
    if "language" in case:
        options["language"] = case["language"]
    if "pty" in options:
        options["pty"] = tuple(options["pty"])
    return case.get("code", case.get("argv")), options


def test_every_scenario_is_here() -> None:
    for name in CASES["scenarios"]:
        assert f"test_{re.sub('[^a-z]+', '_', name.lower())}" in globals(), name


async def test_commands_end_as_the_table_says(sandbox: Sandbox) -> None:
    for case in CASES["execs"]:
        command, options = command_of(case)
        result = await sandbox.run(command, **options)
        expected = (case.get("stdout", ""), case.get("stderr", ""), case.get("exit_code", 0), case.get("signal"))
        assert (result.stdout, result.stderr, result.exit_code, result.signal) == expected, case["name"]
        assert result.timed_out == case.get("timed_out", False), case["name"]
        assert result.duration is not None and result.lost == 0
    assert (await sandbox.commands.run("echo alias")).stdout == "alias\n"
    assert (await sandbox.run_code("print(1)")).stdout == "1\n"


async def test_what_cannot_start_is_refused(sandbox: Sandbox) -> None:
    for case in CASES["refused"]:
        command, options = command_of(case)
        with pytest.raises(RefusedError):
            await sandbox.exec(command, **options)
    assert (await sandbox.run("echo still here")).ok


async def test_output_comes_while_the_command_runs(sandbox: Sandbox) -> None:
    running = await sandbox.exec("echo one; read line; echo got $line; echo err >&2", stdin=True)
    lines = running.stdout.lines()
    assert await lines.__anext__() == "one"
    await running.write_stdin("more\n")
    assert [line async for line in lines] == ["got more"]
    result = await running.wait()
    assert (result.stdout, result.stderr, result.exit_code) == ("", "err\n", 0)
    # Whoever stops reading leaves the rest to `wait`.
    running = await sandbox.exec("echo first; sleep 0.2; echo second")
    async for data in running.stdout:
        assert data == b"first\n"
        break
    assert (await running.wait()).stdout == "second\n"


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"sleep 0.3; echo {i}") for i in range(8)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(8)]


async def test_input_is_taken_as_it_is_written(sandbox: Sandbox) -> None:
    running = await sandbox.exec(["tr", "a-z", "A-Z"], stdin=True)
    for part in ("hello ", b"wor", "ld"):
        await running.write_stdin(part)
    await running.close_stdin()
    assert (await running.wait()).stdout == "HELLO WORLD"
    with pytest.raises(EndedError):
        await running.write_stdin("late")


async def test_a_command_is_killed_and_another_gets_a_signal(sandbox: Sandbox) -> None:
    sleeper = await sandbox.exec("sleep 60 & wait")
    polite = await sandbox.exec("trap 'echo bye; exit 9' INT; echo ready; while true; do sleep 0.02; done")
    async for line in polite.stdout.lines():
        assert line == "ready"
        break
    await polite.signal("INT")
    await sleeper.kill()
    result = await polite.wait()
    assert (result.stdout, result.exit_code) == ("bye\n", 9)
    assert (await sleeper.wait()).signal == 9
    terminal = await sandbox.exec("trap 'stty size; exit' WINCH; echo ready; while true; do sleep 0.02; done", pty=(80, 24))
    async for line in terminal.stdout.lines():
        assert line == "ready\r"
        break
    await terminal.resize(100, 50)
    assert (await terminal.wait()).stdout == "50 100\r\n"


async def test_check_raises_what_a_command_said(sandbox: Sandbox) -> None:
    with pytest.raises(ExecFailedError, match="exit code 4: oh no") as failed:
        await sandbox.run("echo partly; echo oh no >&2; exit 4", check=True)
    assert failed.value.result.stdout == "partly\n"


async def test_output_is_exact_over_many_cuts(proxy: Proxy, sandbox: Sandbox) -> None:
    size, count = SIZES["output"], SIZES["cuts"]
    await proxy.weather(cuts=cuts(size, count), cut=True)
    result = await sandbox.run_code(FLOOD.format(size=size))
    assert len(result.stdout_bytes) == size
    assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr
    assert (await proxy.weather())["cut"] >= count - 2, "it was hardly cut"


async def test_input_is_exact_over_many_cuts(proxy: Proxy, sandbox: Sandbox) -> None:
    size, count = SIZES["input"], SIZES["input_cuts"]
    data = b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(size // 32))
    running = await sandbox.exec(["sha256sum"], stdin=True)
    for i in range(count + 1):
        await running.write_stdin(data[i * len(data) // (count + 1) : (i + 1) * len(data) // (count + 1)])
        await proxy.weather(cut=True)
    await running.close_stdin()
    assert (await running.wait()).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    # All of it at once, as an option, comes to the same.
    result = await sandbox.run(["sha256sum"], stdin=data)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_slow_network_changes_nothing(proxy: Proxy, sandbox: Sandbox) -> None:
    await proxy.weather(delay=0.05)
    assert (await sandbox.run(TICK.format(count=10))).stdout == ticks(10)
    assert (await sandbox.run(["cat"], stdin="slow")).stdout == "slow"


async def test_a_stalled_connection_is_given_up_and_taken_up_again(proxy: Proxy) -> None:
    async with await Sandbox.create(proxy.url, silence=3.0) as sandbox:
        running = await sandbox.exec(TICK.format(count=40))
        async for _ in running.stdout:
            break
        await proxy.weather(stall=True)
        result = await running.wait()
        assert result.stdout.endswith(ticks(40)[-100:]) and result.exit_code == 7
        assert (await proxy.weather())["connections"] >= 2


async def test_a_command_outlives_sigterm_of_its_server(stage: Stage) -> None:
    await asyncio.gather(stage.do("server", name="old"), stage.do("server", name="new"))
    proxy = await stage.proxy("old")
    heard: list[Update] = []
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT, on_status=heard.append)
    running = await sandbox.exec(TICK.format(count=40))
    before = sandbox.info().instance
    async for line in running.stdout.lines():
        if line == "line 5":
            break
    await proxy.weather(to="new")
    await stage.do("signal", name="old", signal="TERM")
    result = await running.wait()
    assert result.exit_code == 7
    assert result.stdout == "".join(ticks(40).splitlines(keepends=True)[-len(result.stdout.splitlines()) :])
    assert len(result.stdout.splitlines()) >= 10, "a good part of it came after the move"
    assert sandbox.info().instance != before
    assert "SANDBOX_CHECKPOINTED" in [update.status.value for update in heard]
    await sandbox.kill()


async def test_a_command_outlives_a_handoff(stage: Stage) -> None:
    await stage.do("server", name="other")
    proxy = await stage.proxy("a")
    sandbox = await Sandbox.create(proxy.url, **PERSISTENT)
    running = await sandbox.exec(TICK.format(count=40))
    waiting = asyncio.ensure_future(running.wait())
    before = sandbox.info().instance
    await proxy.weather(to="other")
    await sandbox.handoff()
    assert sandbox.info().instance != before
    result = await waiting
    assert (result.stdout, result.exit_code) == (ticks(40), 7)
    await sandbox.kill()
    await stage.do("signal", name="other", signal="TERM")


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


async def test_errors_have_their_types(stage: Stage, proxy: Proxy, sandbox: Sandbox) -> None:
    nobody = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"
    with pytest.raises(NotFoundError):
        await Sandbox.attach(proxy.url, nobody, sandbox.token)
    with pytest.raises(PermissionDeniedError):
        await Sandbox.attach(proxy.url, sandbox.id, "wrong")
    with pytest.raises(InUseError):
        await Sandbox.attach(proxy.url, sandbox.id, sandbox.token)
    with pytest.raises(CreationError, match="cwd"):
        await Sandbox.create(proxy.url, cwd="relative")
    with pytest.raises(ConnectionError):
        await Sandbox.create("ws://127.0.0.1:1")
    with pytest.raises(ConnectionError, match="ws://"):
        await Sandbox.create("ftp://example")
    with pytest.raises(CheckpointError):
        await sandbox.checkpoint()
    # Only the session was closed: the sandbox is there, and the client is back with it.
    assert (await sandbox.run("echo back")).stdout == "back\n"
    for kind in (NotFoundError, InUseError, ConnectionError):
        assert issubclass(kind, BatonError)


async def test_the_end_of_the_sandbox_ends_what_waits_on_it(proxy: Proxy) -> None:
    sandbox = await Sandbox.create(proxy.url)
    running = await sandbox.exec("sleep 60")
    waiting = asyncio.ensure_future(running.wait())
    begun = time.monotonic()
    await sandbox.kill()
    with pytest.raises(EndedError, match="killed"):
        await waiting
    with pytest.raises(EndedError):
        await sandbox.run("echo late")
    await sandbox.kill()
    await sandbox.close()
    assert time.monotonic() - begun < 20


async def test_files_go_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write_file("/data/new/note.txt", "é\n", mode=0o640)
    assert await sandbox.read_file("/data/new/note.txt") == "é\n".encode()
    assert await sandbox.read_text("/data/new/note.txt") == "é\n"
    assert await sandbox.read_file("note.txt", cwd="/data/new", offset=1, length=1) == b"\xa9"
    assert (await sandbox.run("stat -c %a /data/new/note.txt")).stdout == "640\n"
    await sandbox.write_file("/data/empty", b"")
    entries = await sandbox.list_files("/data", depth=2)
    assert [(entry.name, entry.kind, entry.size) for entry in entries if entry.kind == "file"] == [
        ("empty", "file", 0),
        ("new/note.txt", "file", 3),
    ]

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(3):
            yield b"%d" % i

    await sandbox.write_file("/data/pieces", pieces())
    assert b"".join([data async for data in sandbox.read_stream("/data/pieces")]) == b"012"
    for path, code in [("/no/such", "ENOENT"), ("/data", "EISDIR")]:
        with pytest.raises(FileError) as failed:
            await sandbox.read_file(path)
        assert failed.value.code == code
    with pytest.raises(FileError):
        await sandbox.write_file("/data", "x")

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        await sandbox.write_file("/data/half", half())
    with pytest.raises(FileError):
        await sandbox.read_file("/data/half")
    local = tmp_path / "up"
    local.write_bytes(b"up and down")
    local.chmod(0o750)
    os.utime(local, (1_700_000_000, 1_700_000_000))
    await sandbox.upload(local, "/data/up")
    await sandbox.download("/data/up", tmp_path / "deep" / "down")
    down = (tmp_path / "deep" / "down").stat()
    assert (down.st_mode & 0o777, down.st_mtime, down.st_size) == (0o750, 1_700_000_000, 11)


async def test_a_directory_goes_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    long = "n" * 120
    for name in ("a.txt", f"sub/{long}", "sub/empty"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name.replace("empty", ""))
    (source / "link").symlink_to("sub/empty")
    (source / "a.txt").chmod(0o755)
    await sandbox.upload(source, "/in")
    found = (await sandbox.run("cd /in; find . -type f -o -type l | sort; stat -c %a a.txt; readlink link")).stdout
    assert found.split() == ["./a.txt", "./link", "./sub/empty", f"./sub/{long}", "755", "sub/empty"]
    await sandbox.run("cd /in; ln -s /etc/passwd out; mkfifo pipe; echo more > more")
    with pytest.raises(FileError):
        await sandbox.download("/in", target)
    # What could be trusted is there, and nothing else.
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert names == ["a.txt", "link", "more", "sub", "sub/empty", f"sub/{long}"]
    assert (target / "sub" / long).read_text() == f"sub/{long}" and os.access(target / "a.txt", os.X_OK)
    assert os.readlink(target / "link") == "sub/empty"


async def test_files_are_exact_over_cuts(proxy: Proxy, sandbox: Sandbox, tmp_path: Path) -> None:
    size, count = SIZES["file"], SIZES["file_cuts"]
    local, back = tmp_path / "local", tmp_path / "back"
    with local.open("wb") as file:
        for i in range(size // 65536 + 1):
            file.write(hashlib.sha256(b"%d" % i).digest() * 2048)

    async def cut() -> None:
        for _ in range(count):
            await asyncio.sleep(0.15)
            await proxy.weather(cut=True)

    cutting = asyncio.ensure_future(cut())
    await sandbox.upload(local, "/big")
    await cutting
    await proxy.weather(cuts=cuts(size, count), cut=True)
    await sandbox.download("/big", back)
    assert await asyncio.to_thread(digest_of, local) == await asyncio.to_thread(digest_of, back)
    await sandbox.run("rm /big")


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


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
