"""Propose a pipeline for an ensemble that was written by hand.

The ensemble has Python steps around one ONNX model. Its steps become functions of the pipeline
(``hooks.py``), which run the files of the steps as they are; the model becomes the core.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from google.protobuf.json_format import MessageToJson

from triptych.base.errors import UserError
from triptych.base.onnx_graph import MODEL_FILE, GraphInterface, GraphTensor, read_interface
from triptych.base.releases import OLDEST
from triptych.container.manifests import MANIFEST_FILE
from triptych.repository.config import CONFIG_FILE
from triptych.repository.lint.snapshot import Model, Repository, is_file, read_repository
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.scaffold import Scaffold, scaffold
from triptych.spec.scaffold_graph import (
    RANDOM_ROWS,
    SAMPLES,
    field_name,
    field_text,
    free_axes_text,
    random_value,
)
from triptych.spec.spec import SPEC_FILE
from triptych.spec.template import BUILT_IN
from triptych.spec.traffic import TRAFFIC_FILE

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

OPTION = "--from-repository"
STEPS = "steps"
"""Folder of the pipeline with the files of the Python steps."""
FUNCTIONS = BUILT_IN / "python_steps.py.txt"
_FILE_WORDS = re.compile(r"(^|_)(image|img|picture|photo|audio|sound|file|bytes|jpe?g|png|wav)")
"""Words in the names of inputs whose BYTES are the content of files."""


class _Step(NamedTuple):
    """A step of the ensemble, with the tensors of the ensemble by those of its model."""

    model: Model
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """Folder of the version that Triton serves."""
        return self.model.served_folders[0]


class _Ensemble(NamedTuple):
    """An ensemble with one core."""

    name: str
    config: ModelConfig
    before: Sequence[_Step]  # Python steps in front of the core
    core: _Step
    graph: GraphInterface  # Inputs and outputs of the core's file
    after: Sequence[_Step]  # Python steps behind the core

    @property
    def read_behind(self) -> set[str]:
        """Tensors that are read behind the core."""
        read = {name for step in self.after for name in step.inputs.values()}
        return read | {each.name for each in self.config.output}

    @property
    def kept(self) -> list[str]:
        """Tensors of the steps in front of the core that are read behind it."""
        made = {name for step in self.before for name in step.outputs.values()}
        return sorted(made & self.read_behind)

    @property
    def reads_inputs_behind(self) -> bool:
        """Whether a step behind the core reads an input of the ensemble."""
        return not self.read_behind.isdisjoint(each.name for each in self.config.input)

    @property
    def fields(self) -> list[tuple[str, ModelInput | ModelOutput]]:
        """Names of the fields of the spec, with the inputs and outputs of the ensemble."""
        found: dict[str, ModelInput | ModelOutput] = {}
        for tensor in (*self.config.input, *self.config.output):
            name = field_name(tensor.name)
            while name in found:
                name += "_out"
            found[name] = tensor
        return list(found.items())

    @property
    def inputs(self) -> dict[str, ModelInput]:
        """Inputs of the ensemble by the names of their fields."""
        return dict(self.fields[: len(self.config.input)])

    @property
    def outputs(self) -> dict[str, ModelOutput]:
        """Outputs of the ensemble by the names of their fields."""
        return dict(self.fields[len(self.config.input) :])


def new_from_repository(name: str, folder: Path, *, pipelines: Path) -> Scaffold:
    """Write the folder ``pipelines/name`` of a pipeline that answers as an ensemble does.

    Args:
        name: Name of the pipeline.
        folder: Folder of the model repository, or of one of its ensembles.
        pipelines: Folder of the pipelines; created if missing.

    Raises:
        UserError: There is no such ensemble, it has a form that a pipeline does not have, or the
            pipeline exists.
    """
    ensemble = _read_ensemble(folder)
    with TemporaryDirectory() as template:
        _write_template(ensemble, Path(template))
        return scaffold(
            name, task=None, model=None, with_hooks=False, pipelines=pipelines, template=template
        )


def _refused(rule: str, given: object, remedy: str) -> UserError:
    return UserError(OPTION, rule, given=str(given), remedy=remedy)


def _read_ensemble(folder: Path) -> _Ensemble:
    folder = folder.resolve()
    root = folder.parent if (folder / CONFIG_FILE).is_file() else folder
    repository = read_repository(root, OLDEST, is_exact=False, with_graphs=False)
    for model in repository.folders():
        if model.config_problem:
            given = f"{model.where}: {model.config_problem}"
            raise _refused("must have configs that Triton can read", given, "Correct the file")
    found = [model for model in repository.ensembles() if folder in (root, model.folder)]
    if len(found) != 1:
        raise _refused(
            "must be a model repository with one ensemble, or the folder of an ensemble",
            f"{folder}: {', '.join(model.name for model in found) or 'no ensemble'}",
            "Give FOLDER/ENSEMBLE; for a single ONNX file: triptych new NAME --model FILE.onnx",
        )
    ensemble, config = found[0], found[0].config
    if is_file(ensemble.folder / MANIFEST_FILE):
        raise _refused(
            "must not be a repository of Triptych",
            f"{MANIFEST_FILE} in {ensemble.name}",
            "Copy the folder of its pipeline",
        )
    if config.max_batch_size < 1:
        raise _refused(
            "must have an ensemble whose inputs have a batch axis",
            f"max_batch_size: {config.max_batch_size} in {ensemble.name}",
            "Set max_batch_size of the ensemble and its models, with dims without the batch",
        )
    steps = [
        _Step(_model_of(repository, s.model_name), dict(s.input_map), dict(s.output_map))
        for s in config.ensemble_scheduling.step
    ]
    cores = [step for step in steps if step.model.backend != "python"]
    files = [is_file(folder / MODEL_FILE) for step in cores for folder in step.model.served_folders]
    if len(cores) != 1 or files[:1] != [True]:
        given = ", ".join(f"{step.model.name}: {step.model.backend}" for step in cores)
        raise _refused(
            f"must have an ensemble of Python steps around one model with a file {MODEL_FILE}",
            given or "Python steps alone",
            "Export the model to ONNX; for several models start with `triptych new NAME chain`",
        )
    (core,), known = cores, {each.name for each in config.input}
    steps.remove(core)
    before = _in_order(steps, known)
    known |= {*core.outputs.values()} if known >= {*core.inputs.values()} else set()
    after = _in_order([step for step in steps if step not in before], known)
    missing = {each.name for each in config.output} - known
    if missing:
        raise _refused(
            "must have steps that make each output of the ensemble",
            f"{', '.join(sorted(missing))} of {ensemble.name}",
            "Correct the maps of its steps",
        )
    graph = read_interface(core.folder / MODEL_FILE)
    return _Ensemble(ensemble.name, config, before, core, graph, after)


def _model_of(repository: Repository, name: str) -> Model:
    """Return the model of a step, which is no ensemble and answers each request once."""
    model = repository.models.get(name)
    if model is None or model.config is None or model.is_ensemble:
        found = "no config.pbtxt" if model is None or model.config is None else "an ensemble"
        raise _refused("must have a model for each step", f"{name}: {found}", "Add its folder")
    if model.backend == "python" and not model.served_folders:
        given = f"{name}: no version that its policy serves"
        raise _refused("must have the files of each step", given, "Add its folder")
    if model.config.model_transaction_policy.decoupled:
        raise _refused(
            "must have steps with one answer for each request",
            f"{name}: decoupled",
            "A step that streams has no counterpart; text generation has its own tasks",
        )
    return model


def _in_order(steps: Sequence[_Step], known: set[str]) -> list[_Step]:
    """Return the steps whose inputs are `known`, in the order of a run; add what they make."""
    ordered: list[_Step] = []
    while ready := [s for s in steps if s not in ordered and known >= {*s.inputs.values()}]:
        ordered += ready
        known |= {name for step in ready for name in step.outputs.values()}
    return ordered


def _write_template(ensemble: _Ensemble, target: Path) -> None:
    """Write the files of the pipeline, with the marks of a template."""
    core, steps = ensemble.core, [*ensemble.before, *ensemble.after]
    for name in (MODEL_FILE, *ensemble.graph.weight_files):
        shutil.copyfile(core.folder / name, target / name)
    for step in steps:
        unwanted = shutil.ignore_patterns("__pycache__")
        place = target / STEPS / step.model.name
        shutil.copytree(step.folder, place / "1", ignore=unwanted)
        text = MessageToJson(step.model.config, preserving_proto_field_name=True)
        (place / "config.json").write_text(text + "\n", encoding="utf-8")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(ensemble.inputs))
    (target / TRAFFIC_FILE).write_text(rows, encoding="utf-8")
    if "samples/" in rows:
        shutil.copytree(BUILT_IN / "image-classification/samples", target / "samples")
    (target / HOOKS_FILE).write_text(_functions(ensemble), encoding="utf-8")
    spec = "\n".join([*_spec_lines(ensemble), *_notes(steps)]) + "\n"
    (target / SPEC_FILE).write_text(spec, encoding="utf-8")


def _functions(ensemble: _Ensemble) -> str:
    """Return the text of the functions that run the steps."""

    def literal(value: Mapping[str, object] | list[str]) -> str:
        if not isinstance(value, Mapping) or not value:
            return json.dumps(value)
        lines = (f"    {json.dumps(key)}: {json.dumps(each)},\n" for key, each in value.items())
        return f"{{\n{''.join(lines)}}}"

    values: dict[str, Mapping[str, object] | list[str]] = {
        "BEFORE": [step.model.name for step in ensemble.before],
        "AFTER": [step.model.name for step in ensemble.after],
        "TENSORS": {
            step.model.name: [step.inputs, step.outputs]
            for step in (*ensemble.before, *ensemble.after)
        },
        "INPUTS": {name: [each.name, _dtype(each)] for name, each in ensemble.inputs.items()},
        "CORE_INPUTS": ensemble.core.inputs,
        "CORE_OUTPUTS": ensemble.core.outputs,
        "KEPT": ensemble.kept,
        "OUTPUTS": {name: each.name for name, each in ensemble.outputs.items()},
        "SINGLE": [n for n, each in ensemble.outputs.items() if list(each.dims) == [1]],
    }
    text = FUNCTIONS.read_text(encoding="utf-8").replace("@ensemble@", ensemble.name)
    for name, value in values.items():
        text = text.replace(f"@{name}@", literal(value))
    takes_rows = ensemble.reads_inputs_behind
    text = text.replace(
        "@arguments@", "arrays, rows, parameters" if takes_rows else "arrays, parameters"
    )
    return text.replace("@tensors@", "_tensors(rows)" if takes_rows else "{}")


def _dtype(tensor: ModelInput | ModelOutput) -> str:
    """Return the type of an input's elements as numpy names it."""
    from tritonclient.grpc.model_config_pb2 import DataType

    name = str(DataType.Name(tensor.data_type)).removeprefix("TYPE_").lower()
    return "object" if name == "string" else re.sub(r"^fp", "float", name)


