"""Options of a bulk run over a file of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class BulkOptions:
    """Options of a bulk run.

    Attributes:
        columns: Column of the file by input of the pipeline, if its name differs; `text` for the
            prompts of a pipeline that generates text.
        constants: Value of an input for every row: a text, or the bytes of an image.
        pairs: Parameters of every request, ``KEY=VALUE``.
        timeout_s: Maximum time in seconds for a request, and for the server to be unreachable.
            None:
            30, or 600 for a pipeline that generates text.
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
        """Return the options that a resumed run must share with the interrupted one."""
        stat = self.file.stat()
        return {
            "pipeline": self.pipeline,
            "file": [str(self.file.resolve()), stat.st_size, stat.st_mtime_ns],
            "columns": dict(self.columns),
            "constants": {name: repr(value) for name, value in self.constants.items()},
            "parameters": sorted(self.pairs),
        }
