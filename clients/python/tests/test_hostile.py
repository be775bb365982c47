"""Downloads from a hostile sandbox: every client unpacks the archives of `clients/suite`, and one program checks the results."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, AsyncGenerator, Iterator, Optional

import pytest
from testbed import SUITE

from baton_sandbox import FileError, ProtocolError, unpack
from baton_sandbox.running import Running
from baton_sandbox.file_results import FileEntry, parse_listing
from baton_sandbox.files import Files
from baton_sandbox.requests import Request

sys.path.insert(0, str(SUITE))
import hostile_archives as hostile  # noqa: E402

CASES = {case["name"]: case for case in hostile.TABLE}
#: Small pieces end in the middle of headers, numbers and names.
PIECES = (100, 1 << 20)


class HostileSandbox(Files):
    """A sandbox that claims to be a directory and sends an archive of its own."""

    def __init__(self, archive: bytes, piece: int = 1 << 20, fails_with: Optional[Exception] = None) -> None:
        self._archive, self._piece, self._fails_with = archive, piece, fails_with
        self.is_closed, self.sent = False, 0

    async def _start(self, request: Request, stdin: Optional[bytes] = None) -> Running:
        raise NotImplementedError

    async def list_files(self, path: str, **options: Any) -> list[FileEntry]:
        return [FileEntry("x", "directory")]

    async def read_stream(self, path: str, **options: Any) -> AsyncGenerator[bytes, None]:
        try:
            for at in range(0, len(self._archive), self._piece):
                self.sent += 1
                yield self._archive[at : at + self._piece]
            if self._fails_with:
                raise self._fails_with
        finally:
            self.is_closed = True


@pytest.fixture
def place() -> Iterator[Path]:
    """Has a short name, because one archive has paths of just under 4096 bytes."""
    place = Path(tempfile.mkdtemp(prefix="b"))
    yield place
    shutil.rmtree(place)


async def download(sandbox: HostileSandbox, target: Path) -> dict[str, Any]:
    """The outcome of a download, in the form that the check expects."""
    try:
        await sandbox.download("/x", target)
    except FileError as error:
        text = str(error)
        if not text.startswith("left out: "):
            return {"error": text}
        more = re.search(r"; and (\d+) more$", text)
        return {"left_out": text.count("; ") + 1 + (int(more[1]) - 1 if more else 0)}
    return {"left_out": 0}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("name", CASES)
async def test_a_hostile_archive_leaves_behind_what_the_table_says(name: str, piece: int, place: Path) -> None:
    here = hostile.prepare_one(place, CASES[name])
    sandbox = HostileSandbox((here / "archive.tar").read_bytes(), piece)
    outcome = await download(sandbox, here / "scene" / "target")
    assert hostile.judge_one(place, CASES[name], outcome) == []
    assert sandbox.is_closed


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "naive" in case])
def test_without_the_defence_the_attack_works(name: str, place: Path) -> None:
    """The control: with a naive extractor the attack works, and the check notices it."""
    case = CASES[name]
    here = hostile.prepare_one(place, case)
    outcome: dict[str, Any] = {"left_out": case.get("left_out", 0)}
    try:
        with tarfile.open(here / "archive.tar", errorlevel=0) as tar:
            tar.extractall(here / "scene" / "target", filter="fully_trusted")
    except (OSError, ValueError, RecursionError) as error:
        outcome = {"error": str(error)}
    touched, complaints = hostile.what_changed_outside(here, case), hostile.judge_one(place, case, outcome)
    assert ("escapes" if touched else "differs" if complaints else "same") == case["naive"], complaints


def test_the_table_has_its_controls() -> None:
    assert len(CASES) == len(hostile.TABLE) >= 50
    assert sum(case.get("naive") == "escapes" for case in hostile.TABLE) >= 20


def test_names_are_split_as_in_the_other_clients() -> None:
    for bad in (b"/etc/passwd", b"../x", b"a/../../x", b"a/..", b"..", b"a\0b", b"a/" * 3000):
        assert unpack.split_name(bad) is None, bad
    assert unpack.split_name(b"./a//b/.") == (b"a", b"b")
    assert unpack.split_name(b"./") == ()
    assert unpack.split_name(b"..a/b..") == (b"..a", b"b..")


def test_a_link_stays_inside_only_if_its_text_shows_it() -> None:
    table = [(b"b", 0, True), (b"../b", 1, True), (b"../../b", 1, False), (b"..", 0, False), (b"/etc", 5, False)]
    # If `a` is a link to `.`, these are above the top.
    table += [(b"a/../b", 0, False), (b"../a/../../b", 3, False), (b"a\0b", 0, False), (b"", 0, True)]
    for target, depth, inside in table:
        assert unpack.stays_inside(target, depth) is inside, (target, depth)


def packed(*members: tuple[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return whole.getvalue()


async def test_names_that_are_not_utf_8_are_kept(tmp_path: Path) -> None:
    await HostileSandbox(packed(("odd-\udcff\udc80", b"odd"))).download("/x", tmp_path)
    assert os.listdir(os.fsencode(tmp_path)) == [b"odd-\xff\x80"]


async def test_a_hostile_name_cannot_write_to_the_terminal_nor_fill_memory(tmp_path: Path) -> None:
    names = [f"../\x1b[2J\n\u202e{number}" + "n" * 5000 for number in range(300)]
    with pytest.raises(FileError, match="and 290 more$") as found:
        await HostileSandbox(packed(*((name, b"") for name in names))).download("/x", tmp_path)
    assert str(found.value).isprintable() and len(str(found.value)) < 5000 and found.value.code == "EINVAL"


async def test_an_archive_that_is_refused_early_ends_the_transfer(tmp_path: Path) -> None:
    """The pipe is full, and the thread that reads it has failed."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: reported.append(what))
    sandbox = HostileSandbox(b"\xff" * (1 << 20), piece=1000)
    with pytest.raises(FileError, match="damaged"):
        await sandbox.download("/x", tmp_path)
    assert sandbox.is_closed and sandbox.sent < 100
    for count in range(1, 8):
        # Also if the sandbox has sent everything when the thread fails.
        with pytest.raises(FileError, match="damaged"):
            await HostileSandbox(b"\xff" * 512 * count, piece=512).download("/x", tmp_path)
    gc.collect()
    assert reported == [], "no task was left behind"


