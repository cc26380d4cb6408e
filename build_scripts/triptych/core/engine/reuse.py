"""What a build leaves for the engine stage, and what it keeps of an engine that still fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from triptych.base.cache import cached_stage, code_hash, sha256_of
from triptych.base.errors import Progress
from triptych.core.inputs import PipelineInputs
from triptych.core.samples import hash_rows, rows_of
from triptych.repository.lock import PLAN_FILE, SAMPLES_FILE, Lock
from triptych.repository.records import EngineRecord
from triptych.spec.engine_spec import EnginePlan
from triptych.spec.plan import Plan

CHECKED_REQUESTS = 64
"""Of the traffic, besides all that the gate made up."""


class KeptEngine(NamedTuple):
    """An engine in the repository that was built of this very core.

    Attributes:
        path: of the plan, relative to the repository.
        file: the plan.
        record: of how it was built.
    """

    path: str
    file: Path
    record: EngineRecord


def samples_of(inputs: PipelineInputs, progress: Progress) -> Path | None:
    """A file of core rows for the engine's check; None where no engine will be built."""
    plan = inputs.plan
    if not plan.builds_engine or plan.spec.core.share is not None:
        return None
    requests = inputs.requests
    made = [request for request in requests if request.edge]
    real = [request for request in requests if not request.edge]
    rows = rows_of([*made, *real[:CHECKED_REQUESTS]])

    def work(target: Path) -> None:
        from triptych.core.samples_file import write_samples

        write_samples(target / SAMPLES_FILE, rows)

    stage = {"rows": hash_rows(rows), "code": code_hash("core/samples_file.py")}
    return cached_stage("samples", stage, work, progress).folder / SAMPLES_FILE


def kept_engine(
    repository: Path,
    plan: Plan,
    previous: Lock | None,
    hashes: Mapping[str, str],
    planned: EnginePlan | None,
) -> KeptEngine | None:
    """The engine that is there, if all that it was built from is as before.

    Args:
        repository: folder of the models.
        plan: what is being built.
        previous: the lock in place.
        hashes: of the files to be, without an engine.
        planned: the engine to be, as a lock has it.
    """
    folder = f"{plan.step('core')}/1"
    path, file = f"{folder}/{PLAN_FILE}", repository / folder / PLAN_FILE
    if previous is None or previous.engine is None or not file.is_file():
        return None
    if previous.plan.engine != planned:
        return None
    core_files = [name for name in hashes if name.startswith(f"{folder}/")]
    if any(previous.files.get(name) != hashes[name] for name in core_files):
        return None
    if sha256_of(file) != previous.engine.plan_sha256:
        return None
    return KeptEngine(path, file, previous.engine)
