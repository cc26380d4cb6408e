"""Everything that is read before a build: spec, model, hooks and requests; and the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from triptych.base.errors import Progress, UserError
from triptych.core.checkpoint import check_architecture, check_rope, check_tokenizer
from triptych.core.export.own_graph import RunGraph
from triptych.core.gate_rows import CALIBRATION_ROWS, GATE_IMAGES, device_rows, gate_rows
from triptych.core.own_chain import Chain
from triptych.core.reader import RequestReader
from triptych.core.requests import GateRequest, Sample
from triptych.models.image_vectors import PADDED_TOWERS
from triptych.models.info import ModelInfo
from triptych.models.older import in_current_form
from triptych.models.roles import QUERY
from triptych.models.source import locate, read_model
from triptych.models.tokenizer import OTHER_TOKENIZER
from triptych.repository.config_text import check_config_texts
from triptych.repository.manifest import CompiledManifest, find_manifest
from triptych.runtime.hooking import (
    HOOKS_FILE,
    REDACT,
    Hook,
    find_hook,
    has_parameter,
    load_hooks,
)
from triptych.spec.backends import Precision
from triptych.spec.custom_task import custom_task, with_added_outputs
from triptych.spec.eval_file import EVAL_FILE, first_rows, read_labels
from triptych.spec.fields import TRITON_AS_NONE, CoreSettings
from triptych.spec.model_fields import CompiledSpec, files_of, is_own
from triptych.spec.own_task import own_task
from triptych.spec.plan import Layout, Plan, make_plan, max_length_of
from triptych.spec.spec import EncoderSpec
from triptych.spec.traffic import TRAFFIC_FILE, TrafficRow, read_traffic
from triptych.spec.tuned import Tuned, describe_tuned, read_tuned
from triptych.tasks.catalog import find_task, text_classification, text_embedding
from triptych.tasks.catalog.text_classification import PAIR_CLASSIFICATION
from triptych.tasks.catalog.text_embedding import FLOAT_EMBEDDING
from triptych.tasks.classes import with_class_scores
from triptych.tasks.labeled import LabeledRow
from triptych.tasks.prompts import PROMPT, ROLE
from triptych.tasks.task import Task

INSTRUCTORS = tuple(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))
"""Models whose prompts sentence-transformers leaves out of pooling, although their files do not."""

LABELED_ROWS = 2000
"""Maximum number of labeled rows that are run."""


@dataclass(frozen=True)
class LabeledRequests:
    """Rows of ``eval.jsonl``."""

    rows: tuple[LabeledRow, ...] = ()  # Rows with the user's labels
    requests: tuple[GateRequest, ...] = ()  # Requests of the rows, in order
    notes: tuple[str, ...] = ()  # Remarks for the gate's result


@dataclass(frozen=True)
class PipelineInputs:
    """Everything that is known before the export."""

    plan: Plan  # Plan of the build
    model_folder: Path  # Local folder of the model's files
    tokenizer_file: Path | None  # The runtime's tokenizer; None for images
    requests: tuple[GateRequest, ...]  # Requests of the gate, edge cases first
    calibration: tuple[Sample, ...]  # Core rows of the traffic that the gate does not use
    # Additional requests of the gate for lower precision, independent of the traffic; none for
    # images.
    probe: tuple[GateRequest, ...]
    hooks: bytes | None  # Content of the pipeline's ``hooks.py``; None if it has none
    # Rows with ground truth, if there are any.
    labeled: LabeledRequests = field(default_factory=LabeledRequests)
    # Every request of ``traffic.jsonl`` as a client sends it, for load tests.
    traffic: tuple[Mapping[str, Any], ...] = ()
    # Functions and models of an own pipeline with several models, of which these are the inputs of
    # one; else None.
    chain: Chain | None = None
    others: tuple[PipelineInputs, ...] = ()  # Inputs of the other models
    # Hashes of the cores whose results are among the requests, by model.
    upstream: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    coarsest: Precision = "fp32"  # Lowest precision of these cores
    # Makes requests without values of the traffic, for the check on the device that serves.
    make_device_rows: Callable[[], Sequence[GateRequest]] = tuple

    @property
    def model(self) -> str:
        """Name of the model, of several in one ensemble; else empty."""
        return self.plan.model

    def run_behind(
        self,
        cores: Mapping[str, RunGraph],
        files: Mapping[str, Mapping[str, str]],
        coarsest: Precision = "fp32",
    ) -> PipelineInputs:
        """Return the inputs with the results of cores in place of those of the user's models.

        Args:
            cores: Function that runs each core, by model.
            files: Hashes of the files of each core.
            coarsest: Lowest precision of the cores.
        """
        if self.chain is None:
            return self
        runs = {**self.chain.originals, **cores}
        requests = self.chain.requests(self.model, self.requests, runs)
        return replace(self, requests=tuple(requests), upstream=dict(files), coarsest=coarsest)

    @property
    def spec(self) -> CompiledSpec:
        return self.plan.spec

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the ``tokenizer.json``, if the task has one; else the model's folder."""
        return self.model_folder if self.tokenizer_file is None else self.tokenizer_file.parent

    def find_hook(self, name: str) -> Hook | None:
        """Return a function of the pipeline's ``hooks.py``; None without it."""
        labels = labels_of(self.plan.task, self.plan.info)
        return find_hook(self.spec.folder, name, labels, self.tokenizer_file)

    @property
    def shortest_row(self) -> Mapping[str, object]:
        """Request of the traffic with the smallest number of characters or bytes."""
        return min(self.traffic, key=_size_of)

    def replanned(self, layout: Layout, core: CoreSettings | None = None) -> PipelineInputs:
        """Return the inputs with a plan for another layout, and for other settings of the core."""
        old = self.plan
        spec = old.spec if core is None else old.spec.model_copy(update={"core": core})
        if is_own(spec):  # rows of equal shape have one layout
            return replace(self, plan=replace(old, spec=spec))
        changed = replace(old, spec=spec)
        asked = replace(changed, spec=changed.asked).encoder_spec  # it is placed again
        plan = make_plan(asked, old.info, old.task, old.parameters, old.lengths, layout=layout)
        return replace(self, plan=replace(plan, forwards_inputs=old.forwards_inputs))

    def with_core_instances(self, count: int) -> PipelineInputs:
        """Return the inputs with at least `count` instances of the core."""
        spec = self.plan.spec
        instances = spec.serving.instances
        more = instances.model_copy(update={"core": max(count, instances.core)})
        serving = spec.serving.model_copy(update={"instances": more})
        spec = spec.model_copy(update={"serving": serving})
        return replace(self, plan=replace(self.plan, spec=spec))

    def with_built_layout(self, repository: Path) -> PipelineInputs:
        """Return the inputs in the layout and for the backend that were built.

        Both may differ from the spec's: not every model can be packed, and ``precision: auto``
        compares backends.
        """
        manifest = find_manifest(repository, self.plan.spec.name, CompiledManifest)
        if manifest is None:
            return self
        core, layout = manifest.spec.core, manifest.plan.layout
        if core.backend != self.plan.spec.core.backend:
            return self.replanned(layout, core)
        return self if layout == self.plan.layout else self.replanned(layout)


