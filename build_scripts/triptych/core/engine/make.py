"""Build a serialized engine from an ONNX graph, with any supported release of TensorRT.

`make_request` checks graph, profiles and options before TensorRT reads them. TensorRT's timing
cache is stored between builds, one file per release and kind of GPU: times of another release or
GPU are rejected or wrong.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import cache_root
from triptych.base.errors import UserError
from triptych.base.files import write_files
from triptych.core.engine.api import Api
from triptych.core.engine.cuda import BuildGpu
from triptych.core.engine.graph import EngineGraph, read_graph
from triptych.core.engine.messages import (
    Messages,
    failure,
    no_gpu,
    parser_failure,
)
from triptych.spec.engine_plan import EnginePlan, ShapeRange

if TYPE_CHECKING:
    import tensorrt as trt

TELL_EVERY_S = 5.0
Tell = Callable[[str], None]

_REBUILD = "Run `triptych build` again: plan and graph do not match"


@dataclass(frozen=True)
class Request:
    """An engine to build: the ``model.onnx``, its properties, and the plan."""

    onnx: Path
    graph: EngineGraph
    plan: EnginePlan

    @property
    def options(self) -> Mapping[str, Any]:
        return self.plan.options


def make_request(onnx: Path, plan: EnginePlan, api: Api) -> Request:
    """Read the graph and check it against the plan and the release of TensorRT.

    Raises:
        UserError: This release cannot build the engine, or plan and graph do not match.
    """
    request = Request(onnx, read_graph(onnx), plan)
    api.hardware_level(plan.options["hardware"])
    if not plan.profiles:
        raise UserError("plan.engine.profiles", "has no profile", remedy=_REBUILD)
    for index, profile in enumerate(plan.profiles):
        _check_profile(index, profile, request.graph)
    return request


def _check_profile(index: int, profile: Mapping[str, ShapeRange], graph: EngineGraph) -> None:
    def refused(rule: str, given: str) -> UserError:
        field = f"plan.engine.profiles[{index}]"
        return UserError(field, rule, given=given, remedy=_REBUILD)

    unlike = sorted(set(profile) ^ set(graph.inputs))
    if unlike:
        raise refused("does not name each of the graph's inputs once", unlike[0])
    for name, shapes in profile.items():
        dims = graph.inputs[name].dims
        given = f"{name} {list(shapes.minimum)} to {list(shapes.maximum)}"
        sides = (shapes.minimum, shapes.optimum, shapes.maximum)
        if any(len(side) != len(dims) for side in sides):
            raise refused(f"has another number of axes for {name} than {len(dims)}", given)
        for axis, fixed in enumerate(dims):
            low, best, high = (side[axis] for side in sides)
            if not 0 < low <= best <= high:
                axis_given = f"{name}, axis {axis}: {low}, {best}, {high}"
                raise refused("must have minimum <= optimum <= maximum on every axis", axis_given)
            if fixed >= 0 and (low, high) != (fixed, fixed):
                rule = f"must keep axis {axis} of {name} at {fixed}, as the graph does"
                raise refused(rule, given)


FOLDER = "timing"


def timing_file(version: str, gpu: BuildGpu) -> Path:
    """Return the file that stores the kernel times of a TensorRT release on a kind of GPU."""
    name = f"{version}-{gpu.name}-{gpu.compute_capability}"
    return cache_root() / FOLDER / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.cache"


def attach(config: trt.IBuilderConfig, file: Path) -> bool:
    """Load the times in `file`, or an empty cache, into a builder's config.

    Returns whether there were any times.
    """
    stored = file.read_bytes() if file.is_file() else b""
    cache = config.create_timing_cache(stored)
    if cache is not None and config.set_timing_cache(cache, False):
        return bool(stored)
    # Times that are unreadable or from another machine are measured again.
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return False


def save(config: trt.IBuilderConfig, file: Path) -> None:
    """Write the config's times into `file`, merged with those that other builds stored meanwhile.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    cache = config.get_timing_cache()
    if cache is None:
        return
    if file.is_file() and (other := config.create_timing_cache(file.read_bytes())) is not None:
        cache.combine(other, False)
    write_files(file.parent, {file.name: bytes(cache.serialize())})


