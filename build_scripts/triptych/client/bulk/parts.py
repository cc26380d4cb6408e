"""The folder beside a file that is being written: its finished parts, and what made them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from triptych.base.errors import UserError
from triptych.base.files import sync, told_to_user, write_files

_RUN = "run.json"
_PART = re.compile(r"(\d{12})-(\d+)-(\d+)\.part")


class Done(NamedTuple):
    """What the parts hold.

    Attributes:
        rows: from the file's first on.
        failed: of these.
        paths: of the parts, in order.
    """

    rows: int
    failed: int
    paths: list[Path]


class Parts:
    """Parts of `out`, each written whole or not at all; no row is in two of them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f"{out.name}.parts")

    @contextmanager
    def held(self, asked: Mapping[str, object]) -> Iterator[None]:
        """Make the folder, or go on with it, and let no other run write there meanwhile.

        Args:
            asked: plain data that decides what the parts hold.

        Raises:
            UserError: `out` exists, other things were asked for in the run that made the folder,
                another run writes there, or nothing can be written.
        """
        if self._out.exists():
            raise UserError(
                "--out",
                "must not exist: nothing is overwritten",
                given=self._out,
                remedy="Name another file, or remove it",
            )
        with told_to_user(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                self._lock(lock)
                self._check(json.loads(json.dumps(asked)))
                yield

    def add(self, first: int, rows: int, failed: int, content: bytes) -> None:
        """Keep the answers of `rows` rows from `first` on, `failed` of which have none."""
        write_files(self.folder, {f"{first:012}-{rows}-{failed}.part": content})

    def done(self) -> Done:
        """What is kept so far."""
        rows, failed, paths = 0, 0, []
        for path in sorted(self.folder.glob("*.part")):
            name = _PART.fullmatch(path.name)
            if name and int(name[1]) == rows:
                rows, failed = rows + int(name[2]), failed + int(name[3])
                paths.append(path)
        return Done(rows, failed, paths)

    @contextmanager
    def whole(self) -> Iterator[IO[bytes]]:
        """Write `out`, whole or not at all, and remove the folder."""
        partial = self.folder / "whole"
        with partial.open("wb") as file:
            yield file
        sync(partial)
        partial.replace(self._out)
        shutil.rmtree(self.folder)

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "--out",
                "must be written by one run at a time",
                given=f"another run writes into {self.folder}",
                remedy="Wait for it, or name another file",
            ) from error

    def _check(self, asked: Mapping[str, object]) -> None:
        path = self.folder / _RUN
        if not path.exists():
            write_files(self.folder, {_RUN: json.dumps(asked, indent=2) + os.linesep})
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if other := [key for key in asked if before.get(key) != asked[key]]:
            raise UserError(
                "--out",
                "has parts of a run that asked for something else",
                given=f"other {', '.join(other)} than in {path}",
                remedy=f"Ask as before to go on, or remove {self.folder} to begin anew",
            )
