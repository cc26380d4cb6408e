"""`triptych shadow`: the same requests on two builds, each on a server of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from triptych.base.errors import Progress, UserError
from triptych.core.gate.live import TOGETHER, Reply, live_requests, run_live
from triptych.core.gate.verify import rules_of
from triptych.core.inputs import PipelineInputs, task_of
from triptych.core.samples import GateRequest
from triptych.operate.watch.findings import hooks_differ
from triptych.operate.watch.sample import Sample, answers_to, reader_of, requests_of
from triptych.operate.watch.verdict import Shadow, compare_answers, judge, speeds_of
from triptych.repository.lock import Lock, build_id, read_lock
from triptych.runtime.hooking import HOOKS_FILE
from triptych.serving.bench.bench import WARM_UP_REQUESTS
from triptych.serving.bench.measure import Target, measure
from triptych.serving.bench.results import Load, Measurement
from triptych.serving.endpoint import Endpoint, served
from triptych.spec.tasks.compare import Outputs
from triptych.spec.traffic import TRAFFIC_FILE, read_traffic

TIMEOUT_S = 60.0
"""Deadline of each request."""

SIDES = ("in place", "candidate")


@dataclass(frozen=True)
class Replay:
    """How requests are replayed.

    Attributes:
        most: requests: of more, as many evenly spread ones.
        clients: requests under way at once where answers are compared.
        load: under which latency and cost are measured.
        rounds: each build once a round, in turns; none compares answers alone.
        seconds: of each measurement.
    """

    most: int
    clients: int
    load: Load
    rounds: int
    seconds: float


def shadow_candidate(
    inputs: PipelineInputs,
    repository: Path,
    candidate: Path,
    sample: Sample | None,
    how: Replay,
    progress: Progress,
) -> Shadow:
    """Send the same requests to a build and a candidate, and say which of them should serve.

    Both are served at once on this machine, and loaded in turns.

    Args:
        inputs: of the pipeline, in the layout of the build in place.
        repository: with the build in place.
        candidate: the other repository.
        sample: whose inputs are replayed; None takes the pipeline's traffic.
        how: it is done.
        progress: told each stage.

    Raises:
        UserError: a repository does not hold the pipeline, the candidate is the same build or has
            another task, there are no requests, or a server fails.
    """
    name = inputs.plan.spec.name
    locks = _locks(name, repository, candidate)
    requests, refused = _requests(inputs, sample, how.most)
    is_known = {lock.model_sha256 for lock in locks} == {inputs.plan.facts.sha256}
    wanted: list[Outputs | None] | None = None
    if is_known:
        progress("shadow", f"{len(requests)} requests in PyTorch fp32 ...")
        answers = answers_to(inputs, requests, progress)
        wanted = [None if answer.refusal else answer.outputs for answer in answers]
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(served(folder, name, None, progress))
            for folder in (repository, candidate)
        ]
        replies = [_ask(inputs, one, requests, how, progress) for one in endpoints]
        rounds = _load(name, endpoints, [request.sent for request in requests], how, progress)
    new = locks[1].gate
    found = compare_answers(
        rules_of(inputs, new.precision, new.rounding),
        new,
        (replies[0], replies[1]),
        wanted,
        [request.query for request in requests],
    )
    found = replace(found, left_out=found.left_out + refused)
    speeds = speeds_of(*rounds)
    failed, errors = (dict.fromkeys(kind for one in each for kind in one.errors) for each in rounds)
    word, reasons = judge(found, speeds, [*errors])
    return Shadow(
        pipeline=name,
        builds=(build_id(repository, name), build_id(candidate, name)),
        precisions=(locks[0].gate.precision, new.precision),
        source="traffic" if sample is None else "sample",
        load=str(how.load) if how.rounds else "",
        verdict=word,
        reasons=tuple(reasons),
        answers=found,
        speeds=speeds,
        errors=(tuple(failed), tuple(errors)),
        notes=tuple(_notes(inputs, locks)),
    )


def _locks(name: str, repository: Path, candidate: Path) -> tuple[Lock, Lock]:
    """Of the build in place, and of the candidate, which may stand in for each other."""
    old, new = read_lock(repository, name), read_lock(candidate, name)
    tasks = [task_of(lock.spec) for lock in (old, new)]
    for what, of in (
        ("the task", [task.name for task in tasks]),
        ("the inputs", [", ".join(sorted(one.name for one in task.inputs)) for task in tasks]),
        ("the outputs", [", ".join(sorted(one.name for one in task.outputs)) for task in tasks]),
    ):
        if of[0] != of[1]:
            raise UserError(
                "--candidate",
                f"must have {what} of the build in place: {of[0]}",
                given=of[1],
                remedy="Clients would have to change: give it a name of its own",
            )
    if replace(old, built_at="") == replace(new, built_at=""):
        raise UserError(
            "--candidate",
            "must be another build than the one in place",
            given=f"{build_id(candidate, name)[:12]}, which has the same files",
            remedy="Build the candidate into another folder with `triptych build --repository`",
        )
    return old, new


def _requests(
    inputs: PipelineInputs, sample: Sample | None, most: int
) -> tuple[list[GateRequest], int]:
    """Those to replay, and how many more the pipeline as it is here refuses."""
    plan, reader = inputs.plan, reader_of(inputs)
    if sample is None:
        lines = read_traffic(plan.spec.folder, [tensor.name for tensor in plan.task.inputs])
        return reader.read(TRAFFIC_FILE, [lines[place] for place in _spread(len(lines), most)]), 0
    question = dict(inputs.shortest_row)  # what health checks ask, and no user need have asked
    rows = [row for row in sample.rows if row.inputs != question]
    read = requests_of(reader, [rows[place] for place in _spread(len(rows), most)])
    requests = [request for request in read if request is not None]
    if not requests:
        raise UserError(
            plan.spec.name,
            "must have sampled requests that it takes",
            given=f"{len(read)} rows, none of them taken" if read else "none",
            remedy="Let users ask first, or replay traffic.jsonl with --traffic",
        )
    return requests, len(read) - len(requests)


def _spread(count: int, most: int) -> list[int]:
    places: list[int] = np.linspace(0, count - 1, min(most, count)).astype(int).tolist()
    return places


def _ask(
    inputs: PipelineInputs,
    endpoint: Endpoint,
    requests: Sequence[GateRequest],
    how: Replay,
    progress: Progress,
) -> Sequence[Reply]:
    sent = live_requests(inputs.plan, requests)
    runs = run_live(
        inputs.plan,
        endpoint.grpc_url,
        sent,
        clients=how.clients,
        timeout_s=TIMEOUT_S,
        progress=lambda line: progress("shadow", line),
        ways=(TOGETHER,),
    )
    return runs.replies[TOGETHER]


def _load(
    name: str,
    endpoints: Sequence[Endpoint],
    sent: Sequence[Mapping[str, str | bytes]],
    how: Replay,
    progress: Progress,
) -> tuple[list[Measurement], list[Measurement]]:
    """What each build did in each round; which of them goes first alternates."""
    found: tuple[list[Measurement], list[Measurement]] = ([], [])
    for number in range(how.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            one = endpoints[side]
            target = Target(one.grpc_url, name, one.metrics_url, one.pid)
            warm = 0 if number else WARM_UP_REQUESTS
            did = measure(target, sent, how.load, seconds=how.seconds, warmup_requests=warm)
            found[side].append(did)
            progress("load", f"round {number + 1}/{how.rounds}: {SIDES[side]}, {how.load}: {did}")
    return found


def _notes(inputs: PipelineInputs, locks: tuple[Lock, Lock]) -> Iterator[str]:
    for side, lock in zip(SIDES, locks, strict=True):
        if lock.model_sha256 != inputs.plan.facts.sha256:
            yield f"{side}: built of another model than the pipeline has now"
        if hooks_differ(inputs, lock):
            yield f"{side}: built with another {HOOKS_FILE} than the pipeline has now"
