"""Keep a Python step alive when the size of a request's shape overflows 64 bits.

Before 26.04 Triton computes the size of a tensor without a check. An INT32 tensor ``[1, 2**62]``
has a size of 0 then, so that Triton takes it as complete without data. The stub of the Python
backend makes its array outside of any handler of exceptions: the error of numpy would end the
process. The functions that the stub calls are therefore replaced by ones that return an empty array
``[0]`` for such a shape. Only an input with a free dimension can have one.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

NEW_ARRAY = 94
"""Index of `PyArray_NewFromDescr` in the table of numpy's C functions, in all of its versions."""
MAX_ELEMENTS = 2**59
"""Maximum number of elements; each has at most 16 bytes."""
_SIZES = ctypes.POINTER(ctypes.c_ssize_t)
_FUNCTION = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, _SIZES, _SIZES),
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
)
_functions: list[Any] = []
"""Functions that the stub calls; they must live as long as the process."""


class Surviving:
    """First base of a step whose inputs have free dimensions."""

    def initialize(self, args: Mapping[str, str]) -> None:
        survive_overflow(args["model_config"])
        super().initialize(args)  # type: ignore[misc]


def survive_overflow(model_config: str) -> None:
    """Protect this process if the model has inputs with a free dimension.

    Call it before the process makes its first `pb_utils.Tensor`, because the stub looks up the
    functions of numpy then.

    Args:
        model_config: Config of the model as JSON, as ``initialize`` receives it.
    """
    inputs = json.loads(model_config)["input"]
    free = {each["data_type"] for each in inputs if any(int(dim) < 0 for dim in each["dims"])}
    if free - {"TYPE_STRING"}:
        _check_shapes_of_numbers()
    if "TYPE_STRING" in free and hasattr(pb_utils, "deserialize_bytes_tensor"):
        _check_shapes_of_texts()


def _check_shapes_of_numbers() -> None:
    table = ctypes.pythonapi.PyCapsule_GetPointer
    table.restype, table.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        core = import_module("numpy._core.multiarray")
    except ImportError:  # its name before numpy 1.26
        core = import_module("numpy.core.multiarray")
    address = table(core._ARRAY_API, None) + NEW_ARRAY * ctypes.sizeof(ctypes.c_void_p)
    entry = ctypes.c_void_p.from_address(address)
    original = entry.value
    make = _FUNCTION(original or 0)

    def make_possible(
        kind: Any, dtype: Any, count: int, sizes: Any, strides: Any, data: Any, flags: int, of: Any
    ) -> Any:
        elements = 1
        for axis in range(count):
            size = sizes[axis]
            if size < 0:
                elements = MAX_ELEMENTS
            elements *= size or 1
        if elements >= MAX_ELEMENTS:
            count, sizes, strides = 1, _SIZES(ctypes.c_ssize_t(0)), None
        return make(kind, dtype, count, sizes, strides, data, flags, of)

    _functions.append(_FUNCTION(make_possible))
    entry.value = ctypes.cast(_functions[-1], ctypes.c_void_p).value
    try:
        pb_utils.Tensor("first", np.zeros(1, np.int32))  # the stub copies the table
    finally:
        entry.value = original


def _check_shapes_of_texts() -> None:
    deserialize = pb_utils.deserialize_bytes_tensor

    def deserialize_texts(data: NDArray[np.uint8]) -> _Texts:
        texts: _Texts = deserialize(data).view(_Texts)
        return texts

    pb_utils.deserialize_bytes_tensor = deserialize_texts


class _Texts(np.ndarray[Any, np.dtype[np.object_]]):
    """Texts of a BYTES tensor, before the stub gives them their shape."""

    def reshape(self, shape: Any) -> NDArray[np.generic]:  # type: ignore[override]
        texts = np.asarray(self)
        try:
            return texts.reshape(shape)
        except ValueError:
            return texts
