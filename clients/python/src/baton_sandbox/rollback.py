"""Roll-backs: the sandbox was restored from a checkpoint that is older than what its client has seen."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Optional

_log = logging.getLogger("baton_sandbox")


class RolledBackWarning(UserWarning):
    """A sandbox lost the work since its last checkpoint. Shown unless ``on_rollback`` is given."""


@dataclass(frozen=True)
class Rollback:
    """The sandbox went back to a checkpoint. Work that it did after that checkpoint is lost."""

    checkpoint_id: str
    #: How old the checkpoint was when it was restored, in seconds.
    age: float

    def __str__(self) -> str:
        return (
            f"the sandbox was rolled back to checkpoint {self.checkpoint_id}, which is {self.age:.1f} s old;"
            " its work since then is lost"
        )


def report(rollback: Rollback, callback: Optional[Callable[[Rollback], Any]]) -> None:
    """Calls the callback, or warns. Neither may break the connection that reports the roll-back."""
    try:
        if callback is not None:
            callback(rollback)
        else:
            warnings.warn(str(rollback), RolledBackWarning, stacklevel=2)
    except Exception:
        _log.exception("reporting a roll-back failed: %s", rollback)
