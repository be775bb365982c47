"""Two servers on one fake Cloud Storage, looked into with Google's client: what they wrote, and what an operator edits."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import client_of
from google.cloud import storage

PATIENCE = 60.0


def eventually(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"it never came true: {what}"
        time.sleep(0.05)


class Servers:
    def __init__(self, url: str, place: Path) -> None:
        self.url, self.place = url, place
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> str:
        log = self.place / f"{name}.log"
        environment = {
            "PATH": os.environ["PATH"],
            "BATON_STATE_DIR": str(self.place / name),
            "BATON_CACHE_DIR": str(self.place / f"{name}-cache"),
            "BATON_LISTEN": "127.0.0.1:0",
            "BATON_ADMIN_LISTEN": "off",
            "BATON_WARM": "0",
            "BATON_SWEEP": "1s",
            "BATON_STORE_RUNTIME": "false",
            "BATON_GCS_ENDPOINT": self.url,
            "SANDBOX_METADATA_BUCKET": "bucket",
            "SANDBOX_CHECKPOINT_BUCKET": "bucket",
            **{piece: os.environ[piece] for piece in ["BATON_RUNSC", "BATON_AGENT", "BATON_ROOTFS"]},
        }
        with log.open("wb") as file:
            server = [os.environ["BATON_BIN"], "serve"]
            self.running.append(subprocess.Popen(server, stdin=subprocess.DEVNULL, stderr=file, env=environment))
        eventually("the server serves", lambda: b"serving address=" in log.read_bytes())
        return log.read_text().split("serving address=", 1)[1].split()[0]

    def run(self, address: str, *arguments: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.place), "BATON_URL": f"ws://{address}"}
        command = [os.environ["BATON_BIN"], *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout

    def end(self) -> None:
        for server in self.running:
            server.terminate()
        for server in self.running:
            server.wait(PATIENCE)


@pytest.fixture
def servers(url: str, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(url, tmp_path)
    yield servers
    servers.end()


def read(bucket: storage.Bucket, name: str) -> Any:
    return json.loads(bucket.blob(name).download_as_bytes())


def test_whoever_tries_two_servers_sees_their_objects_and_can_steer_them(servers: Servers, url: str) -> None:
    bucket = client_of(url).bucket("bucket")
    one, two = servers.start("one"), servers.start("two")
    sandbox = servers.run(one, "create", "--checkpoint", "--handoff").strip()
    assert servers.run(one, "exec", sandbox, "--", "sh", "-c", "echo kept >/root/file; echo done") == "done\n"
    assert servers.run(two, "exec", sandbox, "--", "cat", "/root/file") == "kept\n", "it has moved"
    servers.run(two, "checkpoint", sandbox)

    folders = bucket.list_blobs(delimiter="/")
    assert list(folders) == [] and {"sandboxes/", "sandbox_checkpoints/"} <= folders.prefixes
    stored = [blob.name for blob in bucket.list_blobs(prefix=f"sandboxes/{sandbox}/")]
    assert stored == [f"sandboxes/{sandbox}/{name}" for name in ["lock.json", "metadata.json"]]
    lock = read(bucket, f"sandboxes/{sandbox}/lock.json")
    assert lock["epoch"] == 2 and lock["head"]["bucket"] == "bucket"
    folder = f"sandbox_checkpoints/{lock['head']['checkpoint_id']}/"
    manifest = read(bucket, f"{folder}manifest.json")
    assert hashlib.sha256(bucket.blob(f"{folder}manifest.json").download_as_bytes()).hexdigest() == lock["head"]["manifest_sha256"]
    for file in manifest["files"]:
        blob = bucket.get_blob(folder + file["name"])
        assert blob.size == file["size"]
        assert hashlib.sha256(blob.download_as_bytes(checksum="crc32c")).hexdigest() == file["sha256"]

    def is_checkpointed() -> bool:
        metadata = read(bucket, f"sandboxes/{sandbox}/metadata.json")
        return metadata["latest_sandbox_checkpoint"] == {"bucket": "bucket", "path": folder}

    eventually("the metadata name the checkpoint", is_checkpointed)

    # The operator's interface is the object: what is edited comes true.
    blob = bucket.get_blob(f"sandboxes/{sandbox}/metadata.json")
    metadata = json.loads(blob.download_as_bytes())
    metadata["desired_state"] = "deleted"
    blob.upload_from_string(json.dumps(metadata), if_generation_match=blob.generation)
    eventually("the sweep erases it", lambda: not list(bucket.list_blobs(prefix=f"sandbox_checkpoints/{sandbox}")))
    eventually("a tombstone is left", lambda: read(bucket, f"sandboxes/{sandbox}/lock.json").get("purged") is True)
