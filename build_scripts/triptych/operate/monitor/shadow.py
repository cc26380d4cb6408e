"""`triptych shadow`: replay the same requests on two builds, each with its own server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.errors import Progress, UserError
from triptych.base.tensors import Tensor
from triptych.core.gate.live import TOGETHER, LiveResponse, live_requests, run_live
from triptych.core.gate.verify import rules_of
from triptych.core.inputs import PipelineInputs, task_of
from triptych.core.own_reader import OwnReader
from triptych.core.requests import GateRequest
from triptych.operate.monitor.findings import hooks_differ
from triptych.operate.monitor.sample import (
    TrafficSample,
    answer_requests,
    exclude_health_checks,
    make_reader,
    read_requests,
    take_evenly,
)
from triptych.operate.monitor.shadow_verdict import (
    ReplayComparison,
    compare_answers,
    compare_speeds,
    judge,
)
from triptych.repository.manifest import CompiledManifest, build_id, read_manifest
from triptych.runtime.hooking import HOOKS_FILE
from triptych.serving.bench.bench import WARM_UP_REQUESTS
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.results import Measurement, OfferedLoad
from triptych.serving.endpoint import Endpoint, open_endpoint
from triptych.spec.traffic import TRAFFIC_FILE, read_traffic
from triptych.tasks.compare import Outputs

TIMEOUT_S = 60.0
"""Deadline of each request, in seconds."""

SIDES = ("active", "candidate")
FIRST_ROUNDS = 5
"""Number of rounds whose noise decides how many are measured."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay."""

    max_rows: int  # Maximum number of requests; of more, evenly spaced ones are taken
    clients: int  # Number of requests in flight while answers are compared
    load: OfferedLoad  # Load of the measurements of latency and cost
    rounds: int  # Maximum number of measurements per build, in turns; 0 compares only answers
    seconds: float  # Duration of each measurement


def compare_candidate(
    inputs: PipelineInputs,
    repository: Path,
    candidate: Path,
    sample: TrafficSample | None,
    options: ReplayOptions,
    progress: Progress,
) -> ReplayComparison:
    """Send the same requests to the active build and a candidate, and compare the results.

    Both builds are served concurrently on this machine; load is sent to them in turns.

    Args:
        inputs: Inputs of the pipeline, in the layout of the active build.
        repository: Repository with the active build.
        candidate: Repository with the candidate.
        sample: Rows to replay; None takes the pipeline's traffic.
        options: Options of the replay.
        progress: Called at each stage.

    Raises:
        UserError: A repository lacks the pipeline, the candidate is the same build or has another
            task, there are no requests, or a server fails.
    """
    name = inputs.plan.spec.name
    manifests = _read_manifests(name, repository, candidate)
    requests, refused = _choose_requests(inputs, sample, options.max_rows)
    is_known = {manifest.model_sha256 for manifest in manifests} == {inputs.plan.info.sha256}
    expected: list[Outputs | None] | None = None
    if is_known:
        progress("shadow", f"{len(requests)} requests in PyTorch fp32 ...")
        answers = answer_requests(inputs, requests, progress)
        expected = [None if answer.refusal else answer.outputs for answer in answers]
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(open_endpoint(folder, name, None, progress))
            for folder in (repository, candidate)
        ]
        responses = [
            _send_all(inputs, endpoint, requests, options, progress) for endpoint in endpoints
        ]
        began = time.monotonic()
        rounds = _load(name, endpoints, [request.sent for request in requests], options, progress)
        seconds = time.monotonic() - began
    new = manifests[1].gate
    compared = compare_answers(
        rules_of(inputs, new.precision, new.rounding),
        new,
        (responses[0], responses[1]),
        expected,
        [request.query for request in requests],
    )
    compared = replace(compared, left_out=compared.left_out + refused)
    speeds = compare_speeds(*rounds)
    failed, errors = (
        dict.fromkeys(kind for measurement in side for kind in measurement.errors)
        for side in rounds
    )
    count = len(rounds[0])
    decision, reasons = judge(compared, speeds, ([*failed], [*errors]), seconds / max(count, 1))
    return ReplayComparison(
        pipeline=name,
        builds=(build_id(repository, name), build_id(candidate, name)),
        precisions=(manifests[0].gate.precision, new.precision),
        source="traffic" if sample is None else "sample",
        load=str(options.load) if options.rounds else "",
        rounds=count,
        seconds=seconds if count else 0.0,
        verdict=decision,
        reasons=tuple(reasons),
        answers=compared,
        speeds=speeds,
        errors=(tuple(failed), tuple(errors)),
        notes=tuple(_make_notes(inputs, manifests)),
    )


