"""From a spec to all that is known before anything is exported: model, traffic, plan, samples."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from triptych.build.cache import cached_stage, code_hash, versions_of
from triptych.build.source import locate, read_facts, read_tokenizer
from triptych.errors import UserError
from triptych.model_facts import ModelFacts
from triptych.plan import Layout, Plan, make_plan, max_length_of, row_settings
from triptych.runtime.faults import RequestError
from triptych.runtime.hooking import HOOKS_FILE, Hook, call_before, load_hooks
from triptych.runtime.parameters import check_parameters
from triptych.runtime.row_types import Ask
from triptych.spec import PipelineSpec
from triptych.tasks import Task, find_task
from triptych.tasks.custom import custom_task
from triptych.tensors import TokenRow
from triptych.traffic import TRAFFIC_FILE, Lengths, TrafficRow, read_traffic

GATE_ROWS = 64
GATE_IMAGES = 16
EDGE_TEXTS = ("", " ", "a", "é 漢字 العربية 🙂", "\x00", "word " * 5000)
"""Rows the gate adds to the traffic's own: empty, blank, tiny, other scripts, over the limit."""

UNLIMITED = 1 << 30
Rules = Mapping[str, Mapping[str, Any]]
"""Request parameter to what it may be, as plain data."""

Progress = Callable[[str, str], None]
"""Called with a stage's name and what became of it."""


