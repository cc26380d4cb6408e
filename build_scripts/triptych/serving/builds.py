"""What `triptych build` puts into a repository while something serves it, noticed by its locks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.container.locks import LockError, Pipeline, find_pipelines
from triptych.repository.store import is_being_written

Models = Mapping[str, Mapping[str, str]]
"""Of one pipeline: model -> its files and their hashes, as the lock has them."""


@dataclass(frozen=True)
class Change:
    """What is another than before: models that changed by their pipeline, pipelines that went."""

    built: Mapping[str, list[str]]
    gone: list[str]


class Builds:
    """Looks at a repository now and then; what it holds now is what counts as known.

    Args:
        repository: folder of the models.
        only: the one pipeline that matters; None for all.
    """

    def __init__(self, repository: Path, only: str | None = None) -> None:
        self._repository = repository
        self._only = only
        self._seen = self._stamps()
        self._known = self._models()

    def look(self) -> Change | None:
        """What changed since the last look; None while a build is being written.

        It reads no file where no lock has changed.
        """
        stamps = self._stamps()
        if stamps == self._seen or is_being_written(self._repository):
            return None
        self._seen = stamps
        before, self._known = self._known, self._models()
        built = {}
        for pipeline, models in self._known.items():
            old = before.get(pipeline, {})
            changed = [name for name in models if models[name] != old.get(name)]
            if changed:
                built[pipeline] = changed
        return Change(built, sorted(before.keys() - self._known.keys()))

    def _pipelines(self) -> list[Pipeline]:
        return [p for p in find_pipelines(self._repository) if self._only in (None, p.name)]

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """What tells that a lock is another one than before."""
        found = {}
        for pipeline in self._pipelines():
            if pipeline.lock_file.is_file():
                status = pipeline.lock_file.stat()
                found[pipeline.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def _models(self) -> dict[str, Models]:
        found: dict[str, Models] = {}
        for pipeline in self._pipelines():
            try:
                lock = pipeline.read_lock()
            except LockError:
                continue
            models: dict[str, dict[str, str]] = {}
            for path, digest in sorted(lock.files.items() if lock is not None else ()):
                model, _, inner = path.partition("/")
                models.setdefault(model, {})[inner] = digest
            if models:
                found[pipeline.name] = models
        return found
