"""Reader of ``pipeline.yaml`` and the spec of pipelines with an encoder.

>>> spec = load_spec(Path("pipelines/minilm"), overrides=["core.layout=bucketed"])
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from triptych.base.errors import UserError, closest
from triptych.base.files import parse_yaml
from triptych.base.step_names import STEP_SUFFIXES
from triptych.models.fields import EncoderSource, Frozen
from triptych.spec.fields import (
    Accuracy,
    CoreSettings,
    Custom,
    CustomOutput,
    Image,
    Serving,
    Tokenizer,
)
from triptych.spec.kind import GENERATION, TEXT2TEXT, Kind, kind_of_task
from triptych.spec.template import SPEC_FILE as SPEC_FILE
from triptych.spec.tuned import TUNABLE, TUNED_FILE, read_tuned

_REMEDIES = {
    GENERATION: "Use test, inspect, build, lint, serve, verify, infer, bench, tune or deploy",
    TEXT2TEXT: "Use test, inspect, build, lint, serve, verify, infer, bench or deploy",
}

_UNION_BRANCH = re.compile(
    r"(bool|int|float|str|list|dict|literal|MachineNumbers|function-.*)(\[.*\])?"
)
"""Last part of pydantic's location of an error, where a field may have several types."""

_MAPPING_BRANCH = re.compile(r"dict\[.*\]")
"""Part of pydantic's location before a key, where a field may also have another type."""

RESERVED = ("name", "folder", "tuned")
"""Fields that no file sets."""
Spec = TypeVar("Spec", bound=BaseModel)


class EncoderSpec(BaseModel):
    """Spec of a pipeline whose core is an encoder with a head.

    Attributes:
        folder: Folder of the pipeline; not part of a build manifest.
        tuned: Fields whose values come from ``tuned.yaml``.
        task: Task of the model, or ``custom``.
        parameters: Default request parameters, in place of the task's defaults.
        prompts: Texts put before each input, by name, in addition to the model's; ``any`` if a
            request may send the text itself.
        custom: Declaration of the task if `task` is ``custom``.
        pairs: Whether rows of text-classification are pairs of `text` and `text_pair`.
        outputs: Outputs that the function `after` adds to those of the task.
        pair_with: Pipeline of the other side of a model of texts and images, in a folder beside
            this one. Both must have one vector space, which a build compares and a server checks.
        files: Files or folders that ``hooks.py`` reads while serving, relative to the folder.
    """

    model_config = Frozen.model_config

    name: str
    folder: Path = Path()
    tuned: dict[str, bool | int | float | str | None] = {}
    task: str
    model: EncoderSource
    parameters: dict[str, bool | int | float | str | list[str]] = {}
    prompts: dict[str, str] | Literal["any"] = {}
    custom: Custom | None = None
    pairs: bool = False
    outputs: list[CustomOutput] = []
    pair_with: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    files: list[str] = []
    tokenizer: Tokenizer = Tokenizer()
    image: Image = Image()
    core: CoreSettings = CoreSettings()
    serving: Serving = Serving()
    accuracy: Accuracy = Accuracy()

    @property
    def core_name(self) -> str:
        """Name of its own core in Triton without its ending."""
        return self.name

    @property
    def makes_outputs(self) -> bool:
        """Whether a function of the pipeline makes the outputs from those of the core."""
        return self.custom is not None

    @property
    def max_text_bytes(self) -> int:
        return self.tokenizer.max_text_bytes

    @model_validator(mode="after")
    def _owns_its_core(self) -> EncoderSpec:
        if self.core.shared_from is not None and self.serving.priority is not None:
            raise UserError(
                "serving.priority",
                "is a setting of the core, which another pipeline has",
                given=repr(self.serving.priority),
                remedy=f"Set it in {self.core.shared_from}",
            )
        return self


def load_spec(folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False) -> EncoderSpec:
    """Read ``folder/pipeline.yaml``, then ``tuned.yaml`` if it exists, then the overrides.

    Args:
        folder: Folder of the pipeline.
        overrides: ``KEY=VALUE`` each: dotted keys, YAML values.
        untuned: Whether to ignore ``tuned.yaml``.

    Raises:
        UserError: The file is missing or not YAML, a key is unknown or a value out of range; or the
            pipeline is no encoder.
    """
    task = task_of(folder)
    if kind_of_task(task) is not Kind.ENCODER:
        raise not_known_here(f"{folder / SPEC_FILE}: task", task)
    return load_tunable(EncoderSpec, folder, overrides, untuned=untuned)


def load_tunable(
    model: type[Spec],
    folder: Path,
    overrides: Sequence[str],
    tunable: Sequence[str] = TUNABLE,
    *,
    untuned: bool,
) -> Spec:
    """Read a spec of a class whose fields `tunable` ``tuned.yaml`` may set; see `load_spec`."""
    found = None if untuned else read_tuned(folder, tunable)
    tuned = {} if found is None else found.overrides
    return load_as(model, folder, overrides, tuned, {"tuned": tuned})