def _size_of(row: Mapping[str, object]) -> int:
    return sum(len(v if isinstance(v, str | bytes) else repr(v)) for v in row.values())


def task_of(spec: CompiledSpec) -> Task:
    """Return the task of `spec`: one of the package's, a custom one, or that of an own model.

    Raises:
        UserError: There is no such task.
    """
    if is_own(spec):
        return own_task(spec)
    if (spec.task == "custom") != (spec.custom is not None):
        raise UserError(
            "custom",
            "is required for task: custom, and only supported for it",
            given=f"task {spec.task}",
            remedy="`triptych new NAME custom` writes an example of both",
        )
    if spec.pairs and spec.task != text_classification.TASK.name:
        raise UserError(
            "pairs",
            "is only supported for task: text-classification",
            given=f"task {spec.task}",
            remedy="Remove it; question-answering and reranking always read pairs",
        )
    task = find_task(spec.task) if spec.custom is None else custom_task(spec.custom)
    if spec.pairs:
        task = PAIR_CLASSIFICATION
    elif spec.serving.response_cache and task is text_embedding.TASK:
        task = FLOAT_EMBEDDING
    return with_added_outputs(task, spec.outputs)


def check_cached_outputs(spec: CompiledSpec, task: Task) -> None:
    """Raise a `UserError` if a response cache could store a part of the outputs as the whole.

    The key has the inputs of a request, not the names of the outputs that it requests. No step sees
    these names either: an ensemble requests every output of its steps.
    """
    if spec.serving.response_cache and len(task.outputs) > 1:
        raise UserError(
            "serving.response_cache",
            "is only supported for a pipeline with one output: Triton would store the answer to a "
            "request for some of several outputs, and return it to requests for all of them",
            given=", ".join(tensor.name for tensor in task.outputs),
            remedy="Remove it",
        )


