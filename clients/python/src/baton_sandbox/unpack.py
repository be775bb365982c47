"""Unpacks an archive of a sandbox into a local directory, and never writes outside that directory.

The sandbox may be hostile, and so may every member of its archive. Therefore the path of a member is never
passed to the system: each directory is opened by its name in the open directory above it, and never through a
link; files are created by name in an open directory; modes and times are set on open files. Without a path to
resolve, nothing can be exchanged between a check and its use.

A member that cannot be unpacked is skipped, and the others are unpacked. ``crates/files`` has the same rules in Rust.
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

#: More than the number of directories in any path that the system accepts.
_MAX_DEPTH = 2048
#: Without the set-user-ID bits: no unpacked file may run as another user.
_MODE_BITS = 0o777
#: How many skipped members an error names.
_MAX_LINES = 10
_LONGEST_NAME = 200

Parts = tuple[bytes, ...]


@dataclass
class LeftOut:
    """Members that were not unpacked: their number, and a line about each of the first ones."""

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
    """Unpacks the archive in ``source`` into ``directory``, which is created if it is missing.

    Raises :class:`FileError` if it is not a complete archive, or if the disk is full. Complete members stay.
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
            "this system cannot open files relative to a directory, so an archive of a sandbox cannot be unpacked"
            " safely here; download single files, or keep the archive with read_stream(path, archive=True)",
            "ENOTSUP",
        )


def split_name(name: bytes) -> Optional[Parts]:
    """The components of a name in an archive; ``None`` if the name is invalid or leaves the directory."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    leads_out = name.startswith(b"/") or b"\0" in name or b".." in parts
    return None if leads_out or len(parts) > _MAX_DEPTH else parts


def stays_inside(target: bytes, depth: int) -> bool:
    """Whether a link ``depth`` directories below the top stays inside it.

    ``..`` is accepted only at the start: after a name that may itself be a link, its meaning is not known.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = next((at for at, part in enumerate(parts) if part != b".."), len(parts))
    return not target.startswith(b"/") and b"\0" not in target and up <= depth and b".." not in parts[up:]


@dataclass(frozen=True)
class _Made:
    """A directory that this archive created. Its mode and time are set when all its members are unpacked, because a
    restrictive mode would prevent that and unpacking would change the time."""

    parts: Parts
    member: Member


class _Unpacking:
    def __init__(self, tree: _Tree, is_new: bool) -> None:
        self.tree = tree
        self.left_out = LeftOut()
        self._is_new = is_new
        #: The directories above the current member that this archive created, the deepest last.
        self._made: list[_Made] = []

    def add(self, member: Member, data: Reader) -> None:
        parts = split_name(member.name)
        if parts is None:
            self.left_out.add(member.name, "the name leads outside the directory", "EINVAL")
            return
        self.leave(parts)
        if not parts:
            if self._is_new and member.kind is Kind.DIRECTORY:
                self._made.append(_Made(parts, member))
            return
        try:
            self._unpack_member(member, parts, data)
        except _Refused as refused:
            self.left_out.add(member.name, refused.why, refused.code)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "EIO")
            # The next member would fail, too.
            if error.errno == errno.ENOSPC:
                raise FileError(f"{_printable(member.name)}: {error.strerror}", code) from error
            self.left_out.add(member.name, error.strerror or "unknown error", code)

    def _unpack_member(self, member: Member, parts: Parts, data: Reader) -> None:
        above, name = parts[:-1], parts[-1]
        if member.kind is Kind.FILE:
            _write(self.tree.directory(above), name, member, data)
        elif member.kind is Kind.DIRECTORY:
            if _make_directory(self.tree.directory(above), name):
                self._made.append(_Made(parts, member))
        elif member.kind is Kind.SYMLINK:
            if not stays_inside(member.link, len(above)):
                raise _Refused("the link leads outside the directory", "EPERM")
            _make_symlink(self.tree.directory(above), name, member)
        elif member.kind is Kind.HARD_LINK:
            self._hard_link(member, above, name)
        else:
            raise _Refused("neither a file nor a directory nor a link", "EINVAL")

    def _hard_link(self, member: Member, above: Parts, name: bytes) -> None:
        """Links to an existing regular file. A hard link to a symbolic link is refused, because its target would mean
        something else in another directory."""
        first = split_name(member.link)
        if not first:
            raise _Refused("the link leads outside the directory", "EPERM")
        source = os.dup(self.tree.directory(first[:-1], make=False))
        try:
            parent = self.tree.directory(above)

            def make(unused: bytes) -> None:
                os.link(first[-1], unused, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
                # Checked under the new, random name, which nothing else can exchange in between.
                if not stat.S_ISREG(os.stat(unused, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise _Refused("a hard link to something that is not a file", "EPERM")

            _put(parent, name, make)
        finally:
            os.close(source)

    def leave(self, following: Optional[Parts]) -> None:
        """Completes the directories that do not contain the next member; without a next member, all of them."""
        while self._made:
            made = self._made[-1]
            if following is not None and following[: len(made.parts)] == made.parts:
                return
            self._made.pop()
            # A failure is ignored, because the files themselves are complete.
            with contextlib.suppress(OSError):
                directory = self.tree.directory(made.parts, make=False)
                os.utime(directory, ns=(made.member.mtime_ns, made.member.mtime_ns))
                os.fchmod(directory, made.member.mode & _MODE_BITS)


class _Tree:
    """The target directory. Subdirectories are opened one by one, and no link is followed."""

    def __init__(self, directory: Union[str, bytes, os.PathLike[str]]) -> None:
        self._top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        #: The directory that was opened last.
        self._last: Optional[tuple[Parts, int]] = None

    def directory(self, parts: Parts, make: bool = True) -> int:
        """An open directory, valid until the next call. Creates missing directories if ``make`` is set."""
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
    """Opens a directory, and never the target of a link."""
    return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def _make_directory(parent: int, name: bytes) -> bool:
    """Creates a directory unless it exists. Returns whether it is new."""
    try:
        os.mkdir(name, 0o777, dir_fd=parent)
        return True
    except FileExistsError:
        # The existing entry may be a file or a link.
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
    """Creates an entry under a random name and renames it. An existing entry is replaced and never followed; a
    reader sees the old or the new one."""
    unused = b".baton-" + secrets.token_hex(8).encode()
    try:
        make(unused)
        os.rename(unused, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        # The temporary name still exists if renaming failed, or if both names belong to the same file.
        with contextlib.suppress(OSError):
            os.unlink(unused, dir_fd=parent)


def _printable(name: bytes) -> str:
    """An untrusted name, made safe for a terminal and for a single line."""
    text = name[:_LONGEST_NAME].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
