"""What is sent over HTTP to list and kill sandboxes, and what is made of the responses."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator

import pytest

from baton_sandbox import ConnectionError, NotFoundError, PermissionDeniedError, ProtocolError, Sandbox, SandboxSummary, TimeoutError
from baton_sandbox.sync import Sandbox as SyncSandbox

Answer = tuple[int, dict[str, str], str]


class Requests:
    def __init__(self, url: str) -> None:
        self.url = url
        self.lines: list[str] = []
        self.headers: list[Any] = []


@contextlib.contextmanager
def answering(*answers: Answer) -> Iterator[Requests]:
    """A server with one answer for each request."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            requests.lines.append(f"{self.command} {self.path}")
            requests.headers.append(self.headers)
            code, headers, body = left.pop(0)
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    requests = Requests(f"ws://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def page(*views: dict[str, Any], after: Any = None) -> Answer:
    return 200, {}, json.dumps({"sandboxes": views, "next": after})


async def test_the_list_is_requested_page_by_page_and_filtered_by_every_label() -> None:
    both = {"team": "a&b", "tier": "free"}
    first = {
        "sandbox_id": "one", "phase": "running", "reason": "Created", "message": None, "instance": "inst", "labels": both,
        "created": "2026-11-18T20:00:00Z", "age_seconds": 7, "persistent": True, "tenant": "blue", "news": "of a newer server",
    }  # fmt: skip
    pages = [
        page(first, {"sandbox_id": "two", "labels": {"team": "a&b"}}, after="two"),
        page(after="three"),
        page({"sandbox_id": "four", "labels": both}),
        page({"sandbox_id": "five", "error": "it cannot be read"}),
    ]
    with answering(*pages) as requests:
        options: Any = {"api_key": "k3y", "headers": {"X-Proxy": "yes"}, "auth": lambda: {"Authorization": "Bearer x"}}
        found = [one async for one in Sandbox.list(requests.url, labels=both, **options)]
        assert [one.id for one in found] == ["one", "four"]
        assert found[0] == SandboxSummary(
            "one", "running", "Created", None, "inst", both, "2026-11-18T20:00:00Z", 7, True, "blue"
        )
        assert requests.lines == [
            "GET /sandboxes?label=team%3Da%26b",
            "GET /sandboxes?label=team%3Da%26b&after=two",
            "GET /sandboxes?label=team%3Da%26b&after=three",
        ]
        for headers in requests.headers:
            assert (headers["X-API-Key"], headers["X-Proxy"], headers["Authorization"]) == ("k3y", "yes", "Bearer x")
        (unread,) = [one async for one in Sandbox.list(requests.url)]
        assert (unread.phase, unread.error) == (None, "it cannot be read")
        assert requests.lines[-1] == "GET /sandboxes"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ((404, {}, ""), NotFoundError, "no sandbox"),
        ((401, {}, ""), PermissionDeniedError, "requires a key"),
        ((403, {}, ""), PermissionDeniedError, "does not match"),
        ((403, {}, "This server refuses\n"), PermissionDeniedError, "This server refuses"),
        ((503, {}, '{"message":"Storage does not answer."}'), ConnectionError, "Storage does not answer."),
        ((429, {}, ""), ConnectionError, "HTTP 429"),
        # A key is for one server: a redirect is not followed.
        ((302, {"Location": "http://127.0.0.1:1/"}, ""), ProtocolError, "HTTP 302"),
    ],
)
async def test_a_refused_kill_says_why(answer: Answer, kind: type[Exception], text: str) -> None:
    with answering(answer) as requests:
        with pytest.raises(kind, match=text):
            await Sandbox.kill_by_id(requests.url, "the id", token="t0ken")
        assert requests.lines == ["DELETE /sandboxes/the%20id?wait=30"]
        assert requests.headers[0]["X-Sandbox-Token"] == "t0ken"


async def test_a_list_that_cannot_be_had_says_why() -> None:
    with answering((403, {}, ""), (200, {}, '{"message":"Server is running"}')) as requests:
        with pytest.raises(PermissionDeniedError, match="admin key"):
            await Sandbox.list(requests.url).__anext__()
        with pytest.raises(ProtocolError):
            await Sandbox.list(requests.url).__anext__()


async def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    blocked = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            blocked.wait(20)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            await Sandbox.kill_by_id(f"ws://127.0.0.1:{server.server_address[1]}", "x", token="t", answer_within=0.1)
    finally:
        blocked.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_same_without_asyncio() -> None:
    with answering(page({"sandbox_id": "one"}, after="one"), page({"sandbox_id": "two"}), (204, {}, "")) as requests:
        found = SyncSandbox.list(requests.url)
        assert next(found).id == "one"
        assert len(requests.lines) == 1
        assert [one.id for one in found] == ["two"]
        SyncSandbox.kill_by_id(requests.url, "two", api_key="k3y")
        assert requests.lines[-1] == "DELETE /sandboxes/two?wait=30"
