"""What a run over a file of rows is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """What a run is asked for.

    Attributes:
        columns: input of the pipeline -> the file's column, where that has another name; `text`
            for the prompts of one that generates text.
        constants: input -> the same value for every row: a text, or bytes of an image.
        pairs: parameters of every request, ``KEY=VALUE``.
        timeout_s: that a request may take, and that the server may be away; None: 30, and 600 of
            a pipeline that generates text.
    """

    pipeline: str
    file: Path
    out: Path
    url: str
    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str | bytes] = field(default_factory=dict)
    pairs: Sequence[str] = ()
    timeout_s: float | None = None

    def decides(self) -> dict[str, object]:
        """What a run that goes on must have in common with the one before."""
        stat = self.file.stat()
        return {
            "pipeline": self.pipeline,
            "file": [str(self.file.resolve()), stat.st_size, stat.st_mtime_ns],
            "columns": dict(self.columns),
            "constants": {name: repr(value) for name, value in self.constants.items()},
            "parameters": sorted(self.pairs),
        }
