"""The gate's requests through a served pipeline: alone, beside others, in reverse order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.base.errors import UserError
from triptych.client import (
    AccessDenied,
    Client,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    PipelineConfig,
    PipelineNotFound,
    PipelineNotReady,
    Retry,
    ServerUnreachable,
    StepStatistics,
)
from triptych.core.gate.decoded import as_floats
from triptych.core.samples import GateRequest
from triptych.runtime import open_row_maker
from triptych.runtime.hooking import NUMPY_TYPES
from triptych.spec.plan import Plan
from triptych.spec.tasks.metrics_outputs import Outputs
from triptych.spec.tasks.task import Parameters

ALONE, TOGETHER, REVERSED = "alone", "together", "reversed"
WAYS = (ALONE, TOGETHER, REVERSED)
"""How the requests are sent: one after the other, many at once, and so from the last to the first.
"""

MOST_LATE = 3
"""So many requests past their deadline, and the others are not waited for."""

_NO_SERVER = (ServerUnreachable, AccessDenied, PipelineNotFound, PipelineNotReady)


@dataclass(frozen=True)
class LiveRequest:
    """One request of one row, as a client sends it; the pipeline has defaults for the rest."""

    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Reply:
    """What came back: outputs by name, ``[1, …]`` each, or an error."""

    outputs: Outputs | None = None
    error: InferenceError | None = None

    @property
    def refused(self) -> bool:
        """Whether the pipeline says that the request breaks one of its rules."""
        return isinstance(self.error, InvalidRequest)


@dataclass(frozen=True)
class LiveRuns:
    """The replies of all ways of sending, in the order of the requests.

    Attributes:
        replies: way to one reply a request.
        mean_batch: rows the core ran at a time while many requests were under way; None where the
            server does not tell.
    """

    replies: Mapping[str, Sequence[Reply]]
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
    except DeadlineExceeded as error:
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
) -> list[Reply]:
    """One reply a request, in the order of `requests`; they are begun in the given `order`."""
    late: list[DeadlineExceeded] = []

    def send(place: int) -> Reply:
        if len(late) >= MOST_LATE:
            raise late[0]
        request = requests[place]
        inputs = {name: [value] for name, value in request.inputs.items()}
        try:
            return Reply(client.infer(inputs, parameters=request.parameters))
        except _NO_SERVER:
            raise
        except InferenceError as error:
            if isinstance(error, DeadlineExceeded):
                late.append(error)
            return Reply(error=error)

    with ThreadPoolExecutor(clients) as pool:
        futures = {place: pool.submit(send, place) for place in order}
        try:
            return [futures[place].result() for place in range(len(requests))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
