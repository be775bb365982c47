"""What the sandbox reports about its files: listings and errors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Optional

from .errors import ExecLostError, FileError, ProtocolError
from .result import Result


@dataclass(frozen=True)
class FileEntry:
    """One line of a listing."""

    #: Relative to the path that was listed; for that path itself, its last part.
    name: str
    #: ``"file"``, ``"directory"``, ``"symlink"`` or ``"other"``.
    kind: str
    size: int = 0
    #: Permission bits.
    mode: int = 0
    #: Seconds since 1970.
    mtime: float = 0.0
    #: The target of a symbolic link.
    target: Optional[str] = None


def checked(result: Result, path: str) -> Result:
    if result.exit_code != 0:
        raise file_error(result.stderr, path)
    if result.lost or result.rolled_back:
        raise interrupted(path, result.rolled_back)
    return result


def interrupted(path: str, rolled_back: bool) -> ExecLostError:
    why = "the sandbox was rolled back" if rolled_back else "some bytes were lost"
    return ExecLostError(f"the transfer of {path} is incomplete, because {why}: start it again", rolled_back=rolled_back)


def parse_listing(text: str) -> list[FileEntry]:
    return [_entry(line) for line in text.splitlines()]


def _entry(line: str) -> FileEntry:
    try:
        fields = json.loads(line)
        name, kind, target = fields["name"], fields["kind"], fields.get("target")
        numbers = [fields.get(key, 0) for key in ("size", "mode", "mtime_ms")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _malformed_listing() from error
    is_valid = isinstance(name, str) and isinstance(kind, str) and isinstance(target, (str, type(None)))
    # Larger numbers would overflow where they are used.
    if not is_valid or not all(isinstance(number, int) and abs(number) < 1 << 63 for number in numbers):
        raise _malformed_listing()
    size, mode, mtime_ms = numbers
    known = kind if kind in ("file", "directory", "symlink") else "other"
    return FileEntry(name, known, size, mode, mtime_ms / 1000, target)


def _malformed_listing() -> ProtocolError:
    return ProtocolError("the listing is malformed")


def file_error(stderr: str, path: str) -> FileError:
    """The first error in stderr, such as ``ENOENT: No such file or directory: /data/x``."""
    line = (stderr.strip().splitlines() or [""])[0]
    found = re.match(r"(E[A-Z0-9]+): (.*)", line)
    return FileError(found[2], found[1]) if found else FileError(line or f"{path}: unknown error", "EIO")
