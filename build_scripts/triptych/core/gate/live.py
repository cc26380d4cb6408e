"""The gate's requests through a served pipeline: alone, beside others, in reverse order.

How far two answers to the same request are from each other, in numbers.

Replies of a served pipeline sorted: what can be compared, what is at fault, and how.
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
from numpy.typing import NDArray

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
from triptych.core.gate.runs import as_floats
from triptych.core.samples import GateRequest
from triptych.runtime import open_row_maker
from triptych.runtime.hooking import NUMPY_TYPES
from triptych.spec.fields import Precision
from triptych.spec.plan import Plan
from triptych.spec.tasks.accuracy import TOLERANCES, Tolerance
from triptych.spec.tasks.compare import Outputs
from triptych.spec.tasks.task import Parameters, Task

SCORES = "score"
_SHOWN_ELEMENTS = 5
_SHOWN_CHARACTERS = 200


def shape_fault(got: Outputs, wanted: Outputs) -> str:
    """What of `got` has another form than `wanted`; empty where all can be compared."""
    for name, array in wanted.items():
        if name not in got:
            return f"{name} is missing"
        if got[name].shape != array.shape:
            return f"{name} has the shape {list(got[name].shape)}, not {list(array.shape)}"
    return ""


def is_finite(answer: Outputs, json_outputs: Sequence[str]) -> bool:
    """No NaN and no infinity among the numbers; a score in JSON is a number, too."""
    for name, array in answer.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return False
        if name in json_outputs and not all(map(_finite_json, _entries(array))):
            return False
    return True


def differences(one: Outputs, other: Outputs, json_outputs: Sequence[str]) -> dict[str, float]:
    """Largest difference of the numbers in each output that has any.

    Named scores are compared by name, so that two of equal score may stand in either order; a name
    that only one answer has is held against the last of the other's. Entries of JSON are compared
    where all but their numbers is the same.

    Args:
        one: an answer.
        other: one without a `shape_fault` against it.
        json_outputs: names of the outputs whose elements are JSON texts.
    """
    found = {}
    for name, array in one.items():
        if name in json_outputs:
            found[name] = _largest(_json_differences(_entries(array), _entries(other[name])))
        elif name == SCORES and (names := _names(one)) and names == _names(other):
            found[name] = _largest(_named_differences(one, other, names))
        elif np.issubdtype(array.dtype, np.floating) and array.size:
            with np.errstate(invalid="ignore", over="ignore"):  # infinities give NaN
                found[name] = float(np.abs(array - other[name]).max())
    return found


def same(one: Outputs, other: Outputs) -> bool:
    return all(
        np.issubdtype(array.dtype, np.floating) or bool(np.array_equal(array, other[name]))
        for name, array in one.items()
    )


def show_answer(answer: Outputs) -> str:
    parts = []
    for name, array in answer.items():
        if array.size:
            first = ", ".join(map(_show, array.flat[:_SHOWN_ELEMENTS]))
            parts.append(f"{name}: {first}{', …' if array.size > _SHOWN_ELEMENTS else ''}")
    return "; ".join(parts)


def _show(element: Any) -> str:
    if isinstance(element, bytes):
        text = element.decode("utf-8", "backslashreplace")
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return f"{element:.5g}"


def _largest(values: Iterator[float]) -> float:
    return float(np.max([0.0, *values]))  # NaN where anything is: Python's maximum may lose it


def _names(answer: Outputs) -> str:
    """The output that names the scores, each once; empty where there is none."""
    scores = answer[SCORES]
    for name, array in answer.items():
        if array.dtype == np.object_ and array.shape == scores.shape:
            return name if len(set(array.flat)) == array.size else ""
    return ""


def _named_differences(one: Outputs, other: Outputs, names: str) -> Iterator[float]:
    here, there = (dict(zip(a[names].flat, a[SCORES].flat, strict=True)) for a in (one, other))
    for mine, others in ((here, there), (there, here)):
        last = min(others.values(), default=0.0)
        for name, score in mine.items():
            yield abs(float(score) - float(others.get(name, last)))


def _entries(array: NDArray[Any]) -> list[Any]:
    """What the JSON texts of one output hold, lists one entry after the other."""
    values = [_loaded(text) for text in array.flat]
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a wrong model may answer anything
        return text.decode("utf-8", "backslashreplace")


def _json_differences(one: Sequence[Any], other: Sequence[Any]) -> Iterator[float]:
    matches = {_known(entry): entry for entry in other}
    for entry in one:
        match = matches.get(_known(entry))
        if isinstance(entry, dict) and match is not None:
            for key, value in entry.items():
                if isinstance(value, float) and isinstance(match.get(key), float):
                    yield abs(value - match[key])


def _known(entry: Any) -> str:
    """All of an entry but its numbers with a fraction: what makes it the same in another answer."""
    if isinstance(entry, dict):
        entry = {key: value for key, value in entry.items() if not isinstance(value, float)}
    return json.dumps(entry, sort_keys=True)


def _finite_json(entry: Any) -> bool:
    # A decoder writes a score that is no number as null.
    if isinstance(entry, dict):
        missing = SCORES in entry and entry[SCORES] is None
        return not missing and all(map(_finite_json, entry.values()))
    if isinstance(entry, list):
        return all(map(_finite_json, entry))
    return not isinstance(entry, float) or bool(np.isfinite(entry))


ALONE, TOGETHER, REVERSED = "alone", "together", "reversed"
WAYS = (ALONE, TOGETHER, REVERSED)
"""How the requests are sent: one after the other, many at once, and so from the last to the first.
"""

MAX_LATE = 3
"""So many requests past their deadline, and the others are not waited for."""

_NO_SERVER = (
    ServerUnreachableError,
    AccessDeniedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
)


@dataclass(frozen=True)
class LiveRequest:
    """One request of one row, as a client sends it; the pipeline has defaults for the rest."""

    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class LiveReply:
    """What came back: outputs by name, ``[1, …]`` each, or an error."""

    outputs: Outputs | None = None
    error: InferenceError | None = None

    @property
    def refused(self) -> bool:
        """Whether the pipeline says that the request breaks one of its rules."""
        return isinstance(self.error, InvalidRequestError)


@dataclass(frozen=True)
class LiveRuns:
    """The replies of all ways of sending, in the order of the requests.

    Attributes:
        replies: way to one reply a request.
        mean_batch: rows the core ran at a time while many requests were under way; None where the
            server does not tell.
    """

    replies: Mapping[str, Sequence[LiveReply]]
    mean_batch: float | None


def live_request(
    inputs: Mapping[str, str | bytes], parameters: Parameters, defaults: Parameters
) -> LiveRequest:
    """A request that gives the `parameters` other than the `defaults`; lists go as JSON."""
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
    """For each request the words in which the pipeline must refuse it; empty where it must not.

    The gate's own rows are cut to the limit whatever the spec says; a server does what it says.
    `folder` has the ``tokenizer.json``, where the task has one; `sent` is what a client sends.
    """
    maker = open_row_maker(plan.task.rows, {**plan.row_settings, "bucket_edges": []}, folder)
    row_inputs = [request.row_inputs for request in requests]
    limit = plan.spec.tokenizer.max_text_bytes
    found = []
    for live, rows in zip(sent, maker.make(row_inputs), strict=True):
        # Texts are measured before anything else is done with them.
        long = [
            name
            for name, value in live.inputs.items()
            if isinstance(value, str) and len(value.encode()) > limit
        ]
        if long:
            found.append(f"`{long[0]}` must have at most {limit} bytes")
        else:  # a client with one row is not told which one
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
        plan: what the server should serve.
        url: ``host:port`` of its gRPC endpoint.
        requests: of one row each.
        clients: requests under way at once where they are sent together.
        timeout_s: deadline of each request, in seconds.
        progress: told what is being done.
        ways: of `WAYS`, at least one.

    Raises:
        UserError: no server answers there (any more), it does not serve the pipeline, the
            pipeline has other inputs or outputs, or requests are not answered in time.
    """
    name = plan.spec.name
    try:
        with Client(name, url, timeout_s=timeout_s, retry=Retry()) as client:
            check_interface(plan, client.interface(), url)
            replies = {}
            for way in ways:
                progress(f"{len(requests)} requests, {_words(way, clients)} ...")
                before = _core_statistics(client, plan)
                order = range(len(requests))[:: -1 if way == REVERSED else 1]
                replies[way] = _send(client, requests, order, 1 if way == ALONE else clients)
                after = _core_statistics(client, plan)
    except DeadlineExceededError as error:
        raise UserError(
            f"{name} at {url}",
            f"must answer requests within {timeout_s:g} s",
            given=error.message,
            remedy="Raise --timeout-s, or lower --clients",
        ) from error
    except InferenceError as error:
        raise UserError(
            f"{name} at {url}",
            "must be served all the time that it is verified",
            given=error,
            remedy="Name a server that serves it with --url, or leave --url out to start one",
        ) from error
    mean_batch = None if before is None or after is None else (after - before).mean_batch
    return LiveRuns(replies, mean_batch)


