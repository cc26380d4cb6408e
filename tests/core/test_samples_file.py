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


def test_tokens_come_out_as_they_went_in(tmp_path: Path) -> None:
    write_samples(tmp_path / "rows.npz", TOKENS)
    assert read_samples(tmp_path / "rows.npz") == TOKENS


def test_pixels_come_out_as_they_went_in(tmp_path: Path) -> None:
    write_samples(tmp_path / "rows.npz", PIXELS)
    found: list[Any] = read_samples(tmp_path / "rows.npz")
    assert len(found) == len(PIXELS)
    for one, other in zip(found, PIXELS, strict=True):
        assert one.dtype == np.uint8
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [TOKENS, PIXELS], ids=["tokens", "pixels"])
def test_equal_rows_make_equal_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Sample]
) -> None:
    write_samples(tmp_path / "a.npz", rows)
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    write_samples(tmp_path / "b.npz", rows)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize("rows", [[], [TOKENS[0], PIXELS[0]]], ids=["none", "both kinds"])
def test_rows_that_are_no_batch_are_refused(tmp_path: Path, rows: list[Sample]) -> None:
    with pytest.raises(ValueError, match="all or none must be"):
        write_samples(tmp_path / "rows.npz", rows)


def bad_files(folder: Path) -> dict[str, Path]:
    files = {
        name: folder / f"{name}.npz" for name in ("missing", "rubbish", "other", "torn", "objects")
    }
    files["rubbish"].write_bytes(b"PK no archive")
    np.savez(files["other"], x=np.zeros(3))
    ids, lengths = np.arange(3, dtype=np.int32), np.array([1, 1], np.int32)
    np.savez(files["torn"], ids=ids, lengths=lengths, first_segments=lengths)
    np.savez(files["objects"], pixels=np.array([{"a": 1}], dtype=object))
    return files


@pytest.mark.parametrize("kind", ["missing", "rubbish", "other", "torn", "objects"])
def test_a_file_of_something_else_is_told(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="does not contain the rows"):
        read_samples(bad_files(tmp_path)[kind])
