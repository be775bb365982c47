#!/usr/bin/env python3
"""Real servers on one machine and a bad network in front of them, for the tests of every client library.

Reads one JSON object per line from stdin, answers each with one on stdout, and takes everything
down when stdin ends. Needs Python alone, and from the environment: BATON_BIN, BATON_RUNSC,
BATON_AGENT, BATON_ROOTFS.

  {"do": "server", "name": "a", "settings": {...}}      -> {"address": "127.0.0.1:1234"}
  {"do": "signal", "name": "a", "signal": "TERM"}       -> {}, once it has ended
  {"do": "proxy", "to": "a"}                            -> {"proxy": 1, "address": "127.0.0.1:1235"}
  {"do": "weather", "proxy": 1, ...}                    -> {"connections": 3, "cut": 2}
        "to": "b"        new connections go to another server
        "cuts": [n, …]   each next connection is reset after so many bytes from the server
        "cut": true      all that are open are reset now
        "delay": 0.05    bytes are passed on so much later, in seconds
        "stall": true    on those that are open nothing is passed on, and none ends; false lets it flow again
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

PATIENCE = 60.0


class Server:
    def __init__(self, name: str, place: Path, settings: dict[str, str]) -> None:
        self.state = place / name
        self.log = place / f"{name}.log"
        skip = self.log.stat().st_size if self.log.exists() else 0
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "BATON_STATE_DIR": str(self.state),
            "BATON_LISTEN": "127.0.0.1:0",
            "BATON_RUNSC": os.environ["BATON_RUNSC"],
            "BATON_AGENT": os.environ["BATON_AGENT"],
            "BATON_ROOTFS": os.environ["BATON_ROOTFS"],
            "CHECKPOINT_AND_RESTORE_PATH": str(place / "data"),
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
        self.address = self._said("serving address=", skip)

    def _said(self, text: str, skip: int) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            log = self.log.read_bytes()[skip:].decode("utf-8", "replace")
            if text in log:
                return log.split(text, 1)[1].split()[0]
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended before it served:\n{log}")
            time.sleep(0.01)
        raise RuntimeError(f"the server never said {text!r}:\n{log}")

    def end(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(PATIENCE)

    def clean(self) -> None:
        """The guard of a server that was killed takes down its mounts, which would keep the directory."""
        deadline = time.monotonic() + PATIENCE
        while f" {self.state}/" in Path("/proc/self/mountinfo").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)


class Proxy:
    """Passes bytes between clients and a server, in the weather it was told."""

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
        # From the first: one that is still on its way to the server when all are cut is cut too.
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
        """Whether it was cut on purpose."""
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
            # The last words of one side reach the other before everything ends.
            writer.close()
        except OSError:
            pass
        return False

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """A cut is a reset: what was under way is lost. One that was closed in order stays so."""
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


class Stage:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._servers: dict[str, Server] = {}
        self._proxies: list[Proxy] = []
        (place / "data").mkdir()

    async def do(self, order: dict[str, object]) -> dict[str, object]:
        what = order["do"]
        loop = asyncio.get_running_loop()
        if what == "server":
            name, settings = str(order["name"]), dict(order.get("settings", {}))  # type: ignore[call-overload]
            server = await loop.run_in_executor(None, lambda: Server(name, self._place, settings))
            self._servers[name] = server
            return {"address": server.address}
        if what == "signal":
            number = getattr(signal, f"SIG{order['signal']}")
            await loop.run_in_executor(None, self._servers[str(order["name"])].end, number)
            return {}
        if what == "proxy":
            proxy = Proxy()
            proxy.to = self._servers[str(order["to"])].address
            self._proxies.append(proxy)
            return {"proxy": len(self._proxies), "address": await proxy.start()}
        if what == "weather":
            return self._weather(self._proxies[int(str(order["proxy"])) - 1], order)
        if what == "log":
            return {"log": self._servers[str(order["name"])].log.read_text("utf-8", "replace")}
        raise ValueError(f"nothing here can {what!r}")

    def _weather(self, proxy: Proxy, order: dict[str, object]) -> dict[str, object]:
        if "to" in order:
            proxy.to = self._servers[str(order["to"])].address
        if "cuts" in order:
            proxy.cuts = list(order["cuts"])  # type: ignore[call-overload]
        if "delay" in order:
            proxy.delay = float(str(order["delay"]))
        if "stall" in order:
            proxy.stall(bool(order["stall"]))
        if order.get("cut"):
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
    place = Path(tempfile.mkdtemp(prefix="baton-stage-"))
    stage = Stage(place)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            try:
                answer = await stage.do(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        stage.end()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