def _kind(tensor: ModelInput | ModelOutput) -> str:
    """Return the type of an input or output in a spec."""
    dtype = _dtype(tensor)
    if dtype == "object":
        is_file = _FILE_WORDS.search(tensor.name.lower()) and list(tensor.dims) == [1]
        return "bytes" if is_file else "text"
    return "bool" if dtype == "bool" else "float" if dtype.startswith("float") else "int"


def _as_graph_tensor(tensor: ModelInput | ModelOutput) -> GraphTensor:
    axes = ("batch", *(size if size > 0 else f"size_{i}" for i, size in enumerate(tensor.dims, 1)))
    kind = {"float": "FLOAT", "bool": "BOOL"}.get(_kind(tensor), "INT64")
    return GraphTensor(tensor.name, kind, axes)


def _rows(inputs: Mapping[str, ModelInput]) -> Iterator[dict[str, object]]:
    """Yield rows for the traffic: texts and images of the templates, and random numbers."""
    random = np.random.default_rng(0)
    file = BUILT_IN / "text-embedding" / TRAFFIC_FILE
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    for number in range(RANDOM_ROWS):
        row: dict[str, object] = {}
        for field, each in inputs.items():
            tensor, kind = _as_graph_tensor(each), _kind(each)
            shape = [axis if isinstance(axis, int) else 4 for axis in tensor.row_axes]
            count = int(np.prod(shape))
            found = [texts[(number + index) % len(texts)] for index in range(count)]
            if kind == "text":
                value: object = found[0] if shape == [1] else np.reshape(found, shape).tolist()
            elif kind == "bytes":
                value = f"samples/{SAMPLES[number % len(SAMPLES)]}"
            else:
                value = random_value(each.name.lower(), tensor, shape, random, {})
            row[field] = value
        yield row


