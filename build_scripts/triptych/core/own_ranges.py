"""Find the ranges of the inputs of own models, and show those that cannot be derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import Progress
from triptych.base.onnx_graph import read_model
from triptych.core.export.own_graph import OwnGraph, find_own_graph
from triptych.core.export.own_ranges import GraphRanges, find_ranges
from triptych.core.own_stages import Stages
from triptych.core.requests import Sample
from triptych.runtime.own_model import check_range
from triptych.runtime.request_errors import RequestError
from triptych.spec.model_fields import ModelSpec


def with_ranges(found: Stages, spec: ModelSpec, progress: Progress) -> Stages:
    """Return the stages with the ranges of the inputs of their models.

    Args:
        progress: Receives the ranges, and the inputs whose range cannot be derived.
    """
    stages = []
    for stage in found.stages:
        bounds: dict[str, NDArray[np.generic]] = {}
        for model, inputs, _ in stage.models:
            one = spec.with_model(model)
            ranges = _ranges(one, found.graphs[model], found.rows[model], progress)
            for name, each in ranges.bounds.items():
                low, high = bounds.get(inputs[name], (-np.inf, np.inf))
                both = [np.maximum(low, each[0]), np.minimum(high, each[1])]
                bounds[inputs[name]] = np.stack(both)
            for name, reason in ranges.unknown.items():
                _warn(spec, inputs[name], f"{one.model.source}: {reason}", progress)
        shown = [f"{name} {_shown(each)}" for name, each in bounds.items()]
        if shown:
            progress("ranges", f"{', '.join(shown)}; a row out of range fails alone")
        limits = {name: _plain(each) for name, each in bounds.items()}
        stages.append(replace(stage, own=replace(stage.own, ranges=limits)))
    return found._replace(stages=tuple(stages))


def _ranges(
    spec: ModelSpec, graph: OwnGraph, rows: Sequence[Sample], progress: Progress
) -> GraphRanges:
    arrays = [{t.name: np.asarray(row)[t.name][None] for t in graph.inputs} for row in rows]
    file = find_own_graph(spec, graph.sha256, arrays[0], progress)
    model = read_model(file, weights=False)
    is_graph = spec.model.onnx is not None
    ranges = find_ranges(model, negative=is_graph)
    # The traffic runs: a module that gets negative indices takes them as ONNX does.
    fits = is_graph or all(_fits(ranges.bounds, each) for each in arrays)
    return ranges if fits else find_ranges(model, negative=True)


def _fits(
    bounds: Mapping[str, NDArray[np.generic]], arrays: Mapping[str, NDArray[np.generic]]
) -> bool:
    try:
        for name, each in bounds.items():
            check_range(name, arrays[name], each)
    except RequestError:
        return False
    return True


def _warn(spec: ModelSpec, name: str, reason: str, progress: Progress) -> None:
    """Report an input whose range is not derived, unless the spec declares one."""
    field = spec.inputs.get(name)
    if field is not None and (field.choices or None not in (field.min, field.max)):
        return
    line = f"inputs: {name}: {{min: 0, max: SIZE - 1}}"
    remedy = f"Add `{line}`" if field is not None else "Check it in the function (ValueError)"
    rest = "a value that the model refuses fails the requests of its batch"
    progress("ranges", f"{name} is not known ({reason}): {rest}. {remedy}")


def _shown(bounds: NDArray[np.generic]) -> str:
    pairs = np.unique(bounds.reshape(2, -1).T, axis=0)
    return " or ".join(f"{low:.6g} to {high:.6g}" for low, high in pairs)


def _plain(bounds: NDArray[np.generic]) -> list[object]:
    """Return bounds as JSON has them, with None for infinity."""
    plain = bounds.astype(object)
    plain[np.isinf(bounds)] = None
    return list(plain.tolist())
