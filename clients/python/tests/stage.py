"""The stage of `clients/suite`, from Python."""

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
SIZES = CASES["sizes"][os.environ.get("BATON_TIER", "quick")]


class Proxy:
    def __init__(self, stage: Stage, number: int, address: str) -> None:
        self._stage, self._number = stage, number
        self.url = f"ws://{address}"

    async def weather(self, **weather: Any) -> dict[str, Any]:
        return await self._stage.do("weather", proxy=self._number, **weather)


class Stage:
    def __init__(self) -> None:
        command = [sys.executable, str(SUITE / "stage.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def do_now(self, do: str, **order: Any) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def do(self, do: str, **order: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.do_now, do, **order)

    async def proxy(self, to: str = "a") -> Proxy:
        made = await self.do("proxy", to=to)
        return Proxy(self, made["proxy"], made["address"])

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
