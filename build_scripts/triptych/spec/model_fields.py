"""Spec of a pipeline around the user's own model: ``task: model``.

>>> spec = load_model_spec(Path("pipelines/detector"))
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from typing_extensions import TypeIs

from triptych.base.errors import UserError
from triptych.base.tensors import DType, Tensor
from triptych.models.fields import Frozen
from triptych.spec.fields import Accuracy, CoreSettings, Distance, Instances, Positive, Serving
from triptych.spec.spec import EncoderSpec, load_tunable
from triptych.tasks.task import Rule

ValueType = Literal["text", "bytes", "int", "float", "bool"]
MetricKind = Literal["exact", "max_difference", "cosine", "top1", "iou", "function"]
DTYPES: dict[ValueType, DType] = {
    "text": "BYTES",
    "bytes": "BYTES",
    "int": "INT64",
    "float": "FP32",
    "bool": "BOOL",
}
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Axis = Annotated[int, Field(ge=1, le=100_000_000)] | Name
"""Size of an axis, or the name of an axis of variable size."""

RESERVED_PREFIXES = ("forwarded_", "triton_")
RESERVED_NAMES = (
    "request_ticket",
    "request_payload",
    "direct_call",
    "row_metadata",
    "row_counts",
    "priority",
)
"""Names of tensors between the steps and of Triton's parameters."""


class AxisField(Frozen):
    """An axis of the graph, besides the batch, whose size differs between rows.

    Attributes:
        min: Smallest size; smaller arrays are padded.
        max: Largest size; a larger array is rejected.
        of: Number of the axis for each input, with the batch as 0. Only needed for a module, or for
            a graph that does not name its axes.
    """

    min: Positive = 1
    max: Positive
    of: dict[str, Positive] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> AxisField:
        if self.min > self.max:
            raise ValueError("min must not be greater than max")
        return self


class OwnModel(Frozen):
    """Location of the model.

    Attributes:
        onnx: ONNX file, relative to the folder of the pipeline; its weights may be in a file beside
            it. The first axis of each input and output is the batch, or that whose name contains
            `batch`.
        module: ``FILE:NAME``, a Python file in the folder of the pipeline and its function or class
            that makes a `torch.nn.Module` without arguments. The arguments of `forward` are the
            inputs of the graph.
        weights: Weights of the module, as ``.safetensors`` or as a file of `torch.save` with a
            state dict. None: the module has its weights.
        outputs: Names of the tensors that `forward` returns, if it returns no dict.
        scalars: Arguments of `forward` of the shape ``[batch]``. None: those that `preprocess`
            returns so, and inputs without a shape if `forward` runs with them.
        axes: Axis of variable size by its name in the graph, at most one. Rows are padded with
            zeros to one of a few planned sizes.
    """

    onnx: str | None = None
    module: str | None = None
    weights: str | None = None
    outputs: list[str] = Field(default_factory=list)
    scalars: list[str] | None = None
    axes: Annotated[dict[str, AxisField], Field(max_length=1)] = Field(default_factory=dict)

    @property
    def axis(self) -> tuple[str, AxisField | None]:
        """The axis of variable size with its name; an empty name and None without one."""
        return next(iter(self.axes.items()), ("", None))

    @model_validator(mode="after")
    def _fits(self) -> OwnModel:
        if (self.onnx is None) is (self.module is None):
            raise ValueError("either onnx or module is required")
        if self.module is None and (self.weights is not None or self.outputs or self.scalars):
            raise ValueError("weights, outputs and scalars are only supported with module")
        if self.module is not None and not re.fullmatch(r"[^:]+\.py:[A-Za-z_]\w*", self.module):
            raise ValueError("module must have the form FILE.py:NAME, such as net.py:Net")
        return self

    @property
    def source(self) -> str:
        """The file as the spec names it."""
        return self.onnx or str(self.module)

    @property
    def factory(self) -> str:
        """Name of the function or class that makes the module."""
        return str(self.module).rpartition(":")[2]

    @property
    def revision(self) -> str | None:
        """None, because a file has no revision."""
        return None