def _read_manifests(
    name: str, repository: Path, candidate: Path
) -> tuple[CompiledManifest, CompiledManifest]:
    """Return the manifests of the active build and the candidate after checking that they fit."""
    old, new = (
        read_manifest(repository, name, CompiledManifest),
        read_manifest(candidate, name, CompiledManifest),
    )
    tasks = [task_of(manifest.spec) for manifest in (old, new)]
    for part, (expected, given) in (
        ("the task", [task.name for task in tasks]),
        ("the inputs", [_join_names(task.inputs) for task in tasks]),
        ("the outputs", [_join_names(task.outputs) for task in tasks]),
    ):
        if expected != given:
            raise UserError(
                "CANDIDATE",
                f"must have {part} of the active build: {expected}",
                given=given,
                remedy="Give the candidate's pipeline a new name, because clients must change",
            )
    if replace(old, built_at="") == replace(new, built_at=""):
        raise UserError(
            "CANDIDATE",
            "must be another build than the active one",
            given=f"{build_id(candidate, name)[:12]}, which has the same files",
            remedy="Build the candidate into another folder with `triptych build --repository`",
        )
    return old, new


def _join_names(tensors: Sequence[Tensor]) -> str:
    return ", ".join(sorted(tensor.name for tensor in tensors))


def _choose_requests(
    inputs: PipelineInputs, sample: TrafficSample | None, max_rows: int
) -> tuple[list[GateRequest], int]:
    """Return the requests to replay, and how many more the pipeline refuses."""
    plan, reader = inputs.plan, make_reader(inputs)
    if sample is None:
        if isinstance(reader, OwnReader):
            read_all = reader.read(plan.spec.folder / TRAFFIC_FILE)
            return reader.accepted(take_evenly(read_all, max_rows)), 0
        lines = read_traffic(plan.spec.folder, [tensor.name for tensor in plan.task.inputs])
        return reader.read(TRAFFIC_FILE, take_evenly(lines, max_rows)), 0
    rows = take_evenly(exclude_health_checks(inputs, sample.rows), max_rows)
    read = read_requests(reader, rows)
    requests = [request for request in read if request is not None]
    if not requests:
        raise UserError(
            plan.spec.name,
            "must have sampled requests that it accepts",
            given=f"{len(read)} rows, all refused" if read else "no rows",
            remedy="Wait for user requests, or replay traffic.jsonl with --traffic",
        )
    return requests, len(read) - len(requests)


def _send_all(
    inputs: PipelineInputs,
    endpoint: Endpoint,
    requests: Sequence[GateRequest],
    options: ReplayOptions,
    progress: Progress,
) -> Sequence[LiveResponse]:
    sent = live_requests(inputs.plan, requests)
    runs = run_live(
        inputs.plan,
        endpoint.grpc_url,
        sent,
        clients=options.clients,
        timeout_s=TIMEOUT_S,
        progress=lambda line: progress("shadow", line),
        ways=(TOGETHER,),
    )
    return runs.responses[TOGETHER]


def _load(
    name: str,
    endpoints: Sequence[Endpoint],
    sent: Sequence[Mapping[str, str | bytes]],
    options: ReplayOptions,
    progress: Progress,
) -> tuple[list[Measurement], list[Measurement]]:
    def measure_side(side: int, number: int) -> Measurement:
        endpoint = endpoints[side]
        target = BenchTarget(endpoint.grpc_url, name, endpoint.metrics_url, endpoint.pid)
        warm_up = 0 if number else WARM_UP_REQUESTS
        result = measure(
            target, sent, options.load, seconds=options.seconds, warmup_requests=warm_up
        )
        text = f"{SIDES[side]}, {options.load}: {result}"
        progress("load", f"round {number + 1}, at most {options.rounds}: {text}")
        return result

    return measure_in_turns(measure_side, options.rounds)


def measure_in_turns(
    measure_side: Callable[[int, int], Measurement], max_rounds: int
) -> tuple[list[Measurement], list[Measurement]]:
    """Measure both builds in each round until there is a verdict; the order alternates.

    A verdict is looked for when the noise allows a difference of `MARGIN` to be detected, and again
    after all rounds, so that a wrong one has a probability of at most 5 %. Only a clear regression
    ends the measurements earlier.

    Args:
        measure_side: Function that measures a side of `SIDES`, by its index and the round's.
        max_rounds: Maximum number of rounds.
    """
    measurements: tuple[list[Measurement], list[Measurement]] = ([], [])
    has_looked = False
    for number in range(max_rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            measurements[side].append(measure_side(side, number))
        speeds, rounds = compare_speeds(*measurements), number + 1
        if not speeds:
            break
        states = {speed.state for speed in speeds}
        if rounds == FIRST_ROUNDS and "over limit" in states:
            break
        needed = [speed.ratio.rounds_needed() or FIRST_ROUNDS for speed in speeds]
        if not has_looked and rounds >= max(FIRST_ROUNDS, *needed):
            has_looked = True
            if "over limit" in states or "inconclusive" not in states:
                break
    return measurements


def _make_notes(
    inputs: PipelineInputs, manifests: tuple[CompiledManifest, CompiledManifest]
) -> Iterator[str]:
    for side, manifest in zip(SIDES, manifests, strict=True):
        if manifest.model_sha256 != inputs.plan.info.sha256:
            yield f"{side}: built from another model than the pipeline has now"
        if hooks_differ(inputs, manifest):
            yield f"{side}: built with another {HOOKS_FILE} than the pipeline has now"
