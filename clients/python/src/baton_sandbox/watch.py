"""Watching files of a sandbox."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import AsyncIterator, Optional

from .errors import ExecLostError, ProtocolError
from .file_results import file_error
from .running import Running


@dataclass(frozen=True)
class FileChange:
    """One change below a watched path."""

    #: ``"create"``, ``"write"``, ``"remove"``, ``"rename"``, ``"chmod"``, or ``"overflow"`` if changes are missing.
    type: str
    #: Relative to the watched path.
    name: str
    #: The new name, after a rename.
    to: Optional[str] = None


class FileWatch:
    """The changes below a watched path. Ends with ``close``, ``async with``, or when the watched path is removed."""

    def __init__(self, running: Running, path: str) -> None:
        self._running = running
        self._path = path
        self._is_closed = False
        self._changes = self._read()

    @classmethod
    async def _start(cls, running: Running, path: str) -> FileWatch:
        """Waits until the sandbox watches the path."""
        watch = cls(running, path)
        async for change in watch:
            if change.type != "ready":
                break
            return watch
        raise ProtocolError("the watch did not start")

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self._changes

    async def _read(self) -> AsyncIterator[FileChange]:
        rest, is_partial = b"", False
        async for chunk in self._running.stdout.chunks():
            if isinstance(chunk, bytes):
                *lines, rest = (rest + chunk).split(b"\n")
                # After a gap the first line may be incomplete.
                if is_partial and lines:
                    lines, is_partial = lines[1:], False
                for line in lines:
                    yield _parse(line)
            else:
                # Some lines were dropped, or the sandbox was rolled back.
                rest, is_partial = b"", True
                yield FileChange("overflow", "")
        try:
            result = await self._running.wait()
        except ExecLostError:
            if self._is_closed:
                return
            raise
        if result.exit_code != 0 and not self._is_closed:
            raise file_error(result.stderr, self._path)

    async def close(self) -> None:
        """Ends the watch."""
        self._is_closed = True
        await self._running.kill()

    async def __aenter__(self) -> FileWatch:
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()


def _parse(line: bytes) -> FileChange:
    try:
        fields = json.loads(line)
        change = FileChange(fields["type"], fields["name"], fields.get("to"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError("the watch sent a malformed line") from error
    if not all(isinstance(text, str) for text in (change.type, change.name, change.to or "")):
        raise ProtocolError("the watch sent a malformed line")
    return change