PREPROCESS = "preprocess"
"""Function that makes the inputs of the first model."""


class StepModel(OwnModel):
    """A model among several in an ensemble.

    Attributes:
        step: Function of ``hooks.py`` that makes the inputs of the model: `preprocess`, or another
            one, which gets the results of the models before it.
        core: Settings of its core; fields that are not given are those of the pipeline's `core`.
        instances: Number of instances. None: `serving.instances.core`.
    """

    step: Name = PREPROCESS
    core: CoreSettings = CoreSettings()
    instances: Positive | None = None


class InputField(Frozen):
    """An input of a request, with one value per row.

    Attributes:
        type: Type of the value, or of each element if it has a shape. ``bytes`` is the content of a
            file.
        shape: Size of each axis of a value; a name for a variable size. Empty for a single value.
        default: Value for requests without the input. None: the input is required.
        allow_nan: Whether numbers may be NaN or infinite.
        max_bytes: Maximum size of a value in bytes.
        max_items: Maximum number of elements of a value.
        min: Smallest number.
        max: Largest number.
        choices: Allowed numbers.
    """

    type: ValueType
    shape: list[Axis] = Field(default_factory=list)
    default: bool | int | float | str | list[Any] | None = None
    allow_nan: bool = False
    max_bytes: Positive = 20_000_000
    max_items: Positive | None = None
    min: float | None = None
    max: float | None = None
    choices: list[float] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> InputField:
        limits = [limit for limit in (self.min, self.max) if limit is not None]
        if (limits or self.choices) and self.type not in ("int", "float"):
            raise ValueError("min, max and choices are only supported for numbers")
        if limits != sorted(limits):
            raise ValueError("min must not be greater than max")
        if self.type == "bytes" and self.default is not None:
            raise ValueError("an input of type bytes cannot have a default")
        return self

    def tensor(self, name: str) -> Tensor:
        """Return the input of the ensemble."""
        content: Literal["text", "bytes"] = "bytes" if self.type == "bytes" else "text"
        is_optional = self.default is not None
        return Tensor(name, DTYPES[self.type], _dims(self.shape), content, is_optional)

    @property
    def content(self) -> Literal["text", "bytes", "json"]:
        """Form of a value in samples of requests: JSON for numbers and lists."""
        return "json" if self.shape or self.type not in ("text", "bytes") else self.type

    def as_dict(self) -> dict[str, object]:
        """Return data for the settings of a step."""
        fields = self.model_dump(mode="json", exclude={"min", "max"})
        return {**fields, "dtype": DTYPES[self.type], "bounds": [self.min, self.max]}


class ParameterField(Frozen):
    """A parameter of a request, which applies to all of its rows.

    Attributes:
        type: Type of the value.
        default: Value for requests without the parameter.
        min: Smallest number.
        max: Largest number.
        choices: Allowed texts.
    """

    type: Literal["text", "int", "float", "bool"]
    default: bool | int | float | str
    min: float | None = None
    max: float | None = None
    choices: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> ParameterField:
        kinds: dict[str, type | tuple[type, ...]] = {
            "text": str,
            "int": int,
            "float": (int, float),
            "bool": bool,
        }
        is_number = self.type in ("int", "float")
        fits = isinstance(self.default, kinds[self.type])
        if not fits or (isinstance(self.default, bool) and self.type != "bool"):
            raise ValueError(f"the default must be of type {self.type}")
        if not is_number and (self.min is not None or self.max is not None):
            raise ValueError("min and max are only supported for numbers")
        if self.choices and self.type != "text":
            raise ValueError("choices are only supported for text")
        low = -math.inf if self.min is None else self.min
        high = math.inf if self.max is None else self.max
        if is_number and not low <= float(self.default) <= high:
            raise ValueError(f"the default must be from {low:g} to {high:g}")
        if self.choices and self.default not in self.choices:
            raise ValueError("the default must be one of the choices")
        return self

    @property
    def rule(self) -> Rule:
        kind = "str" if self.type == "text" else self.type
        return Rule(kind, self.default, self.min, self.max, tuple(self.choices))


