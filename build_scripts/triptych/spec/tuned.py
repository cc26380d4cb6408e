"""`tuned.yaml` beside a spec: the numbers that measured best, with where they come from.

It is read after ``pipeline.yaml`` and wins over it; deleting it brings the old numbers back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError, warn_renamed
from triptych.base.files import parse_yaml, write_files
from triptych.spec.renamed import former_fields

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
"""Fields of the spec that change how fast a pipeline is and not what it answers."""

TUNABLE_GENERATION = (
    "core.kv_cache.memory_mib",
    "core.kv_cache.dtype",
    "core.max_num_batched_tokens",
    "core.max_num_seqs",
    "core.enable_prefix_caching",
    "serving.preprocess_instances",
    "serving.stream_interval",
)
"""The same of a pipeline that generates text, but for its KV cache's precision, which is gated."""

_HEAD = """\
# Written by `triptych {verb}`: what {why}. `triptych build {name}` picks it up.
# Delete this file to go back to the numbers of {spec} and the defaults.
"""


@dataclass(frozen=True)
class Tuned:
    """Dotted keys of the spec with their values, and the machine, load and figures behind them.

    ``spec_sha256`` is among the latter.
    """

    overrides: Mapping[str, Any]
    provenance: Mapping[str, Any]


def read_tuned(folder: Path, tunable: Sequence[str] = TUNABLE) -> Tuned | None:
    """The tuned numbers of the pipeline in `folder`; None where there are none.

    Args:
        folder: the pipeline's.
        tunable: fields that the file of such a pipeline may set.

    Raises:
        UserError: the file is not of the form that `write_tuned` gives it.
    """
    path = folder / TUNED_FILE
    if not path.is_file():
        return None
    remedy = f"Run `triptych tune {folder.name}` again, or delete the file"
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), "must be YAML", given=error, remedy=remedy) from error
    parts = document if isinstance(document, dict) else {}
    overrides, provenance = parts.get("set"), parts.get("provenance", {})
    if not isinstance(overrides, dict) or not isinstance(provenance, dict):
        raise UserError(
            str(path),
            "must have a mapping `set` of fields to values",
            given=f"{document!r:.100}",
            remedy=remedy,
        )
    former = former_fields("text-generation")  # no other task has renamed tunable fields
    present = {former.get(key, key): value for key, value in overrides.items()}
    strange = [key for key in overrides if former.get(key, key) not in tunable]
    if strange:
        raise UserError(
            f"{path}: {strange[0]}",
            "must be a field that tuning may set",
            given=strange[0],
            remedy=f"Remove it, or put it into pipeline.yaml. Fields here: {', '.join(tunable)}",
        )
    for key in overrides.keys() - present.keys():
        warn_renamed(f"{path}: {key}", former[key])
    return Tuned(present, provenance)


def write_tuned(folder: Path, tuned: Tuned, *, spec_file: str) -> Path:
    """Write the file, whole or not at all; returns its path."""
    text = tuned_text(folder.name, tuned, spec_file=spec_file)
    write_files(folder, {TUNED_FILE: text})
    return folder / TUNED_FILE


def describe_tuned(folder: Path, tuned: Tuned, *, spec_file: str) -> str:
    """What it sets, and whether it was measured for another spec."""
    changes = ", ".join(f"{key}={value}" for key, value in tuned.overrides.items())
    measured_for = tuned.provenance.get("spec_sha256")
    if measured_for in (None, sha256_of(folder / spec_file)):
        return f"{changes} ({TUNED_FILE})"
    again = f"{spec_file} has changed since: run `triptych tune {folder.name}` again"
    return f"{changes} ({TUNED_FILE}; {again})"


def tuned_text(pipeline: str, tuned: Tuned, *, spec_file: str, measured: bool = True) -> str:
    """The content of the file.

    Args:
        pipeline: its name.
        tuned: what the file says.
        spec_file: name of the spec's.
        measured: whether `tune` found it; else `watch` proposed it.
    """
    document = {"set": dict(tuned.overrides), "provenance": dict(tuned.provenance)}
    plain = json.loads(json.dumps(document))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    verb, why = f"tune {pipeline}", "measured best"
    if not measured:
        verb, why = f"watch {pipeline} --apply", "should suit new traffic, unmeasured"
    return _HEAD.format(verb=verb, why=why, name=pipeline, spec=spec_file) + text