@dataclass(frozen=True)
class Prepared:
    """What is known before anything is exported.

    Attributes:
        plan: the derived numbers.
        model_folder: local folder of the model's files.
        tokenizer_file: the runtime's tokenizer; None for images.
        samples: core rows for the gate: `TokenRow`, or UINT8 pixels ``[H, W, C]``.
        hooks: content of the pipeline's ``hooks.py``.
    """

    plan: Plan
    model_folder: Path
    tokenizer_file: Path | None
    samples: tuple[Any, ...]
    hooks: bytes | None

    def samples_hash(self) -> str:
        """Hash of the samples, in hex."""
        digest = hashlib.sha256()
        for sample in self.samples:
            pixels = isinstance(sample, np.ndarray)
            digest.update(sample.tobytes() if pixels else json.dumps(sample).encode())
        return digest.hexdigest()

    def replanned(self, layout: Layout) -> Prepared:
        """The same with another layout."""
        old = self.plan
        plan = make_plan(old.spec, old.facts, old.task, old.parameters, old.lengths, layout=layout)
        return Prepared(plan, self.model_folder, self.tokenizer_file, self.samples, self.hooks)


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
    traffic = read_traffic(spec.folder, [tensor.name for tensor in task.inputs])
    folder = locate(spec.model, spec.folder)
    facts = read_facts(folder)
    progress("source", f"{facts.architecture}, from {spec.model.source}")
    task.check(facts)
    _check_max_length(spec, facts)
    hooks = _load_hooks(spec, task)
    rules = {name: rule.as_dict() for name, rule in task.parameters(facts).items()}
    parameters = _parameters(spec, task, facts, rules)
    before = getattr(hooks, "before", None)
    asks = [_ask(spec, task, before, rules, parameters, row) for row in traffic]
    hooks_file = None if hooks is None else (spec.folder / HOOKS_FILE).read_bytes()
    if facts.image is not None:
        samples = _image_samples(spec, task, facts, traffic, asks)
        progress("traffic", f"{len(traffic)} images")
        return Prepared(
            make_plan(spec, facts, task, parameters, None), folder, None, samples, hooks_file
        )
    tokenizer = _tokenizer(folder, facts)
    makers = _row_makers(spec, facts, task, tokenizer.parent)
    rows = _core_rows(spec, makers[0], traffic, asks)
    whole = _core_rows(spec, makers[1], traffic, asks)
    # Where there are more rows than without a limit, they are windows: nothing is cut off.
    counted = whole if len(whole) == len(rows) else rows
    max_length = max_length_of(spec, facts, task)
    lengths = Lengths.of([len(row.ids) for row in counted], max_length=max_length)
    progress(
        "traffic",
        f"{lengths.rows} rows, {lengths.mean:.1f} tokens on average, "
        f"{lengths.truncated_share:.1%} over the limit of {max_length}",
    )
    step = max(1, len(rows) // GATE_ROWS)
    samples = (*_edge_rows(makers[0], asks[0]), *rows[::step][:GATE_ROWS])
    plan = make_plan(spec, facts, task, parameters, lengths)
    return Prepared(plan, folder, tokenizer, samples, hooks_file)


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


def _parameters(
    spec: PipelineSpec, task: Task, facts: ModelFacts, rules: Rules
) -> Mapping[str, Any]:
    """The request parameters' defaults: the spec's over the task's."""
    defaults = {
        name: list(rule.default) if isinstance(rule.default, tuple) else rule.default
        for name, rule in task.parameters(facts).items()
        if rule.default is not None
    }
    return _checked("parameters", spec.parameters, rules, defaults)


def _checked(
    where: str,
    given: Mapping[str, Any],
    rules: Rules,
    defaults: Mapping[str, Any],
) -> Mapping[str, Any]:
    # As a client would send them: a list is a JSON text.
    sent = {k: json.dumps(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        return check_parameters(json.dumps(sent), rules, defaults)
    except RequestError as error:
        raise UserError(where, "must be parameters of the task", given=error) from error


def _ask(
    spec: PipelineSpec,
    task: Task,
    before: Hook | None,
    rules: Rules,
    parameters: Mapping[str, Any],
    row: TrafficRow,
) -> Ask:
    where = f"{spec.folder / TRAFFIC_FILE}:{row.line}"
    inputs: dict[str, Any] = dict(row.inputs)
    images = [tensor.name for tensor in task.inputs if tensor.content == "image"]
    for name in images:
        try:
            inputs[name] = (spec.folder / inputs[name]).read_bytes()
        except (OSError, ValueError) as error:
            raise UserError(
                where,
                "must name image files that can be read",
                given=f"{inputs[name]!r:.100}: {error!s:.100}",
                remedy="Paths start at the pipeline's folder",
            ) from error
    if before is not None:
        try:
            inputs = call_before(before, [inputs], list(inputs), encoded=images)[0]
        except Exception as error:
            raise UserError(where, "must pass hooks.before", given=error) from error
    columns = {name: [value] for name, value in inputs.items()}
    return Ask(columns, _checked(where, row.parameters, rules, parameters))


def _image_samples(
    spec: PipelineSpec,
    task: Task,
    facts: ModelFacts,
    traffic: Sequence[TrafficRow],
    asks: Sequence[Ask],
) -> tuple[Any, ...]:
    maker = _row_maker(task)(row_settings(spec, facts, task), spec.folder)
    made = maker.make(asks[:GATE_IMAGES])
    for row, rows in zip(traffic, made, strict=False):
        if isinstance(rows, Exception):
            raise _traffic_fault(spec, row, rows)
    return tuple(pixels for rows in made for pixels in rows.tensors["pixels"])


def _tokenizer(folder: Path, facts: ModelFacts) -> Path:
    stage = {
        "model": facts.sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash("build/*.py"),
    }

    def work(target: Path) -> None:
        (target / "tokenizer.json").write_text(read_tokenizer(folder), encoding="utf-8")

    cache, _ = cached_stage("tokenizer", stage, work)
    return cache / "tokenizer.json"


def _row_maker(task: Task) -> Any:
    module = importlib.import_module(f"triptych.runtime.{Path(task.rows).stem}")
    return module.RowMaker


def _row_makers(spec: PipelineSpec, facts: ModelFacts, task: Task, folder: Path) -> tuple[Any, Any]:
    """The task's row maker as it will run, and one that cuts nothing off."""
    settings = {**row_settings(spec, facts, task), "bucket_edges": [], "overflow": "truncate"}
    kind = _row_maker(task)
    whole = {**settings, "max_length": UNLIMITED, "max_core_rows": UNLIMITED}
    try:
        return kind(settings, folder), kind(whole, folder)
    except RequestError as error:
        raise UserError(
            "tokenizer.max_length", "must suit the task", given=error, remedy="Raise it"
        ) from error


def _core_rows(
    spec: PipelineSpec, maker: Any, traffic: Sequence[TrafficRow], asks: Sequence[Ask]
) -> list[TokenRow]:
    core_rows = []
    for row, rows in zip(traffic, maker.token_rows(asks), strict=True):
        if isinstance(rows, Exception):
            raise _traffic_fault(spec, row, rows)
        core_rows += [TokenRow(tuple(r.ids), r.first_segment) for r in rows]
    return core_rows


def _traffic_fault(spec: PipelineSpec, row: TrafficRow, fault: Exception) -> UserError:
    where = f"{spec.folder / TRAFFIC_FILE}:{row.line}"
    return UserError(
        where, "must be a request that the pipeline takes", given=fault, remedy="Correct the line"
    )


def _edge_rows(maker: Any, example: Ask) -> list[TokenRow]:
    """The edge texts in place of the example's own; those that the task refuses are left out."""
    asks = [
        Ask({name: [text] for name in example.columns}, example.parameters) for text in EDGE_TEXTS
    ]
    return [
        TokenRow(tuple(row.ids), row.first_segment)
        for rows in maker.token_rows(asks)
        if not isinstance(rows, Exception)
        for row in rows
        if row.ids
    ]
