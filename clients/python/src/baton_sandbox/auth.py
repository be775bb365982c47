"""Credentials for what stands in front of the server, such as Cloud Run's access control."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import time
from typing import Awaitable, Callable, Mapping, Optional, Union
from urllib.parse import urlsplit

from .errors import AuthError, text_of

#: ``"google"``, or a function (also an async one) that gives headers before each handshake.
Auth = Union[str, Callable[[], Union[Mapping[str, str], Awaitable[Mapping[str, str]]]], None]

#: A token is renewed this many seconds before its end.
EARLY = 300.0


class Credentials:
    def __init__(self, auth: Auth, address: str) -> None:
        auth = auth if auth is not None else os.environ.get("BATON_AUTH") or None
        if isinstance(auth, str) and auth not in ("google", "none"):
            raise AuthError(f"`{auth}` is no kind of credentials: `google` is, and functions are")
        self._auth = None if auth == "none" else auth
        # Cloud Run wants the address of the service as the audience.
        parts = urlsplit(address)
        self._audience = f"{'http' if parts.scheme == 'ws' else 'https'}://{parts.netloc}"
        self._token: Optional[str] = None
        self._until = 0.0

    async def headers(self) -> Mapping[str, str]:
        if self._auth is None:
            return {}
        if callable(self._auth):
            try:
                headers = self._auth()
                return await headers if inspect.isawaitable(headers) else headers
            except Exception as error:
                raise AuthError(text_of(error)) from error
        if self._token is None or time.time() >= self._until:
            self._token = await asyncio.get_running_loop().run_in_executor(None, _google, self._audience)
            self._until = _end_of(self._token) - EARLY
        return {"Authorization": f"Bearer {self._token}"}


def _google(audience: str) -> str:
    try:
        from google.auth.transport.requests import Request
        from google.oauth2.id_token import fetch_id_token
    except ImportError as error:
        raise AuthError("auth=\"google\" needs google-auth: pip install 'baton-sandbox[google]'") from error
    try:
        return str(fetch_id_token(Request(), audience))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise AuthError(f"no Google ID token: {text_of(error)}") from error


def _end_of(token: str) -> float:
    """When a JWT ends; one that cannot be read is fetched anew each time."""
    try:
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        return 0.0
