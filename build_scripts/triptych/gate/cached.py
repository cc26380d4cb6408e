"""The gate of one artifact, cached: the limits of its precision, the reference, the verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.cache import cached_stage, code_hash, key_of, versions_of
from triptych.errors import Progress
from triptych.gate.decoded import Decoding
from triptych.gate.reference_rows import reference_of
from triptych.pipeline.precisions import Precision
from triptych.requests.prepare import Prepared
from triptych.requests.samples import hash_requests, rows_of
from triptych.tasks.accuracy import metrics_of, thresholds

CODE = (
    "gate/*.py",
    "tasks/*.py",
    "tasks/metrics/*.py",
    "runtime/*.py",
    "requests/feeds.py",
    "requests/samples.py",
    "graph/session.py",
)
GATE_FILE = "gate.json"


class _Failed(Exception):
    """A gate's result that is not to be kept in the cache."""

    def __init__(self, gate: dict[str, Any]) -> None:
        self.gate = gate
        super().__init__()


class Gate:
    """The gate of a pipeline's cores in one precision.

    Args:
        prepared: the pipeline, with the gate's rows.
        precision: of the cores, which decides the limits.
        progress: told each result.

    Attributes:
        precision: see above.
        judged_by: hash of what decides a verdict besides the artifact, in hex.

    Raises:
        UserError: the spec overrides the limit of what is no metric of the task.
    """

    def __init__(self, prepared: Prepared, precision: Precision, progress: Progress) -> None:
        self.precision = precision
        self._prepared = prepared
        self._progress = progress
        self._limits = limits_of(prepared, precision)
        plan = prepared.plan
        inputs = {
            "precision": precision,
            "model": plan.facts.sha256,
            "rows": hash_requests(prepared.requests),
            "labelled": hash_requests(prepared.labelled_requests),
            "truth": [[row.line, repr(row.truth)] for row in prepared.labelled],
            "limits": self._limits,
            "max_drop": plan.spec.accuracy.max_drop,
            "notes": prepared.notes,
            "batch_size": plan.max_batch_size,
            "onnxruntime": versions_of("onnxruntime"),
            "code": code_hash(*CODE),
        }
        self.judged_by = key_of("gate", inputs)

    def run(self, artifact: Path, key: str) -> dict[str, Any]:
        """Check an artifact. What passed stays in the cache; what failed is run again when asked.

        Args:
            artifact: the ``model.onnx``.
            key: hash of all that decided it.

        Returns:
            `GateResult.as_dict()`.
        """

        def work(target: Path) -> None:
            rows = len(self._prepared.requests)
            self._progress("gate", f"{rows} requests against PyTorch fp32 ...")
            result = _check(self._prepared, artifact, self.precision, self._limits)
            if result["failures"]:
                raise _Failed(result)
            (target / GATE_FILE).write_text(json.dumps(result), encoding="utf-8")

        try:
            stage = {"artifact": key, "judged_by": self.judged_by}
            folder, cached = cached_stage("gate", stage, work)
        except _Failed as failed:
            self._progress("gate", _line(failed.gate))
            return failed.gate
        gate: dict[str, Any] = json.loads((folder / GATE_FILE).read_text(encoding="utf-8"))
        self._progress("gate", _line(gate) + (" (cached)" if cached else ""))
        return gate


def limits_of(prepared: Prepared, precision: str) -> dict[str, float]:
    """The limit of each metric for a core of `precision`, the spec's own over the defaults.

    Raises:
        UserError: the spec overrides the limit of what is no metric of the task.
    """
    plan = prepared.plan
    overrides = plan.spec.accuracy.model_dump(exclude={"max_drop"}, exclude_none=True)
    return thresholds(plan.task, precision, overrides)


def decoding_of(prepared: Prepared) -> Decoding:
    """How core outputs become answers, but for what `hooks.after` makes of those."""
    plan = prepared.plan
    custom = plan.spec.custom is not None
    return Decoding(
        task=plan.task,
        settings={**plan.task.settings(plan.facts), "outputs": plan.output_settings},
        folder=plan.spec.folder if custom else prepared.tokenizer_folder,
    )


def _check(
    prepared: Prepared, artifact: Path, precision: Precision, limits: Mapping[str, float]
) -> dict[str, Any]:
    from triptych.gate.artifact import open_core
    from triptych.gate.check import Labelled, check

    plan, task = prepared.plan, prepared.plan.task
    labelled = None
    if prepared.labelled:
        requests = prepared.labelled_requests
        labelled = Labelled(
            rows=prepared.labelled,
            requests=requests,
            expected=reference_of(prepared, rows_of(requests)),
            max_drop=plan.spec.accuracy.max_drop,
        )
    result = check(
        open_core(artifact, plan),
        prepared.requests,
        reference_of(prepared, rows_of(prepared.requests)),
        plan.core,
        limits,
        metrics=metrics_of(task),
        precision=precision,
        batch_size=plan.max_batch_size,
        decoding=decoding_of(prepared) if task.decodes_answers else None,
        labelled=labelled,
        notes=prepared.notes,
    )
    return result.as_dict()


def _line(gate: Mapping[str, Any]) -> str:
    parts = [
        f"{verdict['metric']} {_figure(verdict['value'])}"
        for verdict in gate["verdicts"]
        if verdict["limit"] is not None or verdict["metric"] == "max_difference"
    ]
    return f"{'FAILED' if gate['failures'] else 'passed'}: {', '.join(parts)}"


def _figure(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5g}"
