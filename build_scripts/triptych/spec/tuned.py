"""Reader and writer of ``tuned.yaml``: values found by measurements, with their provenance.

The file is read after ``pipeline.yaml`` and has precedence. Deleting it restores the old values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.files import parse_yaml, write_files
from triptych.spec.template import SPEC_FILE

TUNED_FILE = "tuned.yaml"
TUNABLE = (
    "core.bucket_count",
    "core.layout",
    "core.max_batch_size",
    "core.precision",
    "core.threads",
    "serving.instances.core",
    "serving.instances.postprocess",
    "serving.instances.preprocess",
    "serving.queue.max_delay_us",
)
"""Fields that affect the speed of a pipeline but not its outputs."""

TUNABLE_GENERATION = (
    "core.kv_cache.memory_mib",
    "core.kv_cache.dtype",
    "core.max_num_batched_tokens",
    "core.max_num_seqs",
    "core.enable_prefix_caching",
    "serving.preprocess_instances",
    "serving.stream_interval",
)
"""Fields that affect the speed of text generation but not its outputs, except
``core.kv_cache.dtype``, which the gate checks.
"""

_HEAD = """\
# Written by `triptych tune {name}`: the values that performed best.
# `triptych build {name}` reads it.
# Delete this file to use the values of {spec} and the defaults again.
"""


@dataclass(frozen=True)
class Tuned:
    """Content of ``tuned.yaml``.

    Attributes:
        overrides: Dotted keys of the spec with their values.
        provenance: Machine, load and measured figures behind the values, and ``spec_sha256``.
    """

    overrides: Mapping[str, Any]
    provenance: Mapping[str, Any]


def read_tuned(folder: Path, tunable: Sequence[str] = TUNABLE) -> Tuned | None:
    """Return the tuned values of the pipeline in `folder`, or None if there are none.

    Args:
        folder: Folder of the pipeline.
        tunable: Fields that the file may set.

    Raises:
        UserError: The file does not have the form that `write_tuned` gives it.
    """
    path = folder / TUNED_FILE
    if not path.is_file():
        return None
    remedy = f"Run `triptych tune {folder.name}` again, or delete the file"
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), "is not valid YAML", given=error, remedy=remedy) from error
    parts = document if isinstance(document, dict) else {}
    overrides, provenance = parts.get("set"), parts.get("provenance", {})
    if not isinstance(overrides, dict) or not isinstance(provenance, dict):
        raise UserError(
            str(path),
            "must have a mapping `set` from fields to values",
            given=f"{document!r:.100}",
            remedy=remedy,
        )
    strange = [key for key in overrides if key not in tunable]
    if strange:
        raise UserError(
            f"{path}: {strange[0]}",
            "is not a field that tuning may set",
            given=strange[0],
            remedy=f"Move it to pipeline.yaml, or remove it. Allowed: {', '.join(tunable)}",
        )
    return Tuned(overrides, provenance)


def write_tuned(folder: Path, tuned: Tuned) -> Path:
    """Write the file atomically and return its path."""
    document = {"set": dict(tuned.overrides), "provenance": dict(tuned.provenance)}
    plain = json.loads(json.dumps(document))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    head = _HEAD.format(name=folder.name, spec=SPEC_FILE)
    write_files(folder, {TUNED_FILE: head + text})
    return folder / TUNED_FILE


def describe_tuned(folder: Path, tuned: Tuned) -> str:
    """Return the values of the file as text, with a note if they were measured for another spec."""
    changes = ", ".join(f"{key}={value}" for key, value in tuned.overrides.items())
    measured_for = tuned.provenance.get("spec_sha256")
    if measured_for in (None, sha256_of(folder / SPEC_FILE)):
        return f"{changes} ({TUNED_FILE})"
    again = f"{SPEC_FILE} has changed since: run `triptych tune {folder.name}` again"
    return f"{changes} ({TUNED_FILE}; {again})"
