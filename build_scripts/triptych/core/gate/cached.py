"""Accuracy gate of one artifact, cached: limits of its precision, the reference, the verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, key_of, sha256_of, versions_of
from triptych.base.errors import Progress
from triptych.container.processor import find_instruction_sets
from triptych.core.gate.check import (
    GateCase,
    GateLabels,
    check,
    describe_probe,
    judge_probe,
)
from triptych.core.gate.own_reference import REFERENCE_FILE, find_reference
from triptych.core.gate.reference import check_tokens, measure_rounding, reference_of
from triptych.core.gate.runs import Decoding, open_core
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import hash_requests, rows_of
from triptych.repository.records import GateResult, Verdict, read_record
from triptych.spec.backends import Precision
from triptych.spec.model_fields import files_of, is_own
from triptych.spec.plan import Plan
from triptych.tasks.accuracy import (
    TOLERANCES,
    above_rounding,
    is_lower_better,
    metrics_of,
    probe_limits,
    thresholds,
)

CODE = (
    "core/gate/*.py",
    "base/max_similarity.py",
    "tasks/*.py",
    "tasks/catalog/*.py",
    "runtime/*.py",
    "!runtime/engine_*.py",
    "!runtime/generation_*.py",
    "core/openvino.py",
    "core/requests.py",
    "base/onnx_graph.py",
    "repository/records.py",
    "spec/own_task.py",
)
GATE_FILE = "gate.json"


class _Failed(Exception):
    """Result of a failed gate, which is not cached."""

    def __init__(self, result: GateResult) -> None:
        self.result = result
        super().__init__()


class GateFailure(Exception):
    """Failed gate that ends a build before the build writes anything.

    Args:
        plan: Plan of a compiled core; None for other kinds.
        remedy: Remedy for the message, if there is no plan.
    """

    def __init__(
        self, pipeline: str, gate: GateResult, plan: Plan | None = None, remedy: str = ""
    ) -> None:
        self.gate = gate
        self.plan = plan
        if plan is not None:
            remedy = _remedy(plan, gate)
        remedy = remedy and f". {remedy}"
        failures = "; ".join(gate.failures)
        super().__init__(f"{pipeline} failed the accuracy gate: {failures}{remedy}")


class Gate:
    """Accuracy gate of a pipeline's cores in one precision.

    Args:
        inputs: Inputs of the pipeline, with the gate's rows.
        precision: Precision of the cores, which decides the limits.
        served: Whether the cores are those that will be served, so that they run as `open_core`
            says; else ONNX Runtime runs them.

    Attributes:
        judged_by: Hash of everything that decides a verdict besides the artifact, in hex.

    Raises:
        UserError: The spec sets a limit for a metric that the task does not have.
    """

    def __init__(
        self,
        inputs: PipelineInputs,
        precision: Precision,
        progress: Progress,
        *,
        served: bool = False,
    ) -> None:
        self.precision = precision
        self._served_in = precision if served else ""
        self._inputs = inputs
        self._progress = progress
        # The outputs have the errors of the cores before this one, too.
        outputs = limits_of(inputs, coarsest_of([precision, inputs.coarsest]))
        own = limits_of(inputs, precision)
        self._limits = own | {name: limit for name, limit in outputs.items() if "." in name}
        self._probe_limits = _probe_limits(inputs, precision)
        self._tokens_checked = False
        plan, labeled = inputs.plan, inputs.labeled
        key = {
            "precision": precision,
            "model": plan.info.sha256,
            "rows": hash_requests(inputs.requests),
            "labeled": hash_requests(labeled.requests),
            "truth": [[row.line, repr(row.truth)] for row in labeled.rows],
            "limits": self._limits,
            "own_limits": overrides_of(inputs),
            "probe": hash_requests(inputs.probe),
            "probe_limits": self._probe_limits,
            "max_drop": plan.spec.accuracy.max_drop,
            "notes": labeled.notes,
            "batch_size": plan.max_batch_size,
            "onnxruntime": versions_of("onnxruntime"),
            "code": code_hash(*CODE),
        }
        if plan.info.own is not None:  # the functions make the outputs that the gate compares
            key |= {"hooks": hash_hooks(inputs), "outputs": metrics_of(plan.task)}
        if inputs.chain is not None:  # so do the other models
            key |= {"chain": inputs.chain.key, "upstream": inputs.upstream, "name": inputs.model}
        if served and plan.backend.runs_gate:
            key |= {"run_by": [versions_of("openvino"), find_instruction_sets()]}
        self.judged_by = key_of("gate", key)

    def run(self, artifact: Path, files: Mapping[str, str]) -> GateResult:
        """Check an artifact. Only a passed result is cached.

        Args:
            artifact: Path of the ``model.onnx``.
            files: Hashes of the file and of its weight files, by name.
        """

        def work(target: Path) -> None:
            rows = len(self._inputs.requests)
            self._progress("gate", f"{rows} requests against {self._inputs.plan.original} fp32 ...")
            # Later artifacts have the same tokens, and find the reference in the cache.
            loaded = None if self._tokens_checked else check_tokens(self._inputs)
            self._tokens_checked = True
            result = self._check(artifact, loaded)
            if not result.passed:
                raise _Failed(result)
            (target / GATE_FILE).write_text(json.dumps(result.as_dict()), encoding="utf-8")

        try:
            stage = {"artifact": files, "judged_by": self.judged_by}
            folder, cached, _ = cached_stage("gate", stage, work, self._progress)
        except _Failed as failed:
            return self._told(failed.result, "")
        text = (folder / GATE_FILE).read_text(encoding="utf-8")
        result = read_record(GateResult, json.loads(text))
        return self._told(result, " (cached)" if cached else "")

    def _check(self, artifact: Path, loaded: object) -> GateResult:
        inputs, plan, task = self._inputs, self._inputs.plan, self._inputs.plan.task
        reference = partial(reference_of, inputs, progress=self._progress, loaded=loaded)
        labeled = None
        if inputs.labeled.rows:
            labeled = GateLabels(
                rows=inputs.labeled.rows,
                requests=inputs.labeled.requests,
                expected=reference(rows_of(inputs.labeled.requests)),
                max_drop=plan.spec.accuracy.max_drop,
            )
        case = GateCase(
            requests=inputs.requests,
            expected=reference(rows_of(inputs.requests)),
            core=plan.core,
            limits=self._limits,
            batch_size=plan.max_batch_size,
            decoding=decoding_of(inputs) if task.decodes_answers else None,
        )
        rounding = measure_rounding(inputs, case.expected, self._progress)
        limits = above_rounding(self._limits, rounding, overrides_of(inputs))
        run = open_core(artifact, plan, self._served_in)
        result = check(
            run,
            replace(case, limits=limits),
            self.precision,
            metrics_of(task),
            labeled=labeled,
            notes=(
                *inputs.labeled.notes,
                *_notes(inputs, self.precision, rounding, self._limits, limits),
            ),
        )
        result = replace(result, rounding=rounding)
        if not self._probe_limits:
            return result
        expected = reference(rows_of(inputs.probe))
        probed = replace(case, requests=inputs.probe, expected=expected, limits=self._probe_limits)
        probe, failures = judge_probe(run, probed)
        return replace(result, probe=probe, failures=(*result.failures, *failures))

    def _told(self, result: GateResult, suffix: str) -> GateResult:
        for line in _lines(result, suffix):
            self._progress("gate", line)
        if result.probe is not None:
            self._progress("gate", describe_probe(result.probe))
        return result


def coarsest_of(precisions: Iterable[Precision]) -> Precision:
    """Return the precision with the loosest limits."""
    return max(precisions, key=list(TOLERANCES).index)


def join_gates(gates: Sequence[GateResult]) -> GateResult:
    """Return the result of a pipeline from those of its cores, in the order in which they run.

    The outputs of the pipeline are those behind the last core; the metrics of cores have their
    worst value.
    """
    last = gates[-1]

    def worst(verdict: Verdict) -> Verdict:
        same = [v for gate in gates for v in gate.verdicts if v.metric == verdict.metric]
        if "." in verdict.metric:
            return verdict
        sign = 1 if is_lower_better(verdict.metric) else -1
        return max(same, key=lambda each: (not each.passed, sign * each.value))

    return replace(
        last,
        precision=coarsest_of([gate.precision for gate in gates]),
        finite=all(gate.finite for gate in gates),
        verdicts=tuple(map(worst, last.verdicts)),
        failures=tuple(dict.fromkeys(text for gate in gates for text in gate.failures)),
        notes=tuple(dict.fromkeys(note for gate in gates for note in gate.notes)),
        accepted=next((gate.accepted for gate in gates if gate.accepted), ""),
    )


def limits_of(inputs: PipelineInputs, precision: Precision) -> dict[str, float]:
    """Return the limit of each metric for `precision`: the spec's limit, else the default.

    Raises:
        UserError: The spec sets a limit for a metric that the task does not have.
    """
    return thresholds(inputs.plan.task, precision, overrides_of(inputs))


def decoding_of(inputs: PipelineInputs) -> Decoding:
    """Return the decoder of core outputs, without `hooks.after`."""
    plan, chain = inputs.plan, inputs.chain
    reference = find_reference(plan.spec) if is_own(plan.spec) else None
    return Decoding(
        task=plan.task,
        settings={
            **plan.task.settings(plan.info),
            "outputs": plan.task.output_settings,
            "tokenizer_file": inputs.tokenizer_file,
        },
        reference=chain.answer if chain is not None and reference is None else reference,
        decoder=None if chain is None else chain.behind(inputs.model),
        folder=plan.spec.folder if plan.spec.makes_outputs else inputs.tokenizer_folder,
    )


def _probe_limits(inputs: PipelineInputs, precision: Precision) -> dict[str, float]:
    """Return the limits on the probe; empty if the core is not checked on the probe."""
    if precision == "fp32" or not inputs.probe:
        return {}
    return probe_limits(inputs.plan.task, precision, overrides_of(inputs))


def overrides_of(inputs: PipelineInputs) -> dict[str, float]:
    """Return the limits that the spec sets, by metric."""
    spec = inputs.plan.spec
    limits: dict[str, float] = spec.accuracy.model_dump(exclude={"max_drop"}, exclude_none=True)
    return {**limits, **spec.output_limits} if is_own(spec) else limits


def hash_hooks(inputs: PipelineInputs) -> str:
    """Return the hash of the pipeline's functions and of the files that they read, in hex."""
    spec = inputs.plan.spec
    files = files_of(spec)
    reference = spec.folder / REFERENCE_FILE
    files += [(REFERENCE_FILE, reference)] * reference.is_file()
    parts = [f"{path} {sha256_of(file)}" for path, file in sorted(files)]
    return key_of("hooks", {"hooks": repr(inputs.hooks), "files": parts})


