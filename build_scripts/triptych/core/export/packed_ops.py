"""Run a model on padded rows while its token-wise operations compute on packed tokens.

The model's own code is called on padded rows ``[B, L, ...]``, as in the bucketed layout, and makes
masks, positions and attention biases. While `PackedOperations` is active, each token-wise operation
(a linear layer, a normalization, an activation, an addition) computes its result on the packed
tokens ``[1, T, ...]``. The model receives a tensor of the padded shape without values, and the next
token-wise operation uses the packed tensor again. If an operation is not known to be token-wise,
the packed tokens are copied into padded rows first. This costs more time, but every result equals
that of the padded model.

See `packing` for B, L and T.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from triptych.core.export.packed_batch import GatheredBatch, PackedBatch
from triptych.core.export.row_ops import collect, gather


class Packed(NamedTuple):
    """Packed form of a padded tensor."""

    # Tensor ``[B, ..., L, ...]``. It has no values until `PackedOperations.values` computes them.
    # The reference keeps its identity unique.
    padded: Tensor
    packed: Tensor  # Values of the tokens, ``[1, ..., T, ...]``, or ``[T, ...]`` if `axis` is 0
    axis: int  # Axis of the tokens; 0 if the padded tensor is ``[B * L, ...]``


class TorchCall(NamedTuple):
    """Call of a function of PyTorch, whose arguments are of any type."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: Mapping[str, Any]

    @property
    def operands(self) -> list[object]:
        """Arguments, including those in lists."""
        operands: list[object] = []
        for value in (*self.arguments, *self.options.values()):
            operands += value if isinstance(value, (list, tuple)) else [value]
        return operands

    def argument(self, name: str, place: int, default: object = None) -> Any:
        """Return an argument that is given by its name or its place."""
        is_placed = len(self.arguments) > place
        return self.options.get(name, self.arguments[place] if is_placed else default)

    def on(self, first: object) -> Any:
        """Return the result with another first argument."""
        return self.function(first, *self.arguments[1:], **self.options)


Computed = tuple[Tensor, int]
"""Packed result of an operation, and its axis of tokens."""

Rule = Callable[["PackedOperations", TorchCall], Computed | list[Computed] | None]
"""Function that computes an operation on packed operands; None if the operation does not compute on
tokens alone."""


