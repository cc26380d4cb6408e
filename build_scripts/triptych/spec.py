"""What a user may write in ``pipeline.yaml``: frozen, complete, every default in this one place.

>>> spec = load_spec(Path("pipelines/minilm"), overrides=["core.layout=bucketed"])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.errors import UserError
from triptych.slo import Slo
from triptych.tuned import TUNED_FILE, read_tuned
from triptych.yaml_text import parse_yaml

SPEC_FILE = "pipeline.yaml"
RESERVED = ("name", "folder", "tuned")
"""Fields that no file sets by name."""

Positive = Annotated[int, Field(ge=1)]
Distance = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSource(_Frozen):
    """Where the model's files come from.

    Attributes:
        source: ``package:<module>/<folder>``, a local folder (relative to the pipeline's own
            folder, or absolute), or a Hub id ``owner/name``.
        revision: commit, tag or branch of a Hub id.
    """

    source: str
    revision: str | None = None


class Tokenizer(_Frozen):
    """Limits on what is tokenized.

    Attributes:
        max_length: tokens a row may have, special tokens included; None takes the model's own.
        overflow: what becomes of a longer row.
        max_text_bytes: a longer text is refused whole, so that one request cannot hold up a batch.
    """

    max_length: Annotated[int, Field(ge=3)] | None = None
    overflow: Literal["truncate", "reject"] = "truncate"
    max_text_bytes: Positive = 131_072


class Image(_Frozen):
    """Limits on what is decoded, so that one request cannot hold up or exhaust the server.

    Attributes:
        max_bytes: a larger file is refused.
        max_pixels: an image that would be larger when decoded is refused before it is.
    """

    max_bytes: Positive = 20_000_000
    max_pixels: Positive = 50_000_000


class Core(_Frozen):
    """The compiled model.

    Attributes:
        backend: Triton's name of what runs it.
        device: ``gpu`` asks Triton for KIND_GPU instances.
        precision: of weights and activations. ``int8_dynamic`` finds the range of each token while
            serving, ``int8`` has them fixed by calibration; ``auto`` builds and measures all that
            run here and takes the fastest that passes the gate.
        layout: how rows of different length share a batch; a model whose rows cannot be packed
            without changing results is built bucketed.
        share: pipeline of the same repository and model whose core serves this one, too.
        max_batch_size: rows Triton may put into one batch, and a client into one request.
        bucket_count: number of padded lengths of the bucketed layout.
        threads: that share the work of one operator (``intra_op_thread_count`` of the backend);
            None leaves the choice to it.
        token_budget: tokens that the local backend computes at a time, at most: a larger batch is
            dealt out in pieces; None takes its own. The container's backend takes batches whole.
    """

    backend: Literal["onnxruntime"] = "onnxruntime"
    device: Literal["cpu", "gpu"] = "cpu"
    precision: Literal["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8", "auto"] = "fp32"
    layout: Literal["packed", "bucketed"] = "packed"
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    bucket_count: Annotated[int, Field(ge=1, le=32)] = 6
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    token_budget: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    share: str | None = None


class Instances(_Frozen):
    """Instances of each step; each is a process of its own for Python steps."""

    preprocess: Annotated[int, Field(ge=1, le=64)] = 1
    core: Positive = 1
    postprocess: Positive = 1


class Queue(_Frozen):
    """How requests wait.

    Attributes:
        max_delay_us: how long the core may hold a batch open for more rows.
        max_size: requests that may be under way; one more is refused at once (Unavailable).
    """

    max_delay_us: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    max_size: Annotated[int, Field(ge=1, le=1_000_000)] = 1024


class Serving(_Frozen):
    """How Triton runs the steps.

    Attributes:
        triton: the oldest release (``YY.MM``) the repository must load on. 24.10 is the embedded
            server's; fields newer than it are left out.
        gpus: device ids of the core's instances when ``core.device`` is ``gpu``.
        slo: what `bench` and `tune` hold the pipeline to, where their options say nothing else.
    """

    triton: Annotated[str, Field(pattern=r"^\d\d\.(0[1-9]|1[0-2])$")] = "24.10"
    instances: Instances = Instances()
    gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    queue: Queue = Queue()
    slo: Slo = Slo()


class Accuracy(_Frozen):
    """Overrides of the gate's limits, by the metrics of `tasks.accuracy`; None keeps the default.

    Attributes:
        max_drop: how much worse than the original the model may be on ``eval.jsonl``.
    """

    max_difference: Distance | None = None
    neighbour_effect: Distance | None = None
    edge_error: Distance | None = None
    min_cosine: Share | None = None
    mean_cosine: Share | None = None
    nearest_neighbour_agreement: Share | None = None
    similarity_rank_correlation: Share | None = None
    label_agreement: Share | None = None
    max_probability_difference: Distance | None = None
    confidence_shift: Distance | None = None
    entity_f1: Share | None = None
    exact_match: Share | None = None
    answer_f1: Share | None = None
    rank_correlation: Share | None = None
    top1_agreement: Share | None = None
    top_k_overlap: Share | None = None
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.0


class CustomOutput(_Frozen):
    """An output of a custom task.

    Attributes:
        name: as the client reads it.
        dtype: Triton's name of the element type.
        dims: one entry an axis, without the batch; -1 for one of variable size.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    dtype: Literal["BYTES", "FP32", "INT8", "INT32", "INT64", "BOOL"]
    dims: Annotated[list[Annotated[int, Field(ge=-1, le=1_000_000)]], Field(min_length=1)] = [1]


