"""Checks for pipelines of one repository that share a core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.manifest import MANIFEST_FILE, EncoderManifest, find_manifest
from triptych.spec.fields import Precision
from triptych.spec.model_fields import CompiledSpec


def owner_of_core(repository: Path, spec: CompiledSpec) -> EncoderManifest:
    """Return the manifest of the pipeline whose core `spec` shares.

    Raises:
        UserError: That pipeline is not built, or shares a core itself.
    """
    owner = str(spec.core.shared_from)
    manifest = find_manifest(repository, owner, EncoderManifest) if owner != spec.name else None
    if manifest is None:
        raise UserError(
            "core.shared_from",
            "names a pipeline that is not built into the repository",
            given=owner,
            remedy=f"Run `triptych build {owner}` first, or name both in one command",
        )
    if manifest.spec.core.shared_from is not None:
        raise UserError(
            "core.shared_from",
            "names a pipeline without its own core",
            given=f"{owner}, which shares the core of {manifest.spec.core.shared_from}",
            remedy=f"Set core.shared_from to {manifest.spec.core.shared_from}",
        )
    return manifest


def check_shareable(spec: CompiledSpec, source_key: str, owner: EncoderManifest) -> Precision:
    """Return the precision of the owner's core, if the core can serve `spec`.

    `source_key` is the key of the fp32 core of `spec`.

    Raises:
        UserError: The owner's core is made of another graph, is too small, or has another
            precision.
    """
    own, theirs, precision = spec.core, owner.spec.core, owner.gate.precision
    if owner.source_key != source_key:
        raise UserError(
            "core.shared_from",
            "names a pipeline whose core has another model, task head or parameters",
            given=own.shared_from,
            remedy="Remove core.shared_from to build a separate core for this pipeline",
        )
    if own.max_batch_size > theirs.max_batch_size:
        raise UserError(
            "core.max_batch_size",
            f"is greater than that of the shared core, {theirs.max_batch_size}",
            given=own.max_batch_size,
            remedy=f"Lower it, or raise it in {own.shared_from} first",
        )
    if own.precision not in ("fp32", precision):
        raise UserError(
            "core.precision",
            f"differs from that of the shared core, {precision}",
            given=own.precision,
            remedy="Remove it, or remove core.shared_from",
        )
    return precision


def check_sharers(
    repository: Path, name: str, core_key: str | None, together: Sequence[str]
) -> None:
    """Check that the pipelines which share the core of `name` can use the core of `core_key`.

    Args:
        repository: Folder of the models.
        name: Name of the pipeline that is built.
        core_key: Key of its new core; None if it will have no core.
        together: Pipelines that are built right after this one.

    Raises:
        UserError: A pipeline that is not rebuilt shares another core.
    """
    for path in sorted(repository.glob(f"*/{MANIFEST_FILE}")):
        other = path.parent.name
        manifest = find_manifest(repository, other, EncoderManifest)
        if (
            manifest is None
            or manifest.spec.core.shared_from != name
            or manifest.core_key == core_key
        ):
            continue
        if core_key is None or other not in together:
            raise UserError(
                name,
                "has a core that another pipeline shares",
                given=f"{other} uses it, and it would "
                + ("be removed" if core_key is None else "change"),
                remedy=f"Run `triptych build {name} {other}`, or remove "
                f"core.shared_from from {other}",
            )
