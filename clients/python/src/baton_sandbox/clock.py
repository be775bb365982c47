"""Time and randomness: the rest of the package does not ask the system for them."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Awaitable, Optional, TypeVar

T = TypeVar("T")

#: The shortest and the longest pause between two attempts to connect, in seconds.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


def now() -> float:
    return asyncio.get_running_loop().time()


def backoff(attempt: int, jitter: Optional[float] = None) -> float:
    """How long to wait before attempt number ``attempt``, counted from 0. ``jitter`` is between 0 and 1."""
    ceiling = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(attempt + 1, 16))
    return SHORTEST_PAUSE + (ceiling - SHORTEST_PAUSE) * (random.random() if jitter is None else jitter)


def new_exec_id() -> str:
    return f"x{secrets.token_hex(8)}"


async def wait_for(work: Awaitable[T], span: Optional[float]) -> T:
    """Like ``asyncio.wait_for``, which can swallow a cancellation before Python 3.12.

    A swallowed cancellation would keep the program from ending for as long as the client tries to reconnect.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=span)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    raise asyncio.TimeoutError