class Custom(_Frozen):
    """A task of the pipeline's own: `decode` in its ``hooks.py`` makes the outputs.

    Attributes:
        inputs: ``text``, or ``text`` and ``text_pair``.
        model_class: class of transformers that loads the model with its head.
        reads: what of the encoder's result the head works on.
        returns: what leaves the core.
        outputs: of the ensemble.
    """

    inputs: Annotated[list[Literal["text", "text_pair"]], Field(min_length=1)] = ["text"]
    model_class: Annotated[str, Field(pattern=r"^Auto[A-Za-z]+$")]
    reads: Literal["row", "tokens", "pooled"] = "row"
    returns: Literal["logits", "scores", "token_scores", "vector"] = "scores"
    outputs: Annotated[list[CustomOutput], Field(min_length=1)]


class PipelineSpec(_Frozen):
    """One pipeline as declared.

    Attributes:
        name: of its folder.
        folder: where it was read.
        tuned: fields whose values come from ``tuned.yaml``, and so from measurements.
        parameters: defaults of request parameters, instead of the task's own.
        custom: where `task` is ``custom``.
    """

    name: str
    folder: Path
    tuned: dict[str, bool | int | float | str | None] = {}
    task: str
    model: ModelSource
    parameters: dict[str, bool | int | float | str | list[str]] = {}
    custom: Custom | None = None
    tokenizer: Tokenizer = Tokenizer()
    image: Image = Image()
    core: Core = Core()
    serving: Serving = Serving()
    accuracy: Accuracy = Accuracy()


def load_spec(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> PipelineSpec:
    """Read ``folder/pipeline.yaml``, then ``tuned.yaml`` where there is one, then the overrides.

    Args:
        folder: the pipeline's.
        overrides: ``KEY=VALUE`` each: dotted keys, YAML values.
        untuned: leave ``tuned.yaml`` out.

    Raises:
        UserError: a missing file, bad YAML, an unknown key or a value out of range.
    """
    path = folder / SPEC_FILE
    check_folder(folder, path)
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise UserError(str(path), "must be YAML", given=error, remedy="Mend the line") from error
    if not isinstance(document, dict):
        raise UserError(
            str(path),
            "must be a mapping of `task` and `model` at least",
            given=type(document).__name__,
            remedy="See pipelines/README.md, or start with `triptych new`",
        )
    tuned = None if untuned else read_tuned(folder)
    for key, value in (tuned.overrides if tuned is not None else {}).items():
        _set(document, key, value, source=f"{folder / TUNED_FILE}: ")
    for override in overrides:
        _apply_override(document, override)
    for reserved in RESERVED:
        if reserved in document:
            raise UserError(
                f"{path}: {reserved}",
                "is given by the pipeline's folder and what lies in it",
                given=document[reserved],
                remedy=f"Remove `{reserved}`; rename the folder to rename the pipeline",
            )
    try:
        given = {"name": folder.name, "folder": folder, "tuned": tuned.overrides if tuned else {}}
        return PipelineSpec.model_validate({**document, **given})
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        source = folder / TUNED_FILE if tuned and where in tuned.overrides else path
        raise _as_user_error(source, error) from error


def check_folder(folder: Path, path: Path) -> None:
    """`folder` may be a pipeline's, and has the spec `path`.

    Raises:
        UserError: there is no such file, or the folder's name cannot be a pipeline's.
    """
    if not path.is_file():
        siblings = sorted(p.parent.name for p in folder.parent.glob(f"*/{SPEC_FILE}"))
        raise UserError(
            str(folder),
            f"must be a pipeline's folder with a {SPEC_FILE}",
            given="no such folder" if not folder.is_dir() else f"a folder without {SPEC_FILE}",
            remedy=f"Pipelines here: {', '.join(siblings) or 'none'}",
        )
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", folder.name):
        raise UserError(
            str(folder),
            "must be named with lower-case letters, digits, `_`, `-`, a letter first (64 at most)",
            given=folder.name,
            remedy="Rename the folder: Triton's model names derive from it",
        )
    if folder.name.endswith(("_preprocess", "_core", "_postprocess")):
        raise UserError(
            str(folder),
            "must not end like the name of a step (_preprocess, _core, _postprocess)",
            given=folder.name,
            remedy="Rename the folder: it could be taken for a step of another pipeline",
        )


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(
            "--set",
            "must be KEY=VALUE with a dotted key",
            given=override,
            remedy="Write for example --set core.layout=bucketed",
        )
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(
            f"--set {key}", "must have a YAML value", given=error, remedy="Quote the value"
        ) from error
    _set(document, key, value, source="--set ")


def _set(document: dict[str, Any], key: str, value: Any, *, source: str) -> None:
    *parents, last = key.split(".")
    node = document
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(
                f"{source}{key}",
                "must name a field of the spec",
                given=f"`{part}` is a plain value",
                remedy="See `triptych inspect NAME --json` for the fields",
            )
        node = child
    node[last] = value


def _as_user_error(path: Path, error: ValidationError) -> UserError:
    """The first problem as field, rule, given, remedy; the others are counted."""
    problems = error.errors(include_url=False)
    first = problems[0]
    location = ".".join(str(part) for part in first["loc"])
    more = f" ({len(problems) - 1} more problems follow)" if len(problems) > 1 else ""
    kind = first["type"]
    if kind == "extra_forbidden":
        rule, given = "is not a field of the spec", first["loc"][-1]
        remedy = f"Fields here: {', '.join(_fields_at(first['loc'][:-1]))}"
    elif kind == "missing":
        rule, given, remedy = "is required", "nothing", "Add it; see pipelines/README.md"
    else:
        message = first["msg"]
        rule = "must be valid: " + message[0].lower() + message[1:]
        given, remedy = first["input"], "Correct the value"
    return UserError(f"{path}: {location}", rule, given=given, remedy=remedy + more)


def _fields_at(location: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = PipelineSpec
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field for field in model.model_fields if field not in RESERVED]
