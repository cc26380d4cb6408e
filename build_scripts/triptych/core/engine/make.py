"""ONNX graph -> serialized engine: the one code path for all releases of TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.core.engine import timing
from triptych.core.engine.api import Api
from triptych.core.engine.graph import EngineGraph, onnx_nodes
from triptych.core.engine.messages import (
    Messages,
    Tell,
    failure,
    no_gpu,
    now_and_then,
    parser_failure,
)
from triptych.core.engine.request import Request
from triptych.spec.engine_spec import ShapeRange

_UNCONSTRAINED = ("CAST", "CONSTANT", "IDENTITY", "SHAPE", "QUANTIZE", "DEQUANTIZE")
"""Layers whose type is a setting, and weights, which are stored in the type of what reads them."""


def make_engine(
    api: Api,
    request: Request,
    *,
    timing_file: Path | None,
    tell: Tell,
    look: Callable[[Any], None] | None = None,
) -> bytes:
    """Build the engine of a checked request; returns the content of ``model.plan``.

    Args:
        api: the release that builds.
        request: what is built.
        timing_file: times of kernels: read, and written with what was measured. None where no GPU
            can measure any.
        tell: told now and then where the build is.
        look: called with the parsed network, before it is built.

    Raises:
        OSError: the times cannot be written.
        UserError: TensorRT cannot build it, in words.
    """
    messages = Messages()
    logger = messages.logger(api.trt, None if api.has_monitor() else tell)
    try:
        builder = api.trt.Builder(logger)
    except TypeError as error:  # what the bindings raise where TensorRT gives no object
        raise no_gpu("; ".join((*messages.errors, *messages.warnings)) or error) from error
    network = builder.create_network(api.network_flags())
    # The parser may hand out the network's weights without a copy: it lives as long as the build.
    parser = api.trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(request.onnx)):
        raise parser_failure(parser, request.onnx, api)
    if not api.typed:
        _constrain_types(api.trt, network, request.graph)
    if look is not None:
        look(network)
    config = builder.create_builder_config()
    _configure(api, config, request)
    api.set_target(config)
    for profile in request.plan.profiles:
        _add_profile(builder, config, profile, messages)
    known = timing_file is not None and timing.attach(config, timing_file)
    if api.has_monitor():
        config.progress_monitor = _monitor(api, tell)
    tell(f"{api.name}, {'with' if known else 'without'} times of earlier builds ...")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise failure(messages, "build the engine")
    if timing_file is not None:
        timing.save(config, timing_file)
    return bytes(plan)


def _configure(api: Api, config: Any, request: Request) -> None:
    trt, options = api.trt, request.options
    flags = trt.BuilderFlag
    wanted = api.type_flags(request.graph.kinds)
    if options["version_compatible"]:
        wanted.append(flags.VERSION_COMPATIBLE)
    if options["refit"]:
        wanted.append(flags.REFIT)
    if options["weight_streaming"]:
        wanted.append(api.weight_streaming_flag())
    for flag in wanted:
        config.set_flag(flag)
    # TF32 is on by default.
    (config.set_flag if options["tf32"] else config.clear_flag)(flags.TF32)
    if options["hardware"] != "none":
        config.hardware_compatibility_level = api.hardware_level(options["hardware"])
    if options["workspace_mib"] is not None:
        size = options["workspace_mib"] << 20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, size)
    if options["optimization_level"] is not None:
        config.builder_optimization_level = options["optimization_level"]
    # Else the inspector cannot tell the types of layers.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED


def _constrain_types(trt: Any, network: Any, graph: EngineGraph) -> None:
    """TensorRT 8.6 only: constrain every layer to the type that its ONNX node has.

    Before strong typing, TensorRT takes fp32 for 16 bits wherever that is faster once fp16 is
    allowed at all. So each layer that computes in floating point gets the type of its node as a
    constraint; what the gate wanted in fp32 stays fp32, and the flag OBEY_PRECISION_CONSTRAINTS
    makes the build fail where a constraint cannot be met. What multiplies quantised values is left
    alone: its type is theirs, and a constraint would keep TensorRT from fusing it with them.
    """
    if "fp16" not in graph.kinds:  # then nothing but fp32 is allowed, besides what is quantised
        return
    types = {"fp32": trt.DataType.FLOAT, "fp16": trt.DataType.HALF}
    unconstrained = [getattr(trt.LayerType, name) for name in _UNCONSTRAINED]
    for place in range(network.num_layers):
        layer = network.get_layer(place)
        nodes = (*onnx_nodes(layer.metadata or ""), layer.name)
        node = next((name for name in nodes if name in graph.node_types), None)
        if node is None or graph.products.get(node) == "int8" or layer.type in unconstrained:
            continue
        outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
        real = [index for index, output in enumerate(outputs) if output.dtype in types.values()]
        if not real or any(output.is_shape_tensor for output in outputs):
            continue
        kind = types[graph.node_types[node]]
        layer.precision = kind
        for index in real:
            layer.set_output_type(index, kind)


def _add_profile(
    builder: Any, config: Any, shapes: Mapping[str, ShapeRange], messages: Messages
) -> None:
    profile = builder.create_optimization_profile()
    for name, sizes in shapes.items():
        try:
            profile.set_shape(name, sizes.minimum, sizes.optimum, sizes.maximum)
        except ValueError as error:  # how the bindings say that TensorRT refused it
            raise UserError(
                "plan.engine.profiles",
                "must be ones that TensorRT accepts",
                given=f"{name}: {error}",
                remedy="Run `triptych build` again",
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise failure(messages, "add an optimization profile")


def _monitor(api: Api, tell: Tell) -> Any:
    """Tells now and then which phase the build is in; it never stops one."""
    tell_sometimes = now_and_then(tell)
    base: Any = api.trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            tell_sometimes(f"{phase_name}: {step + 1} of {self._steps.get(phase_name, 0)}")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
