"""Which format a file of rows has, by its suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from triptych.base.errors import UserError
from triptych.client.bulk.delimited import Delimited
from triptych.client.bulk.json_lines import JsonLines, PlainText
from triptych.client.bulk.table import Table


def _parquet(path: Path) -> Table:
    from triptych.client.bulk.parquet import Parquet

    return Parquet(path)


_FORMATS: dict[str, Callable[[Path], Table]] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".jsonl": JsonLines,
    ".parquet": _parquet,
}


def open_table(path: Path, out: Path) -> Table:
    """The rows of `path`, whose answers go to `out`; texts, one a line, where no format fits.

    Raises:
        UserError: it cannot be read, or `out` is not named as its format.
    """
    suffix = path.suffix.lower()
    wanted = suffix if suffix in _FORMATS else ".jsonl"
    if out.suffix.lower() != wanted:
        raise UserError(
            "--out",
            f"must end with {wanted}: answers are written as rows are read, texts as .jsonl",
            given=out,
            remedy=f"Name it {out.with_suffix(wanted).name}",
        )
    try:
        return _FORMATS.get(suffix, PlainText)(path)
    except OSError as error:
        raise UserError("--file", "must be a readable file", given=f"{path}: {error}") from error
