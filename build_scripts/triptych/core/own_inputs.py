"""Read a pipeline around the user's own model: its graph, functions and traffic; and the plan.

The graph declares the core's tensors. Free axes, and the tensors that go past the core, are known
from what `preprocess` makes of the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from triptych.base.cache import key_of
from triptych.base.errors import Progress, UserError
from triptych.base.tensors import Tensor
from triptych.core.export.own_graph import mixed_rows, open_own_model
from triptych.core.gate.runs import RunBatch, by_rows
from triptych.core.gate_rows import (
    CALIBRATION_ROWS,
    GATE_IMAGES,
    GATE_ROWS,
    split_traffic,
)
from triptych.core.inputs import (
    PipelineInputs,
    check_cached_outputs,
    load_checked_hooks,
    report_settings,
)
from triptych.core.own_chain import Chain
from triptych.core.own_ranges import with_ranges
from triptych.core.own_reader import OwnReader
from triptych.core.own_stages import APART_ROWS, Stages, find_stages, takes_rows
from triptych.core.requests import (
    GateRequest,
    Sample,
    record_sizes,
    rows_of,
)
from triptych.models.info import ModelInfo, OwnInterface, info_of_interface
from triptych.repository.config_text import check_config_texts
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import find_class
from triptych.spec.model_fields import ModelSpec, files_of
from triptych.spec.own_plan import make_own_plan
from triptych.spec.own_task import own_task
from triptych.spec.plan import Plan
from triptych.spec.traffic import TRAFFIC_FILE
from triptych.tasks.task import Task

KNOWN_ROWS = 32
"""Maximum number of rows of the traffic from which free axes are known."""
LARGE_ROW_BYTES = 100_000
"""Size of a core row above which the gate takes fewer rows."""
MAX_APART = 1e-3
"""Largest difference of a row in a batch, by another order of additions; the gate has the limits.
"""


def read_own_inputs(spec: ModelSpec, progress: Progress) -> PipelineInputs:
    """Read the graph, the functions and the traffic, and derive the plan.

    Raises:
        UserError: The spec, the graph, the functions or the traffic has a mistake.
    """
    specs = [spec.with_model(name) for name in spec.models or [""]]
    shares = any(each.core.shared_from is not None for each in specs)
    check_config_texts(spec.serving.config, shares_core=shares)
    files_of(spec)
    task = own_task(spec)
    check_cached_outputs(spec, task)
    report_settings(spec, progress)
    hooks = load_checked_hooks(spec)
    reader = OwnReader(spec, task)
    requests = reader.read(spec.folder / TRAFFIC_FILE)
    runs = dict(zip(spec.models or [""], map(open_own_model, specs), strict=True))
    found = find_stages(spec, reader, requests[:KNOWN_ROWS], runs, rows=takes_rows(hooks, spec))
    spec = found.spec
    for name, graph in found.graphs.items():
        source = spec.with_model(name).model.source
        progress("source", f"{source}: {_shown(graph.inputs)} to {_shown(graph.outputs)}")
    found = with_ranges(found, spec, progress)
    stage = found.stages[0]
    maker = reader.maker(info_of_interface(stage.own))
    requests = reader.with_rows(maker, requests, stage.models[0])
    rows = [row for request in requests for row in request.rows]
    plan = _plan(spec, task, reader, found, rows)
    for each in plan.cores:
        some = rows if each is plan else found.rows[each.model]
        run = by_rows(runs[each.model], each.core, each.core_inputs, pad_token_id=0)
        _check_rows_apart(run, some[:APART_ROWS])
    size = np.asarray(rows[0]).nbytes
    most = GATE_IMAGES if size > LARGE_ROW_BYTES else GATE_ROWS
    gate, rest = split_traffic([request.sent for request in requests], max_rows=most)
    sent = [request.sent for request in requests]
    edges = reader.edge_cases(maker, requests[gate[0]], sent, stage.models[0])
    calibration = (row for index in rest for row in requests[index].rows)
    chosen = (*edges, *(requests[index] for index in gate))
    progress("traffic", f"{len(requests)} rows: {len(gate)} for the gate, {len(edges)} edge cases")
    inputs = PipelineInputs(
        plan=plan,
        model_folder=spec.folder,
        tokenizer_file=None,
        requests=chosen,
        calibration=tuple(islice(calibration, CALIBRATION_ROWS)),
        probe=(),
        hooks=None if hooks is None else (spec.folder / HOOKS_FILE).read_bytes(),
        traffic=tuple(reader.encode(request.sent) for request in requests),
        make_device_rows=partial(reader.device_rows, maker, sent, stage.models[0]),
    )
    if not spec.models:
        return inputs
    decoder = find_class(task.decode)(task.settings(plan.info), spec.folder)
    steps = tuple(reader.step(stage) for stage in found.stages[1:])
    key = key_of("chain", {name: graph.sha256 for name, graph in found.graphs.items()})
    chain = Chain(found.stages, maker, steps, decoder, runs, key)
    return with_chain(inputs, chain, [requests[index] for index in rest])


def _plan(
    spec: ModelSpec, task: Task, reader: OwnReader, found: Stages, rows: Sequence[Sample]
) -> Plan:
    """Return the plan of the pipeline, with those of further models; `rows` are of the first."""
    plans = list[Plan]()
    for stage in found.stages:
        for name, *_ in stage.models:
            graph, own = found.graphs[name], spec.with_model(name) if plans else spec
            kind = "PyTorch module" if own.model.onnx is None else "ONNX graph"
            info = ModelInfo(graph.sha256, f"{kind} {own.model.source}", 0, 0, 0, own=stage.own)
            some = found.rows[name] if plans else rows
            sizes = [record_sizes(np.asarray(row), graph.inputs) for row in some]
            every = [size for each in sizes for size in set(each.values())]
            interface = OwnInterface(graph.inputs, graph.outputs)
            plan = make_own_plan(own, info, task, reader.parameters, every, graph=interface)
            plans.append(plan)
    return replace(
        plans[0],
        request_rows=min(plan.max_batch_size for plan in plans),
        stages=found.stages if spec.models else (),
        others=tuple(plans[1:]),
    )


def with_chain(inputs: PipelineInputs, chain: Chain, rest: Sequence[GateRequest]) -> PipelineInputs:
    """Return the inputs with those of the further models.

    Args:
        inputs: Inputs with the rows of the first model.
        rest: Requests whose rows calibrate a conversion.

    Raises:
        UserError: A function fails on the traffic.
    """
    kept = []
    for request in inputs.requests:
        try:
            chain.answer(request)
        except (RequestError, RuntimeError) as error:
            if request.edge and isinstance(error, RequestError):
                continue
            raise UserError(
                str(inputs.spec.folder / HOOKS_FILE),
                f"has a function that fails on {request.preview!r}",
                given=error,
                remedy="Correct the function, or remove the row from traffic.jsonl",
            ) from error
        kept.append(request)
    own = replace(inputs, requests=tuple(kept), chain=chain)
    others = []
    for plan in inputs.plan.others:
        other = replace(own, plan=plan)
        rows = rows_of(chain.requests(other.model, rest[:CALIBRATION_ROWS]))
        others.append(replace(other.run_behind({}, {}), calibration=tuple(rows[:CALIBRATION_ROWS])))
    return replace(own.run_behind({}, {}), others=tuple(others))


def _check_rows_apart(run: RunBatch, rows: Sequence[Sample]) -> None:
    """Check that each row of a batch gives the same result as alone.

    Raises:
        UserError: A row depends on the other rows, or the model does not run them in a batch.
    """
    alone = [run([row])[0] for row in rows]
    try:
        batched = run(rows)
    except Exception as error:  # of the model, in a batch alone
        reason = " ".join(str(error).split())[:200]
        raise mixed_rows(f"a batch of {len(rows)} rows fails: {reason}") from error
    if len(batched) != len(rows):
        raise mixed_rows(f"a batch of {len(rows)} rows has {len(batched)} results")
    for own, right in zip(batched, alone, strict=True):
        for name, value in right.items():
            if own[name].shape != value.shape:
                shapes = f"{list(own[name].shape)} in a batch, {list(value.shape)} alone"
                raise mixed_rows(f"`{name}` of a row has the shape {shapes}")
            wanted = value.astype(np.float64)
            apart = np.abs(own[name] - wanted).max(initial=0.0)
            apart /= max(1.0, np.abs(wanted).max(initial=0.0))
            if not apart <= MAX_APART:
                raise mixed_rows(
                    f"`{name}` differs by {apart:.2g} between a row in a batch and alone"
                )


def _shown(tensors: Sequence[Tensor]) -> str:
    # Exporters name computed axes by their formula.
    dims = {
        t.name: [d if d.isalnum() or d.isidentifier() else "?" for d in map(str, t.dims)]
        for t in tensors
    }
    return ", ".join(f"{t.name} {t.dtype} [{', '.join(dims[t.name])}]" for t in tensors)