async def test_an_error_of_the_sandbox_comes_first(tmp_path: Path) -> None:
    """Even after more bytes behind the end of the archive than the pipe holds."""
    archive = packed(("../bad", b""), ("good", b"good")) + bytes(100 << 10)
    with pytest.raises(FileError, match="the disk is gone"):
        await HostileSandbox(archive, 512, FileError("the disk is gone", "EIO")).download("/x", tmp_path)
    assert (tmp_path / "good").read_bytes() == b"good"


async def test_a_system_without_descriptors_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    with pytest.raises(FileError) as found:
        await HostileSandbox(packed(("good", b"good"))).download("/x", tmp_path / "new")
    assert found.value.code == "ENOTSUP" and not (tmp_path / "new").exists()


async def test_a_full_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(FileError, match="^one: No space") as found:
        await HostileSandbox(packed(("one", b"1"), ("two", b"2"))).download("/x", tmp_path)
    assert found.value.code == "ENOSPC" and os.listdir(tmp_path) == []


def test_a_directory_is_complete_once_it_is_left(tmp_path: Path) -> None:
    """The memory that it needs does not grow with the archive."""
    members = [{"name": f"{number}/", "kind": "directory", "mode": "0700"} for number in range(3)]
    whole = io.BytesIO(hostile.archive({"members": members}, ""))
    modes = []

    class Watched:
        def read(self, size: int) -> bytes:
            modes.append([f"{(tmp_path / name).stat().st_mode & 0o777:o}" for name in sorted(os.listdir(tmp_path))])
            return whole.read(size)

    before = os.umask(0o022)
    try:
        unpack.unpack(Watched(), tmp_path)
    finally:
        os.umask(before)
    assert modes[-2:] == [["700", "755"], ["700", "700", "755"]]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in ("kinds-that-change", "hard-link-to-no-file", "cut-in-a-file", "closed-directory"):
        here = hostile.prepare_one(tmp_path, CASES[name])
        with contextlib.suppress(FileError):
            unpack.unpack(io.BytesIO((here / "archive.tar").read_bytes()), here / "scene" / "target")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_malformed_listing_is_a_protocol_error() -> None:
    good = '{"name":"x","kind":"file","size":1,"mode":420,"mtime_ms":-5}'
    assert parse_listing(good)[0].mtime == -0.005
    bad = ["x", "[]", "{}", '{"name":"x"}', '{"name":1,"kind":"file"}', "[" * 100_000]
    bad += ['{"name":"x","kind":"file","mode":"0"}', '{"name":"x","kind":"file","mtime_ms":1e400}']
    bad += ['{"name":"x","kind":"file","mtime_ms":99999999999999999999}', '{"name":"x","kind":"file","target":1}']
    for line in bad:
        with pytest.raises(ProtocolError):
            parse_listing(line)
    assert parse_listing("") == []
