"""An archive from a sandbox to a directory of this machine, which nothing in it can lead out of.

The sandbox may be hostile, and so may every member of its archive be. Therefore no path of a member is ever
handed to the system: each directory is opened alone, by its name in the open directory above it, and never
through a link; what is made is made by a name in an open directory; modes and times are set on what is open.
So there is no path to resolve, and no resolved path that could mean something else a moment later.

A member that cannot be unpacked is left out, and the others go on. ``crates/files`` has the same rules in Rust.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass, field
from typing import Callable, Optional, Union

from .errors import FileError
from .tar import Kind, Member, Readable, Reader

#: More directories than any path that can be opened by its name has.
_MAX_DEPTH = 2048
#: No file of a stranger runs as another user.
_MODE_BITS = 0o777
#: Lines about members that were left out, of however many.
_MAX_LINES = 10
_LONGEST_NAME = 200

Parts = tuple[bytes, ...]


@dataclass
class LeftOut:
    """Members that were not unpacked: how many, and a line about each of the first."""

    count: int = 0
    code: str = ""
    lines: list[str] = field(default_factory=list)

    def add(self, name: bytes, why: str, code: str) -> None:
        self.count += 1
        self.code = self.code or code
        if len(self.lines) < _MAX_LINES:
            self.lines.append(f"{_printable(name)}: {why}")

    def error(self) -> FileError:
        more = self.count - len(self.lines)
        return FileError(f"left out: {'; '.join(self.lines)}{f'; and {more} more' if more else ''}", self.code)


class _Refused(Exception):
    def __init__(self, why: str, code: str) -> None:
        super().__init__(why)
        self.why, self.code = why, code


def unpack(source: Readable, directory: Union[str, bytes, os.PathLike[str]]) -> LeftOut:
    """Unpacks the archive that ``source`` gives into ``directory``, which is made if it is missing.

    Raises :class:`FileError` if it is no archive, or only half of one, or if the disk is full. What was whole is there.
    """
    _require_descriptors()
    is_new = not os.path.exists(directory)
    os.makedirs(directory, exist_ok=True)
    unpacking = _Unpacking(_Tree(directory), is_new)
    try:
        reader = Reader(source)
        for member in iter(reader.next_member, None):
            unpacking.add(member, reader)
        unpacking.leave(None)
    finally:
        unpacking.tree.close()
    return unpacking.left_out


def _require_descriptors() -> None:
    needed = {os.link, os.mkdir, os.open, os.rename, os.stat, os.symlink, os.unlink, os.utime}
    if not needed <= os.supports_dir_fd or os.utime not in os.supports_fd or not hasattr(os, "O_NOFOLLOW"):
        raise FileError(
            "this system cannot open files relative to a directory, so that an archive from a sandbox cannot be unpacked"
            " safely here; download single files, or keep the archive with read_stream(path, archive=True)",
            "ENOTSUP",
        )


def split_name(name: bytes) -> Optional[Parts]:
    """The parts of a name in an archive; ``None`` if it leads out, or is none."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    leads_out = name.startswith(b"/") or b"\0" in name or b".." in parts
    return None if leads_out or len(parts) > _MAX_DEPTH else parts


