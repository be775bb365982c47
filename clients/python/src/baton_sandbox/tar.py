"""Tar archives as a stream of members: ustar, pax headers and GNU's long names. Touches no file.

The archive may come from a hostile sandbox. Every field is validated, and only the names of one member are kept
in memory, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Optional, Protocol

from .errors import FileError

BLOCK = 512
#: The longest pax header or long name, which bounds the memory that one member needs.
MAX_HEADER = 256 << 10
_PIECE = 256 << 10
_MAX_INT64 = (1 << 63) - 1
_NANO = 1_000_000_000


class Readable(Protocol):
    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or fewer at the end."""


class Kind(Enum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    HARD_LINK = "hard link"
    #: A device, a pipe, or an unknown type.
    OTHER = "other"


@dataclass(frozen=True)
class Member:
    """One member, without its data."""

    #: The name in the archive, not validated.
    name: bytes
    kind: Kind
    #: Permission bits, including set-user-ID, set-group-ID and sticky.
    mode: int
    #: The size of the data; 0 unless it is a file.
    size: int
    #: Nanoseconds since 1970.
    mtime_ns: int
    #: The target of a link.
    link: bytes


@dataclass(frozen=True)
class _Header:
    type: bytes
    #: The number of bytes that follow the header, also for members without data.
    size: int
    member: Member


@dataclass
class _Extended:
    """The extended headers of a member."""

    name: Optional[bytes] = None
    link: Optional[bytes] = None
    size: Optional[int] = None
    mtime_ns: Optional[int] = None
    is_sparse: bool = False

    def take(self, records: list[tuple[bytes, bytes]]) -> None:
        for key, value in records:
            if key in (b"path", b"GNU.sparse.name"):
                self.name = value
            elif key == b"linkpath":
                self.link = value
            elif key == b"mtime":
                self.mtime_ns = parse_time(value)
            elif key == b"size":
                self.size = _digits(value, 10)
                if self.size is None:
                    raise damaged("a member has no size")
            self.is_sparse |= key.startswith(b"GNU.sparse.")


class Reader:
    """Reads one member after the other, and the data of the current one."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        #: Unread bytes of the member's data, and of the padding after it.
        self._left = self._padding = 0

    def next_member(self) -> Optional[Member]:
        """The next member; ``None`` at the end. Skips the unread data of the current one."""
        extended = _Extended()
        while True:
            self._pass_over()
            block = self._source.read(BLOCK)
            # The archive may end between two members, with or without a block of zeros.
            if not block or block == bytes(BLOCK):
                return None
            if len(block) < BLOCK:
                raise _cut_off()
            header = _parse(block)
            self._expect(header.size)
            if header.type == b"x":
                extended.take(parse_records(self._whole()))
            elif header.type == b"L":
                extended.name = _text(self._whole())
            elif header.type == b"K":
                extended.link = _text(self._whole())
            elif header.type != b"g":
                return self._complete(header.member, extended)

    def read(self) -> bytes:
        """The next piece of the member's data; empty after the last one."""
        size = min(self._left, _PIECE)
        piece = self._source.read(size) if size else b""
        if len(piece) < size:
            raise _cut_off()
        self._left -= size
        return piece

    def _complete(self, member: Member, extended: _Extended) -> Member:
        if extended.size is not None and member.kind in (Kind.FILE, Kind.OTHER):
            self._expect(extended.size)
            member = replace(member, size=extended.size if member.kind is Kind.FILE else 0)
        if extended.is_sparse:
            # The data of a sparse file is not the content of the file.
            member = replace(member, kind=Kind.OTHER, size=0)
        name = member.name if extended.name is None else extended.name
        # Old archivers mark directories only by a slash at the end of the name, and a long name is complete only now.
        if member.kind is Kind.FILE and name.endswith(b"/"):
            member = replace(member, kind=Kind.DIRECTORY, size=0)
        link = member.link if extended.link is None else extended.link
        mtime_ns = member.mtime_ns if extended.mtime_ns is None else extended.mtime_ns
        return replace(member, name=name, link=link, mtime_ns=mtime_ns)

    def _expect(self, size: int) -> None:
        self._left, self._padding = size, -size % BLOCK

    def _whole(self) -> bytes:
        if self._left > MAX_HEADER:
            raise damaged("a header is too long")
        return b"".join(iter(self.read, b""))

    def _pass_over(self) -> None:
        self._left, self._padding = self._left + self._padding, 0
        while self.read():
            pass


def damaged(why: str) -> FileError:
    return FileError(f"the archive is damaged: {why}", "EINVAL")


def _cut_off() -> FileError:
    return damaged("it ends in the middle")


_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"1": Kind.HARD_LINK,
    b"2": Kind.SYMLINK,
    b"5": Kind.DIRECTORY,
}


