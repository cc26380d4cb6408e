"""Call a function between two models of an ensemble, and `postprocess` behind such a function.

The arrays that go past a model have other numbers of rows than its batch, which Triton does not
allow. They are sent as one tensor of bytes with as many rows as the batch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hooking import FORWARDED_PREFIX
from .own_model import ROW_COUNTS, CoreResults, OwnDecoder, OwnRowMaker, make_array
from .row_types import Arrays, CoreRows, Metadata, Parameters

PASSED = "passed_arrays"
"""Beginning of the name of a tensor UINT8 ``[core rows, bytes]`` with the arrays that go past a
model; see `pack_arrays`. The rest depends on their names, so that a hot reload of functions that
pass other arrays replaces the steps together."""
_ROWS = "row_total"
_SIZE = struct.Struct("<I")


def pack_arrays(arrays: Arrays, rows: int) -> NDArray[np.uint8]:
    """Return arrays of any shape as one tensor of `rows` rows.

    The content is the size of a JSON list, the list with name, type and shape of each array, and
    their elements. Elements of type object are bytes, each after its size.

    Raises:
        RuntimeError: An array has elements that are no numbers, texts or bytes.
    """
    heads, parts = [], []
    for name, array in arrays.items():
        if array.dtype == np.object_:
            items = array.ravel().tolist()
            if not all(isinstance(item, bytes) for item in items):
                raise RuntimeError(f"`{name}` must be an array of numbers or texts")
            data = b"".join(_SIZE.pack(len(item)) + item for item in items)
        else:
            data = array.tobytes()
        heads.append([name, array.dtype.str, array.shape, len(data)])
        parts.append(data)
    head = json.dumps(heads).encode()
    content = b"".join([_SIZE.pack(len(head)), head, *parts])
    packed = np.zeros((rows, -(-len(content) // rows)), np.uint8)
    packed.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
    return packed


def unpack_arrays(packed: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of `pack_arrays`."""
    content = packed.tobytes()
    start = _SIZE.size + _SIZE.unpack_from(content)[0]
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, dtype, shape, size in json.loads(content[_SIZE.size : start]):
        data, start = content[start : start + size], start + size
        if dtype == np.dtype(np.object_).str:
            array, place = np.empty(int(np.prod(shape)), np.object_), 0
            for index in range(array.size):
                end = place + _SIZE.size + _SIZE.unpack_from(data, place)[0]
                array[index], place = data[place + _SIZE.size : end], end
        else:
            array = np.frombuffer(data, dtype)
        arrays[name] = array.reshape(shape)
    return arrays


class StepResults(CoreResults):
    """Reader of the results of cores behind a function between models."""

    def read(self, outputs: Arrays) -> tuple[dict[str, Any], int]:
        arrays, arguments = dict(outputs), dict[str, object]()
        name = next((name for name in arrays if name.startswith(PASSED)), None)
        if name is None:
            return super().read(outputs)
        passed = unpack_arrays(arrays.pop(name))
        count = int(passed.pop(_ROWS))
        if ROW_COUNTS in passed:
            counts = passed.pop(ROW_COUNTS)
            # A batch has a row even if there is nothing to compute.
            arrays = {name: value[: counts.sum()] for name, value in arrays.items()}
            arguments["counts"] = counts.tolist()
        return arguments | self.split({**arrays, **passed}, count), count


class StepDecoder(OwnDecoder):
    """Decoder that calls `postprocess` behind a function between models."""

    def __init__(self, settings: Mapping[str, object], folder: Path) -> None:
        super().__init__(settings, folder)
        self._results = StepResults(settings)


class OwnStep(OwnRowMaker):
    """Function between models: from the results of some to the inputs of others.

    Args:
        settings: Settings of the step; ``function`` is the name of the function. See `OwnRowMaker`.
        folder: Folder of ``hooks.py``.

    Raises:
        RuntimeError: ``hooks.py`` lacks the function.
    """

    min_count = 0

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        super().__init__(settings, folder)
        self._passed = next(iter(settings["past_core"]), PASSED)
        self._past_core = None
        self._results = StepResults(settings)
        if self._function is None:
            raise RuntimeError(f"hooks.py must have a function `{self.name}`")
        self._step = self._function

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the inputs of the models, ``[core rows, ...]`` each, and `PASSED`."""
        arguments, count = self._results.read(outputs)
        arguments["parameters"] = parameters
        result, counts = self._call(self._step, arguments, count)
        total = self._count(count, counts)
        found = {name: result[name] for name in self.core_inputs if name in result}
        if not total:
            found = {
                name: np.zeros([1, *(max(dim, 1) for dim in tensor["dims"])], np.bool_)
                for name, tensor in self.core_inputs.items()
            }
        tensors = self._check(found, total or 1)
        if total:
            self.check_ranges(tensors, counts)
        rows = self._padded(tensors) if self._axis.get("of") else CoreRows(tensors)
        passed = {n: np.asarray(v) for n, v in result.items() if n not in self.core_inputs}
        passed[_ROWS] = np.array(count)
        if counts is not None:
            passed[ROW_COUNTS] = np.array(counts)
        for name, column in arguments.get("rows", {}).items():
            passed[FORWARDED_PREFIX + name] = make_array(self._fields[name], column)
        return {**rows.tensors, self._passed: pack_arrays(passed, total or 1)}
