"""Rounding weights together, smoothing inputs: each must be better than doing without."""

from typing import Any

import numpy as np
import pytest

import precision_cases as cases
from triptych.core.precision.calibrate import (
    Activations,
    find_smoothing,
    quantized,
    round_nearest,
    round_together,
    scale_of,
)


def correlated(rows: int, width: int = 64, *, rank: int = 6) -> Any:
    random = np.random.default_rng(3)
    basis = random.normal(size=(rank, width))
    few = random.normal(size=(rows, rank)) @ basis
    return (few + 0.05 * random.normal(size=(rows, width))).astype(np.float32)


def error_of(rounded: Any, weight: Any, inputs: Any) -> float:
    return float(np.square(inputs @ (rounded * scale_of(weight) - weight)).mean())


def test_rounding_together_beats_the_nearest_on_correlated_inputs() -> None:
    weight, inputs = cases.matrix(1, 64, 48), correlated(500)
    together = error_of(round_together(weight, inputs), weight, inputs)
    assert together < error_of(round_nearest(weight), weight, inputs) / 3
    fresh = correlated(200)[100:]
    assert error_of(round_together(weight, inputs), weight, fresh) < error_of(
        round_nearest(weight), weight, fresh
    )


def test_rounding_together_stays_within_a_few_steps_of_the_weight() -> None:
    weight = cases.matrix(1, 300, 40)  # more than one block
    rounded = round_together(weight, correlated(400, 300))
    assert rounded.dtype == np.int8
    assert np.abs(rounded).max() <= 127
    assert np.abs(rounded * scale_of(weight) - weight).max() < 8 * scale_of(weight).max()


@pytest.mark.parametrize("dynamic", [False, True])
def test_smoothing_gives_outliers_a_scale_of_their_own(dynamic: bool) -> None:
    vectors = cases.vectors(300, 64)
    vectors[:, 5] *= 200
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 64, 32), dynamic=dynamic)
    assert found.power > 0
    assert found.scale[5] > 2 * np.median(found.scale)
    assert (found.range is None) == dynamic
    assert 0 < found.error < 0.03


def test_smoothing_shifts_one_sided_elements_to_the_middle() -> None:
    vectors = np.abs(cases.vectors(300, 64))
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 64, 32), dynamic=False)
    assert np.allclose(found.shift, (vectors.min(0) + vectors.max(0)) / 2)


def test_a_rare_peak_is_cut_off_where_that_costs_less() -> None:
    vectors = cases.vectors(4000, 16)
    vectors[:8] *= 40  # few vectors in thousands
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 16, 16), dynamic=False)
    assert found.method != "max"
    assert found.range is not None
    smooth = (vectors - found.shift) / found.scale
    assert found.range < np.abs(smooth).max()


def test_values_beyond_the_range_are_cut_off_and_the_others_rounded() -> None:
    vectors = np.array([[0.0, 0.5, 1.27, 50.0, -50.0]], np.float32)
    assert np.allclose(quantized(vectors, 1.27), [[0.0, 0.5, 1.27, 1.27, -1.28]])
    each = quantized(vectors, None)
    assert np.abs(each - vectors).max() <= 50 / 127 / 2 + 1e-6


def test_independent_few_or_no_inputs_do_no_harm() -> None:
    weight = cases.matrix(1, 64, 8)
    inputs = np.eye(64, dtype=np.float32)
    assert np.array_equal(round_together(weight, inputs), round_nearest(weight))
    fresh = cases.vectors(100, 64)
    for inputs in (correlated(2), np.zeros((5, 64), np.float32)):
        rounded = round_together(weight, inputs)
        assert error_of(rounded, weight, fresh) < 2 * error_of(round_nearest(weight), weight, fresh)
    assert not round_together(np.zeros((16, 4), np.float32), correlated(20, 16)).any()