class PackedOperations(TorchFunctionMode):
    """Context in which token-wise operations compute on the packed tokens of `batch`."""

    def __init__(self, batch: PackedBatch | GatheredBatch) -> None:
        super().__init__()
        self.batch = batch
        self._known: dict[int, Packed] = {}
        self._gathered: dict[int, Packed] = {}
        self._values: dict[int, Tensor] = {}
        self._paused = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> object:
        options = options or {}
        if self._paused or function in DESCRIPTIONS:
            return function(*arguments, **options)
        if function in LOOKUPS and self.find(arguments[0]) is None:
            return self._look_up(TorchCall(function, arguments, options))
        if function is functional.linear and self._is_padded_vectors(arguments[0]):
            # Packing is worth its cost here even if the operation before computed on padded rows.
            packed = self.gather(arguments[0])
            return self.spread(function(packed, *arguments[1:], **options), 1)
        rule = RULES.get(function)
        called = TorchCall(function, arguments, options)
        if (largest := self._row_max(called)) is not None:
            return largest
        if rule is not None and any(self.find(value) for value in called.operands):
            computed = rule(self, called)
            if isinstance(computed, list):
                return tuple(self.spread(packed, axis) for packed, axis in computed)
            if computed is not None:
                return self.spread(*computed)
        return function(*tree_map(self.values, arguments), **tree_map(self.values, options))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Compute as without this mode while the context is open."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _row_max(self, called: TorchCall) -> Tensor | None:
        """Return the largest vector of each row, if a call asks for it; None for other calls."""
        if (
            called.function not in MAXIMA
            or called.argument("dim", 1) != 1
            or called.argument("keepdim", 2)
        ):
            return None
        known = self.find(called.arguments[0])
        if known is None or known.axis != 1 or known.padded.dim() != 3:
            return None
        with self.paused():
            return self.batch.row_max(known.packed[0])

    def _look_up(self, called: TorchCall) -> Tensor:
        """Look up vectors for ids that are the same in all rows, such as positions ``[1, L]``."""
        ids, batch = called.arguments[0], self.batch
        result: Tensor = called.on(ids)
        slots = ids.dim() == 2 and _equal(ids.shape[1], batch.max_length)
        if isinstance(batch, GatheredBatch):
            return result  # vectors are added on padded rows, up to the first linear layer
        same = slots and _equal(ids.shape[0], 1)
        if same or (slots and _equal(ids.shape[0], batch.row_count)):
            packed = (
                gather(ids.squeeze(0), batch.position_of_token, 0)[None]
                if same
                else self.gather(ids)
            )
            vectors = called.on(packed)
            self._known[id(result)] = Packed(result, vectors, 1)
            self._values[id(result)] = result
        return result

    def find(self, value: object) -> Packed | None:
        """Return the packed form of a padded tensor, or None if it has none."""
        return self._known.get(id(value)) if isinstance(value, Tensor) else None

    def spread(self, packed: Tensor, axis: int) -> Tensor:
        """Return a tensor of the padded shape that represents a packed tensor."""
        batch = self.batch
        if axis:
            before, after = packed.shape[1:axis], packed.shape[axis + 1 :]
            shape = (batch.row_count, *before, batch.max_length, *after)
        else:
            shape = (batch.row_count * batch.max_length, *packed.shape[1:])
        padded = packed.new_empty(shape)
        self._known[id(padded)] = Packed(padded, packed, axis)
        return padded

    def values(self, value: object) -> Any:
        """Return the padded rows of a tensor that represents packed tokens.

        Other values are returned unchanged.
        """
        known = self.find(value)
        if known is None:
            return value
        if id(value) not in self._values:
            packed, axis, index = known.packed, known.axis, self.batch.token_of_slot
            if axis:
                padded = gather(packed.squeeze(0), index, axis - 1)
                if axis > 1:
                    padded = padded.movedim(axis - 1, 0).contiguous()  # as `view` needs it
            else:
                padded = gather(packed, index.reshape(-1), 0)
            self._values[id(value)] = padded
        return self._values[id(value)]

    def gather(self, padded: Tensor, axis: int = 1) -> Tensor:
        """Return a padded tensor ``[B, ..., L, ...]`` as packed tokens ``[1, ..., T, ...]``."""
        known = self.find(padded) or self._gathered.get(id(padded))
        if known is not None and known.axis == axis:
            return known.packed
        rows: Tensor = self.values(padded).movedim(axis, 1)
        if isinstance(self.batch, GatheredBatch):
            tokens = collect(rows, self.batch.where)
        else:
            tokens = rows.flatten(0, 1).index_select(0, self.batch.slot_of_token)
        packed = tokens[None].movedim(1, axis)
        # It is not added to `_known`, because the padded tensor may differ in slots beyond a row.
        self._gathered[id(padded)] = Packed(padded, packed, axis)
        return packed

    def _is_padded_vectors(self, value: Tensor) -> bool:
        return value.dim() == 3 and self.find(value) is None and self.is_padded(value.shape)

    def is_padded(self, shape: Sequence[object]) -> bool:
        """Check that a shape is ``[B, L, ...]``."""
        batch = self.batch
        return (
            len(shape) > 1
            and _equal(shape[0], batch.row_count)
            and _equal(shape[1], batch.max_length)
        )


def _equal(one: object, other: object) -> bool:
    """Check that two sizes are known to be equal.

    A plain comparison would make the exporter assume that they are.
    """
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return isinstance(one, int) and isinstance(other, int) and one == other