def make_engine(
    api: Api,
    request: Request,
    *,
    timing_file: Path | None,
    tell: Tell,
    look: Callable[[trt.INetworkDefinition], None] | None = None,
) -> bytes:
    """Build the engine of a checked request; return the content of ``model.plan``.

    Args:
        api: Release that builds.
        timing_file: File with kernel times; read, and extended with new measurements. None if there
            is no GPU to measure on.
        tell: Callback for the progress, called at intervals.
        look: Function that is called with the parsed network before the build.

    Raises:
        OSError: The times cannot be written.
        UserError: TensorRT cannot build the engine.
    """
    messages = Messages()
    logger = messages.logger(api.trt)
    collects = gc.isenabled()
    gc.disable()  # TensorRT logs with a lock held that the end of an older builder waits for
    try:
        builder = api.trt.Builder(logger)
    except TypeError as error:  # raised by the bindings if TensorRT returns no object
        raise no_gpu("; ".join((*messages.errors, *messages.warnings)) or error) from error
    finally:
        if collects:
            gc.enable()
    network = builder.create_network(api.network_flags())
    # The network may use weights that the parser owns, so the parser must outlive the build.
    parser = api.trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(request.onnx)):
        raise parser_failure(parser, request.onnx, api)
    if look is not None:
        look(network)
    config = builder.create_builder_config()
    _configure(api, config, request)
    api.set_target(config)
    for profile in request.plan.profiles:
        _add_profile(builder, config, profile, messages)
    known = timing_file is not None and attach(config, timing_file)
    config.progress_monitor = _monitor(api, tell)
    tell(f"{api.name}, {'with' if known else 'without'} times of earlier builds ...")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise failure(messages, "build the engine")
    if timing_file is not None:
        save(config, timing_file)
    return bytes(plan)


def _configure(api: Api, config: trt.IBuilderConfig, request: Request) -> None:
    trt, options = api.trt, request.options
    for option in ("version_compatible", "refit", "weight_streaming", "tf32"):
        # TF32 is on by default.
        change = config.set_flag if options[option] else config.clear_flag
        change(getattr(trt.BuilderFlag, option.upper()))
    if options["hardware"] != "none":
        config.hardware_compatibility_level = api.hardware_level(options["hardware"])
    if options["workspace_mib"] is not None:
        size = options["workspace_mib"] << 20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, size)
    if options["optimization_level"] is not None:
        config.builder_optimization_level = options["optimization_level"]
    # Without details the inspector does not show the types of layers.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED


def _add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    shapes: Mapping[str, ShapeRange],
    messages: Messages,
) -> None:
    profile = builder.create_optimization_profile()
    for name, sizes in shapes.items():
        try:
            profile.set_shape(name, sizes.minimum, sizes.optimum, sizes.maximum)
        except ValueError as error:  # raised by the bindings if TensorRT rejects the shapes
            raise UserError(
                "plan.engine.profiles",
                "has a shape that TensorRT rejects",
                given=f"{name}: {error}",
                remedy="Run `triptych build` again",
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise failure(messages, "add an optimization profile")


def _monitor(api: Api, tell: Tell) -> trt.IProgressMonitor:
    """Return a progress monitor that reports the phase of a build every `TELL_EVERY_S`.

    It never stops a build.
    """
    base: Any = api.trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self._steps: dict[str, int] = {}
            self._told = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = time.monotonic()
            if now - self._told >= TELL_EVERY_S:
                self._told = now
                tell(f"{phase_name}: {step + 1} of {self._steps.get(phase_name, 0)}")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
