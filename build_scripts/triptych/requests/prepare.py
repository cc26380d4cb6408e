"""From a spec to all that is known before anything is exported: model, plan, the gate's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from triptych.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.errors import Progress, UserError
from triptych.model.facts import ModelFacts
from triptych.model.source import locate, read_facts, read_tokenizer
from triptych.pipeline.spec import SPEC_FILE, PipelineSpec
from triptych.pipeline.traffic import TRAFFIC_FILE, Lengths, TrafficRow, read_traffic
from triptych.pipeline.tuned import TUNED_FILE, read_tuned
from triptych.plan.plan import (
    Layout,
    Plan,
    core_rows_of,
    make_plan,
    max_length_of,
    row_settings,
)
from triptych.repository.lock import read_lock
from triptych.requests.feeds import Sample
from triptych.requests.gate_rows import (
    CALIBRATION_ROWS,
    GATE_IMAGES,
    GateRows,
    image_request,
    image_rows,
    text_request,
    text_rows,
)
from triptych.requests.reader import RequestReader
from triptych.requests.samples import FEW_ROWS, GateRequest
from triptych.runtime import module_of
from triptych.runtime.faults import RequestError
from triptych.runtime.hooking import HOOKS_FILE, load_hooks
from triptych.tasks import Task, find_task
from triptych.tasks.custom import custom_task
from triptych.tasks.eval_file import EVAL_FILE, first_rows, read_labels
from triptych.tasks.metrics.labels import LabelledRow

LABELLED_ROWS = 2000
"""Of more labelled rows, only the first ones are run."""

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Prepared:
    """What is known before anything is exported.

    Attributes:
        plan: the derived numbers.
        model_folder: local folder of the model's files.
        tokenizer_file: the runtime's tokenizer; None for images.
        requests: for the gate, made-up ones first.
        calibration: core rows of the traffic that the gate does not use.
        hooks: content of the pipeline's ``hooks.py``.
        labelled: rows of ``eval.jsonl``, where there is one.
        labelled_requests: the requests they make, in order.
        notes: what the gate's result should say about its rows.
        traffic: every request of ``traffic.jsonl`` as a client sends it, for load.
    """

    plan: Plan
    model_folder: Path
    tokenizer_file: Path | None
    requests: tuple[GateRequest, ...]
    calibration: tuple[Sample, ...]
    hooks: bytes | None
    labelled: tuple[LabelledRow, ...] = ()
    labelled_requests: tuple[GateRequest, ...] = ()
    notes: tuple[str, ...] = ()
    traffic: tuple[Mapping[str, str | bytes], ...] = ()

    @property
    def tokenizer_folder(self) -> Path:
        """Where a decoder finds the ``tokenizer.json``, if the task has one."""
        return self.model_folder if self.tokenizer_file is None else self.tokenizer_file.parent

    def replanned(self, layout: Layout) -> Prepared:
        """The same with another layout."""
        old = self.plan
        plan = make_plan(old.spec, old.facts, old.task, old.parameters, old.lengths, layout=layout)
        return replace(self, plan=plan)


def as_built(prepared: Prepared, repository: Path) -> Prepared:
    """The same in the layout that it was built in, which may not be the one that was asked for."""
    lock = read_lock(repository, prepared.plan.spec.name) or {}
    layout = lock.get("plan", {}).get("layout")
    if layout == prepared.plan.layout or layout not in get_args(Layout):
        return prepared
    return prepared.replanned(layout)


def task_of(spec: PipelineSpec) -> Task:
    """The task of `spec`, one of the package's or its own.

    Raises:
        UserError: there is none such.
    """
    if (spec.task == "custom") != (spec.custom is not None):
        raise UserError(
            "custom",
            "must be given where task is custom, and nowhere else",
            given=f"task {spec.task}",
            remedy="See pipelines/README.md",
        )
    return find_task(spec.task) if spec.custom is None else custom_task(spec.custom)


def prepare(spec: PipelineSpec, progress: Progress) -> Prepared:
    """Resolve the model, tokenize the traffic and derive the plan. Writes only to the cache.

    Raises:
        UserError: in the spec, the model, the hooks or the traffic.
    """
    task = task_of(spec)
    _tell_tuned(spec, progress)
    traffic = read_traffic(spec.folder, [tensor.name for tensor in task.inputs])
    folder = locate(spec.model, spec.folder)
    facts = read_facts(folder)
    progress("source", f"{facts.architecture}, from {spec.model.source}")
    task.check(facts)
    _check_max_length(spec, facts)
    hooks = _load_hooks(spec, task)
    asker = RequestReader.of(spec, task, facts, getattr(hooks, "before", None))
    asked = [asker.ask(TRAFFIC_FILE, row) for row in traffic]
    asks = [one.ask for one in asked]
    hooks_file = None if hooks is None else (spec.folder / HOOKS_FILE).read_bytes()
    tokenizer, lengths = None, None
    if facts.image is not None:
        most = core_rows_of(spec, facts, task)
        maker = row_maker(task)(row_settings(spec, facts, task, max_core_rows=most), spec.folder)
        used = slice(GATE_IMAGES + CALIBRATION_ROWS)
        made = asker.taken(TRAFFIC_FILE, traffic[used], maker.make(asks[used]))
        rows = image_rows(
            asked[used], [row.inputs["image"] for row in traffic], made, maker, asker.make_up
        )
        progress("traffic", f"{len(traffic)} images")
    else:
        tokenizer = _tokenizer(folder, facts)
        maker, whole = row_makers(spec, facts, task, tokenizer.parent)
        made, untruncated_rows = (
            asker.taken(TRAFFIC_FILE, traffic, each.token_rows(asks)) for each in (maker, whole)
        )
        lengths = lengths_of(made, untruncated_rows, max_length_of(spec, facts, task))
        progress(
            "traffic",
            f"{lengths.rows} rows, {lengths.mean:.1f} tokens on average, "
            f"{lengths.truncated_share:.1%} over the limit of {max_length_of(spec, facts, task)}",
        )
        mask_token = str(task.settings(facts).get("mask_token", ""))
        rows = text_rows(asked, made, maker, whole, asker.make_up, mask_token=mask_token)
    _tell(progress, rows)
    labelled, labelled_requests, notes = _labelled(spec, asker, maker, progress)
    return Prepared(
        plan=make_plan(spec, facts, task, asker.parameters, lengths),
        model_folder=folder,
        tokenizer_file=tokenizer,
        requests=rows.requests,
        calibration=rows.calibration,
        hooks=hooks_file,
        labelled=labelled,
        labelled_requests=labelled_requests,
        notes=notes,
        traffic=tuple(one.sent for one in asked),
    )


def _tell_tuned(spec: PipelineSpec, progress: Progress) -> None:
    """What comes from ``tuned.yaml``, and whether it was measured for another spec."""
    tuned = read_tuned(spec.folder) if spec.tuned else None
    if tuned is None:
        return
    changes = ", ".join(f"{key}={value}" for key, value in spec.tuned.items())
    measured_for = tuned.provenance.get("spec_sha256")
    stale = measured_for not in (None, sha256_of(spec.folder / SPEC_FILE))
    note = (
        f"; {SPEC_FILE} has changed since: run `triptych tune {spec.name}` again" if stale else ""
    )
    progress("tuned", f"{changes} ({TUNED_FILE}{note})")


def lengths_of(
    made: Sequence[Sequence[Any]], untruncated_rows: Sequence[Sequence[Any]], max_length: int
) -> Lengths:
    """Of the core rows that the row makers, with and without a limit, made of requests."""
    rows, whole = ([row for rows in each for row in rows] for each in (made, untruncated_rows))
    # Where there are more rows than without a limit, they are windows: nothing is cut off.
    counted = whole if len(whole) == len(rows) else rows
    return Lengths.of([len(row.ids) for row in counted], max_length=max_length)


def _tell(progress: Progress, rows: GateRows) -> None:
    gate = sum(not request.edge for request in rows.requests)
    few = f"; {FEW_ROWS} or more for the gate are better" if gate < FEW_ROWS else ""
    progress(
        "traffic",
        f"{gate} for the gate, {len(rows.requests) - gate} more made up, "
        f"{len(rows.calibration)} rows for calibration{few}",
    )


def _labelled(
    spec: PipelineSpec, asker: RequestReader, maker: Any, progress: Progress
) -> tuple[tuple[LabelledRow, ...], tuple[GateRequest, ...], tuple[str, ...]]:
    """Labelled rows, their requests, and what to say about them."""
    path = spec.folder / EVAL_FILE
    if not path.is_file():
        return (), (), ()
    every = read_labels(path, asker.task)
    rows = first_rows(every, asker.task, LABELLED_ROWS)
    lines = [
        TrafficRow(row.line, inputs, row.parameters) for row in rows for inputs in row.requests
    ]
    asked = [asker.ask(EVAL_FILE, line) for line in lines]
    asks = [one.ask for one in asked]
    if hasattr(maker, "token_rows"):
        made = asker.taken(EVAL_FILE, lines, maker.token_rows(asks))
        requests = [text_request(one, rows) for one, rows in zip(asked, made, strict=True)]
    else:
        made = asker.taken(EVAL_FILE, lines, maker.make(asks))
        shown = (line.inputs["image"] for line in lines)
        requests = [image_request(*parts) for parts in zip(asked, made, shown, strict=True)]
    notes = (f"of {len(every)} labelled rows, the first {len(rows)} count",) * (every != rows)
    progress("labels", notes[0] if notes else f"{len(rows)} labelled rows")
    return tuple(rows), tuple(requests), notes


def _check_max_length(spec: PipelineSpec, facts: ModelFacts) -> None:
    wanted = spec.tokenizer.max_length
    if wanted is not None and wanted > facts.max_length:
        raise UserError(
            "tokenizer.max_length",
            f"must be at most the model's own limit of {facts.max_length}",
            given=wanted,
            remedy="Lower it, or leave it out to use the model's limit",
        )


def _load_hooks(spec: PipelineSpec, task: Task) -> ModuleType | None:
    path = spec.folder / HOOKS_FILE
    try:
        hooks = load_hooks(spec.folder)
    except (Exception, SystemExit) as error:
        raise UserError(
            str(path), "must load", given=f"{type(error).__name__}: {error}", remedy="Mend it"
        ) from error
    if spec.custom is not None and not hasattr(hooks, "decode"):
        raise UserError(
            str(path),
            "must have the function `decode` for a custom task",
            given="none",
            remedy="See pipelines/README.md",
        )
    return hooks


def _tokenizer(folder: Path, facts: ModelFacts) -> Path:
    stage = {
        "model": facts.sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash("model/*.py"),
    }

    def work(target: Path) -> None:
        (target / "tokenizer.json").write_text(read_tokenizer(folder), encoding="utf-8")

    cache, _ = cached_stage("tokenizer", stage, work)
    return cache / "tokenizer.json"


def row_maker(task: Task) -> Any:
    """The class that makes core rows of a task's requests."""
    return module_of(task.rows).RowMaker


def row_makers(spec: PipelineSpec, facts: ModelFacts, task: Task, folder: Path) -> tuple[Any, Any]:
    """The task's row maker as it will run, and one that cuts nothing off.

    Raises:
        UserError: the limit leaves no room for what the task adds.
    """
    most = core_rows_of(spec, facts, task)
    settings = {
        **row_settings(spec, facts, task, max_core_rows=most),
        "bucket_edges": [],
        "overflow": "truncate",
    }
    kind = row_maker(task)
    whole = {**settings, "max_length": UNLIMITED, "max_core_rows": UNLIMITED}
    try:
        return kind(settings, folder), kind(whole, folder)
    except RequestError as error:
        raise UserError(
            "tokenizer.max_length", "must suit the task", given=error, remedy="Raise it"
        ) from error
