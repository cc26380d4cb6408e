"""Plain data in which a value may carry its reason: written as commented YAML, listed for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_WIDTH = 100
_UNBROKEN = 1 << 20


@dataclass(frozen=True)
class ExplainedValue:
    """A value of a manifest and why it is that one."""

    value: Any
    reason: str


def plain(node: Any) -> Any:
    """The data without reasons."""
    if isinstance(node, ExplainedValue):
        return plain(node.value)
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, (list, tuple)) else node


def reasons_of(node: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted path, value and reason of everything that has one, in the order of the document."""
    if isinstance(node, ExplainedValue):
        yield path, plain(node.value), node.reason
        yield from reasons_of(node.value, path)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from reasons_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from reasons_of(value, f"{path}[{index}]")


def yaml_of(node: Any) -> str:
    """A document: each reason is a comment above its value, texts of many lines are blocks."""
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
                yield f"{name} |-"
                yield from textwrap.indent(value, pad + "  ").splitlines()
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


def _commented(node: Any, indent: int) -> Generator[str, None, Any]:
    """Yields the comment of a value; returns the value."""
    if isinstance(node, ExplainedValue):
        prefix = " " * indent + "# "
        yield from textwrap.wrap(
            node.reason, _WIDTH, initial_indent=prefix, subsequent_indent=prefix,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return node.value
    return node


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=_UNBROKEN)
    return text.removesuffix("...\n").rstrip("\n")
