"""`core.precision: auto`: every precision that runs here is built, checked and measured.

Those that fail the gate are dropped, the others race under the pipeline's own traffic, and the
fastest is built into the repository. What was built, checked or measured before is not done again.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from triptych import build as assemble
from triptych.build import Built, GateFailure
from triptych.cache import cached_stage, code_hash, versions_of
from triptych.engine.stage import EngineFailure, missing_for_engines
from triptych.errors import Progress, UserError
from triptych.pipeline.precisions import Precision
from triptych.pipeline.spec_fields import Core
from triptych.precision.race import race
from triptych.repository.lock import read_lock
from triptych.repository.records import Candidate
from triptych.requests.prepare import Prepared
from triptych.requests.samples import hash_requests
from triptych.server.processor import processor

AUTO = "auto"
BASELINE: Precision = "fp32"
CLIENTS = 32
THROUGHPUT_FILE = "measured.json"
CODE = (
    "precision/race.py",
    "bench/*.py",
    "server/backends/*/*.py",
    "server/stand_in/*.py",
    "runtime/*.py",
    "repository/*.py",
)

RUNS: dict[tuple[str, str], tuple[Precision, ...]] = {
    ("onnxruntime", "cpu"): ("fp32", "int8", "int8_dynamic", "fp16"),
    ("tensorrt", "gpu"): ("fp32", "fp16", "bf16", "int8", "fp8"),
}
"""Backend and device to the precisions worth a try there. On a CPU, ONNX Runtime computes bf16 not
at all, fp8 and fp16 in fp32; some models gain by fp16 all the same, for their size."""


def build(
    prepared: Prepared,
    repository: Path,
    progress: Progress,
    *,
    together: Sequence[str] = (),
    accept: str = "",
) -> Built:
    """`assemble.build`, with the precision chosen by evidence where the spec leaves it open.

    Raises:
        GateFailure: no candidate passes the gate; it is that of fp32.
        LintFailure, UserError: as `assemble.build`.
    """
    if prepared.plan.spec.core.precision != AUTO:
        return assemble.build(prepared, repository, progress, together=together, accept=accept)
    candidates = choose(prepared, repository, progress, accept=accept)
    best = next(one.precision for one in candidates if one.status == "chosen")
    return assemble.build(
        prepared,
        repository,
        progress,
        together=together,
        accept=accept if best == BASELINE else "",
        precision=best,
        candidates=[one.as_dict() for one in candidates],
    )


def choose(
    prepared: Prepared, repository: Path, progress: Progress, *, accept: str = ""
) -> list[Candidate]:
    """Every candidate, the chosen one among them.

    Args:
        prepared: the pipeline.
        repository: where the chosen one is going to be written: candidates are built beside it.
        progress: told what becomes of each stage.
        accept: why a failed gate of fp32 does not matter; of the others it always does.

    Raises:
        GateFailure: fp32 fails the gate, so nothing can be right.
        UserError: the device cannot be measured here.
    """
    core = prepared.plan.spec.core
    precisions = _precisions(core)
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".auto-", dir=repository.parent) as scratch:
        built: dict[str, Built] = {}
        candidates: dict[str, Candidate] = {}
        for precision in precisions:
            progress("auto", f"{precision}: {precisions.index(precision) + 1}/{len(precisions)}")
            target = Path(scratch, precision)
            reason = accept if precision == BASELINE else ""
            one, candidates[precision] = _built(prepared, precision, target, progress, reason)
            if one is not None:
                built[precision] = one
        measured = _throughputs(prepared, {name: Path(scratch, name) for name in built}, progress)
    for name, one in measured.items():
        candidates[name] = replace(
            candidates[name], throughput_per_s=one["throughput_per_s"], p99_ms=one["p99_ms"]
        )
    best = max(measured, key=lambda name: measured[name]["throughput_per_s"])
    candidates[best] = replace(candidates[best], status="chosen")
    progress("auto", f"{best} is the fastest that passes")
    return list(candidates.values())


def _precisions(core: Core) -> tuple[Precision, ...]:
    known = RUNS.get((core.backend, core.device))
    missing = missing_for_engines() if core.backend == "tensorrt" else ""
    if known is None or missing:
        raise UserError(
            "core.precision",
            "must be named where it cannot be measured here",
            given=f"auto for {core.backend} on a {core.device}" + f"; {missing}" * bool(missing),
            remedy="Name one, such as fp16; `triptych verify` tells how right it is there",
        )
    return known


def _built(
    prepared: Prepared, precision: Precision, target: Path, progress: Progress, accept: str
) -> tuple[Built | None, Candidate]:
    try:
        built = assemble.build(prepared, target, progress, precision=precision, accept=accept)
    except GateFailure as failure:
        if precision == BASELINE:
            raise
        gate = failure.gate
        return None, Candidate(
            precision, "failed", failure.failures, verdicts=_values(gate), kept=_kept(gate)
        )
    except EngineFailure as failure:
        if precision == BASELINE:
            raise
        return None, Candidate(precision, "failed", tuple(failure.gate["failures"]))
    except UserError as error:
        if precision == BASELINE:
            raise
        return None, Candidate(precision, "not runnable", note=str(error))
    size = sum(path.stat().st_size for path in target.glob("*_core/1/*"))
    return built, Candidate(
        precision,
        "passed",
        verdicts=_values(built.gate),
        size_bytes=size,
        kept=_kept(built.gate),
    )


def _values(gate: Mapping[str, Any]) -> dict[str, float | None]:
    return {verdict["metric"]: verdict["value"] for verdict in gate["verdicts"]}


def _kept(gate: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple((gate.get("conversion") or {}).get("kept", ()))


def _throughputs(
    prepared: Prepared, repositories: Mapping[str, Path], progress: Progress
) -> dict[str, dict[str, Any]]:
    name = prepared.plan.spec.name
    requests = [dict(request.sent) for request in prepared.requests if not request.edge]
    locks = {precision: read_lock(path, name) or {} for precision, path in repositories.items()}
    key: dict[str, object] = {
        # The files of a repository tell all that is served, and so all that is measured.
        "files": {precision: lock["files"] for precision, lock in locks.items()},
        "requests": hash_requests(prepared.requests),
        "clients": CLIENTS,
        "machine": [platform.processor(), processor(), len(os.sched_getaffinity(0))],
        "versions": versions_of("onnxruntime", "nvidia-pytriton", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        measured = race(
            repositories, name, requests, baseline=BASELINE, clients=CLIENTS, progress=progress
        )
        plain = {precision: asdict(one) for precision, one in measured.items()}
        (target / THROUGHPUT_FILE).write_text(json.dumps(plain), encoding="utf-8")

    folder, cached = cached_stage("race", key, work)
    if cached:
        progress("race", "as measured before (cached)")
    measured: dict[str, dict[str, Any]] = json.loads((folder / THROUGHPUT_FILE).read_text("utf-8"))
    return measured
