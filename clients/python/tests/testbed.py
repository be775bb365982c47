"""The test bed of `clients/suite`, from Python."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parents[2] / "suite"
CASES = json.loads((SUITE / "cases.json").read_text())
#: Of every server of the test bed.
ADMIN_KEY = "the-admin-key-of-the-test-bed"
SIZES = CASES["sizes"][os.environ.get("BATON_TIER", "quick")]


class Proxy:
    def __init__(self, testbed: Testbed, number: int, address: str) -> None:
        self._testbed, self._number = testbed, number
        self.url = f"ws://{address}"

    async def network(self, **conditions: Any) -> dict[str, Any]:
        """Sets network conditions; returns how many connections there were, and how many were cut."""
        return await self._testbed.do("network", proxy=self._number, **conditions)


class Testbed:
    __test__ = False

    def __init__(self) -> None:
        command = [sys.executable, str(SUITE / "testbed.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def do_now(self, do: str, **request: Any) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def do(self, do: str, **request: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.do_now, do, **request)

    async def proxy(self, to: str = "a") -> Proxy:
        made = await self.do("proxy", to=to)
        return Proxy(self, made["proxy"], made["address"])

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
