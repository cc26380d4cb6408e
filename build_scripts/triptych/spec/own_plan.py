"""Plan of a pipeline around the user's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.spec.model_fields import ModelSpec
from triptych.spec.model_info import ModelInfo
from triptych.spec.plan import Plan, WarmUp
from triptych.spec.tasks.task import Task


def make_own_plan(
    spec: ModelSpec, info: ModelInfo, task: Task, parameters: Mapping[str, Any]
) -> Plan:
    """Return the plan of a pipeline whose graph was read into `info`."""
    if info.own is None:
        raise ValueError("the graph of the pipeline was not read")
    most = spec.core.max_batch_size
    rows = {1, most if spec.core.device == "gpu" else 1}
    return Plan(
        spec=spec,
        info=info,
        task=task,
        parameters=parameters,
        layout="fixed",
        lengths=None,
        max_length=0,
        max_batch_size=most,
        request_rows=most,
        bucket_edges=(),
        core_inputs=info.own.inputs,
        core=task.core(info, parameters),
        warm_ups=tuple(WarmUp(count, 1) for count in sorted(rows)),
        engine=None,
        cost=None,
    )
