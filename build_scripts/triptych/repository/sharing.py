"""Pipelines of one repository that use the same core: what must hold between their locks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.manifest import MANIFEST_FILE, BuildManifest, find_manifest
from triptych.spec.fields import Precision
from triptych.spec.spec import PipelineSpec


def owner_of_core(repository: Path, spec: PipelineSpec) -> BuildManifest:
    """The lock of the pipeline whose core `spec` shares.

    Raises:
        UserError: it is not built, or it shares a core itself.
    """
    owner = str(spec.core.shared_from)
    lock = find_manifest(repository, owner) if owner != spec.name else None
    if lock is None:
        raise UserError(
            "core.shared_from",
            "must name a pipeline already built into the repository",
            given=owner,
            remedy=f"Run `triptych build {owner}` first, or name both in one command",
        )
    if lock.spec.core.shared_from is not None:
        raise UserError(
            "core.shared_from",
            "must name a pipeline with a core of its own",
            given=f"{owner}, which itself uses that of {lock.spec.core.shared_from}",
            remedy="Name that one",
        )
    return lock


def check_shareable(spec: PipelineSpec, source_key: str, owner: BuildManifest) -> Precision:
    """The precision of the owner's core, if it can serve `spec`, whose fp32 core has `source_key`.

    Raises:
        UserError: it is made of another graph, or is too small, or of another precision.
    """
    own, theirs, precision = spec.core, owner.spec.core, owner.gate.precision
    if owner.source_key != source_key:
        raise UserError(
            "core.shared_from",
            "must name a pipeline of the same model, task head and parameters of the core",
            given=f"{own.shared_from}: its core is another one",
            remedy="Remove core.shared_from to give this pipeline a core of its own",
        )
    if own.max_batch_size > theirs.max_batch_size:
        raise UserError(
            "core.max_batch_size",
            f"must be at most that of the shared core, {theirs.max_batch_size}",
            given=own.max_batch_size,
            remedy=f"Lower it, or raise it in {own.shared_from} first",
        )
    if own.precision not in ("fp32", precision):
        raise UserError(
            "core.precision",
            f"must be that of the shared core, {precision}",
            given=own.precision,
            remedy="Leave it out, or remove core.shared_from",
        )
    return precision


def check_sharers(
    repository: Path, name: str, core_key: str | None, together: Sequence[str]
) -> None:
    """Whoever shares the core of `name` can go on with the core of `core_key`.

    Args:
        repository: folder of the models.
        name: of the pipeline that is built.
        core_key: of its core; None where it will have none of its own.
        together: pipelines that are built right after this one.

    Raises:
        UserError: a pipeline that is not built again shares another core.
    """
    for path in sorted(repository.glob(f"*/{MANIFEST_FILE}")):
        other = path.parent.name
        lock = find_manifest(repository, other)
        if lock is None or lock.spec.core.shared_from != name or lock.core_key == core_key:
            continue
        if core_key is None or other not in together:
            raise UserError(
                name,
                "must keep the core that another pipeline shares",
                given=f"{other} uses it, and it would " + ("go" if core_key is None else "change"),
                remedy=f"Run `triptych build {name} {other}`, or "
                f"remove core.shared_from from {other}",
            )
