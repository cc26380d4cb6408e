"""The fields that `pipeline.yaml` can set, described from their classes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from triptych.spec.spec import RESERVED
from triptych.tasks.accuracy import METRICS


class SpecField(NamedTuple):
    """A field of `pipeline.yaml`.

    Attributes:
        name: Dotted name.
        values: Type, choices and range, in words.
        default: Default in Markdown, "none" or "required".
        meaning: Meaning of the field.
    """

    name: str
    values: str
    default: str
    meaning: str


def describe_fields(spec: type[BaseModel]) -> Iterator[SpecField]:
    """Yield the fields that a file of this spec can set, groups before their fields."""
    schema = spec.model_json_schema()
    for name in RESERVED:
        del schema["properties"][name]
    return _walk(spec, schema, schema["$defs"], "")


def as_prose(text: str) -> str:
    """Return prose of a docstring as Markdown, for readers who do not know Python."""
    return re.sub(r"\bNone: ", "Default: ", text.replace("``", "`"))


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split("\n\n")[0].split()))[0]


def _walk(
    model: type[BaseModel], schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> Iterator[SpecField]:
    about = _read_about(model)
    for name, field in schema["properties"].items():
        path = prefix + name
        text = about.get(name, METRICS[name].says if name in METRICS else "")
        inner = _find_reference(field)
        if inner is None:
            default = "required" if name in schema.get("required", ()) else _default(field)
            yield SpecField(path, _describe_values(field, definitions), default, as_prose(text))
        else:
            definition = definitions[inner]
            is_mapping = "additionalProperties" in field
            description = definition.get("description", "")
            if text or is_mapping or field.get("default", 0) is None:
                kind = "mapping" if is_mapping else ""
                yield SpecField(path, kind, "none", as_prose(text or first_sentence(description)))
            prefix_inside = f"{path}.NAME." if is_mapping else f"{path}."
            (group,) = _find_groups(model.model_fields[name].annotation)
            yield from _walk(group, definition, definitions, prefix_inside)


def _find_reference(field: Mapping[str, Any]) -> str | None:
    """Return the name of the group of fields that a field holds, or None."""
    for place in (field, field.get("additionalProperties"), *field.get("anyOf", ())):
        if isinstance(place, dict) and "$ref" in place:
            return str(place["$ref"]).rpartition("/")[2]
    return None


def _find_groups(annotation: object) -> list[type[BaseModel]]:
    """Return the classes of groups of fields in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for part in get_args(annotation) for group in _find_groups(part)]


def _read_about(model: type[BaseModel]) -> dict[str, str]:
    """Return the text of each entry below ``Attributes:`` of a class and of its bases."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        section = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2]
        entry = r"(?ms)^ {4}(\w[\w, ]*): (.*?)(?=^ {4}\w[\w, ]*: |\Z)"
        for names, text in re.findall(entry, section):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _default(field: Mapping[str, object]) -> str:
    value = field.get("default")
    if value in (None, "", [], {}):
        return "none"
    is_name = isinstance(value, str) and not value[0].isdigit()
    return f"`{value if is_name else json.dumps(value)}`"


def _describe_values(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        parts = [one for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(_describe_values(one, definitions) for one in parts))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{each}`" for each in field.get("enum", (field.get("const"),)))
    if field.get("type") == "array":
        items = field["items"]
        if "$ref" in items:
            entries = definitions[str(items["$ref"]).rpartition("/")[2]]["properties"]
            return f"list of {', '.join(f'`{name}`' for name in entries)}"
        return f"list of {_describe_values(items, definitions)}"
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false"}
    return names.get(field.get("type", ""), "mapping") + _describe_range(field)


def _describe_range(field: Mapping[str, object]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f", {low:,} to {high:,}"
    limits = {
        "at least": low,
        "above": field.get("exclusiveMinimum"),
        "at most": high,
        "below": field.get("exclusiveMaximum"),
    }
    return "".join(f", {word} {limit:,}" for word, limit in limits.items() if limit is not None)
