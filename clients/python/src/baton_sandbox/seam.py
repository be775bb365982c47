"""Time, dice and waiting of a client: nothing else here asks the system for them."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Callable, Optional, TypeVar

T = TypeVar("T")

#: The shortest and the longest pause before another try, in seconds.
SHORTEST, LONGEST = 0.1, 5.0


def now() -> float:
    return asyncio.get_running_loop().time()


def pause(attempt: int, share: Optional[float] = None) -> float:
    """How long to wait before try number ``attempt``, counted from 0."""
    ceiling = min(LONGEST, SHORTEST * 2.0 ** min(attempt + 1, 16))
    return SHORTEST + (ceiling - SHORTEST) * (random.random() if share is None else share)


def exec_id() -> str:
    return f"x{secrets.token_hex(8)}"


class Bell:
    """Something changed: everybody who waits looks again."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def until(self, find: Callable[[], Optional[T]]) -> T:
        """What ``find`` finds, once it finds something."""
        found = find()
        while found is None:
            await self.wait()
            found = find()
        return found
