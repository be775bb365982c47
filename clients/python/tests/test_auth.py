"""Google's credentials, with the real library and a fake metadata server."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from scripted_server import scripted_server

from baton_sandbox import AuthError, Sandbox
from baton_sandbox.auth import Credentials, _expiry_of


def token(audience: str, lasts: float) -> str:
    def part(fields: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    claims = {"aud": audience, "iat": int(time.time()), "exp": int(time.time() + lasts), "iss": "https://accounts.google.com"}
    return f"{part({'alg': 'none'})}.{part(claims)}.c2ln"


class Metadata(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        body = "0.1/"
        if parts.path.endswith("/identity"):
            body = token(parse_qs(parts.query)["audience"][0], 3600)
        elif parts.path.endswith("/service-accounts/default/"):
            body = json.dumps({"email": "robot@example.com", "scopes": []})
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json" if body.startswith("{") else "text/plain")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


async def test_google_gives_an_id_token_for_the_service(metadata: str) -> None:
    # In a process of its own: the library reads where the metadata server is when it is imported.
    code = "import asyncio, sys; from baton_sandbox import Sandbox; asyncio.run(Sandbox.create(sys.argv[1]))"
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "GCE_METADATA_HOST": metadata, "GCE_METADATA_IP": metadata, "BATON_AUTH": "google"}
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "http_proxy", "HTTP_PROXY"):
        environment.pop(name, None)
    async with scripted_server() as server:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, server.url, env=environment)
        peer = await server.create()
        kind, sent = peer.headers["Authorization"].split()
        claims = json.loads(base64.urlsafe_b64decode(sent.split(".")[1] + "=="))
        assert (kind, claims["aud"]) == ("Bearer", server.url.replace("ws:", "http:"))
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.oauth2.id_token", None)
    with pytest.raises(AuthError, match="pip install"):
        await Sandbox.create("ws://127.0.0.1:1", auth="google")
    with pytest.raises(AuthError, match="magic"):
        await Sandbox.create("ws://127.0.0.1:1", auth="magic")


async def test_a_token_is_kept_until_shortly_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fetch(audience: str) -> str:
        fetched.append(audience)
        return token(audience, 3600 if len(fetched) < 3 else 10)

    monkeypatch.setattr("baton_sandbox.auth._google", fetch)
    credentials = Credentials("google", "wss://sandboxes.example/api")
    for _ in range(3):
        await credentials.headers()
    assert fetched == ["https://sandboxes.example"]
    credentials._expires = 0
    await credentials.headers()
    assert len(fetched) == 2
    assert _expiry_of("no.token") == 0
