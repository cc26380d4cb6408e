"""Read a pipeline around the user's own model: its graph, functions and traffic; and the plan.

The graph declares the core's tensors. Free axes, and the tensors that go past the core, are known
from what `preprocess` makes of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import Progress, UserError, closest
from triptych.base.tensors import Tensor
from triptych.core.export.own_graph import (
    OwnGraph,
    RunGraph,
    mixed_rows,
    open_own_model,
    read_graph,
    triton_type,
    with_axis,
)
from triptych.core.gate.runs import RunBatch, by_rows
from triptych.core.gate_rows import (
    CALIBRATION_ROWS,
    EDGE_TEXTS,
    GATE_IMAGES,
    GATE_ROWS,
    split_traffic,
)
from triptych.core.inputs import PipelineInputs, load_checked_hooks, report_tuned
from triptych.core.reader import check_line
from triptych.core.requests import (
    GateRequest,
    Sample,
    hash_inputs,
    make_record,
    preview_text,
    record_sizes,
)
from triptych.repository.config_text import check_config_texts
from triptych.runtime.hooking import FORWARDED_PREFIX, HOOKS_FILE, has_parameter
from triptych.runtime.own_model import ROW_COUNTS, OwnInputs, OwnRowMaker, make_array
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.spec.model_fields import InputField, ModelSpec
from triptych.spec.model_info import ModelInfo, OwnInterface
from triptych.spec.own_plan import make_own_plan
from triptych.spec.tasks.own import own_task
from triptych.spec.tasks.task import Task
from triptych.spec.traffic import PARAMETERS, TRAFFIC_FILE, require_lines

KNOWN_ROWS = 32
"""Maximum number of rows of the traffic from which free axes are known."""
LARGE_ROW_BYTES = 100_000
"""Size of a core row above which the gate takes fewer rows."""
APART_ROWS = 4
"""Number of rows that run alone and in one batch to find a graph that mixes rows."""
MAX_APART = 1e-3
"""Largest difference of a row in a batch, by another order of additions; the gate has the limits.
"""


def read_own_inputs(
    spec: ModelSpec, progress: Progress, *, traffic: Path | None = None
) -> PipelineInputs:
    """Read the graph, the functions and the traffic, and derive the plan.

    Args:
        spec: Spec of the pipeline.
        progress: Callback for what was read.
        traffic: File of rows to use instead of the pipeline's ``traffic.jsonl``.

    Raises:
        UserError: The spec, the graph, the functions or the traffic has a mistake.
    """
    check_config_texts(spec.serving.config, shares_core=False)
    spec.own_files()
    task = own_task(spec)
    report_tuned(spec, progress)
    hooks = load_checked_hooks(spec)
    reader = OwnReader(spec, task)
    requests = reader.read(traffic or spec.folder / TRAFFIC_FILE)
    run = open_own_model(spec)
    graph = read_interface(spec, reader, requests, run)
    progress("source", f"{spec.model.source}: {_shown(graph.inputs)} to {_shown(graph.outputs)}")
    own = OwnInterface(graph.inputs, graph.outputs, takes_rows=takes_rows(hooks))
    own = find_interface(own, reader.discover(own, requests[:KNOWN_ROWS]), spec, run)
    kind = "PyTorch module" if spec.model.onnx is None else "ONNX graph"
    info = ModelInfo(graph.sha256, f"{kind} {spec.model.source}", 0, 0, 0, own=own)
    maker = reader.maker(info)
    requests = reader.with_rows(maker, requests)
    rows = [row for request in requests for row in request.rows]
    sizes = [record_sizes(np.asarray(row), own.inputs) for row in rows]
    plan = make_own_plan(
        spec, info, task, reader.parameters, [n for each in sizes for n in set(each.values())]
    )
    _check_rows_apart(by_rows(run, plan.core, own.inputs, pad_token_id=0), rows[:APART_ROWS])
    size = np.asarray(rows[0]).nbytes
    most = GATE_IMAGES if size > LARGE_ROW_BYTES else GATE_ROWS
    gate, rest = split_traffic([request.sent for request in requests], max_rows=most)
    edges = reader.edge_cases(maker, requests[gate[0]], [request.sent for request in requests])
    calibration = (row for index in rest for row in requests[index].rows)
    chosen = (*edges, *(requests[index] for index in gate))
    progress("traffic", f"{len(requests)} rows: {len(gate)} for the gate, {len(edges)} edge cases")
    return PipelineInputs(
        plan=plan,
        model_folder=spec.folder,
        tokenizer_file=None,
        requests=chosen,
        calibration=tuple(islice(calibration, CALIBRATION_ROWS)),
        probe=(),
        hooks=None if hooks is None else (spec.folder / HOOKS_FILE).read_bytes(),
        traffic=tuple(reader.encode(request.sent) for request in requests),
    )


def takes_rows(hooks: ModuleType | None) -> bool:
    """Return whether `postprocess` takes the inputs of the request."""
    return has_parameter(getattr(hooks, "postprocess", None), "rows")


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


def read_interface(
    spec: ModelSpec, reader: OwnReader, requests: Sequence[GateRequest], run: RunGraph
) -> OwnGraph:
    """Return the interface of the graph, or that of the module by its results on one row.

    Raises:
        UserError: The model has a mistake, or `preprocess` fails.
    """
    if spec.model.onnx is not None:
        return with_axis(spec, read_graph(spec))
    from triptych.core.export.own_module import input_names, load_module, read_module

    names = input_names(load_module(spec))
    (made,) = reader.discover(OwnInterface((), ()), requests[:1])
    arrays = made.tensors or reader.named(requests[0], names)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise UserError(
            "model.module",
            "must take arrays that preprocess returns, or inputs of the pipeline, by their names",
            given=f"`forward` takes {missing[0]}; there are {', '.join(arrays) or 'none'}",
            remedy="Rename the argument or the array",
        )
    return read_module(spec, run, {name: arrays[name] for name in names})


def _shown(tensors: Sequence[Tensor]) -> str:
    # Exporters name computed axes by their formula.
    dims = {
        t.name: [d if d.isalnum() or d.isidentifier() else "?" for d in map(str, t.dims)]
        for t in tensors
    }
    return ", ".join(f"{t.name} {t.dtype} [{', '.join(dims[t.name])}]" for t in tensors)


class OwnReader:
    """Makes requests of a pipeline around the user's own model, as its preprocess step will.

    Args:
        spec: Spec of the pipeline.
        task: Task of the pipeline.
        info: Information on the model, for `accepted`.

    Attributes:
        parameters: Defaults of the request parameters.
    """

    def __init__(self, spec: ModelSpec, task: Task, info: ModelInfo | None = None) -> None:
        self._spec = spec
        self._task = task
        self._info = info
        self._rules = {name: field.rule.as_dict() for name, field in spec.parameters.items()}
        self.parameters = {name: field.default for name, field in spec.parameters.items()}
        self._fields = {name: field.as_dict() for name, field in spec.inputs.items()}
        self._reader = OwnInputs({"own_inputs": self._fields})

    def read(self, path: Path) -> list[GateRequest]:
        """Return the request of each line, without core rows.

        Raises:
            UserError: A line is not an object with a value of the right type for each input.
        """
        fields = self._spec.inputs
        form = "{" + ", ".join(f'"{name}": {_example(f)}' for name, f in fields.items()) + "}"
        requests = []
        for number, line, row in require_lines(path, form):
            where = f"{path}:{number}"
            if row is None:
                raise _bad_line(where, "must be a JSON object with the inputs", line[:80], form)
            own = row.pop(PARAMETERS, {})
            if not isinstance(own, dict):
                raise _bad_line(f"{where}: {PARAMETERS}", "must be an object", own, form)
            if strange := [name for name in row if name not in fields]:
                rule = "is not an input of the pipeline"
                remedy = f"{closest(strange[0], fields)}Write {form}"
                raise UserError(f"{where}: {strange[0]}", rule, given=line[:80], remedy=remedy)
            preview = preview_text(row)
            try:
                sent = {name: self._value(name, value) for name, value in row.items()}
                requests.append(
                    self.request(
                        sent, check_line(where, own, self._rules, self.parameters), preview
                    )
                )
            except (RequestError, TypeError, ValueError, OSError) as error:
                raise _bad_line(where, "has an invalid input", error, form) from error
        return requests

    def request(
        self,
        sent: Mapping[str, Any],
        parameters: Mapping[str, Any],
        preview: str,
        *,
        edge: bool = False,
    ) -> GateRequest:
        """Return a request without core rows.

        Raises:
            RequestError: A value breaks the rules of its input.
            TypeError: A value has another type.
            ValueError: An input is missing, or a value has another shape.
        """
        missing = [n for n, f in self._spec.inputs.items() if f.default is None and n not in sent]
        if missing:
            raise ValueError(f"`{missing[0]}` is required")
        arrays = {}
        for name, value in sent.items():
            try:
                arrays[name] = make_array(self._fields[name], [value])
            except (TypeError, ValueError) as error:
                raise type(error)(f"`{name}` {error}") from error
        columns = self._reader.columns({n: arrays[n] for n in self._fields if n in arrays})
        return GateRequest(sent, sent, parameters, (), (), edge, preview, columns)

    def read_sent(
        self, sent: Mapping[str, Any], parameters: Mapping[str, Any], preview: str
    ) -> GateRequest | None:
        """Return a request that a server received, without core rows; None if it is rejected."""
        try:
            checked = check_line(preview, parameters, self._rules, self.parameters)
            return self.request(sent, checked, preview)
        except (UserError, RequestError, TypeError, ValueError):
            return None

    def accepted(self, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Return those `requests` that `preprocess` accepts, with their core rows."""
        if self._info is None:
            raise ValueError("the reader needs the information on the model")
        maker = self.maker(self._info)
        made = maker.make([request.row_inputs for request in requests])
        return [
            _with_core(request, rows, maker)
            for request, rows in zip(requests, made, strict=True)
            if not isinstance(rows, Exception)
        ]

    def key(self, row: Mapping[str, Any]) -> str:
        """Return the hash of a line's inputs, which is equal for equal numbers and defaults.

        Raises:
            ValueError: A value breaks the rules of its input.
        """
        sent = {name: row[name] for name in self._fields if name in row}
        columns = self.request(sent, {}, "").columns or {}
        return hash_inputs({name: np.asarray(each).tolist() for name, each in columns.items()})

    def encode(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs with numbers and lists as arrays without the batch, for load tests."""
        return {
            name: value
            if isinstance(value, str | bytes)
            else make_array(self._fields[name], [value])[0]
            for name, value in sent.items()
        }

    def named(self, request: GateRequest, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return the inputs of a request that have one of the `names`, ``[1, ...]`` each."""
        columns = request.columns or {}
        known = [name for name in names if name in columns]
        return {name: make_array(self._fields[name], columns[name]) for name in known}

    def join(self, requests: Sequence[GateRequest]) -> RowInputs:
        """Return the inputs of one request with the rows of several that have equal parameters."""
        arrays = {
            name: make_array(
                field, [request.sent.get(name, field["default"]) for request in requests]
            )
            for name, field in self._fields.items()
        }
        return RowInputs(self._reader.columns(arrays), requests[0].parameters)

    def maker(self, info: ModelInfo) -> OwnRowMaker:
        """Return the batch encoder of the pipeline."""
        return self._open(self._settings(info))

    def discover(self, own: OwnInterface, requests: Sequence[GateRequest]) -> list[CoreRows]:
        """Return what `preprocess` makes of requests before all tensors are known.

        Raises:
            UserError: `preprocess` fails, or its arrays do not fit the graph.
        """
        settings = self._settings(ModelInfo("", "", 0, 0, 0, own=own))
        del settings["past_core"]
        maker = self._open(settings)
        return [made for _, made in self._made(maker, requests)]

    def with_rows(self, maker: OwnRowMaker, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Return requests with their core rows.

        Raises:
            UserError: `preprocess` fails on a request.
        """
        return [_with_core(request, made, maker) for request, made in self._made(maker, requests)]

    def edge_cases(
        self, maker: OwnRowMaker, example: GateRequest, traffic: Sequence[Mapping[str, Any]]
    ) -> list[GateRequest]:
        """Return requests with unusual texts and numbers, as far as the pipeline accepts them."""
        requests = []
        for name, kind, value in self._edge_values(traffic):
            sent = {**example.sent, name: value}
            try:
                made = self.request(
                    sent, example.parameters, f"{kind}: {preview_text(sent)}", edge=True
                )
                (core_rows,) = maker.make([made.row_inputs])
            except (RequestError, TypeError, ValueError):
                continue
            if not isinstance(core_rows, Exception):
                requests.append(_with_core(made, core_rows, maker))
        return requests

    def _edge_values(self, traffic: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
        for name, field in self._spec.inputs.items():
            if field.type == "text" and not field.shape:
                yield from ((name, kind, text) for kind, text in EDGE_TEXTS.items())
            if field.type in ("int", "float"):
                known = [np.asarray(row[name]) for row in traffic if name in row]
                if not known:
                    continue
                example = known[0]
                yield name, "zeros", np.zeros_like(example).tolist()
                for kind, limit in (("smallest", np.min), ("largest", np.max)):
                    extreme = limit([limit(value) for value in known if value.size])
                    yield name, kind, np.full_like(example, extreme).tolist()

    def _settings(self, info: ModelInfo) -> dict[str, object]:
        return {**self._task.settings(info), "max_core_rows": self._spec.core.max_batch_size}

    def _open(self, settings: Mapping[str, Any]) -> OwnRowMaker:
        try:
            return OwnRowMaker(settings, self._spec.folder)
        except (Exception, SystemExit) as error:  # the user's own `setup`
            raise UserError(
                str(self._spec.folder / HOOKS_FILE),
                "has a function `setup` that fails",
                given=f"{type(error).__name__}: {error}",
                remedy="Correct the function",
            ) from error

    def _made(
        self, maker: OwnRowMaker, requests: Sequence[GateRequest]
    ) -> Iterator[tuple[GateRequest, CoreRows]]:
        for request, made in zip(
            requests, maker.make([r.row_inputs for r in requests]), strict=True
        ):
            if isinstance(made, Exception):
                raise UserError(
                    str(self._spec.folder / HOOKS_FILE),
                    f"has a function `preprocess` that fails on {request.preview!r}",
                    given=made,
                    remedy="Correct the function, or remove the row from traffic.jsonl",
                ) from made
            yield request, made

    def _value(self, name: str, value: Any) -> Any:
        """Return a value as a client sends it: the content of the file for bytes."""
        if self._spec.inputs[name].type != "bytes":
            return value
        if not isinstance(value, str):
            raise TypeError(f"`{name}` must be the path of a file, not {value!r:.40}")
        return (self._spec.folder / value).read_bytes()


def _bad_line(where: str, rule: str, given: object, form: str) -> UserError:
    return UserError(where, rule, given=f"{given!s:.300}", remedy=f"Write {form}")


def _example(field: InputField) -> str:
    values = {
        "text": '"…"',
        "bytes": '"path of a file"',
        "int": "1",
        "float": "0.5",
        "bool": "true",
    }
    return "[" * len(field.shape) + values[field.type] + "]" * len(field.shape)


def _with_core(request: GateRequest, made: CoreRows, maker: OwnRowMaker) -> GateRequest:
    names = maker.core_inputs
    rows = tuple(
        make_record({name: made.tensors[name][index] for name in names})
        for index in range(made.row_count)
    )
    past_core = {name: value for name, value in made.tensors.items() if name not in names}
    return replace(request, rows=rows, past_core=past_core)


def find_interface(
    own: OwnInterface, made: Sequence[CoreRows], spec: ModelSpec, run: RunGraph
) -> OwnInterface:
    """Return the interface with the sizes of free axes, and with the tensors past the core.

    Args:
        own: Interface as the graph and the functions declare it.
        made: Results of `OwnReader.discover`, at least one.
        spec: Spec of the pipeline.
        run: Runs the graph.

    Raises:
        UserError: Rows differ in the size of an axis, or arrays do not fit the graph.
    """
    names = {tensor.name for tensor in own.inputs}
    named, _ = spec.model.axis
    inputs = tuple(_sized(t, [each.tensors[t.name] for each in made], named) for t in own.inputs)
    for tensor in inputs:
        free = [axis for axis in tensor.dims if isinstance(axis, str) and axis != named]
        if free:
            sizes = sorted({str(each.tensors[tensor.name].shape[1:]) for each in made})
            raise UserError(
                f"model: {tensor.name}",
                f"must get arrays of one shape, but its axis {free[0]} differs between rows",
                given=", ".join(sizes[:4]),
                remedy="Resize or cut the rows in preprocess, or declare the axis: "
                f"model.axes: {{{free[0]}: {{max: SIZE}}}}",
            )
    results = [run({t.name: each.tensors[t.name] for t in inputs}) for each in made[:APART_ROWS]]
    outputs = tuple(_sized(t, [each[t.name] for each in results], named) for t in own.outputs)
    counts = {ROW_COUNTS in each.tensors for each in made}
    if len(counts) > 1:
        raise UserError(
            str(spec.folder / HOOKS_FILE),
            "has a function `preprocess` that returns counts for some rows alone",
            given="a dict for one row, a dict and counts for another",
            remedy="Always return the counts",
        )
    passed = [t for t in made[0].tensors if t not in names and not t.startswith(FORWARDED_PREFIX)]
    past_core = [_passed(name, [each.tensors.get(name) for each in made], spec) for name in passed]
    if own.takes_rows:
        for name, field in spec.inputs.items():
            tensor = field.tensor(name)
            past_core.append(replace(tensor, name=FORWARDED_PREFIX + name, optional=False))
    return replace(
        own,
        inputs=inputs,
        outputs=outputs,
        past_core=tuple(past_core),
        has_counts=ROW_COUNTS in made[0].tensors,
    )


def _sized(tensor: Tensor, arrays: Sequence[NDArray[Any]], kept: str = "") -> Tensor:
    """Return a tensor with the size of each free axis that is the same in all arrays.

    The axis `kept` stays free.
    """
    dims = [
        axis if isinstance(axis, int) or axis == kept or len(sizes) > 1 else next(iter(sizes))
        for axis, sizes in (
            (axis, {array.shape[place] for array in arrays})
            for place, axis in enumerate(tensor.dims, start=1)
        )
    ]
    return replace(tensor, dims=tuple(dims))


def _passed(name: str, arrays: Sequence[NDArray[Any] | None], spec: ModelSpec) -> Tensor:
    """Return the tensor of an array that `preprocess` makes beside the inputs of the core.

    Raises:
        UserError: Rows differ in type, number of axes or names.
    """
    known = [array for array in arrays if array is not None]
    forms = {(array.dtype.name, array.ndim) for array in known}
    if len(known) < len(arrays) or len(forms) > 1 or known[0].ndim < 2:
        found = ", ".join(f"{kind} with {axes} axes" for kind, axes in sorted(forms))
        raise UserError(
            f"{spec.folder / HOOKS_FILE}: {name}",
            "must be an array of numbers [core rows, ...] of the same type in each request, since "
            "it is not an input of the graph",
            given=found if len(known) == len(arrays) else f"{found}, and none in another request",
            remedy="Return an array with two axes or more, for example [core rows, 1]",
        )
    return _sized(
        Tensor(
            name, triton_type(name, known[0]), tuple(f"{name}_{i}" for i in range(1, known[0].ndim))
        ),
        known,
    )
