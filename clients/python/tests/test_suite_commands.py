"""The suite that every client library runs: commands and errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from testbed import ADMIN_KEY, CASES, Proxy, Testbed

from baton_sandbox import (
    BatonError,
    CheckpointError,
    Connection,
    ConnectionError,
    CreationError,
    EndedError,
    ExecFailedError,
    InUseError,
    NotFoundError,
    PermissionDeniedError,
    RefusedError,
    Sandbox,
)

def command_of(case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    options = dict(case.get("options", {}))
    if "language" in case:
        options["language"] = case["language"]
    if "pty" in options:
        options["pty"] = tuple(options["pty"])
    return case.get("code", case.get("argv")), options


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
    # `wait` collects the rest after a reader has stopped.
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
    trapping = await sandbox.exec("trap 'echo bye; exit 9' INT; echo ready; while true; do sleep 0.02; done")
    async for line in trapping.stdout.lines():
        assert line == "ready"
        break
    await trapping.signal("INT")
    await sleeper.kill()
    result = await trapping.wait()
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


async def test_errors_have_their_types(testbed: Testbed, proxy: Proxy, sandbox: Sandbox) -> None:
    unknown = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"
    with pytest.raises(NotFoundError):
        await Sandbox.attach(proxy.url, unknown, sandbox.token)
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
    async with await Sandbox.create(proxy.url, persistent=False) as ephemeral:
        with pytest.raises(CheckpointError):
            await ephemeral.checkpoint()
        # Only the session was closed: the sandbox still exists, and the client has reconnected.
        assert (await ephemeral.run("echo back")).stdout == "back\n"
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


async def test_ends_are_told_apart(proxy: Proxy) -> None:
    async def ends(sandbox: Sandbox) -> EndedError:
        while sandbox.info().is_connected:
            await asyncio.sleep(0.02)
        with pytest.raises(EndedError) as ended:
            await sandbox.run("true")
        await sandbox.close()
        return ended.value

    for persistent, text in ((True, "checkpointed"), (False, "deleted")):
        idle = await ends(await Sandbox.create(proxy.url, persistent=persistent, idle_timeout=1))
        assert idle.reason == "idle" and text in str(idle) and "(reason: idle)" in str(idle)
    assert (await ends(await Sandbox.create(proxy.url, ttl=1))).reason == "expired"
    sandbox = await Sandbox.create(proxy.url, persistent=True)
    await sandbox.checkpoint()
    assert (await ends(sandbox)).reason == "checkpoint"
    sandbox = await sandbox.ref.attach()
    await Sandbox.kill_by_id(proxy.url, sandbox.id, token=sandbox.token)
    assert (await ends(sandbox)).reason == "operator"


async def test_sandboxes_are_listed_and_killed_by_id(proxy: Proxy, sandbox: Sandbox) -> None:
    key = {"api_key": ADMIN_KEY}
    labels = {"suite": "python", "case": sandbox.id}
    async with await Sandbox.create(proxy.url, labels=labels, persistent=True) as stored:
        ephemeral = await Sandbox.create(proxy.url, labels=labels, persistent=False)
        waiting = asyncio.ensure_future(ephemeral.run(["sleep", "60"]))
        found = {one.id: one async for one in Sandbox.list(proxy.url, labels=labels, **key)}
        assert found.keys() == {stored.id, ephemeral.id}
        for one, is_stored in ((found[stored.id], True), (found[ephemeral.id], False)):
            assert (one.phase, one.persistent, one.labels, one.error) == ("running", is_stored, labels, None)
            assert one.age is not None and one.age >= 0 and one.created.startswith("20")
        everything = {one.id async for one in Sandbox.list(proxy.url, connection=Connection(**key))}
        assert everything >= {sandbox.id, *found}
        # With the key, and with the token; the sandboxes have clients, which are told.
        await Sandbox.kill_by_id(proxy.url, ephemeral.id, **key)
        with pytest.raises(EndedError):
            await waiting
        await Sandbox.kill_by_id(proxy.url, stored.id, token=stored.token)
        assert [one async for one in Sandbox.list(proxy.url, labels=labels, **key)] == []
        while stored.info().is_connected:
            await asyncio.sleep(0.02)
        with pytest.raises(EndedError):
            await stored.run("true")
        await ephemeral.close()
    unknown = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"
    for id in (unknown, "nonsense/../x"):
        with pytest.raises(NotFoundError):
            await Sandbox.kill_by_id(proxy.url, id, **key)
    with pytest.raises(PermissionDeniedError, match="key"):
        await Sandbox.kill_by_id(proxy.url, sandbox.id)
    with pytest.raises(PermissionDeniedError, match="does not match"):
        await Sandbox.kill_by_id(proxy.url, sandbox.id, token="wrong")
    for options in ({}, {"api_key": "wrong"}):
        with pytest.raises(PermissionDeniedError, match="key"):
            await Sandbox.list(proxy.url, **options).__anext__()
    with pytest.raises(ConnectionError):
        await Sandbox.list("ws://127.0.0.1:1", **key).__anext__()
    assert (await sandbox.run("echo still here")).ok
