"""Files of a sandbox: a transfer is a command without a program, and outlasts drops as one does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tarfile
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Optional, Union

from . import protocol, seam
from .errors import BatonError, ExecLostError, FileError, ProtocolError
from .exec import Running
from .unpack import LeftOut, unpack

Source = Union[bytes, bytearray, memoryview, str, AsyncIterable[bytes], Iterable[bytes]]
LocalPath = Union[str, "os.PathLike[str]"]
_PIECE = 256 << 10


@dataclass(frozen=True)
class FileEntry:
    """One line of a listing."""

    #: Relative to the path asked for; of that path itself, its last part.
    name: str
    #: ``"file"``, ``"directory"``, ``"symlink"`` or ``"other"``.
    kind: str
    size: int = 0
    #: Permission bits.
    mode: int = 0
    #: Seconds since 1970.
    mtime: float = 0.0
    #: Where a symbolic link points.
    target: Optional[str] = None


class Files(ABC):
    """Options of every method: ``user``, ``cwd`` (where a relative path begins) and ``timeout``."""

    @abstractmethod
    async def _start(self, request: protocol.Request, stdin: Optional[bytes] = None) -> Running: ...

    async def read_file(self, path: str, *, offset: int = 0, length: Optional[int] = None, **options: Any) -> bytes:
        """A file's bytes, or a part of them."""
        request = protocol.read_file(seam.exec_id(), path, offset=offset, length=length, **options)
        result = await (await self._start(request)).wait()
        if result.exit_code != 0:
            raise fault_of(result.stderr, path)
        if result.lost:
            raise ExecLostError(f"{result.lost} bytes of {path} were not kept on the way")
        return result.stdout_bytes

    async def read_text(self, path: str, **options: Any) -> str:
        return (await self.read_file(path, **options)).decode("utf-8", "replace")

    async def read_stream(self, path: str, *, archive: bool = False, **options: Any) -> AsyncGenerator[bytes, None]:
        """A file, or with ``archive`` a tar archive of a directory, piece by piece with bounded memory."""
        running = await self._start(protocol.read_file(seam.exec_id(), path, archive=archive, **options))
        is_whole = False
        try:
            async for chunk in running.stdout.chunks():
                if not isinstance(chunk, bytes):
                    raise ExecLostError(f"{path} was not kept on the way: begin again")
                yield chunk
            is_whole = True
        finally:
            if not is_whole:
                with contextlib.suppress(BatonError):
                    await running.kill()
        result = await running.wait()
        if result.exit_code != 0:
            raise fault_of(result.stderr, path)

    async def write_file(
        self,
        path: str,
        data: Source,
        *,
        mode: Optional[int] = None,
        mtime: Optional[float] = None,
        size: Optional[int] = None,
        archive: bool = False,
        **options: Any,
    ) -> None:
        """Writes a file, all at once: a reader sees the old or the new one. Missing directories are made.

        ``data`` may come piece by piece. With ``archive`` it is a tar archive, unpacked into the directory ``path``.
        """
        whole: Optional[bytes] = None
        if isinstance(data, str):
            whole = data.encode()
        elif isinstance(data, (bytes, bytearray, memoryview)):
            whole = bytes(data)
        if whole is not None and not archive:
            size = len(whole)
        request = protocol.write_file(
            seam.exec_id(),
            path,
            mode=mode,
            mtime_ms=None if mtime is None else round(mtime * 1000),
            size=size,
            archive=archive,
            **options,
        )
        running = await self._start(request, whole)
        if whole is None:
            await _send(running, data)  # type: ignore[arg-type]
        result = await running.wait()
        if result.exit_code != 0:
            raise fault_of(result.stderr, path)

    async def list_files(self, path: str, *, depth: int = 1, **options: Any) -> list[FileEntry]:
        """What is in a directory; ``depth`` 0 tells of ``path`` itself, more than 1 of what is below."""
        result = await (await self._start(protocol.list_files(seam.exec_id(), path, depth=depth, **options))).wait()
        if result.exit_code != 0:
            raise fault_of(result.stderr, path)
        return parse_listing(result.stdout)

    async def upload(self, local: LocalPath, path: str, **options: Any) -> None:
        """Copies a file or directory of this machine to ``path``, with modes and times."""
        about = os.stat(local)
        if os.path.isdir(local):
            await self.write_file(path, _pack(local), archive=True, **options)
        else:
            pieces, mode = _pieces(local), about.st_mode & 0o777
            await self.write_file(path, pieces, size=about.st_size, mode=mode, mtime=about.st_mtime, **options)

    async def download(self, path: str, local: LocalPath, **options: Any) -> None:
        """Copies the file or directory at ``path`` to this machine: ``local`` becomes what is there.

        The sandbox is not trusted: nothing outside ``local`` is written, linked or touched. Of a directory, members that
        cannot be unpacked are left out, all others are there, and :class:`FileError` names the first ones. Directories
        need a system that opens files relative to a directory, which Windows does not: ``FileError`` with ``ENOTSUP``.
        """
        entries = await self.list_files(path, depth=0, **options)
        if not entries:
            raise FileError(f"{path}: no such file", "ENOENT")
        entry = entries[0]
        if entry.kind == "directory":
            await _unpack(self.read_stream(path, archive=True, **options), local)
            return
        target = Path(os.path.abspath(local))
        target.parent.mkdir(parents=True, exist_ok=True)
        # To a new file beside, which takes its name at the end: a reader sees the old or the new one.
        handle, beside = tempfile.mkstemp(prefix=".baton-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                async for data in self.read_stream(path, **options):
                    file.write(data)
            os.utime(beside, (entry.mtime, entry.mtime))
            # A link is followed, and has a mode of its own that means nothing.
            os.chmod(beside, entry.mode & 0o777 if entry.kind == "file" else 0o644)
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            raise


def parse_listing(text: str) -> list[FileEntry]:
    return [_entry(line) for line in text.splitlines()]


def _entry(line: str) -> FileEntry:
    try:
        fields = json.loads(line)
        name, kind, target = fields["name"], fields["kind"], fields.get("target")
        numbers = [fields.get(key, 0) for key in ("size", "mode", "mtime_ms")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged_listing() from error
    is_whole = isinstance(name, str) and isinstance(kind, str) and isinstance(target, (str, type(None)))
    # More than 63 bits are no time and no size, and would overflow where they are used.
    if not is_whole or not all(isinstance(number, int) and abs(number) < 1 << 63 for number in numbers):
        raise _damaged_listing()
    size, mode, mtime_ms = numbers
    known = kind if kind in ("file", "directory", "symlink") else "other"
    return FileEntry(name, known, size, mode, mtime_ms / 1000, target)


def _damaged_listing() -> ProtocolError:
    return ProtocolError("a listing is damaged")


def fault_of(stderr: str, path: str) -> FileError:
    """The first fault that stderr names, as in ``ENOENT: No such file or directory: /data/x``."""
    line = (stderr.strip().splitlines() or [""])[0]
    found = re.match(r"(E[A-Z0-9]+): (.*)", line)
    return FileError(found[2], found[1]) if found else FileError(line or f"{path}: it did not work", "EIO")


async def _send(running: Running, data: Union[AsyncIterable[bytes], Iterable[bytes]]) -> None:
    exec, is_whole = running._exec, False
    try:
        async for piece in data if isinstance(data, AsyncIterable) else _later(data):
            # One that ended early says why itself.
            if exec.end is not None or not exec.is_read:
                return
            await running.write_stdin(piece)
        is_whole = True
    except BatonError:
        if exec.end is None:
            raise
    finally:
        # Half a file must not become one.
        with contextlib.suppress(BatonError):
            await (running.close_stdin() if is_whole else running.signal("TERM"))


async def _later(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def _pieces(path: LocalPath) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while True:
            piece = file.read(_PIECE)
            if not piece:
                return
            yield piece


class _Pipe:
    """A file object for a thread, fed by the loop or read by it, with a few pieces between."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Union[bytes, Exception, None]] = asyncio.Queue(4)
        self._rest = memoryview(b"")

    async def put(self, item: Union[bytes, Exception, None]) -> None:
        await self._queue.put(item)

    async def get(self) -> Union[bytes, Exception, None]:
        return await self._queue.get()

    # For the thread.

    def write(self, data: bytes) -> int:
        asyncio.run_coroutine_threadsafe(self._queue.put(bytes(data)), self._loop).result()
        return len(data)

    def read(self, size: int) -> bytes:
        parts: list[memoryview] = []
        left = size
        while left:
            if not self._rest:
                item = asyncio.run_coroutine_threadsafe(self._queue.get(), self._loop).result()
                if not isinstance(item, bytes):
                    # It stays the end for everybody who asks again.
                    asyncio.run_coroutine_threadsafe(self._queue.put(None), self._loop).result()
                    break
                self._rest = memoryview(item)
            part, self._rest = self._rest[:left], self._rest[left:]
            left -= len(part)
            parts.append(part)
        return b"".join(parts)


async def _pack(directory: LocalPath) -> AsyncIterator[bytes]:
    """A directory and everything in it, links as links."""
    pipe = _Pipe()

    def pack() -> None:
        with tarfile.open(fileobj=pipe, mode="w|", bufsize=_PIECE, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            tar.add(os.fspath(directory), arcname=".", filter=_plain)

    async def work() -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, pack)
            await pipe.put(None)
        except Exception as error:
            await pipe.put(error)

    task = asyncio.ensure_future(work())
    try:
        while True:
            item = await pipe.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        # The thread may wait for somebody who takes what it made.
        while not task.done():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(pipe.get(), 0.05)
        await task


def _plain(member: tarfile.TarInfo) -> Optional[tarfile.TarInfo]:
    """Files, directories and links; nobody's names and numbers."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def _unpack(source: AsyncGenerator[bytes, None], directory: LocalPath) -> None:
    pipe = _Pipe()
    task = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, _drain_into, pipe, directory))
    try:
        async for data in source:
            if not await _offer(pipe, data, task):
                break
    except BaseException:
        # What came is unpacked; what went wrong in the sandbox is raised.
        await _offer(pipe, None, task)
        with contextlib.suppress(Exception):
            await task
        raise
    finally:
        await source.aclose()
    await _offer(pipe, None, task)
    left_out = await task
    if left_out.count:
        raise left_out.error()


async def _offer(pipe: _Pipe, item: Optional[bytes], task: asyncio.Future[LeftOut]) -> bool:
    """Whether the thread can still take it: one that failed reads no more, and its pipe stays full."""
    put = asyncio.ensure_future(pipe.put(item))
    either: set[asyncio.Future[Any]] = {put, task}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not put.done():
            put.cancel()
    return not task.done()


def _drain_into(pipe: _Pipe, directory: LocalPath) -> LeftOut:
    left_out = unpack(pipe, directory)
    # The source says at its end whether all was well.
    while pipe.read(_PIECE):
        pass
    return left_out
