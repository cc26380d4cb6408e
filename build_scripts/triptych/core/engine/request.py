"""What an engine is built from, checked before TensorRT sees it: graph, profiles, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.core.engine.api import FIRST_TYPED, Api
from triptych.core.engine.graph import EngineGraph, read_graph
from triptych.spec.engine_spec import EnginePlan, ShapeRange

_REBUILD = "Run `triptych build` again: plan and graph no longer fit each other"


@dataclass(frozen=True)
class Request:
    """One engine to build: the ``model.onnx``, what it says, and what was planned."""

    onnx: Path
    graph: EngineGraph
    plan: EnginePlan

    @property
    def options(self) -> Mapping[str, Any]:
        return self.plan.options


def make_request(onnx: Path, plan: EnginePlan, api: Api) -> Request:
    """Read the graph and check it against the plan and the release of TensorRT.

    Raises:
        UserError: this release cannot build it, or plan and graph do not fit each other.
    """
    request = Request(onnx, read_graph(onnx), plan)
    api.type_flags(request.graph.kinds)
    if not api.typed:
        _check_old_values(request.graph, api)
    api.hardware_level(plan.options["hardware"])
    if plan.options["weight_streaming"]:
        api.weight_streaming_flag()
    if not plan.profiles:
        raise UserError("plan.engine.profiles", "must have a profile", remedy=_REBUILD)
    for place, profile in enumerate(plan.profiles):
        _check_profile(place, profile, request.graph)
    return request


def _check_old_values(graph: EngineGraph, api: Api) -> None:
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for name, value in values.items():
            if value.dtype == "INT64":
                raise UserError(
                    name,
                    f"must not be INT64 for {api.name}",
                    given=f"an {kind} of {value.dtype}",
                    remedy=f"Use INT32, or TensorRT {FIRST_TYPED} or newer (serving.triton 24.05)",
                )


def _check_profile(place: int, profile: Mapping[str, ShapeRange], graph: EngineGraph) -> None:
    def refused(rule: str, given: str) -> UserError:
        field = f"plan.engine.profiles[{place}]"
        return UserError(field, rule, given=given, remedy=_REBUILD)

    unlike = sorted(set(profile) ^ set(graph.inputs))
    if unlike:
        raise refused("must name the graph's inputs, each once", unlike[0])
    for name, shapes in profile.items():
        dims = graph.inputs[name].dims
        given = f"{name} {list(shapes.minimum)} to {list(shapes.maximum)}"
        sides = (shapes.minimum, shapes.optimum, shapes.maximum)
        if any(len(side) != len(dims) for side in sides):
            raise refused(f"must give {name} {len(dims)} axes", given)
        for axis, fixed in enumerate(dims):
            low, best, high = (side[axis] for side in sides)
            if not 0 < low <= best <= high:
                axis_given = f"{name}, axis {axis}: {low}, {best}, {high}"
                raise refused("must have minimum <= optimum <= maximum on every axis", axis_given)
            if fixed >= 0 and (low, high) != (fixed, fixed):
                rule = f"must keep axis {axis} of {name} at {fixed}, as the graph does"
                raise refused(rule, given)