def _notes(
    inputs: PipelineInputs,
    precision: Precision,
    rounding: float | None,
    limits: Mapping[str, float],
    raised: Mapping[str, float],
) -> Iterator[str]:
    """Yield a sentence for raised limits and for a probe that was left out."""
    names = [name for name in limits if raised[name] > limits[name]]
    if names:
        yield (
            f"{inputs.plan.original}'s own rounding is {rounding:.2e}:"
            f" the limit is raised to {raised[names[0]]:.2e} for {', '.join(names)}"
        )
    if precision != "fp32" and not inputs.probe:
        texts = "the pipeline accepts no row of the general probe"
        reason = texts if inputs.tokenizer_file else "the general probe contains no images"
        yield f"not checked outside your traffic: {reason}"


def _lines(result: GateResult, suffix: str) -> Iterator[str]:
    """Yield a sentence about a result, then its metrics with their limits."""
    limited = [verdict for verdict in result.verdicts if verdict.limit is not None]
    failed = sum(not verdict.passed for verdict in limited)
    if result.passed:
        yield f"passed{suffix}: the artifact answers as the original within {len(limited)} limits"
    else:
        yield f"FAILED{suffix}: {failed} of {len(limited)} limits are not met"
    parts = [
        f"{verdict.metric} {_figure(verdict.value)}"
        + ("" if verdict.limit is None else f" (limit {verdict.limit:g})")
        for verdict in result.verdicts
        if verdict.limit is not None or verdict.metric == "max_difference"
    ]
    yield ", ".join(parts)


def _figure(value: float) -> str:
    return f"{value:.5g}" if value - value == 0 else "not a number"


def _remedy(plan: Plan, gate: GateResult) -> str:
    """Return the first change that helps and was not tried.

    If both layouts are allowed, fp32 failed in both.
    """
    spec = plan.spec
    own = [
        f"accuracy.{verdict.metric}"
        for verdict in gate.verdicts
        if not verdict.passed and getattr(spec.accuracy, verdict.metric, None) is not None
    ]
    if own:
        return f"Loosen {own[0]}, which the pipeline sets, or leave it out for the default"
    if spec.core.shared_from is not None:
        return "Remove core.shared_from: the pipeline then has its own core"
    if gate.precision != "fp32":
        close = "" if gate.precision in ("fp16", "bf16") else "fp16, which loses less, or "
        return f"Set core.precision to {close}fp32, or add traffic like the worst rows"
    return (
        "Look at the worst rows: remove rows from traffic.jsonl that no client sends; otherwise "
        "--accept-failed-gate REASON builds it, and records the reason"
    )
