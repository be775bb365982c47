"""Local files and directories, as streams to and from a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
from typing import Any, AsyncGenerator, AsyncIterator, Iterable, Optional, Union

from .clock import wait_for
from .unpack import LeftOut, unpack

LocalPath = Union[str, "os.PathLike[str]"]
_PIECE = 256 << 10


def read_pieces(path: LocalPath) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while True:
            piece = file.read(_PIECE)
            if not piece:
                return
            yield piece


class _ThreadPipe:
    """A file object for a thread, whose other end is in the event loop. Buffers a few pieces."""

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
                    # Every later read finds the end, too.
                    asyncio.run_coroutine_threadsafe(self._queue.put(None), self._loop).result()
                    break
                self._rest = memoryview(item)
            part, self._rest = self._rest[:left], self._rest[left:]
            left -= len(part)
            parts.append(part)
        return b"".join(parts)


async def pack(directory: LocalPath) -> AsyncIterator[bytes]:
    """Packs a directory; links are packed as links."""
    pipe = _ThreadPipe()

    def pack() -> None:
        with tarfile.open(fileobj=pipe, mode="w|", bufsize=_PIECE, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            tar.add(os.fspath(directory), arcname=".", filter=_without_owner)

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
        # The thread may be blocked until its output is taken.
        while not task.done():
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_for(pipe.get(), 0.05)
        await task


def _without_owner(member: tarfile.TarInfo) -> Optional[tarfile.TarInfo]:
    """Files, directories and links, without owners."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def unpack_stream(source: AsyncGenerator[bytes, None], directory: LocalPath) -> None:
    pipe = _ThreadPipe()
    task = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, _drain_into, pipe, directory))
    try:
        async for data in source:
            if not await _offer(pipe, data, task):
                break
    except BaseException:
        # What arrived is unpacked, and the error of the sandbox is raised.
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


async def _offer(pipe: _ThreadPipe, item: Optional[bytes], task: asyncio.Future[LeftOut]) -> bool:
    """Whether the thread still reads. After a failure it does not, and its pipe stays full."""
    put = asyncio.ensure_future(pipe.put(item))
    either: set[asyncio.Future[Any]] = {put, task}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not put.done():
            put.cancel()
    return not task.done()


def _drain_into(pipe: _ThreadPipe, directory: LocalPath) -> LeftOut:
    left_out = unpack(pipe, directory)
    # The source reports errors at its end.
    while pipe.read(_PIECE):
        pass
    return left_out