class OutputField(Frozen):
    """An output of the pipeline, with one value per row.

    Attributes:
        type: Type of the value, or of each element if it has a shape.
        shape: Size of each axis of a value; a name for a variable size. Empty for a single value.
        metric: Comparison of the accuracy gate. ``exact``: fraction of rows with equal values;
            ``max_difference``: largest difference, relative to the largest value above 1;
            ``cosine``: lowest cosine; ``top1``: fraction of rows with the same largest element;
            ``iou``: mean overlap of boxes ``[x1, y1, x2, y2]``; ``function``: lowest result of
            ``compare_NAME(actual, expected)`` in ``hooks.py``. None: ``max_difference`` for float,
            ``exact`` otherwise.
        limit: Worst allowed value of the metric. None: by the precision of the core.
    """

    type: Literal["text", "int", "float", "bool"]
    shape: list[Axis] = Field(default_factory=list)
    metric: MetricKind | None = None
    limit: Distance | None = None

    @model_validator(mode="after")
    def _fits(self) -> OutputField:
        kind = self.compared_by
        if self.type == "text" and kind not in ("exact", "function"):
            raise ValueError(f"metric {kind} is not supported for text")
        if kind == "iou" and self.shape[-1:] != [4]:
            raise ValueError("metric iou is only supported for a shape that ends with 4")
        if kind in ("cosine", "top1") and not self.shape:
            raise ValueError(f"metric {kind} is only supported for outputs with a shape")
        if kind == "function" and self.limit is None:
            raise ValueError("metric function requires a limit")
        return self

    @property
    def compared_by(self) -> MetricKind:
        return self.metric or ("max_difference" if self.type == "float" else "exact")

    def tensor(self, name: str) -> Tensor:
        """Return the output of the ensemble."""
        return Tensor(name, DTYPES[self.type], _dims(self.shape))

    def as_dict(self) -> dict[str, object]:
        """Return data for the settings of a step."""
        return {"type": self.type, "shape": self.shape, "dtype": DTYPES[self.type]}


