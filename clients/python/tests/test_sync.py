"""The same sandboxes without asyncio."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stage import Stage

from baton_sandbox import ExecFailedError, NotFoundError
from baton_sandbox.sync import Sandbox


def test_everything_works_without_asyncio(stage: Stage) -> None:
    made = stage.do_now("proxy", to="a")
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
        stage.do_now("weather", proxy=made["proxy"], cut=True)
        assert list(lines) == ["end"]
        assert running.wait(check=True).ok
        sleeper = sandbox.exec(["sleep", "60"])
        threading.Timer(0.2, sleeper.kill).start()
        assert sleeper.wait().signal == 9
        place = sandbox.place
        sandbox.checkpoint()
    again = Sandbox.attach(url, place.id, place.token)
    assert again.info().is_connected
    again.kill()
    with pytest.raises(NotFoundError):
        place.attach()


def test_the_facade_has_everything_that_sandboxes_have() -> None:
    from baton_sandbox import OutputStream, Place, Running, sync
    from baton_sandbox import Sandbox as Async

    for one, other in [(Async, Sandbox), (Running, sync.Running), (OutputStream, sync.OutputStream), (Place, sync.Place)]:
        missing = [name for name in dir(one) if not name.startswith("_") and not hasattr(other, name)]
        assert missing == [], f"{other.__module__}.{other.__name__} in {Path(__file__).name}"