def _spec_lines(ensemble: _Ensemble) -> Iterator[str]:
    core, inputs = ensemble.core.model, ensemble.graph.inputs
    yield f"# @name@: Answers as the ensemble {ensemble.name}, which was written by hand."
    yield "# Every field: triptych fields --task model"
    yield f"# Try it: triptych infer @name@ --file @folder@/{TRAFFIC_FILE}"
    yield "task: model"
    yield "model:"
    yield f"  onnx: {MODEL_FILE}"
    free = {axis for each in inputs for axis in each.row_axes if isinstance(axis, str)}
    yield from free_axes_text(sorted(free), {})
    yield "inputs:                      # check the types; bytes are the content of a file"
    for name, tensor in ensemble.inputs.items():
        yield f"  {name}: {_field(tensor)}"
    yield "outputs:                     # metric: exact | max_difference | cosine | top1 | iou"
    for name, output in ensemble.outputs.items():
        yield f"  {name}: {_field(output)}"
    if ensemble.before or ensemble.after:
        yield f"files: [{STEPS}]"
    if core.config.max_batch_size > 0:
        yield f"core: {{max_batch_size: {core.config.max_batch_size}}}"
    if (count := sum(map(core.instances_of, core.config.instance_group))) > 1:
        yield f"serving: {{instances: {{core: {count}}}}}"


def _field(tensor: ModelInput | ModelOutput) -> str:
    text = field_text(_as_graph_tensor(tensor))
    return re.sub(r"type: \w+", f"type: {_kind(tensor)}", text, count=1)


def _notes(steps: Sequence[_Step]) -> Iterator[str]:
    """Yield comments on steps with files of a Hugging Face model."""
    for step in steps:
        for file in sorted(step.folder.rglob("config.json")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r'"architectures": *\[\s*"(\w+)"', text):
                yield f"# {step.model.name} has files of {found[1]}. A task of Triptych serves the"
                yield "# checkpoint of such a model without functions: `triptych new --help`."