def _dims(shape: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(shape) or (1,)


class ModelSpec(BaseModel):
    """Spec of a pipeline around the user's own model.

    Attributes:
        folder: Folder of the pipeline; not part of a build manifest.
        tuned: Fields whose values come from ``tuned.yaml``.
        task: Always ``model``.
        models: Several models by name in place of `model`, in the order in which they run, each
            with the fields of `model`, and with `step` (the function in ``hooks.py`` that makes its
            inputs), `core` and `instances`. After the spec is read, `model`, `core` and
            `serving.instances.core` are those of the first one.
        inputs: Inputs of a request by name.
        parameters: Request parameters by name.
        outputs: Outputs of the pipeline by name.
        files: Files or folders of the pipeline that ``hooks.py`` reads while serving, relative to
            the pipeline's folder.
    """

    model_config = Frozen.model_config

    name: str
    folder: Path = Path()
    tuned: dict[str, bool | int | float | str | None] = {}
    task: Literal["model"]
    model: OwnModel
    models: dict[Name, StepModel] = {}
    inputs: Annotated[dict[Name, InputField], Field(min_length=1)]
    parameters: dict[Name, ParameterField] = {}
    outputs: Annotated[dict[Name, OutputField], Field(min_length=1)]
    files: list[str] = []
    core: CoreSettings = CoreSettings()
    serving: Serving = Serving()
    accuracy: Accuracy = Accuracy()

    @property
    def makes_outputs(self) -> bool:
        """Whether a function of the pipeline makes the outputs from those of the core."""
        return True

    @property
    def max_text_bytes(self) -> int:
        """Maximum size of any text in bytes."""
        return max(field.max_bytes for field in self.inputs.values())

    @property
    def steps(self) -> dict[str, list[str]]:
        """Names of the models by the function that makes their inputs; one without a name alone."""
        steps: dict[str, list[str]] = {}
        for name, model in self.models.items():
            steps.setdefault(model.step, []).append(name)
        return steps or {PREPROCESS: [""]}

    @property
    def core_name(self) -> str:
        """Name of the core in Triton without its ending; that of the first model of several."""
        return f"{self.name}.{next(iter(self.models))}" if self.models else self.name

    def max_rows(self, step: str) -> int:
        """Return the maximum number of rows that the models behind a function take at once."""
        return min(self.with_model(name).core.max_batch_size for name in self.steps[step])

    def with_model(self, name: str) -> ModelSpec:
        """Return the spec with one of several models alone; the spec itself for an empty name."""
        if not name:
            return self
        model = self.models[name]
        count = model.instances or self.serving.instances.core
        instances = self.serving.instances.model_copy(update={"core": count})
        serving = self.serving.model_copy(update={"instances": instances})
        return self.model_copy(
            update={
                "name": f"{self.name}.{name}",
                "model": model,
                "models": {},
                "core": model.core,
                "serving": serving,
            }
        )

    @property
    def model_file(self) -> Path:
        """Path of the ONNX file."""
        return self.folder / str(self.model.onnx)

    @property
    def module_file(self) -> Path:
        """Path of the Python file of the module."""
        return self.folder / str(self.model.module).rpartition(":")[0]

    @property
    def weights_file(self) -> Path | None:
        """Path of the weights of the module."""
        return None if self.model.weights is None else self.folder / self.model.weights

    @property
    def output_limits(self) -> dict[str, float]:
        """Limits that the outputs declare, by metric as a result of the gate names it."""
        return {
            f"{name}.{output.compared_by}": output.limit
            for name, output in self.outputs.items()
            if output.limit is not None
        }

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, given: Any) -> object:
        """Fill in the settings of each of several models, and those of the first as `model`."""
        models = given.get("models") if isinstance(given, dict) else None
        if not models or not isinstance(models, dict):
            return given
        if not all(isinstance(model, dict) for model in models.values()):
            return given
        cores = [given.get("core"), *(model.get("core") for model in models.values())]
        if not all(isinstance(core or {}, dict) for core in cores):
            return given
        serving = copy.deepcopy(given.get("serving") or {})
        instances = serving.setdefault("instances", {}) if isinstance(serving, dict) else None
        if not isinstance(instances, dict):
            return given
        usual = instances.get("core", Instances().core)
        filled = {
            name: {
                **model,
                "core": {**(cores[0] or {}), **(model.get("core") or {})},
                "instances": usual if model.get("instances") is None else model["instances"],
            }
            for name, model in models.items()
        }
        first = next(iter(filled.values()))
        model = {name: value for name, value in first.items() if name in OwnModel.model_fields}
        named = given.get("model", model)
        is_mapping = isinstance(named, dict)
        if not is_mapping or any(v != model.get(name) for name, v in named.items() if v):
            raise _refused("models", "replaces model", "both are given", "Remove `model`")
        instances["core"] = first["instances"]
        return {
            **given,
            "models": filled,
            "model": model,
            "core": first["core"],
            "serving": serving,
        }

    def _check_sharing(self) -> None:
        cores = [self.core, *(model.core for model in self.models.values())]
        for shared in [core.shared_from for core in cores if core.shared_from is not None]:
            if shared.partition(".")[0] == self.name:
                rule = "must name a core of another pipeline"
                raise _refused("core.shared_from", rule, shared, "Remove it")
            if self.serving.priority is not None:
                rule = "is a setting of the core, which another pipeline has"
                raise _refused("serving.priority", rule, "set here", f"Set it in {shared}")

    def _check_steps(self) -> None:
        steps = self.steps
        if next(iter(steps)) != PREPROCESS:
            first = next(iter(self.models))
            rule = f"must be {PREPROCESS} for the first model"
            raise _refused(f"models.{first}.step", rule, next(iter(steps)), "Move the model down")
        taken = {"setup", "postprocess", "redact", *RESERVED_NAMES}
        for name, model in self.models.items():
            if name in taken | {*steps} or model.step in taken:
                rule = "must not have the name of a function with another purpose"
                raise _refused(f"models.{name}", rule, f"step {model.step}", "Rename it")
            if model.core.backend == "tensorrt":
                rule = "is not supported for several models in one ensemble"
                remedy = "Use core.accelerator: tensorrt, or a pipeline for each model"
                raise _refused(f"models.{name}.core.backend", rule, "tensorrt", remedy)
            if model.core.precision == "auto":
                rule = "must name a precision for several models in one ensemble"
                remedy = "Choose one for each model"
                raise _refused(f"models.{name}.core.precision", rule, "auto", remedy)
        for models in steps.values():
            axes = [self.models[name].axes for name in models if name]
            if any(each != axes[0] for each in axes):
                rule = "must be equal for the models of one step, which get the same arrays"
                remedy = "Declare the same axes, or give one of the models a step of its own"
                raise _refused(f"models.{models[-1]}.axes", rule, "different axes", remedy)

    @model_validator(mode="after")
    def _fits(self) -> ModelSpec:
        self._check_sharing()
        self._check_steps()
        names = [*self.inputs, *self.parameters, *self.outputs]
        for name in names:
            if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
                raise _refused(name, "is the name of a tensor between the steps", name, "Rename it")
        if twice := [name for name in names if names.count(name) > 1]:
            rule = "must be the name of one input, parameter or output alone"
            raise _refused(twice[0], rule, "it is declared twice", "Rename one of them")
        if next(iter(self.inputs.values())).default is not None:
            rule = "must begin with an input without a default, which gives the number of rows"
            raise _refused("inputs", rule, next(iter(self.inputs)), "Move it down")
        unsupported: dict[str, object] = {
            "serving.class_scores": self.serving.class_scores or None,
        }
        lists = [name for name, each in self.inputs.items() if each.type == "bytes" and each.shape]
        if lists:
            unsupported["serving.sample"] = self.serving.sample
        for field, value in unsupported.items():
            if value is not None:
                raise _refused(field, "is not supported for task: model", value, "Remove it")
        return self


