"""Trials of a run that was interrupted: what was measured is not measured again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triptych.bench.points import from_json, to_json
from triptych.cache import cache_root
from triptych.files import write_files
from triptych.tune.results import Trial


class Journal:
    """Finished trials, a file each, in a folder of their own in the cache.

    Args:
        key: all that decides what a trial finds, but for its settings; plain data.
    """

    def __init__(self, key: Mapping[str, Any]) -> None:
        self.folder = cache_root() / "tune" / _hash(key)

    def find(self, present: Mapping[str, Any], other: Mapping[str, Any]) -> Trial | None:
        """The trial of `other` against `present`, if it was finished."""
        path = self._path(present, other)
        try:
            return from_json(Trial, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            return None

    def add(self, present: Mapping[str, Any], other: Mapping[str, Any], trial: Trial) -> None:
        """Keep a finished trial; it appears whole or not at all."""
        path = self._path(present, other)
        write_files(path.parent, {path.name: json.dumps(to_json(trial))})

    def close(self) -> None:
        """Forget everything: the run came to its end, and the next one measures afresh."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, present: Mapping[str, Any], other: Mapping[str, Any]) -> Path:
        return self.folder / f"{_hash([dict(present), dict(other)])}.json"


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
