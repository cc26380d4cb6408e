"""`triptych verify`: the accuracy gate through a live ensemble, on a server of one's own or not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from triptych.base.errors import Progress, UserError
from triptych.core.gate.answers import reference_answers
from triptych.core.gate.cached import limits_of, overrides_of
from triptych.core.gate.live_replies import LiveCase, Rules
from triptych.core.gate.live_send import live_requests, refusals, run_live
from triptych.core.gate.live_verdict import LiveVerdict, judge_live
from triptych.core.inputs import PipelineInputs
from triptych.repository.lock import Lock, find_lock
from triptych.repository.plain import plain_data
from triptych.runtime.hooking import find_hook
from triptych.spec.plan import Plan
from triptych.spec.precisions import Precision
from triptych.spec.tasks.accuracy import TOLERANCES, above_rounding


class Endpoint(Protocol):
    """A server that is ready."""

    @property
    def grpc_url(self) -> str:
        """``host:port``."""


@dataclass(frozen=True)
class Verification:
    """What the live gate found, and where.

    Attributes:
        pipeline: its name.
        url: ``host:port`` of the server's gRPC endpoint.
        precision: that decided the limits.
        rows: requests of the traffic.
        edge_rows: generated requests.
        accepted: why the build was let pass a failed gate; empty where it was not.
        clients: requests under way at once where they were sent together.
        mean_batch: rows the core ran at a time then; None where the server does not tell.
        seconds: that the requests took, all three times.
        found: figures, failures and rows.
    """

    pipeline: str
    url: str
    precision: str
    rows: int
    edge_rows: int
    accepted: str
    clients: int
    mean_batch: float | None
    seconds: float
    found: LiveVerdict

    @property
    def passed(self) -> bool:
        """Whether the pipeline served is right."""
        return not self.found.failures

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: a figure that is no number is null."""
        fields = {**asdict(self), **asdict(self.found), "passed": self.passed}
        del fields["found"]
        plain: dict[str, Any] = plain_data(fields)
        return plain


def verify_pipeline(
    inputs: PipelineInputs,
    repository: Path,
    server: AbstractContextManager[Endpoint],
    progress: Progress,
    *,
    clients: int,
    timeout_s: float,
) -> Verification:
    """Send the gate's requests to the served pipeline and compare with the reference.

    Args:
        inputs: of the pipeline.
        repository: folder of the models: its lock tells the precision that was built.
        server: that serves the pipeline; entered once all else is ready.
        progress: told what becomes of each stage.
        clients: requests under way at once where they are sent together.
        timeout_s: deadline of each request, in seconds.

    Raises:
        UserError: there is no server, or it does not serve this pipeline (any more).
    """
    plan = inputs.plan
    lock = find_lock(repository, plan.spec.name)
    precision = _precision(plan, repository, lock)
    rules = rules_of(inputs, precision, None if lock is None else lock.gate.rounding)
    sent = live_requests(plan, inputs.requests)
    progress("verify", f"{len(inputs.requests)} requests in PyTorch fp32 ...")
    wanted = reference_answers(inputs, progress)
    refused = refusals(plan, inputs.tokenizer_folder, inputs.requests, sent)
    cases = [
        LiveCase(
            request.shown, request.query, request.edge, answer.outputs, words or answer.refusal
        )
        for request, answer, words in zip(inputs.requests, wanted, refused, strict=True)
    ]
    with server as reached:
        endpoint = reached.grpc_url
        started = time.monotonic()
        runs = run_live(
            plan,
            endpoint,
            sent,
            clients=clients,
            timeout_s=timeout_s,
            progress=lambda line: progress("verify", line),
        )
        seconds = time.monotonic() - started
    edge_rows = sum(case.edge for case in cases)
    return Verification(
        pipeline=plan.spec.name,
        url=endpoint,
        precision=precision,
        rows=len(cases) - edge_rows,
        edge_rows=edge_rows,
        clients=clients,
        mean_batch=runs.mean_batch,
        seconds=seconds,
        accepted="" if lock is None else lock.gate.accepted,
        found=judge_live(cases, runs, rules),
    )


def rules_of(inputs: PipelineInputs, precision: Precision, rounding: float | None) -> Rules:
    """What the answers of a build are held to.

    Args:
        inputs: of the pipeline.
        precision: of the core that was built.
        rounding: see `GateResult`; None where it is not known.
    """
    plan = inputs.plan
    return Rules(
        task=plan.task,
        tolerance=TOLERANCES[precision],
        limits=above_rounding(limits_of(inputs, precision), rounding, overrides_of(inputs)),
        hooked=plan.spec.custom is not None or find_hook(plan.spec.folder, "after") is not None,
    )


def _precision(plan: Plan, repository: Path, lock: Lock | None) -> Precision:
    """Of the core that was built, where the repository says so; else what the spec asks for.

    Raises:
        UserError: the spec leaves it to the build, and there is none.
    """
    spec = plan.spec
    precision = spec.core.precision if lock is None else lock.gate.precision
    if precision == "auto":
        raise UserError(
            "core.precision",
            "must be known: it decides how close answers must be",
            given=f"{precision}, and no build of {spec.name} in {repository}",
            remedy="Name the repository with --repository, or write --set core.precision=int8",
        )
    return precision


def describe_verification(result: Verification) -> Iterator[tuple[str, str]]:
    """The lines that show a result, each with its style: figures, rows, counts, what is wrong."""
    found = result.found
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items()))
    yield f"{result.pipeline} at {result.url}, held to the limits of {result.precision}", "bold"
    for verdict in found.verdicts:
        value = "-" if math.isnan(verdict.value) else f"{verdict.value:.7g}"
        limit = "" if verdict.limit is None else f"limit {verdict.limit:g}"
        state = "ok" if verdict.passed else "FAILED"
        line = f"  {verdict.metric:28} {value:>12}  {limit:16} {state if limit else ''}".rstrip()
        yield line, "" if verdict.passed else "red"
    batch = "" if result.mean_batch is None else f", {result.mean_batch:.1f} rows a batch"
    yield f"  {result.rows} rows of the traffic and {result.edge_rows} edge rows: {counts}", ""
    yield (
        f"  each sent alone and twice beside others ({result.clients} at a time{batch}), in"
        f" {result.seconds:.1f} s",
        "",
    )
    if result.accepted:
        yield f"  note: built although the gate failed, since: {result.accepted}", "yellow"
    for note in found.notes:
        yield f"  note: {note}", "yellow"
    if found.failures:
        yield "rows furthest from the reference:", "bold"
        for row in found.worst:
            yield f"  {row.shown!r}  (difference {row.difference:.3g})", ""
            yield f"    wanted {row.wanted}", ""
            yield f"    got    {row.got}", ""
    for failure in found.failures:
        yield f"failed: {failure}", "red"
    if not found.failures:
        yield "passed", "green"
