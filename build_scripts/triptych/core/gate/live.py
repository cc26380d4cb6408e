"""Requests of the gate to a served encoder: alone, concurrently, and in reverse order.

The module sorts the responses into answers and faults, and computes the differences of answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.arrays import Array
from triptych.base.errors import UserError
from triptych.client import (
    AccessDeniedError,
    Client,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    PipelineConfig,
    PipelineNotFoundError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
    StepStatistics,
)
from triptych.client.tasks import TERMS
from triptych.core.gate.runs import as_floats
from triptych.core.requests import GateRequest
from triptych.runtime.hooking import NUMPY_TYPES
from triptych.runtime.row_types import RowMaker, find_class
from triptych.spec.backends import Precision
from triptych.spec.plan import Plan
from triptych.tasks.accuracy import TOLERANCES, Tolerance
from triptych.tasks.compare import Outputs
from triptych.tasks.task import Parameters, Task

SCORES = "score"


def shape_fault(got: Outputs, wanted: Outputs) -> str:
    """Return which output of `got` is missing or has a wrong shape; empty if none.

    A server leaves out optional outputs without elements, such as the vectors of another encoding.
    Rounding may add or remove terms of little weight.
    """
    if terms := _terms(got, wanted):
        wanted = {**wanted, **dict.fromkeys(terms, got[TERMS[1]])}
    for name, array in wanted.items():
        if name not in got and array.size:
            return f"{name} is missing"
        if name in got and got[name].shape != array.shape:
            return f"{name} has the shape {list(got[name].shape)}, not {list(array.shape)}"
    return ""


def is_finite(answer: Outputs, json_outputs: Sequence[str]) -> bool:
    """Return whether no number is NaN or infinite, including the numbers in JSON."""
    for name, array in answer.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return False
        if name in json_outputs and not all(map(_finite_json, _entries(array))):
            return False
    return True


def differences(one: Outputs, other: Outputs, json_outputs: Sequence[str]) -> dict[str, float]:
    """Return the largest difference of the numbers in each output that has numbers.

    Named scores are compared by name, so that names of equal score may be in any order, and weights
    by term. A name or term that only one answer has is compared with the last score of the other
    answer, or with 0 if that is nearer. Entries of JSON are compared if they are equal without
    their fractional numbers.

    Args:
        one: An answer.
        other: Another answer, without a `shape_fault` against the first.
        json_outputs: Names of the outputs whose elements are JSON texts.
    """
    found = {}
    for name, array in one.items():
        if name in json_outputs:
            found[name] = _largest(_json_differences(_entries(array), _entries(other[name])))
        elif name == SCORES and (names := _names(one)) and names == _names(other):
            found[name] = _largest(_named_differences(one, other, (names, SCORES)))
        elif name in _terms(one, other):
            found[TERMS[1]] = _largest(_named_differences(one, other, TERMS))
        elif np.issubdtype(array.dtype, np.floating) and array.size:
            with np.errstate(invalid="ignore", over="ignore"):  # Infinities give NaN.
                found[name] = float(np.abs(array - other[name]).max())
    return found


def same(one: Outputs, other: Outputs) -> bool:
    return all(
        np.issubdtype(array.dtype, np.floating)
        or not (array.size or name in other)
        or name in _terms(one, other)
        or bool(np.array_equal(array, other[name]))
        for name, array in one.items()
    )


def _terms(one: Outputs, other: Outputs) -> Sequence[str]:
    """Return the outputs with the terms of both answers; none if they are no sparse vectors."""
    return TERMS if {*TERMS} <= one.keys() & other.keys() else ()


def _largest(values: Iterator[float]) -> float:
    return float(np.max([0.0, *values]))  # Python's maximum may lose a NaN.


def _names(answer: Outputs) -> str:
    """Return the output that names each score uniquely; empty if there is none."""
    scores = answer[SCORES]
    for name, array in answer.items():
        if array.dtype == np.object_ and array.shape == scores.shape:
            return name if len(set(array.flat)) == array.size else ""
    return ""


def _named_differences(one: Outputs, other: Outputs, outputs: tuple[str, str]) -> Iterator[float]:
    pairs = ([each[name].flat for name in outputs] for each in (one, other))
    here, there = (dict(zip(*pair, strict=True)) for pair in pairs)
    for mine, others in ((here, there), (there, here)):
        last = min(others.values(), default=0.0)
        for name, score in mine.items():
            found = [others[name]] if name in others else [last, 0.0]
            yield min(abs(float(score) - float(each)) for each in found)


def _entries(array: Array) -> list[object]:
    """Return the values in the JSON texts of one output, with lists flattened."""
    values = [_loaded(text) for text in array.flat]
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _loaded(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:  # A wrong model may return any text.
        return text.decode("utf-8", "backslashreplace")


def _json_differences(one: Sequence[Any], other: Sequence[Any]) -> Iterator[float]:
    matches = {_known(entry): entry for entry in other}
    for entry in one:
        match = matches.get(_known(entry))
        if isinstance(entry, dict) and match is not None:
            for key, value in entry.items():
                if isinstance(value, float) and isinstance(match.get(key), float):
                    yield abs(value - match[key])


def _known(entry: object) -> str:
    """Return the JSON text of an entry without its floats, to find the entry in another answer."""
    if isinstance(entry, dict):
        entry = {key: value for key, value in entry.items() if not isinstance(value, float)}
    return json.dumps(entry, sort_keys=True)


def _finite_json(entry: object) -> bool:
    # Decoders write a score that is NaN as null.
    if isinstance(entry, dict):
        missing = SCORES in entry and entry[SCORES] is None
        return not missing and all(map(_finite_json, entry.values()))
    if isinstance(entry, list):
        return all(map(_finite_json, entry))
    return not isinstance(entry, float) or bool(np.isfinite(entry))


ALONE, TOGETHER, REVERSED = "alone", "together", "reversed"
WAYS = (ALONE, TOGETHER, REVERSED)
"""Ways of sending: one by one, concurrently, and concurrently from the last to the first."""

MAX_LATE = 3
"""Number of requests past their deadline that ends the run."""

NO_SERVER = (
    ServerUnreachableError,
    AccessDeniedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
)
"""Errors that end a run, because no request can be answered."""


@dataclass(frozen=True)
class LiveRequest:
    """Request of one row, as a client sends it, with the non-default parameters alone."""

    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class LiveResponse:
    """Response to one request: outputs by name, of shape ``[1, …]``, or an error."""

    outputs: Outputs | None = None
    error: InferenceError | None = None

    @property
    def refused(self) -> bool:
        """Whether the pipeline rejected the request as invalid."""
        return isinstance(self.error, InvalidRequestError)


@dataclass(frozen=True)
class LiveRuns:
    """Responses of all ways of sending, in the order of the requests."""

    responses: Mapping[str, Sequence[LiveResponse]]  # Response to each request, by way of sending
    # Mean number of rows in a batch of the core during the last way of sending; None if the server
    # does not report it.
    mean_batch: float | None


def live_request(
    inputs: Mapping[str, str | bytes], parameters: Parameters, defaults: Parameters
) -> LiveRequest:
    """Return a request with the `parameters` that differ from the `defaults`; lists as JSON."""
    given = {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple) else value
        for name, value in parameters.items()
        if name not in defaults or defaults[name] != value
    }
    return LiveRequest(inputs, given)


def live_requests(plan: Plan, requests: Sequence[GateRequest]) -> list[LiveRequest]:
    return [
        live_request(request.sent, as_floats(request.parameters), plan.parameters)
        for request in requests
    ]


def refusals(
    plan: Plan, folder: Path, requests: Sequence[GateRequest], sent: Sequence[LiveRequest]
) -> list[str]:
    """Return the message with which the pipeline must reject each request; empty if none.

    The gate truncates its rows to the limit; a server follows the spec.

    Args:
        folder: Folder of the ``tokenizer.json``, if the task has one.
        requests: Requests of the gate.
        sent: Requests in the form that a client sends, in the same order.
    """
    settings = {**plan.row_settings, "bucket_edges": []}
    maker: RowMaker = find_class(plan.task.rows)(settings, folder)
    row_inputs = [request.row_inputs for request in requests]
    limit = plan.spec.max_text_bytes
    found = []
    for live, rows in zip(sent, maker.make(row_inputs), strict=True):
        # A server checks the size of a text before it tokenizes the text.
        long = [
            name
            for name, value in live.inputs.items()
            if isinstance(value, str) and len(value.encode()) > limit
        ]
        if long:
            found.append(f"`{long[0]}` must have at most {limit} bytes")
        else:  # The server names no row to a client that sent one row.
            found.append(str(rows).removeprefix("row 0: ") * isinstance(rows, Exception))
    return found


def run_live(
    plan: Plan,
    url: str,
    requests: Sequence[LiveRequest],
    *,
    clients: int,
    timeout_s: float,
    progress: Callable[[str], None],
    ways: Sequence[str] = WAYS,
) -> LiveRuns:
    """Send every request in each of `ways`.

    Args:
        plan: Plan of the pipeline that the server should serve.
        url: ``host:port`` of the server's gRPC endpoint.
        requests: Requests of one row each.
        clients: Number of requests in flight, if requests are sent concurrently.
        timeout_s: Deadline of each request in seconds.
        progress: Receives a line before each way of sending.
        ways: Ways of sending from `WAYS`, at least one.

    Raises:
        UserError: No server answers, the server does not serve the pipeline, the pipeline has
            other inputs or outputs, or requests are not answered in time.
    """
    name = plan.spec.name
    try:
        with Client(name, url, timeout_s=timeout_s, retry=Retry()) as client:
            check_interface(plan, client.interface(), url)
            responses = {}
            for way in ways:
                progress(f"{len(requests)} requests, {_words(way, clients)} ...")
                before = _core_statistics(client, plan)
                order = range(len(requests))[:: -1 if way == REVERSED else 1]
                responses[way] = _send(client, requests, order, 1 if way == ALONE else clients)
                after = _core_statistics(client, plan)
    except DeadlineExceededError as error:
        raise UserError(
            f"{name} at {url}",
            f"does not answer requests within {timeout_s:g} s",
            given=error.message,
            remedy="Raise --timeout-s, or lower --clients",
        ) from error
    except InferenceError as error:
        raise UserError(
            f"{name} at {url}",
            "was not served for the whole verification",
            given=error,
            remedy="Name a server that serves it with --url, or leave --url out to start one",
        ) from error
    mean_batch = None if before is None or after is None else (after - before).mean_batch
    return LiveRuns(responses, mean_batch)


def check_interface(plan: Plan, config: PipelineConfig, url: str) -> None:
    """Raise `UserError` unless the pipeline served has the inputs and outputs of the plan."""
    wanted = {
        tensor.name: (NUMPY_TYPES[tensor.dtype], tuple(max(dim, 0) for dim in tensor.config_dims))
        for tensor in plan.task.outputs
    }
    found = {name: (dtype, tuple(dims)) for name, (dtype, dims) in config.outputs.items()}
    inputs = sorted(tensor.name for tensor in plan.task.inputs if not tensor.optional)
    for kind, want, have in (
        ("inputs", inputs, sorted(config.inputs)),
        ("outputs", _shown(wanted), _shown(found)),
    ):
        if want != have:
            raise UserError(
                f"{plan.spec.name} at {url}",
                f"does not have the {kind} of {plan.task.name}: {', '.join(want)}",
                given=", ".join(have),
                remedy="Build the pipeline again, or name the server that serves it",
            )


def _shown(outputs: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]) -> list[str]:
    return sorted(
        f"{name} {np.dtype(dtype).name} [{', '.join(str(dim or -1) for dim in dims)}]"
        for name, (dtype, dims) in outputs.items()
    )


def _words(way: str, clients: int) -> str:
    if way == ALONE:
        return "one after the other"
    return f"{clients} at a time" + (", from the last to the first" if way == REVERSED else "")


def _core_statistics(client: Client, plan: Plan) -> StepStatistics | None:
    with suppress(InferenceError):  # Statistics may be disabled on the server.
        steps = client.step_statistics()
        return next((step for step in steps if step.model == plan.step("core")), None)
    return None


def _send(
    client: Client, requests: Sequence[LiveRequest], order: Sequence[int], clients: int
) -> list[LiveResponse]:
    """Return the response to each of `requests`; the requests are sent in the given `order`."""
    late: list[DeadlineExceededError] = []

    def send(place: int) -> LiveResponse:
        if len(late) >= MAX_LATE:
            raise late[0]
        request = requests[place]
        inputs = {name: [value] for name, value in request.inputs.items()}
        try:
            outputs = client.infer(inputs, parameters=request.parameters)
            return LiveResponse({name: _as_decoded(array) for name, array in outputs.items()})
        except NO_SERVER:
            raise
        except InferenceError as error:
            if isinstance(error, DeadlineExceededError):
                late.append(error)
            return LiveResponse(error=error)

    with ThreadPoolExecutor(clients) as pool:
        futures = {place: pool.submit(send, place) for place in order}
        try:
            return [futures[place].result() for place in range(len(requests))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _as_decoded(array: Array) -> Array:
    """Return an output of a client with texts as the bytes that a decoder makes."""
    if array.dtype != np.object_:
        return array
    encoded: Array = np.frompyfunc(str.encode, 1, 1)(array)
    return encoded


_NOT_FINITE = "answered with NaN or infinity"
_MAX_SHOWN = 160


@dataclass(frozen=True)
class ExpectedAnswer:
    """One request and its expected result."""

    preview: str  # Short text for tables
    query: str  # Group of the row, if rows are ranked
    edge: bool  # Whether the request is a synthetic edge case
    wanted: Outputs  # Answer of the reference
    refusal: str  # Message of the error that the spec requires instead; empty if there is none


@dataclass(frozen=True)
class AnswerRules:
    """Rules that the answers must meet."""

    task: Task  # Task of the pipeline
    precision: Precision  # Precision of the core, which decides the limits
    limits: Mapping[str, float]  # Limit of each metric
    # Whether hooks of the pipeline make the outputs. Hooks may round, so the numbers of two answers
    # may differ by any amount.
    hooked: bool

    @property
    def tolerance(self) -> Tolerance:
        """Tolerance of the precision."""
        return TOLERANCES[self.precision]

    @property
    def json_outputs(self) -> list[str]:
        """Names of the outputs whose elements are JSON texts."""
        return [tensor.name for tensor in self.task.outputs if tensor.content == "json"]


@dataclass(frozen=True)
class SortedResponses:
    """Responses of one way of sending, sorted into answers and faults."""

    # Answers by index of the case, without the cases that must be rejected.
    answers: Mapping[int, Outputs]
    # Index of the case and message of each fault, by kind of fault.
    faults: Mapping[str, Sequence[tuple[int, str]]]
    counts: Counter[str]  # Number of responses by outcome
    finite: bool  # Whether no number is NaN or infinite


def sort_responses(
    cases: Sequence[ExpectedAnswer], responses: Sequence[LiveResponse], rules: AnswerRules
) -> SortedResponses:
    """Sort the responses, one for each case, into answers and faults."""
    answers: dict[int, Outputs] = {}
    faults: dict[str, list[tuple[int, str]]] = {}
    counts: Counter[str] = Counter()
    finite = True
    for place, (case, response) in enumerate(zip(cases, responses, strict=True)):
        counts[_fate(response)] += 1
        fault = _fault_of(case, response, rules)
        if fault is not None:
            kind, words = fault
            faults.setdefault(kind, []).append((place, words))
            finite &= kind != _NOT_FINITE
        if response.outputs is not None and not case.refusal:
            answers[place] = response.outputs
    return SortedResponses(answers, faults, counts, finite)


def _fate(response: LiveResponse) -> str:
    if response.error is None:
        return "answered"
    return "refused" if response.refused else type(response.error).__name__


def _fault_of(
    case: ExpectedAnswer, response: LiveResponse, rules: AnswerRules
) -> tuple[str, str] | None:
    """Return kind and message of the fault; None if the response is as expected."""
    if response.outputs is None:
        said = "" if response.error is None else response.error.message
        if not response.refused:
            return f"not answered ({_fate(response)})", said
        if not case.refusal:
            return "refused", said
        if case.refusal not in said:
            return "refused in other words than the spec's", f"{said} (the spec: {case.refusal})"
        return None
    if case.refusal:
        return "answered, though the spec refuses them", case.refusal
    if not is_finite(response.outputs, rules.json_outputs):
        return _NOT_FINITE, ""
    shape = shape_fault(response.outputs, case.wanted)
    if shape and not rules.hooked:  # Hooks may leave out low scores.
        return "answered in another form", shape
    return None


def describe_faults(
    cases: Sequence[ExpectedAnswer], view: SortedResponses, way: str
) -> Iterator[str]:
    """Yield a line for each kind of fault among the responses of one `way` of sending."""
    for kind, found in view.faults.items():
        place, words = found[0]
        count = f"{len(found)} requests were" if len(found) > 1 else "1 request was"
        first = f"{cases[place].preview!r:.{_MAX_SHOWN}}" + (f": {words}" if words else "")
        yield f"{way}: {count} {kind}; the first: {first}"
    if not view.answers:
        yield f"{way}: there is no answer that can be compared"