def not_known_here(field: str, task: str) -> UserError:
    """Return the error of a command that does not support the pipelines of a task."""
    return UserError(
        field,
        "is not supported by this command",
        given=task,
        remedy=_REMEDIES.get(task, "Name a pipeline that generates text"),
    )


def task_of(folder: Path) -> str:
    """Return the task that the pipeline in `folder` names; empty if it names none.

    Raises:
        UserError: The file is missing or not YAML.
    """
    return str(_read_document(folder).get("task", ""))


def load_as(
    model: type[Spec],
    folder: Path,
    overrides: Sequence[str],
    measured: Mapping[str, object],
    given: Mapping[str, object],
) -> Spec:
    """Read ``folder/pipeline.yaml`` as one kind of spec.

    Args:
        folder: Folder of the pipeline.
        overrides: See `load_spec`.
        measured: Values of ``tuned.yaml`` by dotted key.
        given: Fields that no file sets, besides `name` and `folder`.

    Raises:
        UserError: See `load_spec`.
    """
    path = folder / SPEC_FILE
    document = _read_document(folder)
    for key, value in measured.items():
        _set(document, key, value, source=f"{folder / TUNED_FILE}: ")
    for override in overrides:
        _apply_override(document, override)
    for reserved in RESERVED:
        if reserved in document:
            raise UserError(
                f"{path}: {reserved}",
                "cannot be set in a file: it is taken from the folder of the pipeline",
                given=document[reserved],
                remedy=f"Remove `{reserved}`; rename the folder to rename the pipeline",
            )
    try:
        return model.model_validate({**document, "name": folder.name, "folder": folder, **given})
    except ValidationError as error:
        problems = _problems(model, error)
        where = problems[0].field
        source = f"{folder / TUNED_FILE if where in measured else path}: "
        keys = (override.partition("=")[0] for override in overrides)
        if where in keys:
            source = "--set "
        raise _as_user_error(source, problems) from error


MAX_SPEC_BYTES = 1 << 18
"""Maximum size of a spec. The parser takes 5 s for a file of this size with a key per line."""


