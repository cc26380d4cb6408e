"""The build record of a pipeline that generates text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triptych.base.errors import UserError
from triptych.building.generation.inputs import GeneratingInputs
from triptych.repository.lock import LOCK_FILE
from triptych.repository.records import GateResult, plain_data
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.spec import GENERATING, GENERATION

SCHEMA = "generation-1"


def lock_bytes(
    inputs: GeneratingInputs,
    files: Mapping[str, str],
    *,
    versions: Mapping[str, str],
    gate: GateResult | None,
    ungated: str,
    repository: Path,
) -> bytes:
    """The lock's content; the time of the one in `repository` is kept where all else is equal.

    Args:
        inputs: of the build.
        files: path relative to the repository -> SHA-256 in hex.
        versions: of what the gate was run with.
        gate: None where no model was checked.
        ungated: why not, where somebody said so.
        repository: folder of the models.
    """
    spec, facts = inputs.spec, inputs.model.facts
    prompts, adapters = inputs.prompts, inputs.adapters
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "spec": spec.model_dump(mode="json", exclude={"folder"}),
        "model_sha256": facts.sha256,
        "architecture": facts.architecture,
        **({"adapters": {one.name: one.sha256 for one in adapters}} if adapters else {}),
        **({"quantization": asdict(facts.quantization)} if facts.quantization else {}),
        "versions": dict(versions),
        "plan": {"max_length": inputs.max_length},
        "traffic": {
            "prompts": len(prompts),
            "mean_tokens": round(sum(len(prompt.ids) for prompt in prompts) / len(prompts), 2),
        },
        "gate": None if gate is None else gate.as_dict(),
        **({"ungated": ungated} if ungated else {}),
        "files": dict(sorted(files.items())),
    }
    previous = _read(repository / spec.name / LOCK_FILE)
    plain: dict[str, Any] = plain_data(record)
    if {**plain, "built_at": previous.get("built_at")} == previous:
        plain = previous
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def built_spec(repository: Path, pipeline: str) -> GenerationSpec | Text2TextSpec | None:
    """The spec that a pipeline was built by; None where it does not generate text.

    Raises:
        UserError: a lock of another release of triptych.
    """
    spec = _read(repository / pipeline / LOCK_FILE).get("spec")
    task = spec.get("task") if isinstance(spec, dict) else None
    if task not in GENERATING:
        return None
    kind = GenerationSpec if task == GENERATION else Text2TextSpec
    try:
        return kind.model_validate_json(json.dumps(spec))
    except ValidationError as error:
        raise UserError(
            f"{pipeline}/{LOCK_FILE}",
            "must be a lock of this release of triptych",
            given=error.errors(include_url=False)[0]["msg"],
            remedy=f"Run `triptych build {pipeline}` again",
        ) from error


def built_gate(repository: Path, pipeline: str) -> Mapping[str, Any]:
    """What the gate found of the build in `repository`; empty where none did."""
    return _read(repository / pipeline / LOCK_FILE).get("gate") or {}
