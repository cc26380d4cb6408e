"""Find types and shapes with which the user's PyTorch module runs, for a new pipeline.

Nothing but the names of the inputs is declared. The module is called with inputs of several types
and shapes, whose sizes are those of its weights. The inputs that a failed operator depends on show
which combinations need not be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from triptych.base.errors import UserError
from triptych.core.export.own_module import (
    export_module,
    input_names,
    load_module,
    open_module,
)
from triptych.models.loading import quiet
from triptych.spec.model_fields import AxisField, ModelSpec, OwnModel
from triptych.spec.scaffold_graph import MAX_LENGTH

_MAX_CALLS = 1500
"""Maximum number of calls of the module with inputs of other types and shapes."""
_MAX_STEPS = 100_000
"""Maximum number of forms that are considered for these calls."""
_ROWS = 7
"""Number of rows in a call."""
_FREE = 19
"""Size of an axis that is not known from the weights."""
_LONGER = 23
"""Another size of such an axis."""
AXIS = "length"
"""Name of a free axis."""
_SIDES = (224, 32, 28, 64, 16000)
"""Heights and widths of images, and the number of samples of a sound."""


class _Form(NamedTuple):
    """Type and shape of the rows of an input."""

    start: int | None  # Smallest integer, None for numbers of type float
    shape: tuple[int, ...]

    def make(self, name: str) -> NDArray[np.generic]:
        """Return rows of equal integers, as neighbors may be out of range, or of random numbers."""
        shape = (_ROWS, *self.shape)
        if self.start is not None:
            return np.full(shape, self.start, np.int64)
        return np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)


class _Traced(torch.Tensor):
    """Tensor that knows the inputs on which it depends; `last` are those of the last operator."""

    last: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and note the inputs on which its operands depend."""
        traced = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Traced)]
        sources = frozenset[str]().union(*(each.sources for each in traced))
        _Traced.last = sources
        run: Any = super().__torch_function__  # which has no types
        results = run(func, types, args, kwargs or {})
        for each in tree_leaves(results):
            if isinstance(each, _Traced):
                each.sources = sources
        return results


def probe_module(file: Path, factory: str, target: Path) -> tuple[dict[str, int], list[str]]:
    """Export a module whose inputs are found by trial.

    Returns:
        The number of the free axis by input, and the inputs of the shape ``[batch]``.

    Args:
        factory: Function or class in it that makes the module without arguments.
        target: Folder for the graph.

    Raises:
        UserError: The module cannot be made or exported, or no inputs are found with which it runs.
    """
    fields: dict[str, Any] = {
        "inputs": {"x": {"type": "float"}},
        "outputs": {"y": {"type": "float"}},
    }
    model = OwnModel(module=f"{file.name}:{factory}", scalars=[])
    spec = ModelSpec(name="new", task="model", folder=file.parent, model=model, **fields)
    module = load_module(spec)
    with quiet(), torch.no_grad():
        found = _search(module, input_names(module))
    model = model.model_copy(update={"scalars": [n for n, f in found.items() if not f.shape]})
    spec = spec.model_copy(update={"model": model})
    arrays = {name: form.make(name) for name, form in found.items()}
    of = {n: form.shape.index(_FREE) + 1 for n, form in found.items() if _FREE in form.shape}
    if of and not _takes_padding(spec, module, arrays, of):
        of = {}
    if of:
        axes = {AXIS: AxisField(max=MAX_LENGTH, of=of)}
        spec = spec.model_copy(update={"model": model.model_copy(update={"axes": axes})})
    export_module(spec, {name: array[:1] for name, array in arrays.items()}, target)
    return of, spec.model.scalars or []


def _search(module: torch.nn.Module, names: Sequence[str]) -> dict[str, _Form]:
    """Return the first types and shapes with which the module runs.

    Raises:
        UserError: None are found.
    """
    search = _CallSearch(names, tuple(_forms(module)))
    error: Exception | None = None
    for _ in range(_MAX_CALLS):
        chosen = search.choose({})
        if chosen is None:
            break
        try:
            _call(module, chosen)
        except Exception as found:  # of the user's code
            error = found
            search.exclude({name: chosen[name] for name in _Traced.last or names})
        else:
            return chosen
    raise UserError(
        "--model",
        f"has a forward({', '.join(names)}) whose types and shapes are not found by trial",
        given=f"the last call failed: {' '.join(str(error).split())[:200]}",
        remedy="Begin with `triptych new NAME pytorch`, and put the file and its inputs there",
    ) from error


