#!/usr/bin/env python3
"""The test bed of every client library: real servers on one machine, behind a proxy that plays a bad network.

It reads one JSON object per line from stdin, answers each with one on stdout, and stops everything when
stdin ends. It needs only Python, and from the environment BATON_BIN, BATON_RUNSC, BATON_AGENT and BATON_ROOTFS.

  {"do": "server", "name": "a", "settings": {...}}      -> {"address": "127.0.0.1:1234"}
        a name that was used before starts that server again, on its state directory
  {"do": "signal", "name": "a", "signal": "TERM"}       -> {}, once it has exited
  {"do": "proxy", "to": "a"}                            -> {"proxy": 1, "address": "127.0.0.1:1235"}
  {"do": "network", "proxy": 1, ...}                    -> {"connections": 3, "cut": 2}
        "to": "b"        new connections go to another server
        "cuts": [n, …]   each next connection is reset after this many bytes from the server
        "cut": true      resets all open connections
        "delay": 0.05    delays all bytes by this many seconds
        "stall": true    open connections pass on nothing and stay open; false lets them continue
  {"do": "log", "name": "a"}                            -> {"log": "..."}
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: With this key as the API key, all sandboxes are listed.
ADMIN_KEY = "the-admin-key-of-the-test-bed"
#: Seconds until a server must have started or stopped.
TIME_LIMIT = 60.0


class Server:
    def __init__(self, name: str, directory: Path, settings: dict[str, str]) -> None:
        self.state = directory / name
        self.log = directory / f"{name}.log"
        skip = self.log.stat().st_size if self.log.exists() else 0
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "BATON_STATE_DIR": str(self.state),
            "BATON_LISTEN": "127.0.0.1:0",
            "BATON_RUNSC": os.environ["BATON_RUNSC"],
            "BATON_AGENT": os.environ["BATON_AGENT"],
            "BATON_ROOTFS": os.environ["BATON_ROOTFS"],
            "BATON_ADMIN_KEY": ADMIN_KEY,
            "CHECKPOINT_AND_RESTORE_PATH": str(directory / "data"),
            **settings,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [os.environ["BATON_BIN"], "serve"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )
        self.address = self._logged("serving address=", skip)

    def _logged(self, text: str, skip: int) -> str:
        """Waits for a text in the log; the word after it."""
        deadline = time.monotonic() + TIME_LIMIT
        while time.monotonic() < deadline:
            log = self.log.read_bytes()[skip:].decode("utf-8", "replace")
            if text in log:
                return log.split(text, 1)[1].split()[0]
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited before it was ready:\n{log}")
            time.sleep(0.01)
        raise RuntimeError(f"the server never logged {text!r}:\n{log}")

    def end(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(TIME_LIMIT)

    def clean(self) -> None:
        """Waits until the guard of a killed server has unmounted its mounts, so that the directory can be removed."""
        deadline = time.monotonic() + TIME_LIMIT
        while f" {self.state}/" in Path("/proc/self/mountinfo").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)


class Proxy:
    """Passes bytes between clients and a server, under the network conditions that a test has set."""

    def __init__(self) -> None:
        self.to = ""
        self.cuts: list[int] = []
        self.delay = 0.0
        self.connections = self.cut = 0
        self._stalls: set[asyncio.Event] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = self.cuts.pop(0) if self.cuts else None
        # Before connecting, so that a cut also ends connections that have not reached the server yet.
        self._open.add(writer)
        try:
            host, port = self.to.split(":")
            away_reader, away_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            self._open.discard(writer)
            self._reset(writer)
            return
        if writer.is_closing():
            self._open.discard(writer)
            self._reset(away_writer)
            return
        flowing = asyncio.Event()
        flowing.set()
        self._stalls.add(flowing)
        pair = {writer, away_writer}
        self._open |= pair
        ways = [
            asyncio.ensure_future(self._pass(reader, away_writer, flowing, None)),
            asyncio.ensure_future(self._pass(away_reader, writer, flowing, left)),
        ]
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if any(way.result() for way in done):
            self.cut += 1
        for way in ways:
            way.cancel()
        self._open -= pair
        self._stalls.discard(flowing)
        for one in pair:
            self._reset(one)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event, left: int | None
    ) -> bool:
        """Passes bytes until one side ends. Returns whether the connection reached its limit."""
        try:
            while data := await reader.read(32 << 10):
                await flowing.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if left is not None:
                    left -= len(data)
                    if left < 0:
                        return True
                writer.write(data)
                await writer.drain()
            # The other side receives everything before the connection closes.
            writer.close()
        except OSError:
            pass
        return False

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """Resets a connection, which loses the bytes in flight. A connection that was closed in request stays closed."""
        if not writer.is_closing():
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def stall(self, is_stalled: bool) -> None:
        for flowing in self._stalls:
            (flowing.clear if is_stalled else flowing.set)()

    def cut_all(self) -> None:
        for writer in list(self._open):
            self._reset(writer)


class Testbed:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: dict[str, Server] = {}
        self._proxies: list[Proxy] = []
        (directory / "data").mkdir()

    async def do(self, request: dict[str, object]) -> dict[str, object]:
        what = request["do"]
        loop = asyncio.get_running_loop()
        if what == "server":
            name, settings = str(request["name"]), dict(request.get("settings", {}))  # type: ignore[call-overload]
            server = await loop.run_in_executor(None, lambda: Server(name, self._directory, settings))
            self._servers[name] = server
            return {"address": server.address}
        if what == "signal":
            number = getattr(signal, f"SIG{request['signal']}")
            await loop.run_in_executor(None, self._servers[str(request["name"])].end, number)
            return {}
        if what == "proxy":
            proxy = Proxy()
            proxy.to = self._servers[str(request["to"])].address
            self._proxies.append(proxy)
            return {"proxy": len(self._proxies), "address": await proxy.start()}
        if what == "network":
            return self._network(self._proxies[int(str(request["proxy"])) - 1], request)
        if what == "log":
            return {"log": self._servers[str(request["name"])].log.read_text("utf-8", "replace")}
        raise ValueError(f"unknown request {what!r}")

    def _network(self, proxy: Proxy, request: dict[str, object]) -> dict[str, object]:
        if "to" in request:
            proxy.to = self._servers[str(request["to"])].address
        if "cuts" in request:
            proxy.cuts = list(request["cuts"])  # type: ignore[call-overload]
        if "delay" in request:
            proxy.delay = float(str(request["delay"]))
        if "stall" in request:
            proxy.stall(bool(request["stall"]))
        if request.get("cut"):
            proxy.cut_all()
        return {"connections": proxy.connections, "cut": proxy.cut}

    def end(self) -> None:
        for server in self._servers.values():
            if server.process.poll() is None:
                server.process.terminate()
        for server in self._servers.values():
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            server.clean()


async def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="baton-testbed-"))
    testbed = Testbed(directory)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            try:
                answer = await testbed.do(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        testbed.end()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
