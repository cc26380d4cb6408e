"""Plan of a pipeline around the user's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from triptych.models.info import ModelInfo, OwnInterface
from triptych.spec.engine_plan import engine_plan
from triptych.spec.model_fields import ModelSpec
from triptych.spec.padded_lengths import choose_edges
from triptych.spec.plan import TENSOR_CORE_MULTIPLE, Plan, make_warm_ups, placed
from triptych.spec.traffic import Lengths
from triptych.tasks.task import Task


def make_own_plan(
    spec: ModelSpec,
    info: ModelInfo,
    task: Task,
    parameters: Mapping[str, object],
    sizes: Sequence[int] = (),
    *,
    graph: OwnInterface,
) -> Plan:
    """Return the plan of a pipeline, or of one of its models.

    Args:
        parameters: Defaults of the request parameters.
        sizes: Size of the free axis for each core row of the traffic; none without such an axis.
        graph: Interface of the model's graph. That of `info` may have the tensors of several.
    """
    placement, machine = None, spec.serving.served_by
    if machine is not None:
        placement = placed(spec, info, None, machine=machine)
        spec = spec.model_copy(update=placement.changes)
    most = spec.core.max_batch_size
    edges: tuple[int, ...] = ()
    lengths = None
    _, axis = spec.model.axis
    if axis is not None:
        lengths = Lengths.of([max(size, axis.min) for size in sizes], max_length=axis.max)
        multiple = TENSOR_CORE_MULTIPLE if spec.core.device == "gpu" else 1
        edges = choose_edges(lengths, axis.max, count=spec.core.bucket_count, multiple=multiple)
    engine = None
    if "tensorrt" in (spec.core.backend, spec.core.accelerator):
        longest = 0 if axis is None else axis.max
        engine = engine_plan(spec, graph.inputs, lengths, edges, longest, most)
    return Plan(
        spec=spec,
        info=info,
        task=task,
        parameters=parameters,
        layout="fixed" if axis is None else "bucketed",
        lengths=None,
        max_length=0 if axis is None else axis.max,
        max_batch_size=most,
        request_rows=most,
        bucket_edges=edges,
        core_inputs=graph.inputs,
        core=task.core(replace(info, own=graph), parameters),
        warm_ups=make_warm_ups(None, edges, most if spec.core.device == "gpu" else 1),
        engine=engine,
        cost=None,
        placement=placement,
    )
