"""Rows of requests to the feed of one run, its results back to the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from triptych.server.stand_in.contract import BatchInputSpec, Contract, OutputSpec

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]


class Ticket:
    """One request under way: its inputs, and the pieces of its outputs as they come in.

    Attributes:
        caller: whom to answer; nothing here looks into it.
        inputs: tensors by name, with the batch dimension; strings are `str` objects.
        rows: size of the batch dimension; 1 for a model without one.
        row_cost: what one row adds to the load of a micro-batch, in elements.
        closed: whether it has failed, so that what else comes of it is of no interest.
    """

    __slots__ = ("caller", "closed", "inputs", "pieces", "row_cost", "rows", "rows_left")

    def __init__(self, caller: Any, inputs: Feed, *, rows: int, row_cost: int) -> None:
        self.caller = caller
        self.inputs = inputs
        self.rows = rows
        self.row_cost = row_cost
        self.rows_left = rows
        self.pieces: list[tuple[int, list[Array]]] = []
        self.closed = False

    def outputs(self) -> list[Array]:
        """The finished outputs in the contract's order, all rows in the request's order."""
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        self.pieces.sort(key=lambda piece: piece[0])
        return [np.concatenate(parts) for parts in zip(*(p[1] for p in self.pieces), strict=True)]


class Part(NamedTuple):
    """The rows ``start`` to ``stop`` of one request."""

    ticket: Ticket
    start: int
    stop: int


class SplitError(Exception):
    """The graph returned fewer rows or elements than its requests asked for."""


def new_ticket(contract: Contract, caller: Any, inputs: Feed) -> Ticket:
    """A ticket for a request of `caller`, its rows counted and its row cost measured."""
    if contract.max_batch_size == 0:
        return Ticket(caller, inputs, rows=1, row_cost=1)
    rows = next(iter(inputs.values())).shape[0]
    elements = max((inputs[name].size for name in contract.measured_inputs), default=rows)
    return Ticket(caller, inputs, rows=rows, row_cost=max(1, elements // max(1, rows)))


def build_feed(contract: Contract, parts: Sequence[Part]) -> Feed:
    """What the graph is run on for these rows, batch inputs included."""
    feed: Feed = {}
    batched = contract.max_batch_size > 0
    for spec in contract.inputs:
        name = spec.name
        if not batched:
            value = parts[0].ticket.inputs.get(name)
            if value is not None:  # an optional input may be missing
                feed[name] = value.reshape(-1) if spec.ragged else value
            continue
        pieces = [ticket.inputs[name][start:stop] for ticket, start, stop in parts]
        if spec.ragged:
            pieces = [piece.reshape(-1) for piece in pieces]
        feed[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    for batch_input in contract.batch_inputs:
        value = _describe(batch_input, parts, batched=batched)
        for target in batch_input.targets:
            feed[target] = value
    return feed


def hand_out(contract: Contract, values: Sequence[Array], parts: Sequence[Part]) -> list[Ticket]:
    """Give each request its rows of the results, which are in the contract's order.

    Returns:
        The tickets that now have all their rows.

    Raises:
        SplitError: an output is too small to be cut.
    """
    shares = [
        _cut(contract, spec, value, parts)
        for spec, value in zip(contract.outputs, values, strict=True)
    ]
    finished = []
    for index, (ticket, start, stop) in enumerate(parts):
        ticket.pieces.append((start, [share[index] for share in shares]))
        ticket.rows_left -= stop - start
        if ticket.rows_left == 0:
            finished.append(ticket)
    return finished


def _describe(spec: BatchInputSpec, parts: Sequence[Part], *, batched: bool) -> Array:
    dtype = np.float32 if spec.data_type == "TYPE_FP32" else np.int32
    sources = [ticket.inputs[spec.source] for ticket, _, _ in parts]
    if spec.kind in ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"):
        shapes = [source.shape[1:] for source in sources]
        repeats = (
            [stop - start for _, start, stop in parts]
            if batched
            else [source.shape[0] for source in sources]
        )
        value: Array = np.repeat(np.array(shapes, dtype), repeats, axis=0)
        return value if spec.kind == "BATCH_ITEM_SHAPE" else value.reshape(-1)
    counts = [source.size for source in sources]
    if spec.kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    if spec.kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), dtype)
    totals: list[int] = np.cumsum(counts).tolist()
    if spec.kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        totals.insert(0, 0)
    return np.array(totals, dtype)


def _cut(contract: Contract, spec: OutputSpec, value: Array, parts: Sequence[Part]) -> list[Array]:
    if spec.scatter_source is not None:
        return _scatter(contract, spec, value, parts)
    if contract.max_batch_size == 0:
        return [value if value.ndim else value.reshape(spec.dims)]
    ends = np.cumsum([stop - start for _, start, stop in parts]).tolist()
    if value.ndim == 0 or value.shape[0] < ends[-1]:
        raise SplitError(
            f"failed to split the output tensor '{spec.name}' in responses: expected batch size of "
            f"at least {ends[-1]} in model output, got {value.shape[0] if value.ndim else 'none'}"
        )
    return [
        value[end - (stop - start) : end] for end, (_, start, stop) in zip(ends, parts, strict=True)
    ]


def _scatter(
    contract: Contract, spec: OutputSpec, value: Array, parts: Sequence[Part]
) -> list[Array]:
    flat = value.reshape(-1)
    shares = []
    offset = 0
    for ticket, start, stop in parts:
        shape = list(ticket.inputs[spec.scatter_source or ""].shape)
        dims = list(spec.dims)
        if contract.max_batch_size > 0:
            shape[0] = stop - start
            dims.insert(0, -1)
        if any(dim == -1 and axis >= len(shape) for axis, dim in enumerate(dims)):
            raise SplitError(
                f"failed to split the output tensor '{spec.name}': it has more variable dimensions "
                f"than its source input '{spec.scatter_source}'"
            )
        dims = [shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims)]
        size = int(np.prod(dims))
        if offset + size > flat.size:
            raise SplitError(
                f"failed to split the output tensor '{spec.name}' in responses: expected at least "
                f"{offset + size} elements in model output, got {flat.size}"
            )
        shares.append(flat[offset : offset + size].reshape(dims))
        offset += size
    return shares
