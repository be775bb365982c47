#!/usr/bin/env python3
"""Archives that a hostile sandbox might send, directories to unpack them in, and a check of the results.

`hostile_archives.json` describes what each archive contains and what it must leave behind. This program builds the
archives from it, so that every client unpacks the same bytes. It needs only Python.

  hostile_archives.py prepare DIRECTORY      creates DIRECTORY/<name of the archive> for each archive, with
        archive.tar      what the sandbox sends
        scene/target/    where the client unpacks it
        scene/outside/   what no archive may touch
  hostile_archives.py judge DIRECTORY        reads the outcome of each archive from stdin, as
        {"<name>": {"left_out": 2} | {"error": "text"}}, and prints {"<name>": ["complaint", ...]}

For each archive the table has what it `makes` below the target, how many members are `left_out`, or that it ends with
an `error`. `naive` is the outcome of an extractor without any defence: it `escapes`, or its result `differs`.
`{outside}` is the absolute path of scene/outside, and `{text*3}` is texttexttext.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

TABLE: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())["archives"]
BLOCK = 512
#: The default time: long ago, so that every modification is visible.
THEN = 1_000_000_000
TYPES = {
    "file": b"0",
    "hardlink": b"1",
    "symlink": b"2",
    "character": b"3",
    "block": b"4",
    "directory": b"5",
    "fifo": b"6",
    "sparse": b"S",
    "unknown": b"Z",
}


# Building the archives.


def archive(case: dict[str, Any], outside: str) -> bytes:
    members = case["members"] if case.get("top") is False else [{"name": "./", "kind": "directory"}, *case["members"]]
    whole = b"".join(_member(member, outside) for member in members) + bytes(2 * BLOCK)
    return whole[: len(whole) + case["cut"]] if case.get("cut", 0) < 0 else whole


def expand(text: str, outside: str) -> bytes:
    text = text.replace("{outside}", outside)
    while True:
        shorter, text = text, re.sub(r"\{([^{}*]+)\*(\d+)\}", lambda found: found[1] * int(found[2]), text)
        if shorter == text:
            return text.encode()


def _member(member: dict[str, Any], outside: str) -> bytes:
    name, link = expand(member["name"], outside), expand(member.get("target", ""), outside)
    data = expand(member.get("data", ""), outside)
    records = {key: expand(value, outside) for key, value in member.get("pax", {}).items()}
    before = b""
    if member.get("format") == "gnu":
        before = _block(b"././@LongLink", b"L", len(name) + 1) + _padded(name + b"\0")
        before += _block(b"././@LongLink", b"K", len(link) + 1) + _padded(link + b"\0")
    else:
        records.update({key: value for key, value in (("path", name), ("linkpath", link)) if len(value) > 100})
    if records:
        text = b"".join(_record(key.encode(), value) for key, value in records.items())
        before += _block(b"PaxHeader", b"x", member.get("pax_size", len(text))) + _padded(text)
    block = _block(name, TYPES[member.get("kind", "file")], member.get("size", len(data)), member, link)
    return before + block + _padded(data)


def _block(name: bytes, kind: bytes, size: int, member: dict[str, Any] = {}, link: bytes = b"") -> bytes:
    mode = int(member.get("mode", "0755" if kind == b"5" else "0644"), 8)
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, member.get("mtime", THEN))
    head = _field(name, 100) + numbers
    rest = kind + _field(link, 100) + b"ustar\x0000" + bytes(80) + _field(member.get("prefix", "").encode(), 155) + bytes(12)
    total = sum(head) + sum(rest) + 8 * ord(" ") + member.get("checksum_off_by", 0)
    return head + b"%06o\0 " % total + rest


def _field(text: bytes, size: int) -> bytes:
    return text[:size].ljust(size, b"\0")


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def _record(key: bytes, value: bytes) -> bytes:
    """`length key=value`, whose length includes its own digits."""
    rest = len(key) + len(value) + 3
    length = rest
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


# The directories in which they are unpacked.


def prepare(directory: Path) -> None:
    for case in TABLE:
        prepare_one(directory, case)


def prepare_one(directory: Path, case: dict[str, Any]) -> Path:
    """Prepares one archive; returns its directory."""
    here = directory / case["name"]
    scene = here / "scene"
    outside = scene / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "file").write_text("canary")
    (outside / "sub" / "file").write_text("canary below")
    (outside / "link").symlink_to("file")
    for path in (outside / "sub" / "file", outside / "sub", outside / "file", outside):
        os.utime(path, (THEN - 1, THEN - 1))
    (here / "archive.tar").write_bytes(archive(case, str(outside)))
    if case.get("before", {}) is not None:
        (scene / "target").mkdir(mode=0o755)
        for name, thing in case.get("before", {}).items():
            _plant(scene / "target" / name, thing)
    os.utime(scene, (THEN - 1, THEN - 1))
    (here / "before.json").write_text(json.dumps(outside_of(scene)))
    return here


def _plant(path: Path, thing: dict[str, Any]) -> None:
    if "symlink" in thing:
        path.symlink_to(thing["symlink"])
    elif "directory" in thing:
        path.mkdir()
    else:
        path.write_text(thing["file"])


def outside_of(scene: Path) -> dict[str, list[Any]]:
    """Everything in a scene except its target, with the times of the last modification and the last change."""
    found = {}
    for path in [scene, *_below(scene, "target")]:
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        times = [about.st_mtime_ns, about.st_ctime_ns]
        found[str(path.relative_to(scene))] = [about.st_mode, about.st_nlink, *times, content]
    return found


def _below(top: Path, but: str = "") -> list[Path]:
    """Everything in a directory, at any depth. Directories whose path is too long to open are listed without their content."""
    found, unseen = [], [str(top)]
    while unseen:
        directory = unseen.pop()
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if directory == str(top) and entry.name == but:
                    continue
                found.append(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    unseen.append(entry.path)
    return found


# Checking the results against the table.


def judge(directory: Path, outcomes: dict[str, Any]) -> dict[str, list[str]]:
    return {case["name"]: judge_one(directory, case, outcomes.get(case["name"], {})) for case in TABLE}


def judge_one(directory: Path, case: dict[str, Any], outcome: dict[str, Any]) -> list[str]:
    """A sentence for each difference."""
    here = directory / case["name"]
    return what_changed_outside(here, case) + _differences(here / "scene" / "target", case) + _said(case, outcome)


def what_changed_outside(here: Path, case: dict[str, Any]) -> list[str]:
    before, after = json.loads((here / "before.json").read_text()), outside_of(here / "scene")
    if case.get("before", {}) is None:
        # The client created the target, which changes its parent.
        before.pop("."), after.pop(".", None)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"outside, {name} was {before.get(name)} and is {after.get(name)}" for name in names]


def _differences(target: Path, case: dict[str, Any]) -> list[str]:
    scene = str(target.parent)
    wanted = {expand(name, scene).decode(): thing for name, thing in case["makes"].items()}
    found = {str(path.relative_to(target)): path for path in _below(target)}
    if target.exists():
        found["."] = target
    complaints = [f"{name[:60]} is there" for name in sorted(found.keys() - wanted.keys() - {"."})]
    complaints += [f"{name[:60]} is missing" for name in sorted(wanted.keys() - found.keys())]
    for name in sorted(found.keys() & wanted.keys()):
        thing = {key: expand(value, scene).decode() if isinstance(value, str) else value for key, value in wanted[name].items()}
        seen = _describe(found[name])
        if thing.items() - seen.items():
            complaints.append(f"{name[:60]} is {seen} instead of {thing}")
    return complaints


def _describe(path: Path) -> dict[str, Any]:
    about = path.lstat()
    seen: dict[str, Any] = {"mode": f"{stat.S_IMODE(about.st_mode):04o}", "mtime": about.st_mtime_ns / 1e9}
    if stat.S_ISDIR(about.st_mode):
        return {**seen, "directory": True}
    if stat.S_ISLNK(about.st_mode):
        return {**seen, "symlink": os.readlink(path)}
    if stat.S_ISREG(about.st_mode):
        return {**seen, "file": path.read_text(), "links": about.st_nlink}
    return {**seen, "special": True}


def _said(case: dict[str, Any], outcome: dict[str, Any]) -> list[str]:
    if case.get("error"):
        return [] if "error" in outcome else [f"the client reported {outcome}, and not that the archive is damaged"]
    wanted = {"left_out": case.get("left_out", 0)}
    return [] if outcome == wanted else [f"the client reported {outcome} instead of {wanted}"]


def main(do: str, directory: Path) -> int:
    if do == "prepare":
        prepare(directory)
        return 0
    complaints = judge(directory, json.load(sys.stdin))
    print(json.dumps(complaints))
    return 1 if any(complaints.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
