"""The gate of one artifact, cached: the limits of its precision, the reference, the verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from triptych.cache import cached_stage, code_hash, key_of, versions_of
from triptych.errors import Progress
from triptych.gate.decoded import Decoding
from triptych.gate.reference_rows import reference_of
from triptych.pipeline.precisions import Precision
from triptych.plan.plan import Plan
from triptych.repository.records import GateResult, read_record
from triptych.requests.inputs import PipelineInputs
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
    "repository/records.py",
)
GATE_FILE = "gate.json"


class _Failed(Exception):
    """A gate's result that is not to be kept in the cache."""

    def __init__(self, result: GateResult) -> None:
        self.result = result
        super().__init__()


class GateFailure(Exception):
    """The artifact is not right: nothing was written."""

    def __init__(self, plan: Plan, gate: GateResult) -> None:
        self.plan = plan
        self.gate = gate
        super().__init__(f"{plan.spec.name} failed the accuracy gate: {'; '.join(gate.failures)}")


class Gate:
    """The gate of a pipeline's cores in one precision.

    Args:
        inputs: of the pipeline, with the gate's rows.
        precision: of the cores, which decides the limits.
        progress: told each result.

    Attributes:
        precision: see above.
        judged_by: hash of what decides a verdict besides the artifact, in hex.

    Raises:
        UserError: the spec overrides the limit of what is no metric of the task.
    """

    def __init__(self, inputs: PipelineInputs, precision: Precision, progress: Progress) -> None:
        self.precision = precision
        self._inputs = inputs
        self._progress = progress
        self._limits = limits_of(inputs, precision)
        plan, labelled = inputs.plan, inputs.labelled
        key = {
            "precision": precision,
            "model": plan.facts.sha256,
            "rows": hash_requests(inputs.requests),
            "labelled": hash_requests(labelled.requests),
            "truth": [[row.line, repr(row.truth)] for row in labelled.rows],
            "limits": self._limits,
            "max_drop": plan.spec.accuracy.max_drop,
            "notes": labelled.notes,
            "batch_size": plan.max_batch_size,
            "onnxruntime": versions_of("onnxruntime"),
            "code": code_hash(*CODE),
        }
        self.judged_by = key_of("gate", key)

    def run(self, artifact: Path, key: str) -> GateResult:
        """Check an artifact. What passed stays in the cache; what failed is run again when asked.

        Args:
            artifact: the ``model.onnx``.
            key: hash of all that decided it.
        """

        def work(target: Path) -> None:
            rows = len(self._inputs.requests)
            self._progress("gate", f"{rows} requests against PyTorch fp32 ...")
            result = _check(self._inputs, artifact, self.precision, self._limits)
            if not result.passed:
                raise _Failed(result)
            (target / GATE_FILE).write_text(json.dumps(result.as_dict()), encoding="utf-8")

        try:
            stage = {"artifact": key, "judged_by": self.judged_by}
            folder, cached = cached_stage("gate", stage, work)
        except _Failed as failed:
            self._progress("gate", _line(failed.result))
            return failed.result
        text = (folder / GATE_FILE).read_text(encoding="utf-8")
        result = read_record(GateResult, json.loads(text))
        self._progress("gate", _line(result) + (" (cached)" if cached else ""))
        return result


def limits_of(inputs: PipelineInputs, precision: Precision) -> dict[str, float]:
    """The limit of each metric for a core of `precision`, the spec's own over the defaults.

    Raises:
        UserError: the spec overrides the limit of what is no metric of the task.
    """
    plan = inputs.plan
    overrides = plan.spec.accuracy.model_dump(exclude={"max_drop"}, exclude_none=True)
    return thresholds(plan.task, precision, overrides)


def decoding_of(inputs: PipelineInputs) -> Decoding:
    """How core outputs become answers, but for what `hooks.after` makes of those."""
    plan = inputs.plan
    custom = plan.spec.custom is not None
    return Decoding(
        task=plan.task,
        settings={**plan.task.settings(plan.facts), "outputs": plan.output_settings},
        folder=plan.spec.folder if custom else inputs.tokenizer_folder,
    )


def _check(
    inputs: PipelineInputs, artifact: Path, precision: Precision, limits: Mapping[str, float]
) -> GateResult:
    from triptych.gate.artifact import open_core
    from triptych.gate.check import Labelled, check

    plan, task = inputs.plan, inputs.plan.task
    labelled = None
    if inputs.labelled.rows:
        labelled = Labelled(
            rows=inputs.labelled.rows,
            requests=inputs.labelled.requests,
            expected=reference_of(inputs, rows_of(inputs.labelled.requests)),
            max_drop=plan.spec.accuracy.max_drop,
        )
    return check(
        open_core(artifact, plan),
        inputs.requests,
        reference_of(inputs, rows_of(inputs.requests)),
        plan.core,
        limits,
        metrics=metrics_of(task),
        precision=precision,
        batch_size=plan.max_batch_size,
        decoding=decoding_of(inputs) if task.decodes_answers else None,
        labelled=labelled,
        notes=inputs.labelled.notes,
    )


def _line(result: GateResult) -> str:
    parts = [
        f"{verdict.metric} {_figure(verdict.value)}"
        for verdict in result.verdicts
        if verdict.limit is not None or verdict.metric == "max_difference"
    ]
    return f"{'passed' if result.passed else 'FAILED'}: {', '.join(parts)}"


def _figure(value: float) -> str:
    return f"{value:.5g}" if value - value == 0 else "not a number"
