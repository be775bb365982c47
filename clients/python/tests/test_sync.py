"""The same sandboxes without asyncio."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
from testbed import Testbed

import baton_sandbox
from baton_sandbox import ExecFailedError, NotFoundError, RefusedError, sync
from baton_sandbox.sync import Sandbox


def test_everything_works_without_asyncio(testbed: Testbed) -> None:
    made = testbed.do_now("proxy", to="a")
    url = f"ws://{made['address']}"
    with Sandbox.create(url, enable_checkpoint=True) as sandbox:
        assert sandbox.run("echo hello; exit 3").exit_code == 3
        assert sandbox.commands.run(["echo", "hi"]).stdout == "hi\n"
        assert sandbox.run_code("print(1 + 1)").stdout == "2\n"
        with pytest.raises(ExecFailedError):
            sandbox.run("exit 1", check=True)
        running = sandbox.exec("read line; echo $line; echo end", stdin=True)
        running.write_stdin("typed\n")
        running.close_stdin()
        lines = running.stdout.lines()
        assert next(lines) == "typed"
        testbed.do_now("network", proxy=made["proxy"], cut=True)
        assert list(lines) == ["end"]
        assert running.wait(check=True).ok
        sleeper = sandbox.exec(["sleep", "60"])
        threading.Timer(0.2, sleeper.kill).start()
        assert sleeper.wait().signal == 9
        sandbox.write_file("/tmp/pieces", iter([b"one", b"two"]))
        assert b"".join(sandbox.read_stream("/tmp/pieces", offset=1)) == b"netwo"
        assert [entry.name for entry in sandbox.list_files("/tmp/pieces")] == ["pieces"]
        assert sandbox.rollbacks == ()
        ref = sandbox.ref
        sandbox.checkpoint()
    again = Sandbox.attach(url, ref.id, ref.token)
    assert again.info().is_connected
    with pytest.raises(RefusedError):
        again.follow("unknown")
    (copy,) = again.fork()
    with copy.attach() as forked:
        assert forked.id != again.id
    copy.attach().kill()
    again.kill()
    with pytest.raises(NotFoundError):
        ref.attach()


def test_the_block_keeps_what_was_detached_and_kills_the_rest(testbed: Testbed) -> None:
    url = f"ws://{testbed.do_now('proxy', to='a')['address']}"
    with Sandbox.create(url) as sandbox:
        ref = sandbox.detach()
    with Sandbox.create(url, keep=True) as sandbox:
        kept = sandbox.ref
    with Sandbox.create(url, enable_checkpoint=True) as sandbox:
        gone = sandbox.ref
    for one in (ref, kept):
        one.attach().kill()
    with pytest.raises(NotFoundError):
        gone.attach()


#: Special methods that differ in name only.
BLOCKING = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


@pytest.mark.parametrize("name", ["Sandbox", "Running", "OutputStream", "FileWatch", "Port", "PortConnection", "SandboxRef", "Place"])
def test_both_variants_have_the_same_members_and_signatures(name: str) -> None:
    compare(getattr(baton_sandbox, name), getattr(sync, name))


def test_both_variants_have_the_same_commands() -> None:
    compare(baton_sandbox.sandbox.Commands, sync.Commands)


def compare(one: type, other: type) -> None:
    def members(of: type) -> set[str]:
        names = {*dir(of), *getattr(of, "__dataclass_fields__", ())}
        return {name for name in names if not name.startswith("_")}

    assert members(one) == members(other)
    for name in members(one) | (BLOCKING.keys() & vars(one).keys()):
        here, there = getattr(one, name, None), getattr(other, BLOCKING.get(name, name))
        if callable(here):
            assert parameters(here) == parameters(there), name
            assert name.startswith("_") or (here.__doc__ and here.__doc__ == there.__doc__), name
            assert not inspect.iscoroutinefunction(there) and not inspect.isasyncgenfunction(there), name


def parameters(of: Any) -> list[tuple[str, Any, Any, Any]]:
    return [(one.name, one.kind, one.default, one.annotation) for one in inspect.signature(of).parameters.values()]
