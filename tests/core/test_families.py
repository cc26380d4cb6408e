"""Every family of transformers in every task: built as a user builds it, equal to transformers.

``pytest tests/core/test_families.py -m long --rewrite`` puts the results on record, which
``pipelines/families.md`` shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from families import measure, pairs
from family_table import LIMIT, NOT_MEASURED, read_record, turn, write_record

pytestmark = [pytest.mark.build, pytest.mark.filterwarnings("ignore")]
EVERYDAY = 2
"""Served families that `make test` and CI check in turn: an export takes seconds. Only all long
tests (``make test-long``) measure the others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = pairs()
    if "family" not in metafunc.fixturenames:
        return
    served = {(row.family, row.task) for row in read_record() if row.outcome == "served"}
    known = [index for index, pair in enumerate(every) if pair in served]
    now = [known[index] for index in turn(len(known), EVERYDAY)]
    in_parts = "/" in metafunc.config.getoption("--long")
    others = [index for index in range(len(every)) if index not in now and not in_parts]
    marked = [pytest.param(*every[index], marks=pytest.mark.long) for index in others]
    metafunc.parametrize(("family", "task"), [*(every[index] for index in now), *marked])


def test_the_record_has_every_family_in_every_task() -> None:
    assert {(row.family, row.task) for row in read_record()} == set(pairs())


def test_a_family_is_equal_to_the_reference_or_refused(
    tmp_path: Path, family: str, task: str, rewrite: bool
) -> None:
    result = measure(family, task, tmp_path)
    if rewrite:
        write_record([result])
    (known,) = (row for row in read_record() if (row.family, row.task) == (family, task))
    if known.outcome != NOT_MEASURED:
        assert (result.outcome, result.layout) == (known.outcome, known.layout), result
    if result.outcome == "served":
        assert result.difference is not None
        assert result.difference <= LIMIT
    else:
        assert result.outcome == "differs" or result.message
