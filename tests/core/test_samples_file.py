"""The file of core rows: what goes in comes out, in the same bytes each time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.base.errors import UserError
from triptych.base.tensors import TokenRow
from triptych.core.requests import Sample, read_samples, write_samples

TOKENS: list[Sample] = [TokenRow((101, 7, 102), 3), TokenRow((1,), 1), TokenRow((5, 6), 1)]
PIXELS: list[Sample] = [np.full((2, 3, 3), value, np.uint8) for value in (0, 7, 255)]


def test_rows_come_out_as_they_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, rows in enumerate((TOKENS, PIXELS)):
        file, again = tmp_path / f"{number}.npz", tmp_path / "again.npz"
        write_samples(file, rows)
        monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
        write_samples(again, rows)
        assert file.read_bytes() == again.read_bytes()
        found: list[Any] = read_samples(file)
        assert len(found) == len(rows)
        for one, other in zip(found, rows, strict=True):
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
            assert np.all(one == other) if rows is PIXELS else one == other


@pytest.mark.parametrize("rows", [[], [TOKENS[0], PIXELS[0]]], ids=["none", "both kinds"])
def test_rows_that_are_no_batch_are_refused(tmp_path: Path, rows: list[Sample]) -> None:
    with pytest.raises(ValueError, match="all or none must be"):
        write_samples(tmp_path / "rows.npz", rows)


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    ids, lengths = np.arange(3, dtype=np.int32), np.array([1, 1], np.int32)
    arrays: dict[str, dict[str, Any]] = {
        "other": {"x": np.zeros(3)},
        "torn": {"ids": ids, "lengths": lengths, "first_segments": lengths},
        "objects": {"pixels": np.array([{"a": 1}], dtype=object)},
    }
    for name, content in arrays.items():
        np.savez(tmp_path / name, **content)
    (tmp_path / "rubbish.npz").write_bytes(b"PK no archive")
    for name in (*arrays, "rubbish", "missing"):
        with pytest.raises(UserError, match="does not contain the rows"):
            read_samples(tmp_path / f"{name}.npz")
