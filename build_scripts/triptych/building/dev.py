"""What has changed in a folder since the last look, by size and time of its files."""

from __future__ import annotations

import os
import time
from pathlib import Path

_SETTLE_S = 0.1
_LONGEST_SETTLE_S = 2.0
_PASSING = (".swp", ".tmp", "~", ".pyc")
"""Ends of the names of what editors and Python leave beside a file."""

Stamps = dict[str, tuple[int, int]]


class Watch:
    """The files of `folder`, at any depth, but hidden ones and what editors leave for a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """Files that are new, gone or not as they were, once nobody is writing any more."""
        now = self._look()
        if now == self._seen:
            return []
        deadline = time.monotonic() + _LONGEST_SETTLE_S
        while time.monotonic() < deadline:  # an editor empties a file, and then fills it
            before = now
            time.sleep(_SETTLE_S)
            now = self._look()
            if now == before:
                break
        seen, self._seen = self._seen, now
        return sorted(name for name in {*seen, *now} if seen.get(name) != now.get(name))

    def _look(self) -> Stamps:
        found: Stamps = {}
        for root, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            for name in names:
                if name.startswith(".") or name.endswith(_PASSING):
                    continue
                path = Path(root, name)
                try:
                    status = path.stat()
                except OSError:  # gone meanwhile
                    continue
                shown = path.relative_to(self._folder).as_posix()
                found[shown] = (status.st_mtime_ns, status.st_size)
        return found