def stays_inside(target: bytes, depth: int) -> bool:
    """Whether a link ``depth`` directories below the top cannot lead above it.

    Dots are only believed in front: behind a name that is itself a link, ``..`` is not where it seems to be.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = next((at for at, part in enumerate(parts) if part != b".."), len(parts))
    return not target.startswith(b"/") and b"\0" not in target and up <= depth and b".." not in parts[up:]


@dataclass(frozen=True)
class _Made:
    """A directory that this archive made. It gets mode and time when it is left, so that neither hinders or is
    changed by what is put into it."""

    parts: Parts
    member: Member


class _Unpacking:
    def __init__(self, tree: _Tree, is_new: bool) -> None:
        self.tree = tree
        self.left_out = LeftOut()
        self._is_new = is_new
        #: On the way to the last member, the deepest last.
        self._made: list[_Made] = []

    def add(self, member: Member, data: Reader) -> None:
        parts = split_name(member.name)
        if parts is None:
            self.left_out.add(member.name, "the name leads out of the directory", "EINVAL")
            return
        self.leave(parts)
        if not parts:
            if self._is_new and member.kind is Kind.DIRECTORY:
                self._made.append(_Made(parts, member))
            return
        try:
            self._place(member, parts, data)
        except _Refused as refused:
            self.left_out.add(member.name, refused.why, refused.code)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "EIO")
            # The next one would not fare better.
            if error.errno == errno.ENOSPC:
                raise FileError(f"{_printable(member.name)}: {error.strerror}", code) from error
            self.left_out.add(member.name, error.strerror or "it did not work", code)

    def _place(self, member: Member, parts: Parts, data: Reader) -> None:
        above, name = parts[:-1], parts[-1]
        if member.kind is Kind.FILE:
            _write(self.tree.directory(above), name, member, data)
        elif member.kind is Kind.DIRECTORY:
            if _make_directory(self.tree.directory(above), name):
                self._made.append(_Made(parts, member))
        elif member.kind is Kind.SYMLINK:
            if not stays_inside(member.link, len(above)):
                raise _Refused("the link leads out of the directory", "EPERM")
            _make_symlink(self.tree.directory(above), name, member)
        elif member.kind is Kind.HARD_LINK:
            self._hard_link(member, above, name)
        else:
            raise _Refused("neither a file nor a directory nor a link", "EINVAL")

    def _hard_link(self, member: Member, above: Parts, name: bytes) -> None:
        """Another name for a file that is already there, and only for a file: the text of a symbolic link means
        something else in another directory."""
        first = split_name(member.link)
        if not first:
            raise _Refused("the link leads out of the directory", "EPERM")
        source = os.dup(self.tree.directory(first[:-1], make=False))
        try:
            parent = self.tree.directory(above)

            def make(unused: bytes) -> None:
                os.link(first[-1], unused, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
                # Looked at under the new name, which nobody else knows: it cannot become something else in between.
                if not stat.S_ISREG(os.stat(unused, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise _Refused("a hard link to something that is no file", "EPERM")

            _put(parent, name, make)
        finally:
            os.close(source)

    def leave(self, following: Optional[Parts]) -> None:
        """Directories that the next member is not in are complete; without a next one, all are."""
        while self._made:
            made = self._made[-1]
            if following is not None and following[: len(made.parts)] == made.parts:
                return
            self._made.pop()
            # What cannot be set stays as it is: the files are there.
            with contextlib.suppress(OSError):
                directory = self.tree.directory(made.parts, make=False)
                os.utime(directory, ns=(made.member.mtime_ns, made.member.mtime_ns))
                os.fchmod(directory, made.member.mode & _MODE_BITS)


class _Tree:
    """A directory that no step leads out of: each is taken alone, and no link is followed."""

    def __init__(self, directory: Union[str, bytes, os.PathLike[str]]) -> None:
        self._top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        #: The directory last asked for.
        self._last: Optional[tuple[Parts, int]] = None

    def directory(self, parts: Parts, make: bool = True) -> int:
        """An open directory, for as long as no other is asked for. Missing ones are made, if wanted."""
        if not parts:
            return self._top
        if self._last is not None and self._last[0] == parts:
            return self._last[1]
        self._forget()
        here = self._top
        for part in parts:
            try:
                below = _step(here, part, make)
            finally:
                if here != self._top:
                    os.close(here)
            here = below
        self._last = (parts, here)
        return here

    def close(self) -> None:
        self._forget()
        os.close(self._top)

    def _forget(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None


def _step(above: int, part: bytes, make: bool) -> int:
    try:
        return _enter(above, part)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o777, dir_fd=above)
    return _enter(above, part)


def _enter(above: int, part: bytes) -> int:
    """The directory itself, never one that a link leads to."""
    return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def _make_directory(parent: int, name: bytes) -> bool:
    """Whether it is new."""
    try:
        os.mkdir(name, 0o777, dir_fd=parent)
        return True
    except FileExistsError:
        # What is there may be a file, or a link.
        os.close(_enter(parent, name))
        return False


def _write(parent: int, name: bytes, member: Member, data: Reader) -> None:
    def make(unused: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(unused, flags, 0o600, dir_fd=parent), "wb") as file:
            for piece in iter(data.read, b""):
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), member.mode & _MODE_BITS)
            os.utime(file.fileno(), ns=(member.mtime_ns, member.mtime_ns))

    _put(parent, name, make)


def _make_symlink(parent: int, name: bytes, member: Member) -> None:
    def make(unused: bytes) -> None:
        os.symlink(member.link, unused, dir_fd=parent)
        with contextlib.suppress(OSError):
            times = (member.mtime_ns, member.mtime_ns)
            os.utime(unused, ns=times, dir_fd=parent, follow_symlinks=False)

    _put(parent, name, make)


def _put(parent: int, name: bytes, make: Callable[[bytes], None]) -> None:
    """Makes something under a name that nobody has, then gives it its own. Whatever had that is replaced, and never
    followed; a reader sees the old or the new one."""
    unused = b".baton-" + secrets.token_hex(8).encode()
    try:
        make(unused)
        os.rename(unused, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        # It is still there if that failed, or if both were names of one file.
        with contextlib.suppress(OSError):
            os.unlink(unused, dir_fd=parent)


def _printable(name: bytes) -> str:
    """A stranger's name as it may stand on a terminal and in one line."""
    text = name[:_LONGEST_NAME].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
