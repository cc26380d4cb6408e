"""API keys: a file with hashes, pipelines and limits of each key, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.gateway.errors import ApiError

_PREFIX = "triptych-"
_KEY_BYTES = 32
_LOOK_S = 0.5
"""Minimum time between two looks at the file, in seconds."""


class KeyEntry(BaseModel):
    """A key in the file.

    Attributes:
        sha256: SHA-256 of the key in hex. A random key of 256 bits needs no slower hash.
        pipelines: Names of the pipelines that it may use; None for all.
        requests_per_s: Maximum number of requests per second; None for no limit.
        items_per_s: Maximum number of texts, pairs, images and answers per second.
    """

    model_config = ConfigDict(extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pipelines: list[str] | None = None
    requests_per_s: float | None = Field(default=None, gt=0)
    items_per_s: float | None = Field(default=None, gt=0)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: dict[str, KeyEntry] = Field(default_factory=dict)


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
        self.level -= count
        return 0.0


class Caller:
    """Holder of a key, with its limits.

    Attributes:
        name: Name of the key.
        entry: Entry of the key in the file.
    """

    def __init__(self, name: str, entry: KeyEntry) -> None:
        self.name = name
        self.entry = entry
        self._requests = _Bucket(entry.requests_per_s)
        self._items = _Bucket(entry.items_per_s)

    def may_use(self, pipeline: str) -> bool:
        return self.entry.pipelines is None or pipeline in self.entry.pipelines

    def take_request(self) -> None:
        """Count a request; raise `ApiError` if it is over the limit."""
        _check(self._requests.take(1), "requests")

    def take_items(self, count: int) -> None:
        """Count texts; raise `ApiError` if they are over the limit."""
        _check(self._items.take(count), "items")


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
        self._stamp = _stamp(path)
        self._callers: dict[str, Caller] = {}
        self._take_over(read_keys(path))

    def find(self, authorization: bytes) -> Caller:
        """Return the caller with the key of an ``authorization`` header.

        Raises:
            ApiError: There is no key, or it is not in the file.
        """
        self._look()
        scheme, _, key = authorization.partition(b" ")
        found: Caller | None = None
        if scheme.lower() == b"bearer":
            given = hashlib.sha256(key.strip()).hexdigest()
            # Compares with every key, so that the time does not depend on the key.
            for caller in self._callers.values():
                if hmac.compare_digest(caller.entry.sha256, given):
                    found = caller
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
        """Read the file again if it has changed; a file with a mistake changes nothing."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take_over(read_keys(self._path))
        except UserError as error:
            print(f"warning: keys are not changed: {error.message}", file=sys.stderr, flush=True)

    def _take_over(self, entries: Mapping[str, KeyEntry]) -> None:
        """Replace all keys; a key whose entry is the same keeps its current rates."""
        before = self._callers
        self._callers = {
            name: before[name]
            if name in before and before[name].entry == entry
            else Caller(name, entry)
            for name, entry in entries.items()
        }


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Return the entries of a file of keys by name.

    Raises:
        UserError: The file cannot be read, or is invalid.
    """
    try:
        plain = parse_yaml(path.read_text(encoding="utf-8")) or {}
        return _KeyFile.model_validate(plain).keys
    except OSError as error:
        given: object = error.strerror
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        given = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError:
        given = "no YAML"
    raise UserError(
        str(path),
        "must be a file of keys",
        given=given,
        remedy="Write one with `triptych key new NAME`",
    )


def make_key() -> tuple[str, str]:
    """Return a new key and its SHA-256 in hex."""
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


def print_keys(entries: Mapping[str, KeyEntry]) -> str:
    """Return the content of a file of keys."""
    plain: dict[str, Any] = {
        name: entry.model_dump(exclude_none=True) for name, entry in entries.items()
    }
    return yaml.safe_dump({"keys": plain}, sort_keys=False)