def check_interface(plan: Plan, config: PipelineConfig, url: str) -> None:
    """Raise `UserError` unless the pipeline served has the inputs and outputs of the plan."""
    wanted = {
        tensor.name: (NUMPY_TYPES[tensor.dtype], tuple(max(dim, 0) for dim in tensor.config_dims))
        for tensor in plan.task.outputs
    }
    found = {name: (dtype, tuple(dims)) for name, (dtype, dims) in config.outputs.items()}
    inputs = sorted(tensor.name for tensor in plan.task.inputs)
    for kind, want, have in (
        ("inputs", inputs, sorted(config.inputs)),
        ("outputs", _shown(wanted), _shown(found)),
    ):
        if want != have:
            raise UserError(
                f"{plan.spec.name} at {url}",
                f"must have the {kind} of {plan.task.name}: {', '.join(want)}",
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
    with suppress(InferenceError):  # a server may keep its statistics to itself
        steps = client.step_statistics()
        return next((step for step in steps if step.model == plan.step("core")), None)
    return None


def _send(
    client: Client, requests: Sequence[LiveRequest], order: Sequence[int], clients: int
) -> list[LiveReply]:
    """One reply a request, in the order of `requests`; they are begun in the given `order`."""
    late: list[DeadlineExceededError] = []

    def send(place: int) -> LiveReply:
        if len(late) >= MAX_LATE:
            raise late[0]
        request = requests[place]
        inputs = {name: [value] for name, value in request.inputs.items()}
        try:
            return LiveReply(client.infer(inputs, parameters=request.parameters))
        except _NO_SERVER:
            raise
        except InferenceError as error:
            if isinstance(error, DeadlineExceededError):
                late.append(error)
            return LiveReply(error=error)

    with ThreadPoolExecutor(clients) as pool:
        futures = {place: pool.submit(send, place) for place in order}
        try:
            return [futures[place].result() for place in range(len(requests))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_NOT_FINITE = "answered with NaN or infinity"
_MAX_SHOWN = 160


@dataclass(frozen=True)
class LiveCase:
    """One request and what must come of it.

    Attributes:
        preview: Short text for tables.
        query: what it is grouped by where rows are ranked.
        edge: generated, not of the traffic.
        wanted: what the reference answers.
        refusal: words of the error that the spec demands instead; empty where there is none.
    """

    preview: str
    query: str
    edge: bool
    wanted: Outputs
    refusal: str


@dataclass(frozen=True)
class Rules:
    """What the answers are held to.

    Attributes:
        task: of the pipeline.
        precision: Precision of the core, which decides the limits.
        limits: metric to limit.
        hooked: whether functions of the pipeline's own make the outputs: they may round, so that
            the numbers of two answers can be any distance apart.
    """

    task: Task
    precision: Precision
    limits: Mapping[str, float]
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
class SortedReplies:
    """The replies to one way of sending: what can be compared, what is wrong, what became of all.

    Attributes:
        answers: place of a case to its answer, where it should have one.
        faults: kind of fault to the places and words of the replies that have it.
        counts: replies by what they are.
        finite: no NaN, no infinity.
    """

    answers: Mapping[int, Outputs]
    faults: Mapping[str, Sequence[tuple[int, str]]]
    counts: Counter[str]
    finite: bool


def sort_replies(
    cases: Sequence[LiveCase], replies: Sequence[LiveReply], rules: Rules
) -> SortedReplies:
    """Which of the replies, one a case, can be compared, and what is wrong with the others."""
    answers: dict[int, Outputs] = {}
    faults: dict[str, list[tuple[int, str]]] = {}
    counts: Counter[str] = Counter()
    finite = True
    for place, (case, reply) in enumerate(zip(cases, replies, strict=True)):
        counts[_fate(reply)] += 1
        fault = _fault_of(case, reply, rules)
        if fault is not None:
            kind, words = fault
            faults.setdefault(kind, []).append((place, words))
            finite &= kind != _NOT_FINITE
        if reply.outputs is not None and not case.refusal:
            answers[place] = reply.outputs
    return SortedReplies(answers, faults, counts, finite)


def _fate(reply: LiveReply) -> str:
    if reply.error is None:
        return "answered"
    return "refused" if reply.refused else type(reply.error).__name__


def _fault_of(case: LiveCase, reply: LiveReply, rules: Rules) -> tuple[str, str] | None:
    """Kind and words; None where the reply is as it must be."""
    if reply.outputs is None:
        said = "" if reply.error is None else reply.error.message
        if not reply.refused:
            return f"not answered ({_fate(reply)})", said
        if not case.refusal:
            return "refused", said
        if case.refusal not in said:
            return "refused in other words than the spec's", f"{said} (the spec: {case.refusal})"
        return None
    if case.refusal:
        return "answered, though the spec refuses them", case.refusal
    if not is_finite(reply.outputs, rules.json_outputs):
        return _NOT_FINITE, ""
    shape = shape_fault(reply.outputs, case.wanted)
    if shape and not rules.hooked:  # functions of the user's own may leave out what scores low
        return "answered in another form", shape
    return None


def describe_faults(cases: Sequence[LiveCase], view: SortedReplies, way: str) -> Iterator[str]:
    """One line for each kind of fault among the replies to one `way` of sending."""
    for kind, found in view.faults.items():
        place, words = found[0]
        count = f"{len(found)} requests were" if len(found) > 1 else "1 request was"
        first = f"{cases[place].preview!r:.{_MAX_SHOWN}}" + (f": {words}" if words else "")
        yield f"{way}: {count} {kind}; the first: {first}"
    if not view.answers:
        yield f"{way}: there is no answer that can be compared"
