"""API keys of the gateway: the file of their hashes, pipelines and limits, and their rates."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.base.errors import UserError, print_line
from triptych.base.files import parse_yaml
from triptych.gateway.errors import ApiError

_PREFIX = "triptych-"
_KEY_BYTES = 32
_LOOK_S = 0.5
"""Minimum time between two looks at the file, in seconds."""


class KeyEntry(BaseModel):
    """A key in the file, with its pipelines and limits.

    Attributes:
        sha256: SHA-256 of the key in hex. A random key of 256 bits needs no slower hash.
        pipelines: Names of the pipelines that it may use; None for all.
        requests_per_s: Maximum number of requests per second; None for no limit.
        items_per_s: Maximum number of texts, pairs, images and answers per second.
        tokens_per_s: Maximum number of tokens per second in the gateway, of prompts and answers.
        priority: Level of its requests in the gateway, 1 for the first, if the pipeline has levels.
    """

    model_config = ConfigDict(extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pipelines: list[str] | None = None
    requests_per_s: float | None = Field(default=None, gt=0)
    items_per_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    priority: int | None = Field(default=None, ge=1)


class KeyFile(BaseModel):
    """Content of a file of keys, by their names."""

    model_config = ConfigDict(extra="forbid")

    keys: dict[str, KeyEntry] = Field(default_factory=dict)


def read_keys(path: Path) -> KeyFile:
    """Return the content of a file of keys.

    Raises:
        UserError: The file cannot be read, or is invalid.
    """
    try:
        found = KeyFile.model_validate(parse_yaml(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        given: object = error.strerror
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        given = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError:
        given = "no YAML"
    else:
        return found
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


def print_keys(file: KeyFile) -> str:
    """Return the content of a file of keys."""
    return yaml.safe_dump(file.model_dump(mode="json", exclude_none=True), sort_keys=False)


def file_stamps(paths: Iterable[Path]) -> list[tuple[int, int]] | None:
    """Return a value that changes with the files; None if one is missing."""
    try:
        return [(found.st_mtime_ns, found.st_ino) for found in (path.stat() for path in paths)]
    except OSError:  # between two files that are replaced
        return None


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

    def __init__(self, name: str, entry: KeyEntry) -> None:
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
        self._take_over()
        self._stamps = file_stamps([path])

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
        stamps = file_stamps([self._path])
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._take_over()
        except UserError as error:
            print_line(f"warning: keys are not changed: {error.message}")

    def _take_over(self) -> None:
        """Replace all keys; a key whose entry is the same keeps its current rates."""
        file = read_keys(self._path)
        before = {caller.name: caller for _, caller in self._keys}
        self._keys = []
        for name, entry in file.keys.items():
            caller = before.get(name)
            if caller is None or caller.entry != entry:
                caller = Caller(name, entry)
            self._keys.append((entry.sha256, caller))