class _CallSearch:
    """Combinations of forms of several inputs, without those that contain one that failed."""

    def __init__(self, names: Sequence[str], forms: Sequence[_Form]) -> None:
        self._names, self._forms = names, forms
        self._failed: dict[tuple[str, _Form], list[dict[str, _Form]]] = {}
        self._steps = 0

    def exclude(self, failed: dict[str, _Form]) -> None:
        for pair in failed.items():
            self._failed.setdefault(pair, []).append(failed)

    def choose(self, chosen: dict[str, _Form]) -> dict[str, _Form] | None:
        """Return forms of all inputs, the first of them as `chosen`; None without any."""
        self._steps += 1
        if len(chosen) == len(self._names) or self._steps > _MAX_STEPS:
            return chosen if len(chosen) == len(self._names) else None
        name = self._names[len(chosen)]
        # Zeros in a mask would hide the other inputs.
        forms = (form for form in self._forms if form.start == 1 or "mask" not in name)
        for form in forms:
            more = {**chosen, name: form}
            failed = self._failed.get((name, form), ())
            if not any(each.items() <= more.items() for each in failed):
                found = self.choose(more)
                if found is not None:
                    return found
        return None


def _forms(module: torch.nn.Module) -> Iterator[_Form]:
    """Yield types and shapes, those of few axes first."""
    weights = list(module.parameters())
    widths = {size for weight in weights for size in weight.shape[:2]}
    widths |= {a - b for a in widths for b in widths if a > b}  # of arrays that are concatenated
    known = sorted(widths - {1}) + [size for size in range(2, 33) if size not in widths]
    shapes: list[tuple[int, ...]] = [(), (1,), *((width,) for width in known)]
    images = [weight.shape[1] for weight in weights if weight.ndim == 4]
    sounds = [weight.shape[1] for weight in weights if weight.ndim == 3]
    shapes += [(channels, side, side) for channels in images[:1] for side in _SIDES[:-1]]
    shapes += [(_FREE, width) for width in known[: len(widths)]]
    shapes += [(channels, 400) for channels in sounds[:1]]
    yield from (_Form(None, shape) for shape in shapes[:2])
    for start in (1, 0):
        yield from (_Form(start, shape) for shape in ((), (_FREE,), (1,)))
    yield from (_Form(None, shape) for shape in (*shapes[2:], (_FREE,), _SIDES[-1:]))


def _call(module: torch.nn.Module, chosen: Mapping[str, _Form]) -> None:
    """Call the module on rows together and on the first row alone.

    Raises:
        Exception: The module fails, or its results are not those of each row.
    """
    results = []
    for rows in (_ROWS, 1):
        tensors = []
        for name, form in chosen.items():
            tensor = torch.from_numpy(form.make(name)[:rows]).as_subclass(_Traced)
            tensor.sources = frozenset((name,))
            tensors.append(tensor)
        _Traced.last = frozenset()
        results.append(
            [each for each in tree_leaves(module(*tensors)) if isinstance(each, torch.Tensor)]
        )
    _Traced.last = frozenset(chosen)
    for batch, alone in zip(*results, strict=True):
        same = batch.shape[0] == _ROWS and batch.shape[1:] == alone.shape[1:]
        if not (same and torch.allclose(batch[:1], alone, rtol=1e-3, atol=1e-4, equal_nan=True)):
            raise ValueError(f"a result of {_ROWS} rows has the shape {list(batch.shape)}")


def _takes_padding(
    spec: ModelSpec,
    module: torch.nn.Module,
    arrays: Mapping[str, NDArray[np.generic]],
    of: Mapping[str, int],
) -> bool:
    """Return whether zeros at the end of an axis change no result but add some."""
    run = open_module(spec, module)
    padded = dict(arrays)
    for name, axis in of.items():
        ends = [(0, _LONGER - _FREE if place == axis else 0) for place in range(arrays[name].ndim)]
        padded[name] = np.pad(arrays[name], ends)
    try:
        one, other = run(arrays), run(padded)
    except UserError:
        return False
    return all(
        np.allclose(value, other[name][tuple(map(slice, value.shape))], rtol=1e-3, atol=1e-4)
        for name, value in one.items()
    )
