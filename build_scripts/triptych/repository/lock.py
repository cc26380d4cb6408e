"""The build record beside the ensemble: what went in, what came out, what the gate said."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from triptych.plan.plan import Plan

LOCK_FILE = "triptych.lock.json"
PLAN_FILE = "model.plan"
"""Of a TensorRT core, beside the ONNX file it was built from."""

SAMPLES_FILE = "engine_samples.npz"
"""Beside the lock: core rows that an engine is checked on."""

SCHEMA = 4


def make_lock(
    plan: Plan,
    file_hashes: Mapping[str, str],
    *,
    core_key: str,
    source_key: str,
    unpacked: str,
    versions: Mapping[str, str],
    gate: Mapping[str, object],
    engine: Mapping[str, Any] | None,
    previous: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The lock as JSON data. Only ``built_at`` differs between two builds of the same inputs.

    Args:
        plan: what was built.
        file_hashes: path relative to the repository -> SHA-256 in hex.
        core_key: hash of all that decided the core.
        source_key: the same of the fp32 graph that it was made of.
        unpacked: why the layout is not packed although the spec says so; else empty.
        versions: of the libraries that made the artifact.
        gate: the gate's result; with ``accepted`` where it failed and that was accepted.
        engine: record of the engine in place, where it was built of this very core.
        previous: the lock in place; its time is kept where all else is equal.
    """
    spec = plan.spec.model_dump(mode="json", exclude={"folder"})
    lock = {
        "schema": SCHEMA,
        "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "spec": spec,
        "model_sha256": plan.facts.sha256,
        "architecture": plan.facts.architecture,
        "versions": dict(versions),
        "core_key": core_key,
        "source_key": source_key,
        "plan": {
            "layout": plan.layout,
            "unpacked": unpacked,
            "max_length": plan.max_length,
            "bucket_edges": list(plan.bucket_edges),
            "max_batch_size": plan.max_batch_size,
            "core": asdict(plan.core),
            "engine": planned_engine(plan, gate),
        },
        "engine": engine,
        "traffic": _traffic(plan),
        "gate": dict(gate),
        "files": dict(sorted(file_hashes.items())),
    }
    plain: dict[str, Any] = json.loads(json.dumps(lock))  # as `previous` was read
    if previous is not None and {**previous, "built_at": ""} == {**plain, "built_at": ""}:
        plain["built_at"] = previous["built_at"]
    return plain


def planned_engine(plan: Plan, gate: Mapping[str, object]) -> dict[str, Any] | None:
    """What the engine stage builds, as a lock has it; None where it builds nothing."""
    if plan.engine is None or not plan.builds_engine or plan.spec.core.share is not None:
        return None
    # The precision that was built, where the spec leaves it open.
    return replace(plan.engine, precision=str(gate["precision"])).as_dict()


def _traffic(plan: Plan) -> dict[str, object]:
    if plan.lengths is None:
        return {}
    return {
        "rows": plan.lengths.rows,
        "mean_tokens": round(plan.lengths.mean, 2),
        "p99_tokens": plan.lengths.quantile(0.99),
        "truncated_share": round(plan.lengths.truncated_share, 4),
    }


def print_lock(lock: Mapping[str, Any]) -> bytes:
    """The lock's file content."""
    return (json.dumps(lock, indent=2, ensure_ascii=False) + "\n").encode()


def read_lock(repository: Path, pipeline: str) -> dict[str, Any] | None:
    """The lock of a built pipeline, or None where there is none or it is not JSON."""
    try:
        text = (repository / pipeline / LOCK_FILE).read_text(encoding="utf-8")
        lock = json.loads(text)
    except (OSError, ValueError):
        return None
    return lock if isinstance(lock, dict) else None
