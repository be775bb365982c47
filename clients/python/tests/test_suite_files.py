"""The suite that every client library runs: files."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import AsyncIterator

import pytest
from suite import cuts
from testbed import SIZES, Proxy

from baton_sandbox import FileError, Sandbox

def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


async def test_files_go_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write_file("/data/new/note.txt", "é\n", mode=0o640)
    assert await sandbox.read_file("/data/new/note.txt") == "é\n".encode()
    assert await sandbox.read_text("/data/new/note.txt") == "é\n"
    assert await sandbox.read_file("note.txt", cwd="/data/new", offset=1, length=1) == b"\xa9"
    assert (await sandbox.run("stat -c %a /data/new/note.txt")).stdout == "640\n"
    await sandbox.write_file("/data/empty", b"")
    entries = await sandbox.list_files("/data", depth=2)
    assert [(entry.name, entry.kind, entry.size) for entry in entries if entry.kind == "file"] == [
        ("empty", "file", 0),
        ("new/note.txt", "file", 3),
    ]

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(3):
            yield b"%d" % i

    await sandbox.write_file("/data/pieces", pieces())
    assert b"".join([data async for data in sandbox.read_stream("/data/pieces")]) == b"012"
    for path, code in [("/no/such", "ENOENT"), ("/data", "EISDIR")]:
        with pytest.raises(FileError) as failed:
            await sandbox.read_file(path)
        assert failed.value.code == code
    with pytest.raises(FileError):
        await sandbox.write_file("/data", "x")

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        await sandbox.write_file("/data/half", half())
    with pytest.raises(FileError):
        await sandbox.read_file("/data/half")
    local = tmp_path / "up"
    local.write_bytes(b"up and down")
    local.chmod(0o750)
    os.utime(local, (1_700_000_000, 1_700_000_000))
    await sandbox.upload(local, "/data/up")
    await sandbox.download("/data/up", tmp_path / "deep" / "down")
    down = (tmp_path / "deep" / "down").stat()
    assert (down.st_mode & 0o777, down.st_mtime, down.st_size) == (0o750, 1_700_000_000, 11)


async def test_a_directory_goes_in_and_out(sandbox: Sandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    long = "n" * 120
    for name in ("a.txt", f"sub/{long}", "sub/empty"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name.replace("empty", ""))
    (source / "link").symlink_to("sub/empty")
    (source / "a.txt").chmod(0o755)
    await sandbox.upload(source, "/in")
    found = (await sandbox.run("cd /in; find . -type f -o -type l | sort; stat -c %a a.txt; readlink link")).stdout
    assert found.split() == ["./a.txt", "./link", "./sub/empty", f"./sub/{long}", "755", "sub/empty"]
    await sandbox.run("cd /in; ln -s /etc/passwd out; mkfifo pipe; echo more > more")
    with pytest.raises(FileError):
        await sandbox.download("/in", target)
    # What could be trusted is there, and nothing else.
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert names == ["a.txt", "link", "more", "sub", "sub/empty", f"sub/{long}"]
    assert (target / "sub" / long).read_text() == f"sub/{long}" and os.access(target / "a.txt", os.X_OK)
    assert os.readlink(target / "link") == "sub/empty"


async def test_files_are_exact_over_cuts(proxy: Proxy, sandbox: Sandbox, tmp_path: Path) -> None:
    size, count = SIZES["file"], SIZES["file_cuts"]
    local, back = tmp_path / "local", tmp_path / "back"
    with local.open("wb") as file:
        for i in range(size // 65536 + 1):
            file.write(hashlib.sha256(b"%d" % i).digest() * 2048)

    async def cut() -> None:
        for _ in range(count):
            await asyncio.sleep(0.15)
            await proxy.network(cut=True)

    cutting = asyncio.ensure_future(cut())
    await sandbox.upload(local, "/big")
    await cutting
    await proxy.network(cuts=cuts(size, count), cut=True)
    await sandbox.download("/big", back)
    assert await asyncio.to_thread(digest_of, local) == await asyncio.to_thread(digest_of, back)
    await sandbox.run("rm /big")
