"""Waiting for a condition on shared state."""

from __future__ import annotations

import asyncio
from typing import Callable, Optional, TypeVar

T = TypeVar("T")


class Notifier:
    """Wakes every waiter after a change, so that each of them checks its condition again."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def until(self, check: Callable[[], Optional[T]]) -> T:
        """The first result of ``check`` that is not ``None``."""
        found = check()
        while found is None:
            await self.wait()
            found = check()
        return found
