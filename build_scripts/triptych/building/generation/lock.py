"""Build manifest of a pipeline that generates text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triptych.building.generation.inputs import GeneratingInputs
from triptych.repository.manifest import read_manifest_data
from triptych.repository.records import GateResult, plain_data

SCHEMA = "generation-2"


def lock_bytes(
    inputs: GeneratingInputs,
    files: Mapping[str, str],
    *,
    versions: Mapping[str, str],
    gate: GateResult,
    repository: Path,
) -> bytes:
    """Return the content of the build manifest; an equal one in `repository` is returned unchanged.

    Args:
        inputs: Inputs of the build.
        files: Path in the repository to the SHA-256 hash in hex.
        versions: Versions of the packages of the gate.
        gate: Result of the gate.
        repository: Folder of the models.
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
        "gate": gate.as_dict(),
        "files": dict(sorted(files.items())),
    }
    previous = read_manifest_data(repository, spec.name)
    plain: dict[str, Any] = plain_data(record)
    if {**plain, "built_at": previous.get("built_at")} == previous:
        plain = previous
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def built_gate(repository: Path, pipeline: str) -> Mapping[str, Any]:
    """Return the gate's result of a build as plain data; empty without a build."""
    return read_manifest_data(repository, pipeline).get("gate") or {}
