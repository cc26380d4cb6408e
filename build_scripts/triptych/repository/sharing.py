"""Checks for pipelines of one repository that share a core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.manifest import (
    MANIFEST_FILE,
    CompiledManifest,
    CoreRecord,
    find_manifest,
)
from triptych.spec.backends import Precision
from triptych.spec.fields import CoreSettings
from triptych.spec.model_fields import CompiledSpec, is_own
from triptych.spec.plan import Layout


@dataclass(frozen=True)
class UsedCore:
    """A core that a built pipeline uses."""

    name: str  # Name in Triton without its ending, by which `core.shared_from` names it
    settings: CoreSettings  # Settings of the core
    layout: Layout  # Layout of its batches
    record: CoreRecord  # Record of the core

    @property
    def is_shared(self) -> bool:
        """Whether another pipeline owns the core."""
        return self.settings.shared_from is not None


def used_cores(manifest: CompiledManifest) -> Iterator[UsedCore]:
    """Yield the cores that a pipeline uses."""
    spec, layout = manifest.spec, manifest.plan.layout
    first = CoreRecord(manifest.core_key, manifest.source_key, manifest.gate.precision)
    for name, record in (manifest.cores or {"": first}).items():
        one = spec.with_model(name) if is_own(spec) else spec
        yield UsedCore(one.core.shared_from or one.core_name, one.core, layout, record)


def owner_of_core(repository: Path, spec: CompiledSpec) -> UsedCore:
    """Return the core of another pipeline that `spec` shares.

    Raises:
        UserError: That pipeline is not built, has no such core, or shares it itself.
    """
    wanted = str(spec.core.shared_from)
    owner = wanted.partition(".")[0]
    is_other = owner != spec.name.partition(".")[0]
    manifest = find_manifest(repository, owner, CompiledManifest) if is_other else None
    if manifest is None:
        raise UserError(
            "core.shared_from",
            "names a pipeline that is not built into the repository",
            given=owner,
            remedy=f"Run `triptych build {owner}` first, or name both in one command",
        )
    cores = list(used_cores(manifest))
    found = next((core for core in cores if core.name == wanted and not core.is_shared), None)
    if found is None:
        shared = next((core.name for core in cores if core.is_shared), "")
        names = ", ".join(core.name for core in cores if not core.is_shared)
        raise UserError(
            "core.shared_from",
            "names a pipeline without its own core",
            given=f"{wanted}, which shares the core of {shared}" if shared else wanted,
            remedy=f"Set core.shared_from to {names or shared}",
        )
    return found


def check_shareable(spec: CompiledSpec, source_key: str, owner: UsedCore) -> Precision:
    """Return the precision of the owner's core, if the core can serve `spec`.

    `source_key` is the key of the fp32 core of `spec`.

    Raises:
        UserError: The owner's core is made of another graph, is too small, or has another
            precision.
    """
    own, theirs, precision = spec.core, owner.settings, owner.record.precision
    if owner.record.source_key != source_key:
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
    repository: Path, name: str, core_keys: Mapping[str, str], together: Sequence[str]
) -> None:
    """Check that the pipelines which share a core of `name` can use its new cores.

    Args:
        repository: Folder of the models.
        name: Name of the pipeline that is built.
        core_keys: Key of each of its new cores by name; none of cores that it shares itself.
        together: Pipelines that are built right after this one.

    Raises:
        UserError: A pipeline that is not rebuilt shares another core.
    """
    for path in sorted(repository.glob(f"*/{MANIFEST_FILE}")):
        other = path.parent.name
        manifest = find_manifest(repository, other, CompiledManifest)
        for core in () if manifest is None else used_cores(manifest):
            key = core_keys.get(core.name)
            is_own_core = core.name.partition(".")[0] == name
            if not core.is_shared or not is_own_core or core.record.core_key == key:
                continue
            if key is None or other not in together:
                raise UserError(
                    name,
                    "has a core that another pipeline shares",
                    given=f"{other} uses it, and it would "
                    + ("be removed" if key is None else "change"),
                    remedy=f"Run `triptych build {name} {other}`, or remove "
                    f"core.shared_from from {other}",
                )