def read_model_of(
    spec: EncoderSpec, task: Task, folder: Path, progress: Progress
) -> tuple[ModelInfo, Path | None]:
    """Return information about the model in a folder, and its tokenizer, as a pipeline reads it."""
    return read_model(
        folder,
        progress,
        for_images=any(tensor.content == "image" for tensor in task.inputs),
        loader=task.loader,
        modules=task.modules,
        tokenizer=spec.tokenizer.source,
        vectors_by=spec.image.pooling or "" if task.reads_image_vectors else None,
    )


def read_inputs(spec: EncoderSpec, progress: Progress) -> PipelineInputs:
    """Resolve the model, read and tokenize the requests, derive the plan.

    Only the cache is written.

    Raises:
        UserError: The spec, the model, the hooks or the traffic has a mistake.
    """
    task = task_of(spec)
    check_cached_outputs(spec, task)
    files_of(spec)
    check_config_texts(spec.serving.config, shares_core=spec.core.shared_from is not None)
    report_settings(spec, progress)
    lines = read_traffic(spec.folder, [tensor.name for tensor in task.inputs])
    folder = in_current_form(locate(spec.model, spec.folder), task.loader, progress)
    info, tokenizer = read_model_of(spec, task, folder, progress)
    info = _with_prompts(info, spec, task)
    progress("source", f"{info.architecture}, from {spec.model.source}")
    task.check(info)
    task = task.form(task, info, spec.parameters)
    info = _with_length(info, spec, task, progress)
    _warn_of_labels(info, task, progress)
    if spec.serving.class_scores:
        task = with_class_scores(task, info)
    _check_max_length(spec, info)
    check_rope(folder, max_length_of(spec, info, task))
    hooks = _load_hooks(spec, labels_of(task, info), tokenizer)
    images = info.image is not None
    before = getattr(hooks, "before", None)
    reader = RequestReader(
        spec, task, info, folder if tokenizer is None else tokenizer.parent, before
    )
    most = GATE_IMAGES + CALIBRATION_ROWS if images else None
    requests = reader.read(TRAFFIC_FILE, lines, with_rows=most)
    lengths = None if images else reader.lengths(requests)
    if lengths is None:
        progress("traffic", f"{len(requests)} images")
    else:
        progress(
            "traffic",
            f"{lengths.rows} rows, {lengths.mean:.1f} tokens on average, "
            f"{lengths.truncated_share:.1%} over the limit of {reader.max_length}",
        )
    mask_token = str(task.settings(info).get("mask_token", ""))
    read_otherwise = (QUERY,) if info.has_query_weights else tuple(info.roles)
    rows = gate_rows(
        reader,
        requests[:most],
        images=images,
        mask_token=mask_token,
        prompts=info.prompts,
        roles=read_otherwise if ROLE in task.parameters(info) else (),
    )
    progress("traffic", str(rows))
    if tokenizer is not None and (other := tokenizer.parent / OTHER_TOKENIZER).is_dir():
        check_tokenizer(RequestReader(spec, task, info, other, before), rows)
    plan = make_plan(spec, info, task, reader.parameters, lengths)
    plan = replace(plan, forwards_inputs=has_parameter(getattr(hooks, "after", None), "inputs"))
    _check_output_names(plan)
    check_architecture(plan.core.auto_class, info.architecture, spec.model)
    return PipelineInputs(
        plan=plan,
        model_folder=folder,
        tokenizer_file=tokenizer,
        requests=rows.requests,
        calibration=rows.calibration,
        probe=rows.probe,
        hooks=None if hooks is None else (spec.folder / HOOKS_FILE).read_bytes(),
        labeled=_read_labeled(spec, task, reader, progress),
        traffic=tuple(request.sent for request in requests),
        make_device_rows=partial(
            device_rows, reader, requests[0], images=images, mask_token=mask_token
        ),
    )


