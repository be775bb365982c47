"""The files of the suite have every scenario of `clients/suite`."""

from __future__ import annotations

import re
from pathlib import Path

from testbed import CASES


def test_every_scenario_is_here() -> None:
    files = Path(__file__).parent.glob("test_suite_*.py")
    written = {name for file in files for name in re.findall(r"^async def test_(\w+)", file.read_text(), re.MULTILINE)}
    assert written == {re.sub("[^a-z]+", "_", name.lower()) for name in CASES["scenarios"]}
