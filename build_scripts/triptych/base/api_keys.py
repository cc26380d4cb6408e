"""The file of API keys: hashes, pipelines and limits of each key, for the gateway and Envoy."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.base.errors import UserError
from triptych.base.files import parse_yaml

_PREFIX = "triptych-"
_KEY_BYTES = 32


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
