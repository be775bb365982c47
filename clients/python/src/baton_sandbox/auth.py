"""Credentials for a proxy in front of the server, such as Cloud Run's access control."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import time
from typing import Awaitable, Callable, Mapping, Optional, Union
from urllib.parse import urlsplit

from .errors import AuthError, describe

#: ``"google"``, or a function, async or not, that returns headers before each handshake.
Auth = Union[str, Callable[[], Union[Mapping[str, str], Awaitable[Mapping[str, str]]]], None]

#: A token is renewed this many seconds before it expires.
RENEW_EARLY = 300.0


class Credentials:
    def __init__(self, auth: Auth, address: str) -> None:
        auth = auth if auth is not None else os.environ.get("BATON_AUTH") or None
        if isinstance(auth, str) and auth not in ("google", "none"):
            raise AuthError(f"auth must be \"google\" or a function, not `{auth}`")
        self._auth = None if auth == "none" else auth
        # Cloud Run requires the address of the service as the audience.
        parts = urlsplit(address)
        self._audience = f"{'http' if parts.scheme == 'ws' else 'https'}://{parts.netloc}"
        self._token: Optional[str] = None
        self._expires = 0.0

    async def headers(self) -> Mapping[str, str]:
        if self._auth is None:
            return {}
        if callable(self._auth):
            try:
                headers = self._auth()
                return await headers if inspect.isawaitable(headers) else headers
            except Exception as error:
                raise AuthError(describe(error)) from error
        if self._token is None or time.time() >= self._expires:
            self._token = await asyncio.get_running_loop().run_in_executor(None, _google, self._audience)
            self._expires = _expiry_of(self._token) - RENEW_EARLY
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
        raise AuthError(f"no Google ID token: {describe(error)}") from error


def _expiry_of(token: str) -> float:
    """When a JWT expires. One that cannot be read is fetched again each time."""
    try:
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        return 0.0
