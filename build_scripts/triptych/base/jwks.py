"""Public keys (JWKS) of the issuers of tokens: in the file of keys, beside it, or at a URL."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from triptych.base.errors import UserError

REFRESH_S = 300
"""Time in seconds after which the keys at a URL are fetched again."""
TIMEOUT_S = 5
_MAX_BYTES = 1 << 20
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DIRECT = build_opener(ProxyHandler({}))


def remote_url(jwks: str | dict[str, Any]) -> str | None:
    """Return the URL of public keys; None for a file or its content."""
    return jwks if isinstance(jwks, str) and "://" in jwks else None


class RemoteKeys:
    """Public keys at URLs; keys older than `REFRESH_S` are fetched again in a thread."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, str]] = {}

    def read(self, url: str) -> str:
        """Return the keys at a URL as JSON. Only the first call waits for the issuer.

        Raises:
            UserError: The first call got no keys.
        """
        now_s = time.monotonic()
        if url not in self._found:
            self._found[url] = now_s, _fetch(url)
        fetched_s, text = self._found[url]
        if now_s - fetched_s > REFRESH_S:
            self._found[url] = now_s, text
            threading.Thread(target=self._refresh, args=(url,), daemon=True).start()
        return text

    def _refresh(self, url: str) -> None:
        try:
            self._found[url] = time.monotonic(), _fetch(url)
        except UserError as error:
            print(f"warning: the last keys stay: {error.message}", file=sys.stderr, flush=True)


REMOTE_KEYS = RemoteKeys()
"""Public keys that this process has fetched."""


def _fetch(url: str) -> str:
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if parts.scheme != "https" and not is_local:
        raise _mistake(url, "neither https nor http on this machine")
    try:
        with _DIRECT.open(url, timeout=TIMEOUT_S) as answer:
            return check_jwks(answer.read(_MAX_BYTES).decode(), url)
    except (OSError, ValueError) as error:
        raise _mistake(url, str(error)) from error


def check_jwks(text: str, place: str | Path) -> str:
    """Return the JSON of public keys.

    Args:
        text: The JSON.
        place: URL or path of the keys, for errors.

    Raises:
        UserError: It has no keys.
    """
    try:
        if json.loads(text)["keys"]:
            return text
        given = "no key"
    except (ValueError, LookupError, TypeError):
        given = "no JSON with `keys`"
    raise _mistake(place, given)


def read_jwks(keys: Path, jwks: str | dict[str, Any]) -> str:
    """Return the public keys of an issuer in the file of keys at `keys`, as JSON.

    Raises:
        UserError: They cannot be read or fetched, or there are none.
    """
    if isinstance(jwks, dict):
        return check_jwks(json.dumps(jwks), keys)
    if url := remote_url(jwks):
        return REMOTE_KEYS.read(url)
    path = keys.parent / jwks
    try:
        return check_jwks(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise _mistake(path, str(error.strerror)) from error


def _mistake(place: str | Path, given: str) -> UserError:
    return UserError(
        "jwks",
        "must be public keys (JWKS): their URL, their file, or their content",
        given=f"{place} ({given})",
        remedy="Give the jwks_uri of the issuer, or save its answer in the file",
    )