def _with_length(info: ModelInfo, spec: EncoderSpec, task: Task, progress: Progress) -> ModelInfo:
    """Return `info` with the length that the spec gives to a model that limits none.

    Warn if the reference reads longer texts than the pipeline does without a limit in the spec.
    """
    own, known = spec.tokenizer.max_length, info.library_length
    if own is not None:
        return replace(info, max_length=own) if known is None and info.image is None else info
    if info.image is not None or task.max_length is not None or known == info.max_length:
        return info
    library = task.loader or "transformers"
    progress(
        "WARNING",
        f"no file of the model limits its texts, so that {library} does not cut them: they are "
        f"cut after {info.max_length} tokens unless the pipeline sets tokenizer.max_length"
        if known is None
        else f"texts are cut after {info.max_length} tokens (max_position_embeddings in "
        f"config.json); {library} cuts them after {known} (max_seq_length)",
    )
    return info


def _warn_of_labels(info: ModelInfo, task: Task, progress: Progress) -> None:
    """Warn if answers name classes that the model's config does not name."""
    unnamed = info.labels and info.labels == tuple(f"LABEL_{i}" for i in range(len(info.labels)))
    if unnamed and "labels" in task.settings(info) and task.decodes_answers:
        progress(
            "WARNING",
            f"config.json does not name its {len(info.labels)} classes (id2label); answers name "
            f"them {info.labels[0]} to {info.labels[-1]}",
        )


def _check_output_names(plan: Plan) -> None:
    """Check that each output has a name of its own among the tensors of the ensemble."""
    outputs = [tensor.name for tensor in plan.task.outputs]
    others = (*plan.request_inputs, *plan.preprocess_outputs, *plan.core.outputs)
    names = [*outputs, *(tensor.name for tensor in others)]
    for name in outputs:
        if names.count(name) > 1:
            raise UserError(
                f"{'outputs' if name in plan.task.added else 'custom.outputs'}: {name}",
                "must have a name that no other tensor of the pipeline has",
                given=name,
                remedy="Rename it",
            )


def report_settings(spec: CompiledSpec, progress: Progress) -> None:
    """Report a flow control that is built as another one, and the settings from ``tuned.yaml``."""
    if spec.serving.flow_control == "triton" and not spec.serving.queue_policy_of_triton:
        progress("WARNING", f"serving.flow_control: {TRITON_AS_NONE}")
    if spec.tuned and (found := read_tuned(spec.folder)):
        told = Tuned(spec.tuned, found.provenance)
        progress("tuned", describe_tuned(spec.folder, told))


