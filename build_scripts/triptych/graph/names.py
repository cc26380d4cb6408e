"""The names of a graph's values: which nodes read them, and how to make names that are free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def reads(node: Any) -> Iterator[str]:
    """What a node reads, with all that the bodies of an If or a Loop name."""
    yield from node.input
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                yield from reads(inner)
            yield from (output.name for output in body.output)


def readers(graph: Any) -> dict[str, list[int]]:
    """Value to the indices of the nodes that read it, each once."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for name in dict.fromkeys(reads(node)):
            found.setdefault(name, []).append(index)
    return found


def drop_unused(graph: Any) -> None:
    """Take out the initializers that nothing reads any more, in place."""
    used = {name for node in graph.node for name in reads(node)}
    used |= {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def free_mark(graph: Any) -> str:
    """What may stand between the name of a value and a word, for a name that nothing has yet."""
    taken = list(_names(graph))
    mark = "/"
    while any(mark in name for name in taken):
        mark += "/"
    return mark


def _names(graph: Any) -> Iterable[str]:
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from node.output
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _names(body)
