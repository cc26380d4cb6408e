"""The file of API keys: hashes, pipelines and limits of each key, for the gateway and Envoy."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.base.jwks import remote_url

_PREFIX = "triptych-"
_KEY_BYTES = 32
MAX_SUBJECTS = 10_000
"""Maximum number of subjects of tokens whose rates are kept; the least recent one is dropped."""
CLOCK_SKEW_S = 60
"""Time in seconds by which a token may have expired, because clocks differ."""


class Permissions(BaseModel):
    """Pipelines and limits of a caller.

    Attributes:
        pipelines: Names of the pipelines that it may use; None for all.
        requests_per_s: Maximum number of requests per second; None for no limit.
        items_per_s: Maximum number of texts, pairs, images and answers per second.
        tokens_per_s: Maximum number of tokens per second in the gateway, of prompts and answers.
        priority: Level of its requests in the gateway, 1 for the first, if the pipeline has levels.
    """

    model_config = ConfigDict(extra="forbid")

    pipelines: list[str] | None = None
    requests_per_s: float | None = Field(default=None, gt=0)
    items_per_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    priority: int | None = Field(default=None, ge=1)


class KeyEntry(Permissions):
    """A key in the file.

    Attributes:
        sha256: SHA-256 of the key in hex. A random key of 256 bits needs no slower hash.
    """

    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class IssuerEntry(Permissions):
    """An issuer of JSON web tokens in the file; the limits are those of each subject.

    Attributes:
        issuer: Value of ``iss`` in its tokens.
        audiences: Values of ``aud``, one of which a token must have.
        jwks: Its public keys (JWKS), their URL, or their file, relative to the file of keys.
    """

    issuer: str = Field(min_length=1)
    audiences: list[str] = Field(min_length=1)
    jwks: str | dict[str, Any]


class KeyFile(BaseModel):
    """Content of a file of keys, by names that differ."""

    model_config = ConfigDict(extra="forbid")

    keys: dict[str, KeyEntry] = Field(default_factory=dict)
    issuers: dict[str, IssuerEntry] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_names(self) -> KeyFile:
        if shared := self.keys.keys() & self.issuers.keys():
            raise ValueError(f"{min(shared)} is the name of a key and of an issuer")
        return self


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


def files_of(keys: Path, file: KeyFile) -> list[Path]:
    """Return the file of keys, and the files of the public keys of issuers."""
    sets = [entry.jwks for entry in file.issuers.values()]
    names = [each for each in sets if isinstance(each, str) and not remote_url(each)]
    return [keys, *(keys.parent / name for name in names)]


def make_key() -> tuple[str, str]:
    """Return a new key and its SHA-256 in hex."""
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


def print_keys(file: KeyFile) -> str:
    """Return the content of a file of keys."""
    plain = file.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump({name: part for name, part in plain.items() if part}, sort_keys=False)


def file_stamps(paths: Iterable[Path]) -> list[tuple[int, int]] | None:
    """Return a value that changes with the files; None if one is missing."""
    try:
        return [(found.st_mtime_ns, found.st_ino) for found in (path.stat() for path in paths)]
    except OSError:  # between two files that are replaced
        return None