@functools.lru_cache(maxsize=1)
def _parse(text: str) -> Any:
    """Return the data of a document, which several readers of one spec parse one after another."""
    return parse_yaml(text)


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / SPEC_FILE
    check_folder(folder, path)
    size = path.stat().st_size
    if size > MAX_SPEC_BYTES:
        raise UserError(
            str(path),
            f"must have at most {MAX_SPEC_BYTES >> 10} KiB",
            given=f"{size >> 10} KiB",
            remedy="Remove keys that are no fields of the spec",
        )
    try:
        document = copy.deepcopy(_parse(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise UserError(
            str(path), "is not valid YAML", given=error, remedy="Fix the line"
        ) from error
    if not isinstance(document, dict):
        raise UserError(
            str(path),
            "must be a mapping with at least `task` and `model`",
            given="an empty file" if document is None else f"a {type(document).__name__}",
            remedy="Create a pipeline with `triptych new NAME TASK`, or write both fields",
        )
    return document


def check_folder(folder: Path, path: Path) -> None:
    """Check that `folder` can be a pipeline's folder and contains the spec `path`.

    Raises:
        UserError: The file is missing, or the folder has a name that no pipeline may have.
    """
    if not path.is_file():
        siblings = sorted(p.parent.name for p in folder.parent.glob(f"*/{SPEC_FILE}"))
        raise UserError(
            str(folder),
            f"must be the folder of a pipeline, with a {SPEC_FILE}",
            given="no such folder" if not folder.is_dir() else f"a folder without {SPEC_FILE}",
            remedy=closest(folder.name, siblings)
            + f"Pipelines here: {', '.join(siblings) or 'none'}",
        )
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", folder.name):
        raise UserError(
            str(folder),
            "must have a name of at most 64 lower-case letters, digits, `_` and `-` that begins "
            "with a letter",
            given=folder.name,
            remedy="Rename the folder: the names of Triton's models are derived from it",
        )
    if folder.name.endswith(STEP_SUFFIXES):
        raise UserError(
            str(folder),
            f"must not end with the name of a step ({', '.join(STEP_SUFFIXES)})",
            given=folder.name,
            remedy="Rename the folder, so that it differs from the steps of other pipelines",
        )


def _apply_override(document: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(
            "--set",
            "must have the form KEY=VALUE with a dotted key",
            given=override,
            remedy="Example: --set core.layout=bucketed",
        )
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(
            f"--set {key}", "must have a YAML value", given=error, remedy="Quote the value"
        ) from error
    _set(document, key, value, source="--set ")


def _set(document: dict[str, object], key: str, value: object, *, source: str) -> None:
    *parents, last = key.split(".")
    node = document
    for count, part in enumerate(parents, start=1):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(
                f"{source}{key}",
                "is not a field of the spec",
                given=f"`{part}` has no fields",
                remedy=f"Set the field itself: {source}{'.'.join(parents[:count])}=VALUE",
            )
        node = child
    node[last] = value


_MAX_DETAILS = 200
"""Maximum number of reported problems; a field of several types has one for each type."""


def _problems(model: type[BaseModel], error: ValidationError) -> list[UserError]:
    """Return one error for each wrong field: unknown fields first, missing fields last."""
    by_field: dict[str, list[ErrorDetails]] = {}
    order = {"extra_forbidden": 0, "missing": 2}
    found = error.errors(include_url=False)
    if len(found) > _MAX_DETAILS:
        found = sorted(found, key=lambda detail: order.get(detail["type"], 1))[:_MAX_DETAILS]
    for detail in found:
        first, *rest = map(str, detail["loc"])
        parts = [first, *(part for part in rest[:-1] if not _MAPPING_BRANCH.fullmatch(part))]
        parts += [part for part in rest[-1:] if not _UNION_BRANCH.fullmatch(part)]
        by_field.setdefault(".".join(parts), []).append(detail)
    for field in [*by_field]:  # of the types of a field, the one whose entry is wrong was meant
        if any(other.startswith(f"{field}.") for other in by_field):
            del by_field[field]
    fields = sorted(by_field.items(), key=lambda item: order.get(item[1][0]["type"], 1))
    return [_problem(model, field, details) for field, details in fields]


def _problem(model: type[BaseModel], field: str, details: Sequence[ErrorDetails]) -> UserError:
    """Return the error of a field. `details` has an entry for each type that the field may have."""
    first = details[0]
    given = first["input"]
    if given is None or given == "" or isinstance(given, bool):
        given = json.dumps(given)
    if first["type"] == "missing":
        return UserError(field, "is required", remedy="Add it")
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        remedy = f"{_meant(model, first['loc'], known)}Fields here: {', '.join(known)}"
        rule, given = "is not a field of the spec", first["loc"][-1]
        return UserError(field, rule, given=given, remedy=remedy if known else "Remove it")
    if first["type"] == "model_type" and len(details) == 1:
        known = _fields_at(model, first["loc"])
        example = "source" if "source" in known else (known or ["FIELD"])[0]
        return UserError(
            field,
            f"must be a mapping with the fields {', '.join(known)}"
            if known
            else "must be a mapping",
            given=given,
            remedy=f"Write `{example}: ...` below `{field}:`, on a line of its own and indented",
        )
    rules = [_plain_rule(detail) for detail in details]
    if all(rule.startswith("Input should be ") for rule in rules):
        rule = "must be " + " or ".join(rule.removeprefix("Input should be ") for rule in rules)
    else:
        rule = "is not valid: " + " or ".join(rule[0].lower() + rule[1:] for rule in rules)
    remedy = "Correct the value"
    if first["type"] == "literal_error":
        expected = re.findall("'([^']+)'", str(first.get("ctx", {})["expected"]))
        remedy = closest(str(given), expected).strip() or remedy
    elif first["type"] == "string_type" and isinstance(given, int | float):
        remedy = "Write the value in quotes: YAML reads it as a number"
    return UserError(field, rule, given=given, remedy=remedy)


_PLAIN_TYPES = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _plain_rule(detail: ErrorDetails) -> str:
    """Return the rule of a problem in words of YAML instead of those of Python."""
    if detail["type"] in _PLAIN_TYPES:
        return f"Input should be {_PLAIN_TYPES[detail['type']]}"
    rule = detail["msg"].removeprefix("Value error, ")
    rule = rule.replace("greater than or equal to", "at least")
    return rule.replace("less than or equal to", "at most")


def _as_user_error(source: str, problems: Sequence[UserError]) -> UserError:
    """Return the first problem, with the other ones in its remedy."""
    first, *others = problems
    remedy = first.remedy
    if others:
        listed = "; ".join(f"`{other.field}` {other.rule}" for other in others)
        separator = " " if remedy.endswith("?") else ". "
        remedy = f"{remedy}{separator}Other problems of this file: {listed}"
    return UserError(f"{source}{first.field}", first.rule, given=first.given, remedy=remedy)


def _meant(model: type[BaseModel], location: Sequence[int | str], known: Sequence[str]) -> str:
    """Return ``Did you mean `…`? ``: a field near the wrong one, or one of its name elsewhere."""
    wrong = str(location[-1])
    if suggestion := closest(wrong, known):
        return suggestion
    everywhere = _dotted_fields(model)
    same = [field for field in everywhere if field.rpartition(".")[2] == wrong]
    if len(same) == 1:
        return f"Did you mean `{same[0]}`? "
    return closest(".".join(map(str, location)), everywhere)


def _dotted_fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return dotted names of every field that a file may set: ``core.layout``."""
    found = []
    for name, field in model.model_fields.items():
        if prefix or name not in RESERVED:
            found.append(prefix + name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found += _dotted_fields(field.annotation, f"{prefix}{name}.")
    return found


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        if str(part) not in model.model_fields:  # the name of one of several types
            continue
        annotation = model.model_fields[str(part)].annotation
        types = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
        models = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(models) != 1:
            return []
        (model,) = models
    return [field for field in model.model_fields if field not in RESERVED]
