"""API keys of the gateway: their limits, and the file of keys, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from triptych.base.api_keys import (
    CLOCK_SKEW_S,
    MAX_SUBJECTS,
    IssuerEntry,
    Permissions,
    file_stamps,
    files_of,
    read_keys,
)
from triptych.base.errors import UserError
from triptych.base.jwks import REMOTE_KEYS, read_jwks, remote_url
from triptych.gateway.errors import ApiError

_LOOK_S = 0.5
"""Minimum time between two looks at the file, in seconds."""


@dataclass
class _Bucket:
    """Token bucket of one second; one large request may make it negative."""

    rate: float | None
    level: float = field(init=False)
    at_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.level = self._most

    @property
    def _most(self) -> float:
        return max(1.0, self.rate or 0.0)

    def take(self, count: int) -> float:
        """Take `count` and return 0, or take nothing and return the time to wait in seconds."""
        if self.rate is None:
            return 0.0
        now_s = time.monotonic()
        self.level = min(self._most, self.level + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        lacking = min(float(count), self._most) - self.level
        if lacking > 1e-9:
            return lacking / self.rate
        self.spend(count)
        return 0.0

    def spend(self, count: int) -> None:
        """Take `count` that is used already; later ones wait for it."""
        self.level -= count


class Caller:
    """Holder of a key, with its limits.

    Attributes:
        name: Name of the key.
        entry: Entry of the key in the file.
    """

    def __init__(self, name: str, entry: Permissions) -> None:
        self.name = name
        self.entry = entry
        self._requests = _Bucket(entry.requests_per_s)
        self._items = _Bucket(entry.items_per_s)
        self._tokens = _Bucket(entry.tokens_per_s)

    def may_use(self, pipeline: str) -> bool:
        return self.entry.pipelines is None or pipeline in self.entry.pipelines

    def take_request(self) -> None:
        """Count a request; raise `ApiError` if it is over the limit."""
        _check(self._tokens.take(0), "tokens")
        _check(self._requests.take(1), "requests")

    def take_items(self, count: int) -> None:
        """Count texts; raise `ApiError` if they are over the limit."""
        _check(self._items.take(count), "items")

    @property
    def has_token_limit(self) -> bool:
        return self.entry.tokens_per_s is not None

    def spend_tokens(self, count: int) -> None:
        """Count tokens, which are known after the work; the next request waits if it must."""
        self._tokens.spend(count)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Caller of the current request; None if the gateway has no keys."""


def _check(wait_s: float, what: str) -> None:
    if wait_s:
        raise ApiError(
            429,
            "rate_limit_exceeded",
            f"The limit of {what} per second of the key is reached. Try again in {wait_s:.2f} s.",
            retry_after_s=wait_s,
        )


class Keys:
    """The keys of a file, with their current rates.

    Raises:
        UserError: The file cannot be read, or is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_s = time.monotonic()
        self._keys: list[tuple[str, Caller]] = []
        self._tokens = Tokens({})
        self._paths = [path]
        self._lock = threading.Lock()
        self._take_over()
        self._stamps = file_stamps(self._paths)

    def find(self, authorization: bytes) -> Caller:
        """Return the caller with the key of an ``authorization`` header.

        Raises:
            ApiError: There is no key, or it is not in the file.
        """
        self._look()
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        found: Caller | None = None
        if scheme.lower() == b"bearer":
            given = hashlib.sha256(key).hexdigest()
            # Compares with every key, so that the time does not depend on the key.
            for digest, caller in self._keys:
                if hmac.compare_digest(digest, given):
                    found = caller
            found = found or self._tokens.find(key)
        if found is None:
            raise ApiError(
                401,
                "invalid_api_key",
                "`authorization` must be `Bearer` and a key of this gateway. "
                f"Given: {'another key' if key else 'no key'}. Ask its operator for one.",
                closes=True,
            )
        return found

    def _look(self) -> None:
        """Read the files again if one has changed; a file with a mistake changes nothing."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        stamps = file_stamps(self._paths)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        # An issuer that answers late must not delay requests.
        threading.Thread(target=self._reload, daemon=True).start()

    def _reload(self) -> None:
        try:
            with self._lock:
                self._take_over()
        except UserError as error:
            print(f"warning: keys are not changed: {error.message}", file=sys.stderr, flush=True)

    def _take_over(self) -> None:
        """Replace all keys; a key whose entry is the same keeps its current rates."""
        file = read_keys(self._path)
        sets = {name: read_jwks(self._path, entry.jwks) for name, entry in file.issuers.items()}
        issuers = {
            entry.issuer: Issuer(name, entry, sets[name]) for name, entry in file.issuers.items()
        }
        before = {caller.name: caller for _, caller in self._keys}
        self._tokens = self._tokens.replaced(issuers)
        self._keys = []
        for name, entry in file.keys.items():
            caller = before.get(name)
            if caller is None or caller.entry != entry:
                caller = Caller(name, entry)
            self._keys.append((entry.sha256, caller))
        self._paths = files_of(self._path, file)


@dataclass(frozen=True)
class Issuer:
    """Issuer of tokens, with its public keys as JSON, or as they were at their URL."""

    name: str
    entry: IssuerEntry
    jwks: str

    @property
    def keys(self) -> Any:
        """The public keys, as a `jwt.PyJWKSet`."""
        url = remote_url(self.entry.jwks)
        return _parse(REMOTE_KEYS.read(url) if url else self.jwks)


@lru_cache(maxsize=64)
def _parse(jwks: str) -> Any:
    import jwt

    return jwt.PyJWKSet.from_json(jwks)


class Tokens:
    """Verifies JSON web tokens, and holds the rates of their subjects.

    Args:
        issuers: Issuers by the ``iss`` of their tokens.
        callers: Callers by issuer and subject, the least recent one first.
    """

    def __init__(
        self, issuers: Mapping[str, Issuer], callers: Mapping[tuple[str, str], Caller] | None = None
    ) -> None:
        self._issuers = issuers
        self._callers = OrderedDict(callers or {})

    def replaced(self, issuers: Mapping[str, Issuer]) -> Tokens:
        """Return the tokens of other issuers; one whose entry is the same keeps its rates."""
        entries = {name: issuer.entry for name, issuer in issuers.items()}
        kept = {
            key: caller
            for key, caller in self._callers.items()
            if entries.get(key[0]) == caller.entry
        }
        return Tokens(issuers, kept)

    def find(self, token: bytes) -> Caller | None:
        """Return the subject of a token; None if it is not valid."""
        if not self._issuers or token.count(b".") != 2:
            return None
        import jwt

        try:
            stated = jwt.decode(token, options={"verify_signature": False})["iss"]
            issuer = self._issuers[stated]
            key = issuer.keys[jwt.get_unverified_header(token)["kid"]]
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=issuer.entry.audiences,
                issuer=stated,
                leeway=CLOCK_SKEW_S,
                options={"require": ["exp"]},
            )
        except (jwt.PyJWTError, LookupError, TypeError, ValueError):
            return None
        subject = (stated, str(claims.get("sub")))
        caller = self._callers.pop(subject, None) or Caller(issuer.name, issuer.entry)
        self._callers[subject] = caller
        if len(self._callers) > MAX_SUBJECTS:
            self._callers.popitem(last=False)
        return caller
