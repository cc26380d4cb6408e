"""What a look calls for: alarms, drifts and notes, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from triptych.base.cache import sha256_of
from triptych.core.inputs import PipelineInputs
from triptych.operate.tune.drift import Drift
from triptych.operate.watch.found import Held, Look
from triptych.operate.watch.mixes import Mix, label_of
from triptych.operate.watch.sample import Sample
from triptych.repository.lock import Lock
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.spec import SPEC_FILE
from triptych.spec.tuned import TUNED_FILE


def drifts_in(drift: Drift | None, mixes: Sequence[Mix]) -> Iterator[str]:
    if drift is not None and (drift.drifted or drift.action != "keep"):
        yield (
            f"lengths: {drift.now.mean_tokens:.1f} tokens on average, built for"
            f" {drift.before.mean_tokens:.1f}; {drift.action}: {drift.reason}"
        )
    for mix in mixes:
        if mix.moved:
            yield f"{mix.kind}: {mix.largest}"


def notes_on(
    inputs: PipelineInputs,
    lock: Lock,
    sample: Sample,
    own: int,
    mine: int,
    chosen: int,
) -> Iterator[str]:
    if not sample.rows:
        yield "no new rows: nothing is said of the answers since the last look"
    elif not own:
        yield "all rows were answered by other builds than the one in the repository"
    if mine < own:
        yield f"left out: {own - mine} rows that are the health check's question"
    if chosen < mine:
        yield f"of {mine} rows, {chosen} evenly spread ones were compared"
    for what in edits_since(inputs, lock):
        yield f"{what} not as built: what is said here is of the pipeline as it is now"


def hooks_differ(inputs: PipelineInputs, lock: Lock) -> bool:
    """Whether a build has other functions of the pipeline's own than the pipeline has now."""
    built = lock.files.get(f"{inputs.plan.spec.name}_preprocess/1/{HOOKS_FILE}")
    file = inputs.plan.spec.folder / HOOKS_FILE
    return (sha256_of(file) if file.is_file() else None) != built


def edits_since(inputs: PipelineInputs, lock: Lock) -> Iterator[str]:
    """What of the pipeline, but for its traffic, is not as it was built, with the verb."""
    if lock.model_sha256 != inputs.plan.facts.sha256:
        yield "the model's files are"
    if hooks_differ(inputs, lock):
        yield f"{HOOKS_FILE} is"
    own, built = (
        spec.model_dump(mode="json", exclude={"folder"}) for spec in (inputs.plan.spec, lock.spec)
    )
    if own != built:
        yield f"{SPEC_FILE} or {TUNED_FILE} is"


def changed_files(repository: Path, lock: Lock) -> list[str]:
    """Files of the repository that are not as they were built."""
    return [
        name
        for name, digest in lock.files.items()
        if not (repository / name).is_file() or sha256_of(repository / name) != digest
    ]


def alarms_in(look: Look, changed: Sequence[str], held: Sequence[Held]) -> Iterator[str]:
    for test in look.tests:
        if test.alarmed and test.mean is not None:
            yield (
                f"{test.name}: the mean loss is {test.mean:.4g} over {test.rows} rows,"
                f" {test.allowed:.2g} is allowed (evidence 10^{test.evidence:.1f},"
                f" needed 10^{test.needed:.1f}, since row {test.alarm_row})"
            )
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"not as it was built: {', '.join(changed[:3])}{more}"
    if any(test.alarmed for test in look.tests) and (renamed := _renamed(held)):
        yield f"labels go by other names: {renamed}"


def _renamed(held: Sequence[Held]) -> str:
    """Labels that are always called otherwise, in words; empty where that does not explain it."""
    names: dict[str, set[str]] = {}
    for one in held:
        right, mine = label_of(one.wanted), label_of(one.row.answer)
        if right is not None and mine is not None:
            names.setdefault(right, set()).add(mine)
    other = {right: next(iter(mine)) for right, mine in names.items() if len(mine) == 1}
    moved = {right: mine for right, mine in other.items() if right != mine}
    if len(other) < len(names) or not moved or len(set(other.values())) < len(other):
        return ""
    return ", ".join(f"{right} is {mine}" for right, mine in sorted(moved.items())[:4])
