"""What a look proposes, built from its rows and put in place; or all stays as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.cache import sha256_of
from triptych.base.errors import Progress
from triptych.base.files import scratch_folder, told_to_user, write_files
from triptych.building.build import Built, build
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.samples import FEW_ROWS
from triptych.operate.tune.proposal import Proposal, expected_of
from triptych.operate.watch.alarms import edits_since
from triptych.operate.watch.found import Look
from triptych.operate.watch.new_rows import choose_rows
from triptych.operate.watch.sample import SampledRow
from triptych.repository.history import put_back
from triptych.repository.lock import build_id, read_lock
from triptych.repository.plain import plain_data
from triptych.spec.spec import SPEC_FILE, load_spec
from triptych.spec.traffic import TRAFFIC_FILE
from triptych.spec.tuned import TUNED_FILE, Tuned, read_tuned, tuned_text

BEFORE = ".before"
"""Ends the names of the files that were replaced in the pipeline's folder."""


@dataclass(frozen=True)
class Applied:
    """What was put in place.

    Attributes:
        build: id of the build in place now.
        replaced: of the one before it, which is kept.
        built: what the build did.
        rows: of the new traffic.
        set: fields of ``tuned.yaml`` that have other values now.
    """

    pipeline: str
    build: str
    replaced: str
    built: Built
    rows: int
    set: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        plain: dict[str, Any] = plain_data(
            {
                "build": self.build,
                "replaced": self.replaced,
                "rows": self.rows,
                "set": self.set,
                **self.built.as_dict(),
            }
        )
        return plain


def hindrance(
    inputs: PipelineInputs, look: Look, rows: Sequence[SampledRow], repository: Path
) -> str:
    """Why what a look proposes is not to be applied, in words; empty where it may be."""
    if look.alarms:
        return "the answers are wrong, which a change of numbers may hide: mend that first"
    lock = read_lock(repository, look.pipeline)
    if build_id(repository, look.pipeline) != look.build:
        return "another build was put in place meanwhile"
    if edits := [*edits_since(inputs, lock)]:
        return f"{edits[0]} not as built, and would be built along: run `triptych build` yourself"
    if len({tuple(row.inputs.items()) for row in rows}) < FEW_ROWS:
        return f"{len(rows)} rows are too few to build and gate with: {FEW_ROWS} different ones are"
    return ""


def apply_proposal(
    inputs: PipelineInputs,
    look: Look,
    rows: Sequence[SampledRow],
    repository: Path,
    progress: Progress,
    *,
    most: int,
) -> Applied:
    """Build with the rows and the proposed settings, through the gate, and put it in place.

    The pipeline's folder is written last: its traffic and ``tuned.yaml`` become those of the build,
    and the old ones lie beside them.

    Args:
        inputs: of the pipeline as it is.
        look: with a proposal that nothing hinders.
        rows: that the look saw.
        repository: with the build that is to be replaced.
        progress: told each stage.
        most: rows of the new traffic.

    Raises:
        EngineFailure, GateFailure, LintFailure, UserError: all is as it was.
    """
    folder, name, drift = inputs.plan.spec.folder, look.pipeline, look.drift
    if drift is None or drift.proposal is None:
        raise ValueError("nothing is proposed")
    proposal = drift.proposal
    chosen = choose_rows(inputs, rows, replace=True, most=most)
    spec = load_spec(folder, tuned=proposal.after)
    files: dict[str, str | bytes] = {TRAFFIC_FILE: chosen.text}
    if proposal.changes:
        tuned = Tuned(proposal.after, _provenance(folder, look, proposal))
        files[TUNED_FILE] = tuned_text(name, tuned, spec_file=SPEC_FILE, measured=False)
    old = {
        file + BEFORE: (folder / file).read_bytes() for file in files if (folder / file).is_file()
    }
    with scratch_folder(".triptych-apply-") as scratch:
        traffic = scratch / TRAFFIC_FILE
        traffic.write_text(chosen.text, encoding="utf-8")
        new = read_inputs(spec, progress, traffic=traffic)
        try:
            built = build(new, repository, progress)
            with told_to_user(folder):
                write_files(folder, {**old, **files})
        except BaseException:
            # A graph is in place before its engine is built, which may fail.
            if build_id(repository, name) != look.build:
                put_back(repository, name, look.build)
            raise
    return Applied(
        pipeline=name,
        build=build_id(repository, name),
        replaced=look.build,
        built=built,
        rows=len(chosen.added),
        set=dict(proposal.changes),
    )


def _provenance(folder: Path, look: Look, proposal: Proposal) -> dict[str, Any]:
    """Of a proposal: from which rows it came and what is expected; what was measured before it."""
    old = read_tuned(folder)
    rate = None if look.drift is None else look.drift.rate_per_s
    return {
        "proposed_for": "" if look.drift is None else look.drift.source,
        "expected": expected_of(proposal, rate),
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        **({} if old is None else {"before": {"set": dict(old.overrides), **old.provenance}}),
    }


def describe_applied(done: Applied) -> Iterator[str]:
    """The lines that show it."""
    models = ", ".join(done.built.changed) or "no model changed"
    yield f"applied: {done.pipeline} is build {done.build[:12]} now ({models})"
    yield f"  traffic.jsonl has the {done.rows} rows of this look; the old files end in {BEFORE}"
    yield f"  nothing of it was measured: `triptych bench {done.pipeline}`, and `triptych tune`"
    yield f"  take it back: triptych rollback {done.pipeline} {done.replaced[:12]}"
