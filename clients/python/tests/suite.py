"""What the files of the suite share."""

from __future__ import annotations

import hashlib

TICK = "for i in $(seq 1 {count}); do echo line $i; sleep 0.05; done; exit 7"
PERSISTENT = {"enable_checkpoint": True, "enable_sandbox_handoff": True}


def ticks(count: int) -> str:
    return "".join(f"line {i}\n" for i in range(1, count + 1))


def cuts(size: int, count: int) -> list[int]:
    """Where to cut each connection, a little later than the one before."""
    return [size // (count + 2) + i * 997 for i in range(count)]


def sample(size: int) -> bytes:
    """Bytes without repetition."""
    return b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(size // 32))
