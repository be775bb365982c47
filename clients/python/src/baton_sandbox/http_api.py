"""Requests over HTTP, without attaching: the list of sandboxes, and the deletion of one."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, AsyncIterator, Mapping, NoReturn, Optional
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPRedirectHandler, Request, build_opener

from . import clock
from .auth import Credentials
from .connect import normalize_url
from .errors import ConnectionError, NotFoundError, PermissionDeniedError, ProtocolError, TimeoutError, describe
from .options import Connection

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ConnectionOptions

#: The longest wait for one response, in seconds; a server gives up a listing after half of it.
RESPONSE_WITHIN = 60.0
#: How many seconds a server may wait until a killed sandbox is gone.
GONE_WITHIN = 30


@dataclass(frozen=True)
class SandboxSummary:
    """One sandbox in the list of a server."""

    id: str
    #: ``pending``, ``running``, ``checkpointed``, ``failed``, or ``unresponsive`` if its instance stopped renewing its
    #: lease. ``None`` if the sandbox could not be read: see ``error``.
    phase: Optional[str] = None
    #: Why it is in this phase; ``baton explain`` knows the words.
    reason: str = ""
    #: The same in a sentence.
    message: Optional[str] = None
    #: The instance that has it.
    instance: Optional[str] = None
    #: The labels that it was created with.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: When it was created, in RFC 3339.
    created: str = ""
    #: How many seconds ago that was.
    age: Optional[float] = None
    #: Whether it outlives its instance.
    persistent: bool = False
    #: The tenant that it belongs to.
    tenant: Optional[str] = None
    #: Why the server knows only its id.
    error: Optional[str] = None


def server_of(url: Optional[str]) -> str:
    """The server's address, by default that of the environment."""
    url = url or os.environ.get("BATON_URL")
    if not url:
        raise ConnectionError("no address: pass one, or set BATON_URL")
    return url


class Unattached:
    """What :class:`Sandbox` does without attaching to a sandbox."""

    @classmethod
    def list(
        cls,
        url: Optional[str] = None,
        *,
        labels: Optional[Mapping[str, str]] = None,
        connection: Optional[Connection] = None,
        **options: Unpack[ConnectionOptions],
    ) -> AsyncIterator[SandboxSummary]:
        """Iterates over the sandboxes of a server, without attaching to them; it is asked for one page at a time.

        With the admin key of the server as ``api_key`` these are all sandboxes, with an API key those of its tenant.
        ``labels`` selects the sandboxes that have all of them.
        """
        return _HttpApi(url, replace(connection or Connection(), **options)).list(dict(labels or {}))

    @classmethod
    async def kill_by_id(
        cls,
        url: Optional[str],
        id: str,
        *,
        token: Optional[str] = None,
        connection: Optional[Connection] = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        """Kills and deletes a sandbox without attaching to it, also while another client is attached.

        Needs the sandbox's ``token``, or as ``api_key`` a key of its tenant or the admin key. Returns when the sandbox
        is gone, or after half a minute if only its deletion is recorded by then. An unknown id is a ``NotFoundError``.
        """
        await _HttpApi(url, replace(connection or Connection(), **options)).kill(id, token)


class _HttpApi:
    def __init__(self, url: Optional[str], options: Connection) -> None:
        address = normalize_url(server_of(url))
        self._base = "http" + address[len("ws") :]
        self._options = options
        self._credentials = Credentials(options.auth, address)

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxSummary]:
        # A server filters by one label, up to its first `=`; the rest is done here.
        label = next((f"{name}={value}" for name, value in labels.items() if "=" not in name), None)
        after: Optional[str] = None
        while True:
            query = {"label": label, "after": after}
            path = "/sandboxes?" + urlencode({name: value for name, value in query.items() if value is not None})
            code, body = await self._request("GET", path.rstrip("?"), None)
            if code != 200:
                _refuse(code, body, "the server lists sandboxes only for its admin key or an API key")
            try:
                page = json.loads(body)
                found = [_summary(view) for view in page["sandboxes"]]
                after = page["next"]
            except (ValueError, KeyError, TypeError) as error:
                raise ProtocolError(f"the list of sandboxes cannot be read: {describe(error)}") from error
            for one in found:
                if labels.items() <= one.labels.items():
                    yield one
            if after is None:
                return

    async def kill(self, id: str, token: Optional[str]) -> None:
        code, body = await self._request("DELETE", f"/sandboxes/{quote(id, safe='')}?wait={GONE_WITHIN}", token)
        if code == 404:
            raise NotFoundError(f"there is no sandbox {id}")
        if code not in (202, 204):
            _refuse(code, body, "the token or the key does not match the sandbox")

    async def _request(self, method: str, path: str, token: Optional[str]) -> tuple[int, bytes]:
        options = self._options
        further = {"X-API-Key": options.api_key, "X-Sandbox-Token": token}
        within = min(options.answer_within, RESPONSE_WITHIN)
        try:
            credentials = await clock.wait_for(self._credentials.headers(), options.connect_within)
            headers = {**options.headers, **credentials}
            headers.update({name: value for name, value in further.items() if value is not None})
            request = Request(self._base + path, headers=headers, method=method)
            send = functools.partial(_send, request, within)
            return await clock.wait_for(asyncio.get_running_loop().run_in_executor(None, send), within)
        except (asyncio.TimeoutError, socket.timeout):
            raise TimeoutError(f"no answer within {within} s") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise ConnectionError(str(reason) or type(error).__name__) from error


class _NoRedirects(HTTPRedirectHandler):
    """Keys are for one server only."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _send(request: Request, within: float) -> tuple[int, bytes]:
    try:
        with build_opener(_NoRedirects).open(request, timeout=within) as response:
            return response.status, response.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def _summary(view: Mapping[str, Any]) -> SandboxSummary:
    return SandboxSummary(
        id=view["sandbox_id"],
        phase=view.get("phase"),
        reason=view.get("reason") or "",
        message=view.get("message"),
        instance=view.get("instance"),
        labels=view.get("labels") or {},
        created=view.get("created") or "",
        age=view.get("age_seconds"),
        persistent=bool(view.get("persistent")),
        tenant=view.get("tenant"),
        error=view.get("error"),
    )


def _refuse(code: int, body: bytes, forbidden: str) -> NoReturn:
    """``forbidden`` is what 403 means if the server does not say it."""
    text = body.decode("utf-8", "replace").strip()
    try:
        text = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        pass
    if code == 401:
        raise PermissionDeniedError(text or "the server requires a key, and this one is wrong or missing (HTTP 401)")
    if code == 403:
        raise PermissionDeniedError(text or f"{forbidden} (HTTP 403)")
    if code in (408, 425, 429) or code >= 500:
        raise ConnectionError(text or f"HTTP {code}")
    raise ProtocolError(text or f"HTTP {code}")
