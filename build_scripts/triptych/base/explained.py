"""Plain data in which a value may have its reason: read from YAML templates, written as YAML.

In a template (Jinja2) every inserted value becomes a YAML value, text in quotes. An
`ExplainedValue` becomes its value and, behind it, its reason as a comment. A comment above a value
is its reason, too.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDTH = 100
_UNBROKEN = 1 << 20
_NUMBER = re.compile(r"[-+]?(0o[0-7]+|[\d_]*\.?[\d_]+([eE][-+]?\d+)?)")
_FILE = re.compile(r"^--- # (\S+)\n", re.MULTILINE)
_BEHIND = re.compile(r":?\s+#\s?(.*)")


@dataclass(frozen=True)
class ExplainedValue:
    """A value of a manifest and the reason for it."""

    value: Any
    reason: str


def plain(node: object) -> Any:
    """Return the data without reasons."""
    if isinstance(node, ExplainedValue):
        return plain(node.value)
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, (list, tuple)) else node


def reasons_of(node: object, path: str = "") -> Iterator[tuple[str, object, str]]:
    """Yield path, value and reason of each value that has one, in the order of the document."""
    if isinstance(node, ExplainedValue):
        yield path, plain(node.value), node.reason
        yield from reasons_of(node.value, path)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from reasons_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from reasons_of(value, f"{path}[{index}]")


class Raw(str):
    """Text that a template inserts as it is, such as a comment."""

    __slots__ = ()


def map_value(function: Callable[[Any], Any]) -> Callable[[ExplainedValue], ExplainedValue]:
    """Return a filter of templates that changes a value and retains its reason."""
    return lambda explained: ExplainedValue(function(explained.value), explained.reason)


def render_yaml(template: Path, **values: object) -> Any:
    """Return the data of a YAML template, with `ExplainedValue` where it has comments.

    Raises:
        jinja2.UndefinedError: The template reads a name that is not in `values`.
        yaml.YAMLError: The result is not YAML.
    """
    return parse_yaml(_render(template, values))


def render_files(template: Path, **values: object) -> dict[str, Any]:
    """Return the data of each file of a template by its path; ``--- # PATH`` begins a file."""
    head, *parts = _FILE.split(_render(template, values))
    if head.strip():
        raise ValueError(f"{template} has text before its first file")
    return {path: parse_yaml(text) for path, text in zip(parts[::2], parts[1::2], strict=True)}


def _render(template: Path, values: Mapping[str, object]) -> str:
    return _environment(template.parent).get_template(template.name).render(values)


@functools.cache
def _environment(folder: Path) -> Environment:
    """Return the environment of the templates in a folder, which compiles each of them once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        finalize=_as_yaml,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": map_value(lambda mib: mib << 20),
        "raw": Raw,
        "seconds": map_value("{:g}s".format),
        "text": map_value(str),
        "unit": lambda explained, unit: map_value(lambda value: f"{value}{unit}")(explained),
    }
    return environment


def _as_yaml(value: object) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, ExplainedValue):
        return f"{_as_yaml(value.value)} # {' '.join(value.reason.split())}"
    return json.dumps(plain(value), ensure_ascii=False)


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML document: a value with a comment is an `ExplainedValue`.

    Comments stand above a value (of a list's mapping: above its first value), or behind it.
    """
    loader = yaml.CSafeLoader(text)
    try:
        return _Explainer(loader, text.splitlines()).read(loader.get_single_node())
    finally:
        loader.dispose()


class _Explainer:
    """Nodes of a document in order; lines before `_line` belong to nodes that were read."""

    def __init__(self, loader: yaml.CSafeLoader, lines: list[str]) -> None:
        self._loader = loader
        self._lines = lines
        self._line = 0

    def read(self, node: yaml.Node | None) -> Any:
        if isinstance(node, yaml.MappingNode):
            construct = self._loader.construct_object
            return {construct(key): self._explained(value, key) for key, value in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read(item) if isinstance(item, yaml.MappingNode) else self._explained(item)
                for item in node.value
            ]
        if node is None:
            return None
        self._line = max(self._line, node.end_mark.line + (node.end_mark.column > 0))
        return self._loader.construct_object(node, deep=True)

    def _explained(self, node: yaml.Node, key: yaml.Node | None = None) -> object:
        """Return the value of a node, with the comments above its key and behind itself."""
        start = (key or node).start_mark.line
        above = [line.strip() for line in self._lines[self._line : start]]
        reasons = [line.lstrip("# ") for line in above if line.startswith("#")]
        self._line = max(self._line, start)
        value = self.read(node)
        is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
        mark = key.end_mark if key is not None and is_block else node.end_mark
        if mark.column > 0 and (found := _BEHIND.fullmatch(self._lines[mark.line][mark.column :])):
            reasons.append(found[1])
        return ExplainedValue(value, " ".join(reasons)) if reasons else value


def yaml_of(node: object) -> str:
    """Return a YAML document with each reason as a comment above its value."""
    return "\n".join(_lines(node, 0)) + "\n"


def _lines(node: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    if isinstance(node, Mapping):
        for key, child in node.items():
            value = yield from _commented(child, indent)
            name = f"{pad}{_scalar(key)}:"
            if isinstance(value, (Mapping, list, tuple)) and value:
                yield name
                yield from _lines(value, indent + 2)
            elif isinstance(value, str) and "\n" in value:
                # Its first line says what line breaks it ends with and what spaces it begins with.
                text = yaml.safe_dump(value, default_style="|", width=_UNBROKEN, allow_unicode=True)
                head, *rest = text.removesuffix("...\n").removesuffix("\n").split("\n")
                yield f"{name} {head}"
                yield from (line and pad + line for line in rest)
            else:
                yield f"{name} {_scalar(value)}"
        return
    for child in node:
        value = yield from _commented(child, indent)
        if not isinstance(value, Mapping):
            yield f"{pad}- {_scalar(value)}"
            continue
        is_first = True
        for line in _lines(value, indent + 2):
            # Comments of the first key come before the dash, and belong to what follows it.
            if not is_first:
                yield line
            elif line.lstrip().startswith("#"):
                yield pad + line.lstrip()
            else:
                yield f"{pad}- {line[indent + 2 :]}"
                is_first = False


def _commented(node: object, indent: int) -> Generator[str, None, Any]:
    """Yield the comment of a value, and return the value."""
    if isinstance(node, ExplainedValue):
        prefix = " " * indent + "# "
        yield from textwrap.wrap(
            node.reason, _WIDTH, initial_indent=prefix, subsequent_indent=prefix,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return node.value
    return node


def _scalar(value: object) -> str:
    return _written(plain(value)) if isinstance(value, (Mapping, list, tuple)) else _atom(value)


@functools.lru_cache(maxsize=10_000, typed=True)
def _atom(value: object) -> str:
    """Return a value that is neither a mapping nor a list, as YAML: most repeat in a document."""
    return _written(value)


def _written(value: object) -> str:
    # PyYAML writes YAML 1.1; Kubernetes reads a version such as 0479701e6330 as a number.
    style = "'" if isinstance(value, str) and _NUMBER.fullmatch(value) else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=_UNBROKEN)
    return text.removesuffix("...\n").rstrip("\n")