def _parse(block: bytes) -> _Header:
    _check_sum(block)
    type = block[156:157]
    kind = _KINDS.get(type, Kind.OTHER)
    size = parse_number(block[124:136])
    if size is None or size < 0:
        raise damaged("a member has no size")
    name, prefix = _text(block[:100]), _text(block[345:500])
    if block[257:263] == b"ustar\0" and prefix:
        name = prefix + b"/" + name
    mode = parse_number(block[100:108])
    member = Member(
        name=name,
        kind=kind,
        mode=(0o644 if mode is None else mode) & 0o7777,
        size=size if kind is Kind.FILE else 0,
        mtime_ns=(parse_number(block[136:148]) or 0) * _NANO,
        link=_text(block[157:257]),
    )
    # Links, devices and pipes have no data, whatever their headers claim; unknown types have the size in their header.
    has_data = type not in (b"1", b"2", b"3", b"4", b"5", b"6")
    return _Header(type, size if has_data else 0, member)


def _check_sum(block: bytes) -> None:
    stated = parse_number(block[148:156])
    counted = block[:148] + b" " * 8 + block[156:]
    # Some old archivers added signed bytes.
    if stated != sum(counted) and stated != sum(counted) - 256 * sum(byte > 127 for byte in counted):
        raise damaged("it is no tar archive, or a header was changed")


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def parse_number(field: bytes) -> Optional[int]:
    """Octal digits, or GNU's binary numbers. An empty field is 0."""
    if field[0] & 0x80:
        sign = -1 if field[0] & 0x40 else field[0] & 0x3F
        number = sign * 256 ** (len(field) - 1) + int.from_bytes(field[1:], "big")
        return number if -_MAX_INT64 <= number <= _MAX_INT64 else None
    digits = field.lstrip(b" ").replace(b"\0", b" ").split(b" ", 1)[0]
    return _digits(digits, 8) if digits else 0


def _digits(text: bytes, base: int) -> Optional[int]:
    # int() also accepts signs, blanks and underscores, which are not allowed here. 21 octal digits are 63 bits.
    if not text or len(text) > 21 or text.strip(b"01234567" if base == 8 else b"0123456789"):
        return None
    number = int(text, base)
    return number if number <= _MAX_INT64 else None


def parse_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """The records ``length key=value`` of a pax header."""
    records = []
    while data:
        space = data.find(b" ", 0, 8)
        length = _digits(data[: max(space, 0)], 10)
        if length is None or not space + 1 < length <= len(data) or data[length - 1 : length] != b"\n":
            raise damaged("a pax header")
        key, equals, value = data[space + 1 : length - 1].partition(b"=")
        if not equals:
            raise damaged("a pax header")
        records.append((key, value))
        data = data[length:]
    return records


def parse_time(text: bytes) -> Optional[int]:
    """Seconds with a fraction, also before 1970, in nanoseconds; ``None`` if it is not a valid time."""
    whole, _, fraction = text.partition(b".")
    is_negative = whole.startswith(b"-")
    seconds = _digits(whole[is_negative:], 10)
    if seconds is None or fraction.strip(b"0123456789"):
        return None
    nanoseconds = seconds * _NANO + int(fraction[:9].ljust(9, b"0"))
    return -nanoseconds if is_negative else nanoseconds
