"""Every fixture of the protocol: requests are built like them, and events are parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_sandbox import protocol, requests
from baton_sandbox.file_results import parse_listing
from baton_sandbox.protocol import Status

FIXTURES = Path(__file__).parents[3] / "crates" / "protocol" / "fixtures"


def fixtures(kind: str) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((FIXTURES / kind).glob("*.json"))}


CHECKPOINT = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab-7-12-00112233445566778899aabbccddeeff"
REQUESTS: dict[str, Any] = {
    "ack": requests.ack("build-7", 4096, 17),
    "checkpoint": requests.checkpoint(live=True, keep_running=True),
    "config": requests.config(
        idle_timeout=300,
        enable_checkpoint=True,
        enable_sandbox_handoff=True,
        enable_idle_timeout_auto_checkpoint=True,
        filesystem_snapshot_name="py3.11",
        labels={"team": "blue"},
        env={"LANG": "C.UTF-8"},
        cwd="/root",
        limits={"memory": 512 << 20, "cpus": 1.5, "pids": 256, "disk": 1 << 30, "files": 1024},
        ttl=86400,
        on_incompatible="files",
        from_checkpoint=CHECKPOINT,
        source_token="t0ken",
    ),
    "config_network": requests.config(network={"egress": ["example.org:443", "*.example.net", "203.0.113.0/24:5432"]}),
    "config_never_idle": requests.config(idle_timeout=None),
    "config_persistent": requests.config(persistent=True),
    "config_persistent_auto": requests.config(persistent="auto"),
    "config_stays": requests.config(
        enable_checkpoint=True, enable_sandbox_handoff=False, enable_idle_timeout_auto_checkpoint=False
    ),
    "exec_argv": requests.exec_(
        exec_id="build-7",
        argv=["make", "-j2"],
        env={"CI": "1"},
        cwd="/src",
        user="nobody",
        stdin=True,
        pty=(80, 24),
        timeout=30,
    ),
    "fork": requests.fork(3),
    "handoff": requests.handoff(),
    "kill_process": requests.kill_process("build-7"),
    "kill_sandbox": requests.kill_sandbox(),
    "reconnect": requests.reconnect({"build-7": (4096, 0)}),
    "reconnect_peek": requests.reconnect({"exec-1": (0, 0)}, peek=True),
    "resize": requests.resize("build-7", 120, 40),
    "signal": requests.signal("build-7", "INT"),
    "snapshot_filesystem": requests.snapshot("py3.11", full=True),
    "stdin_base64": requests.stdin("build-7", "/wA=", encoding="base64", eof=True, offset=12),
    "read_file": requests.read_file("get-1", "/data/big.bin", offset=1048576, length=4096),
    "read_file_archive": requests.read_file("", "/src", archive=True),
    "write_file": requests.write_file(
        "put-1", "/data/run.sh", mode=0o755, mtime_ms=1731751200250, size=4096, user="nobody", timeout=60
    ),
    "write_file_archive": requests.write_file("", "src", archive=True, cwd="/data"),
    "list_files": requests.list_files("", "/src", depth=3),
    "make_directory": requests.make_directory("", "/data/new/deep", parents=True, mode=0o755),
    "remove_file": requests.remove_file("", "/data/old", recursive=True),
    "rename_file": requests.rename_file("", "/data/a", "/data/b"),
    "set_idle_timeout": requests.set_idle_timeout(600),
    "set_idle_timeout_never": requests.set_idle_timeout(None),
    "watch_files": requests.watch_files("watch-1", "/data", recursive=True),
}
#: Requests of the plain dialect, which this client does not use.
PLAIN = {"exec", "stdin"}


@pytest.mark.parametrize("name", sorted(set(fixtures("requests")) - PLAIN))
def test_every_request_equals_its_fixture(name: str) -> None:
    request = {field: value for field, value in REQUESTS[name].items() if (field, value) != ("exec_id", "")}
    assert request == fixtures("requests")[name]


@pytest.mark.parametrize("name", sorted(fixtures("events/status_update")))
def test_every_status_is_parsed(name: str) -> None:
    fixture = fixtures("events/status_update")[name]
    event = protocol.parse(json.dumps(fixture))
    assert isinstance(event, protocol.Update)
    assert event.status.value == fixture["status"] == f"SANDBOX_{name.upper()}"
    plain = ("message", "reason", "exec_id", "exec", "exit_code", "signal", "duration_ms", "checkpoint_id", "paused_ms", "snapshot", "boot")
    for field in plain:
        assert getattr(event, field) == fixture.get(field)
    progress = event.progress and {"done": event.progress.done, "total": event.progress.total}
    assert progress == fixture.get("progress")
    assert event.timed_out == fixture.get("timed_out", False)
    assert (event.execs is None) == ("execs" not in fixture)
    for view, known in zip(event.execs or (), fixture.get("execs", ())):
        assert (view.exec_id, view.exec, view.running, view.stdin) == tuple(
            known[field] for field in ("exec_id", "exec", "running", "stdin")
        )
        assert (view.stdout.end, view.stderr.start) == (known["stdout"]["to"], known["stderr"]["from"])
        assert view.exit_code == known.get("exit_code")


def test_every_status_has_a_fixture() -> None:
    assert len(fixtures("events/status_update")) == len(Status)


@pytest.mark.parametrize("name", sorted(fixtures("events")))
def test_every_event_is_parsed(name: str) -> None:
    fixture = fixtures("events")[name]
    event = protocol.parse(json.dumps({**fixture, "later": {"field": 1}}))
    expected: dict[str, protocol.Event] = {
        "egress_denied": protocol.EgressDenied("example.org", 443, "policy"),
        "error": protocol.ErrorText("Cannot checkpoint while an execution is in progress."),
        "forked": protocol.Forked((protocol.Identity("sandbox-1c9f5a52-6f0e-4b1c-8d3e-0123456789ab", "0ther"),)),
        "hello": protocol.Hello(1, 1048576, 1024, "inst-00112233445566778899aabbccddeeff"),
        "idle_timeout": protocol.IdleTimeout(600),
        "output_gap": protocol.OutputGap("build-7", "stdout", 0, 8388608),
        "output_rewound": protocol.OutputRewound("build-7", "stderr", 17),
        "rolled_back": protocol.RolledBack(CHECKPOINT, 120000),
        "sandbox_id": protocol.Identity("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab", "t0ken", True),
        "stderr": protocol.TextOutput("stderr", "oh\n"),
        "stdin_ack": protocol.StdinAck("build-7", 4),
        "stdout": protocol.TextOutput("stdout", "é\n"),
    }
    assert event == expected[name]


def test_what_is_not_known_is_ignored() -> None:
    unknown = '{"event":"status_update","status":"SANDBOX_LATER"}'
    for text in ('{"event":"later"}', unknown, "[]", "no", "{}", '{"event":["x"]}'):
        assert protocol.parse(text) is None


def test_a_token_is_never_printed() -> None:
    assert "t0ken" not in repr(protocol.Identity("id", "t0ken"))


def test_a_listing_is_parsed() -> None:
    entries = parse_listing((FIXTURES / "files" / "list.jsonl").read_text())
    assert [(entry.name, entry.kind) for entry in entries] == [
        ("run.sh", "file"),
        ("lib", "directory"),
        ("lib/latest", "symlink"),
        ("control", "other"),
    ]
    assert (entries[0].size, entries[0].mode, entries[0].mtime) == (4096, 0o755, 1731751200.25)
    assert entries[2].target == "run.sh"
    assert parse_listing('{"name":"x","kind":"whiteout","later":1}')[0].kind == "other"


def test_a_binary_frame_comes_back_as_it_was() -> None:
    frame = protocol.encode_chunk(2, 0x01020304, 1 << 40, b"\xff\0x")
    assert frame[:13] == bytes([2, 1, 2, 3, 4, 0, 0, 1, 0, 0, 0, 0, 0])
    assert protocol.decode_chunk(frame) == (2, 0x01020304, 1 << 40, b"\xff\0x")
    for bad in (b"\1" * 12, b"\3" * 13):
        with pytest.raises(ValueError):
            protocol.decode_chunk(bad)