def _elementwise(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Compute an operation on elements, with operands that broadcast."""
    operands = [value for value in called.operands if isinstance(value, Tensor)]
    known = [packed for packed in map(mode.find, operands) if packed is not None]
    axis, rank = known[0].axis, max(operand.dim() for operand in operands)
    if any(packed.axis != axis or packed.padded.dim() != rank for packed in known):
        return None
    mapped: dict[int, Tensor] = {}
    for operand in operands:
        packed = _aligned(mode, operand, axis, rank)
        if packed is None:
            return None
        mapped[id(operand)] = packed

    def swap(value: object) -> object:
        return mapped[id(value)] if isinstance(value, Tensor) else value

    swapped = {name: swap(value) for name, value in called.options.items()}
    return called.function(*map(swap, called.arguments), **swapped), axis


def _aligned(mode: PackedOperations, operand: Tensor, axis: int, rank: int) -> Tensor | None:
    """Return an operand so that it broadcasts against packed tokens; None if it cannot."""
    known = mode.find(operand)
    if known is not None:
        return known.packed
    missing = rank - operand.dim()
    without_tokens = missing > axis or (axis and _equal(operand.shape[axis - missing], 1))
    if without_tokens and (missing > 0 or _equal(operand.shape[0], 1)):
        return operand
    if not axis or _equal(operand.shape[-1], 1):
        # A value per slot, such as a mask, may clear the slots beyond a row, which a convolution
        # reads. Packed tokens have no such slots.
        return None
    shape = [1] * missing + list(operand.shape)
    batch = mode.batch
    if not (_equal(shape[0], 1) or _equal(shape[0], batch.row_count)):
        return None
    if not (_equal(shape[axis], 1) or _equal(shape[axis], batch.max_length)):
        return None
    shape[0], shape[axis] = batch.row_count, batch.max_length
    return mode.gather(operand.expand(shape), axis)


def _first_only(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Compute an operation on the vector of each token, if its other operands are weights."""
    known = mode.find(called.arguments[0])
    others = called._replace(arguments=called.arguments[1:]).operands
    if known is None or any(mode.find(value) for value in others):
        return None
    last = known.padded.dim() - 1
    if called.function is functional.layer_norm or called.function is getattr(
        functional, "rms_norm", None
    ):
        shape = called.argument("normalized_shape", 1)
        if len(shape) > last - known.axis:
            return None
    elif called.function not in LOOKUPS and known.axis >= last:
        return None
    if called.function in PRODUCTS and any(isinstance(v, Tensor) and v.dim() > 2 for v in others):
        return None
    return called.on(known.packed), known.axis


def _last_axis(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Compute a reduction or a softmax over the last axis."""
    known = mode.find(called.arguments[0])
    if known is None:
        return None
    dim = called.argument("dim", 1)
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    last = known.padded.dim() - 1
    if dims not in ([-1], [last]) or known.axis >= last:
        return None
    result = called.on(known.packed)
    return (result, known.axis) if isinstance(result, Tensor) else None


def _reshape(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Change a shape such that rows and slots stay as they are or are joined."""
    known = mode.find(called.arguments[0])
    if known is None or known.axis > 1 or isinstance(called.arguments[1], torch.dtype):
        return None
    shape = called.function(*called.arguments, **called.options).shape
    batch = mode.batch
    if mode.is_padded(shape):
        return known.packed.reshape(1, batch.token_count, *shape[2:]), 1
    slots = batch.row_count * batch.max_length
    if len(shape) > 1 and (shape[0] is slots or _equal(shape[0], slots)):
        return known.packed.reshape(batch.token_count, *shape[1:]), 0
    return None


def _permute(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Permute axes such that the rows stay first."""
    known = mode.find(called.arguments[0])
    if known is None or not known.axis or called.options:
        return None
    rank = known.padded.dim()
    if called.function in (Tensor.permute, torch.permute):
        dims = called.arguments[1:]
        order = [dim % rank for dim in (dims[0] if isinstance(dims[0], (list, tuple)) else dims)]
    else:
        one, other = (dim % rank for dim in called.arguments[1:3])
        order = list(range(rank))
        order[one], order[other] = other, one
    if order[0] != 0:
        return None
    return known.packed.permute(order), order.index(known.axis)


def _index(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Slice the axes behind the tokens."""
    known = mode.find(called.arguments[0])
    if known is None or not known.axis:
        return None
    index = (
        called.arguments[1] if isinstance(called.arguments[1], tuple) else (called.arguments[1],)
    )
    if any(not isinstance(item, (slice, int)) and item is not Ellipsis for item in index):
        return None
    if Ellipsis in index:
        place = index.index(Ellipsis)
        missing = known.padded.dim() - len(index) + 1
        index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
    if any(item != slice(None) for item in index[: known.axis + 1]):
        return None
    return known.packed[index], known.axis


def _pieces(mode: PackedOperations, called: TorchCall) -> list[Computed] | None:
    """Split along the last axis; returns a list of results."""
    known = mode.find(called.arguments[0])
    dim = called.argument("dim", 2, 0)
    if known is None or dim not in (-1, known.padded.dim() - 1) or dim == known.axis:
        return None
    parts = called.on(known.packed)
    return [(part, known.axis) for part in parts]


def _joined(mode: PackedOperations, called: TorchCall) -> Computed | None:
    """Concatenate along the last axis."""
    known = [mode.find(value) for value in called.arguments[0]]
    dim = called.argument("dim", 1, 0)
    first = known[0]
    if first is None or dim not in (-1, first.padded.dim() - 1) or dim == first.axis:
        return None
    if any(one is None or one.axis != first.axis for one in known):
        return None
    return called.on([one.packed for one in known if one]), first.axis


DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}
"""Operations that read no value of a tensor."""

LOOKUPS = {functional.embedding, torch.embedding}
"""Operations that look vectors up in a table by token ids or positions."""

MAXIMA = {Tensor.amax, torch.amax}

PRODUCTS = {functional.linear, Tensor.matmul, torch.matmul, Tensor.__matmul__}


def _rules() -> dict[object, Rule]:
    elementwise: list[object] = [operator.add, operator.mul]
    names = (
        "add sub rsub mul div true_divide pow neg abs exp log sqrt rsqrt reciprocal tanh sigmoid "
        "relu erf sin cos square clamp clip where maximum minimum masked_fill eq ne lt le gt ge "
        "logical_and logical_or logical_not to type float half double int long bool contiguous "
        "clone detach type_as __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
        "__rtruediv__ __pow__ __rpow__ __neg__ __and__ __or__ __invert__ add_ mul_ sub_ div_"
    )
    for name in names.split():
        elementwise += [getattr(owner, name, None) for owner in (Tensor, torch)]
    activations = (
        "gelu silu relu relu6 leaky_relu elu selu mish tanh sigmoid softplus hardtanh hardswish "
        "hardsigmoid logsigmoid dropout tanhshrink threshold"
    )
    elementwise += [getattr(functional, name, None) for name in activations.split()]
    elementwise += [torch.dropout]
    first_only: list[object] = [functional.layer_norm, getattr(functional, "rms_norm", None)]
    norm = torch.linalg.vector_norm
    last_axis: list[object] = [functional.softmax, functional.log_softmax, norm]
    for name in ("mean", "sum", "var", "std", "norm", "amax", "amin", "softmax"):
        last_axis += [getattr(owner, name, None) for owner in (Tensor, torch)]
    table: list[tuple[Rule, list[object]]] = [
        (_elementwise, elementwise),
        (_first_only, [*first_only, *LOOKUPS, *PRODUCTS]),
        (_last_axis, last_axis),
        (_reshape, [Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten]),
        (_permute, [Tensor.transpose, torch.transpose, Tensor.permute, torch.permute]),
        (_index, [Tensor.__getitem__]),
        (_pieces, [Tensor.chunk, torch.chunk, Tensor.split, torch.split]),
        (_joined, [torch.cat, torch.concat]),
    ]
    rules = {function: rule for rule, functions in table for function in functions}
    rules.pop(None, None)
    return rules


RULES: Mapping[object, Rule] = _rules()
"""Rule of each operation that can compute on packed tokens."""
