"""Files of a sandbox. A transfer is a command without a program, and survives dropped connections as commands do."""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Optional, Union

from . import requests
from .clock import new_exec_id
from .errors import BatonError, FileError, ProtocolError
from .file_results import FileEntry, checked, interrupted, parse_listing
from .local_files import LocalPath, pack, read_pieces, unpack_stream
from .running import Running
from .watch import FileWatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import FileOptions, ReadOptions

Source = Union[bytes, bytearray, memoryview, str, AsyncIterable[bytes], Iterable[bytes]]


class Files(ABC):
    """Every method also takes ``user``, ``cwd`` (where relative paths start) and ``timeout``."""

    @abstractmethod
    async def _start(self, request: requests.Request, stdin: Optional[bytes] = None) -> Running: ...

    async def read_file(self, path: str, *, offset: int = 0, length: Optional[int] = None, **options: Unpack[FileOptions]) -> bytes:
        """The bytes of a file, or a part of them."""
        request = requests.read_file(new_exec_id(), path, offset=offset, length=length, **options)
        return checked(await (await self._start(request)).wait(), path).stdout_bytes

    async def read_text(self, path: str, **options: Unpack[ReadOptions]) -> str:
        """A file as text. Bytes that are not UTF-8 are replaced."""
        return (await self.read_file(path, **options)).decode("utf-8", "replace")

    async def read_stream(self, path: str, *, offset: int = 0, length: Optional[int] = None, archive: bool = False, **options: Unpack[FileOptions]
    ) -> AsyncGenerator[bytes, None]:
        """A file, or with ``archive`` a tar archive of a directory, piece by piece and with bounded memory."""
        request = requests.read_file(new_exec_id(), path, offset=offset, length=length, archive=archive, **options)
        running = await self._start(request)
        is_complete = False
        try:
            async for chunk in running.stdout.chunks():
                if not isinstance(chunk, bytes):
                    raise interrupted(path, running._exec.rolled_back)
                yield chunk
            is_complete = True
        finally:
            if not is_complete:
                with contextlib.suppress(BatonError):
                    await running.kill()
        checked(await running.wait(), path)

    async def write_file(
        self,
        path: str,
        data: Source,
        *,
        mode: Optional[int] = None,
        mtime: Optional[float] = None,
        size: Optional[int] = None,
        archive: bool = False,
        **options: Unpack[FileOptions],
    ) -> None:
        """Writes a file atomically: a reader sees the old or the new one. Missing directories are created.

        ``data`` may be an iterator. With ``archive`` it is a tar archive, which is unpacked into the directory ``path``.
        """
        whole: Optional[bytes] = None
        if isinstance(data, str):
            whole = data.encode()
        elif isinstance(data, (bytes, bytearray, memoryview)):
            whole = bytes(data)
        if whole is not None and not archive:
            size = len(whole)
        request = requests.write_file(
            new_exec_id(),
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
        checked(await running.wait(), path)

    async def list_files(self, path: str, *, depth: int = 1, **options: Unpack[FileOptions]) -> list[FileEntry]:
        """The entries of a directory. ``depth`` 0 lists only ``path`` itself, more than 1 also subdirectories."""
        request = requests.list_files(new_exec_id(), path, depth=depth, **options)
        return parse_listing(checked(await (await self._start(request)).wait(), path).stdout)

    async def stat_file(self, path: str, **options: Unpack[FileOptions]) -> FileEntry:
        """The file, directory or link at ``path`` itself. Raises ``FileError`` with code ``ENOENT`` if there is none."""
        entries = await self.list_files(path, depth=0, **options)
        if not entries:
            raise ProtocolError("the listing is empty")
        return entries[0]

    async def file_exists(self, path: str, **options: Unpack[FileOptions]) -> bool:
        """Whether there is anything at ``path``. A link counts, wherever it points."""
        try:
            await self.stat_file(path, **options)
        except FileError as error:
            if error.code in ("ENOENT", "ENOTDIR"):
                return False
            raise
        return True

    async def remove_file(self, path: str, *, recursive: bool = False, **options: Unpack[FileOptions]) -> None:
        """Removes a file, a link or an empty directory; with ``recursive`` a directory and everything in it."""
        request = requests.remove_file(new_exec_id(), path, recursive=recursive, **options)
        checked(await (await self._start(request)).wait(), path)

    async def rename_file(self, path: str, to: str, **options: Unpack[FileOptions]) -> None:
        """Renames a file or directory. A file at ``to`` is replaced atomically."""
        request = requests.rename_file(new_exec_id(), path, to, **options)
        checked(await (await self._start(request)).wait(), path)

    async def make_directory(
        self, path: str, *, parents: bool = True, mode: Optional[int] = None, **options: Unpack[FileOptions]
    ) -> None:
        """Creates a directory. With ``parents`` also the missing ones above it, and one that exists is not an error."""
        request = requests.make_directory(new_exec_id(), path, parents=parents, mode=mode, **options)
        checked(await (await self._start(request)).wait(), path)

    async def watch_files(self, path: str, *, recursive: bool = False, **options: Unpack[FileOptions]) -> FileWatch:
        """Watches a directory, or with ``recursive`` everything below it, or one file.

        When this returns, every later change is reported, also after a reconnect, a checkpoint and a handoff.
        """
        request = requests.watch_files(new_exec_id(), path, recursive=recursive, **options)
        return await FileWatch._start(await self._start(request), path)

    async def upload(self, local: LocalPath, path: str, **options: Unpack[FileOptions]) -> None:
        """Copies a local file or directory to ``path``, with modes and times."""
        about = os.stat(local)
        if os.path.isdir(local):
            await self.write_file(path, pack(local), archive=True, **options)
        else:
            pieces, mode = read_pieces(local), about.st_mode & 0o777
            await self.write_file(path, pieces, size=about.st_size, mode=mode, mtime=about.st_mtime, **options)

    async def download(self, path: str, local: LocalPath, **options: Unpack[FileOptions]) -> None:
        """Copies the file or directory at ``path`` to ``local``.

        The sandbox is not trusted: nothing outside ``local`` is written, linked or touched. Members of a directory that
        cannot be unpacked are skipped, all others are copied, and :class:`FileError` names the first skipped ones.
        Directories need a system that can open files relative to a directory. Windows cannot: ``FileError`` with ``ENOTSUP``.
        """
        entry = await self.stat_file(path, **options)
        if entry.kind == "directory":
            await unpack_stream(self.read_stream(path, archive=True, **options), local)
            return
        target = Path(os.path.abspath(local))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A temporary file is renamed at the end: a reader sees the old or the new file.
        handle, temporary = tempfile.mkstemp(prefix=".baton-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                async for data in self.read_stream(path, **options):
                    file.write(data)
            os.utime(temporary, (entry.mtime, entry.mtime))
            # The mode of a link means nothing; the file that it points to was downloaded.
            os.chmod(temporary, entry.mode & 0o777 if entry.kind == "file" else 0o644)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


async def _send(running: Running, data: Union[AsyncIterable[bytes], Iterable[bytes]]) -> None:
    exec, is_complete = running._exec, False
    try:
        async for piece in data if isinstance(data, AsyncIterable) else _as_async(data):
            # The result of a transfer that ended early says why.
            if exec.end is not None or not exec.is_reading:
                return
            await running.write_stdin(piece)
        is_complete = True
    except BatonError:
        if exec.end is None:
            raise
    finally:
        # An incomplete file must not be written.
        with contextlib.suppress(BatonError):
            await (running.close_stdin() if is_complete else running.signal("TERM"))


async def _as_async(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece
