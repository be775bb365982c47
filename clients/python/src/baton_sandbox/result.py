"""How a command ended, and what it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .errors import ExecFailedError

#: How many characters of each stream ``str`` and ``repr`` show.
_STR_LENGTH, _REPR_LENGTH = 2000, 200


@dataclass(frozen=True, repr=False)
class Result:
    """How a command ended, and what it wrote. A non-zero exit code is a result, not an error.

    ``print(result)`` shows the exit code and the output.
    """

    #: The exact output, except for what was read from the streams.
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    exit_code: Optional[int] = None
    #: The number of the signal that killed the command.
    signal: Optional[int] = None
    #: The command was killed because it ran longer than its ``timeout``.
    timed_out: bool = False
    #: How long it ran in seconds, without the time in which the sandbox was paused.
    duration: Optional[float] = None
    #: How many bytes of output were dropped and are missing here.
    lost: int = 0
    #: The sandbox was rolled back to an older checkpoint while the command ran, so parts of it ran twice.
    rolled_back: bool = False

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def ending(self) -> str:
        """How the command ended, for people: ``"exit code 3"``."""
        if self.timed_out:
            return "timed out"
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return f"exit code {self.exit_code}"

    def check(self) -> Result:
        """Returns the result if the command succeeded, and raises ``ExecFailedError`` otherwise."""
        if not self.ok:
            raise ExecFailedError(self)
        return self

    def __str__(self) -> str:
        notes = [self.ending]
        if self.lost:
            notes.append(f"{self.lost} bytes of output lost")
        if self.rolled_back:
            notes.append("rolled back to an older checkpoint")
        lines = ["; ".join(notes)]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            text = _last_part(text.rstrip("\n"), _STR_LENGTH)
            if text:
                lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        fields = [f"exit_code={self.exit_code}"]
        fields += [f"{name}={getattr(self, name)}" for name in ("signal", "timed_out", "lost", "rolled_back") if getattr(self, name)]
        fields += [f"{name}={_last_part(getattr(self, name), _REPR_LENGTH)!r}" for name in ("stdout", "stderr")]
        return f"Result({', '.join(fields)})"


def _last_part(text: str, length: int) -> str:
    return text if len(text) <= length else f"… {len(text) - length} characters …\n{text[-length:]}"