def _read_labeled(
    spec: EncoderSpec, task: Task, reader: RequestReader, progress: Progress
) -> LabeledRequests:
    path = spec.folder / EVAL_FILE
    if not path.is_file():
        return LabeledRequests()
    every = read_labels(path, task)
    rows = first_rows(every, task, LABELED_ROWS)
    lines = [
        TrafficRow(row.line, inputs, row.parameters) for row in rows for inputs in row.requests
    ]
    requests = reader.read(EVAL_FILE, lines)
    notes = (f"of {len(every)} labeled rows, the first {len(rows)} count",) * (every != rows)
    progress("labels", notes[0] if notes else f"{len(rows)} labeled rows")
    return LabeledRequests(tuple(rows), tuple(requests), notes)


def _with_prompts(info: ModelInfo, spec: EncoderSpec, task: Task) -> ModelInfo:
    """Return `info` with the prompts of the spec in addition to the model's."""
    own = {} if spec.prompts == "any" else spec.prompts
    info = replace(info, prompts={**info.prompts, **own}, free_prompt=spec.prompts == "any")
    if spec.model.source in INSTRUCTORS:
        info = replace(info, include_prompt=False)
    if spec.prompts and PROMPT not in task.parameters(info):
        raise UserError(
            "prompts",
            "is supported for text-embedding and reranking only",
            given=f"task {spec.task}",
            remedy="Remove `prompts`",
        )
    return info


def _check_max_length(spec: EncoderSpec, info: ModelInfo) -> None:
    wanted = spec.tokenizer.max_length
    if wanted is not None and wanted < info.max_length and info.architecture in PADDED_TOWERS:
        raise UserError(
            "tokenizer.max_length",
            f"must be {info.max_length}, to which the model pads each text",
            given=wanted,
            remedy="Remove it",
        )
    if wanted is not None and wanted > info.max_length:
        raise UserError(
            "tokenizer.max_length",
            f"is greater than the model's limit of {info.max_length}",
            given=wanted,
            remedy="Lower it, or remove it to use the model's limit",
        )


def labels_of(task: Task, info: ModelInfo) -> Sequence[str]:
    """Return the names of the model's classes that the pipeline's functions may read."""
    labels: Sequence[str] = task.settings(info).get("labels", ())  # type: ignore[assignment]
    return labels


def load_checked_hooks(
    spec: CompiledSpec, labels: Sequence[str] = (), tokenizer: Path | None = None
) -> ModuleType | None:
    """Return the pipeline's ``hooks.py``; None if it has none. See `load_hooks`.

    Raises:
        UserError: The file cannot be loaded, or lacks the function `redact` that the spec requires.
    """
    path, sample = spec.folder / HOOKS_FILE, spec.serving.sample
    try:
        hooks = load_hooks(spec.folder, labels, tokenizer)
    except (Exception, SystemExit) as error:
        raise UserError(
            str(path),
            "cannot be loaded",
            given=f"{type(error).__name__}: {error}",
            remedy="Correct the file, or its function `setup`",
        ) from error
    if sample is not None and sample.redact and not callable(getattr(hooks, REDACT, None)):
        raise UserError(
            str(path),
            f"has no function `{REDACT}`, which serving.sample.redact requires",
            given="none",
            remedy="Write `def redact(inputs, answer)`, which returns both as they may be stored",
        )
    return hooks


def _load_hooks(
    spec: EncoderSpec, labels: Sequence[str], tokenizer: Path | None
) -> ModuleType | None:
    path, hooks = spec.folder / HOOKS_FILE, load_checked_hooks(spec, labels, tokenizer)
    if spec.outputs and not callable(getattr(hooks, "after", None)):
        raise UserError(
            str(path),
            "has no function `after`, which the field outputs requires",
            given=", ".join(output.name for output in spec.outputs),
            remedy="Write `def after(rows)`, or remove outputs",
        )
    if spec.custom is not None and not hasattr(hooks, "decode"):
        raise UserError(
            str(path),
            "has no function `decode`, which a custom task requires",
            given="none",
            remedy="Write it; `triptych new NAME custom` writes an example",
        )
    return hooks
