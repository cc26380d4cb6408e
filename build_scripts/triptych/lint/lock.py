"""Lint: the repository is what was built, and was built from enough traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.lint.files_hash import sha256_of
from triptych.lint.flaw import Flaw, error, warning
from triptych.lint.snapshot import Model, Repository, is_file
from triptych.repository.lock import LOCK_FILE

_FEWEST_ROWS = 50
_MOST_TRUNCATED_SHARE = 0.05


def lock_readable(repository: Repository) -> Iterator[Flaw]:
    """A lock is a JSON object whose `files` maps paths to hashes."""
    for model in repository.models.values():
        problem = model.lock_problem or _malformed(model.lock)
        if problem:
            yield error(
                f"{model.name}/{LOCK_FILE}",
                "must be the build record: a JSON object, its `files` mapping paths to sha256",
                given=problem,
                remedy="Build the pipeline again",
            )


def _malformed(lock: Any) -> str:
    if lock is None:
        return ""
    if not isinstance(lock, dict):
        return f"a {type(lock).__name__}"
    files = lock.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(v, str) for v in files.values()):
        return "`files` is something else"
    return "" if isinstance(lock.get("traffic", {}), dict) else "`traffic` is no object"


def _locks(repository: Repository) -> Iterator[tuple[Model, dict[str, Any]]]:
    for model in repository.models.values():
        if model.lock is not None and not _malformed(model.lock):
            yield model, model.lock


def lock_files(repository: Repository) -> Iterator[Flaw]:
    """Every file in the lock is unchanged since the build."""
    for model, lock in _locks(repository):
        for name, digest in sorted(lock.get("files", {}).items()):
            path = repository.root / name
            if not is_file(path):
                yield _changed(model, name, "the file is missing")
            elif sha256_of(path) != digest.lower().removeprefix("sha256:"):
                yield _changed(model, name, "the content is another one")


def _changed(model: Model, name: str, given: str) -> Flaw:
    return error(
        name,
        f"must be as it was built and verified, see {model.name}/{LOCK_FILE}",
        given=given,
        remedy=f"Build {model.name} again: change the pipeline, not what was built from it",
    )


def traffic(repository: Repository) -> Iterator[Flaw]:
    """The traffic behind the numbers is large enough and fits the maximal length."""
    for model, lock in _locks(repository):
        seen = lock.get("traffic", {})
        rows, truncated = seen.get("rows"), seen.get("truncated_share")
        file = f"{model.name}/{LOCK_FILE}"
        if _is_number(rows) and rows < _FEWEST_ROWS:
            yield warning(
                file,
                f"should be built from at least {_FEWEST_ROWS} rows of traffic",
                given=f"{rows} rows",
                remedy="Add real requests to traffic.jsonl: bucket edges, calibration and the gate "
                "all rest on them",
            )
        if _is_number(truncated) and truncated > _MOST_TRUNCATED_SHARE:
            yield warning(
                file,
                f"should truncate at most {_MOST_TRUNCATED_SHARE:.0%} of the traffic",
                given=f"{truncated:.1%} of the rows are longer than tokenizer.max_length",
                remedy="Raise tokenizer.max_length, split long texts, or set overflow: reject",
            )


def gate_accepted(repository: Repository) -> Iterator[Flaw]:
    """No core failed the accuracy gate."""
    for model, lock in _locks(repository):
        gate = lock.get("gate")
        reason = gate.get("accepted") if isinstance(gate, dict) else None
        if reason:
            yield warning(
                f"{model.name}/{LOCK_FILE}",
                "should be a build that passed the accuracy gate",
                given=f"accepted although it failed: {reason!s:.200}",
                remedy="See the report of the build; mend what failed and build again",
            )


def shared_core(repository: Repository) -> Iterator[Flaw]:
    """A pipeline that uses another one's core was built against the core that is there."""
    locks = {model.name: lock for model, lock in _locks(repository)}
    for name, lock in locks.items():
        spec = lock.get("spec")
        core = spec.get("core") if isinstance(spec, dict) else None
        owner = core.get("share") if isinstance(core, dict) else None
        if owner in locks and locks[owner].get("core_key") != lock.get("core_key"):
            yield error(
                f"{name}/{LOCK_FILE}",
                "must be built against the core that it shares",
                given=f"the core of {owner} was built anew since",
                remedy=f"Build {name} again",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