def _refused(field: str, rule: str, given: object, remedy: str) -> UserError:
    return UserError(field, rule, given=given, remedy=remedy)


CompiledSpec = EncoderSpec | ModelSpec
"""Spec of a pipeline whose core is a compiled graph."""


def files_of(spec: CompiledSpec) -> list[tuple[str, Path]]:
    """Return each file of `files`: its path relative to the pipeline's folder, and the file.

    Raises:
        UserError: A file does not exist, or is outside of the folder.
    """
    found: list[tuple[str, Path]] = []
    root = spec.folder.resolve()
    for name in spec.files:
        path = (spec.folder / name).resolve()
        if not path.exists() or not path.is_relative_to(root) or path == root:
            rule = "must name a file or folder in the folder of the pipeline"
            raise _refused("files", rule, name, "Correct the path")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [(f.relative_to(root).as_posix(), f) for f in files if f.is_file()]
    return found


def is_own(spec: CompiledSpec) -> TypeIs[ModelSpec]:
    """Return whether the model of a pipeline is the user's own; otherwise it is an encoder."""
    return isinstance(spec, ModelSpec)


def load_model_spec(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> ModelSpec:
    """Read ``folder/pipeline.yaml``, ``tuned.yaml`` and the overrides; arguments as `load_spec`.

    Raises:
        UserError: The file is missing or not YAML, a key is unknown or a value out of range.
    """
    return load_tunable(ModelSpec, folder, overrides, untuned=untuned)
