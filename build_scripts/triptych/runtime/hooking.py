"""Load the hooks of a pipeline, call them with rows of plain data, and check their results."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .request_errors import RequestError

HOOKS_FILE = "hooks.py"
MODULE_NAME = "triptych_hooks"
FUNCTIONS = ("before", "after", "decode")
SETUP = "setup"
"""Function that runs whenever ``hooks.py`` is loaded."""
FILES_FOLDER = "files"
"""Folder in that of a step with the pipeline's `files`."""
REDACT = "redact"
"""Hook for samples, not for requests."""

Row = dict[str, Any]
Hook = Callable[..., list[Row]]
NUMPY_TYPES: dict[str, type[np.generic]] = {
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "UINT32": np.uint32,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


TOKENIZER_FILE = "tokenizer.json"


class Context:
    """Argument of `setup`.

    Args:
        folder: Folder with the pipeline's `files`.
        labels: Names of the model's classes; empty if the step does not know them.
        tokenizer: The model's ``tokenizer.json``.

    Attributes:
        folder: Folder with the pipeline's `files`.
    """

    def __init__(self, folder: Path, labels: Sequence[str], tokenizer: Path) -> None:
        self.folder = folder
        self._labels = labels
        self._tokenizer = tokenizer

    @property
    def labels(self) -> list[str]:
        """Names of the classes: of the model, else a JSON list in ``labels.json`` of `files`."""
        if self._labels:
            return list(self._labels)
        names: list[str] = json.loads((self.folder / "labels.json").read_text(encoding="utf-8"))
        return names

    @property
    def tokenizer(self) -> Any:
        """`tokenizers.Tokenizer` of ``tokenizer.json`` in `files`, else of the model."""
        from tokenizers import Tokenizer

        own = self.folder / TOKENIZER_FILE
        return Tokenizer.from_file(str(own if own.is_file() else self._tokenizer))


def load_hooks(
    folder: Path, labels: Sequence[str] = (), tokenizer: Path | None = None
) -> ModuleType | None:
    """Return the module ``hooks.py`` of `folder` after its function `setup` has run, or None.

    Args:
        folder: Folder of a pipeline, or version folder of a step.
        labels: Names of the model's classes.
        tokenizer: The model's ``tokenizer.json``; None for that of the step.
    """
    path = folder / HOOKS_FILE
    if not path.is_file():
        return None
    hooks = load_file(path, MODULE_NAME)
    setup = getattr(hooks, SETUP, None)
    if setup is not None:
        files = folder / FILES_FOLDER
        tokenizer = tokenizer or folder / TOKENIZER_FILE
        setup(Context(files if files.is_dir() else folder, labels, tokenizer))
    return hooks


def load_file(path: Path, name: str) -> ModuleType:
    """Return the Python file `path`, run as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclasses` needs the module there
    spec.loader.exec_module(module)
    return module


def find_hook(
    folder: Path, name: str, labels: Sequence[str] = (), tokenizer: Path | None = None
) -> Hook | None:
    """Return a function of ``hooks.py``; None without it. See `load_hooks`."""
    hook: Hook | None = getattr(load_hooks(folder, labels, tokenizer), name, None)
    return hook


def has_parameter(function: Any, name: str) -> bool:
    """Return whether a function of the user has the parameter `name`."""
    return callable(function) and name in inspect.signature(function).parameters


class HookFailure(RuntimeError):
    """A hook raised an exception; `row` is the first row for which it raises alone, if one is."""

    def __init__(self, text: str, row: int | None) -> None:
        super().__init__(text)
        self.row = row


def call_hook(
    name: str,
    hook: Hook,
    rows: list[Row],
    keys: Sequence[str],
    inputs: list[Row] | None = None,
) -> list[Row]:
    """Return the result of `hook` on `rows`: the same number of rows, each with exactly `keys`.

    Args:
        inputs: Rows of the request, for a hook that takes them.

    Raises:
        RequestError: The hook raised ValueError; the error has its message and, if the hook raises
            for a row alone as well, the first such row.
        RuntimeError: The hook raised another exception, or its result has another form.
    """
    given, copies = len(rows), [dict(row) for row in rows]
    try:
        result = hook(rows) if inputs is None else hook(rows, inputs=inputs)
    except BaseException as error:  # sys.exit() in a hook must not end the step
        index, cause = _first_failure(hook, copies, inputs) or (None, error)
        if isinstance(cause, ValueError):
            raise RequestError(
                f"hooks.{name}", "rejected the request", str(cause), "Correct the request", index
            ) from error
        raise HookFailure(f"hooks.{name} raised {type(cause).__name__}: {cause}", index) from error
    if not isinstance(result, list) or len(result) != given:
        count = len(result) if isinstance(result, list) else type(result).__name__
        raise RuntimeError(f"hooks.{name} must return {given} rows, returned {count}")
    for row in result:
        if not isinstance(row, dict) or row.keys() != set(keys):
            found = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise RuntimeError(f"hooks.{name} must return rows with {list(keys)}, found {found}")
    return result


def _first_failure(
    hook: Hook, rows: list[Row], inputs: list[Row] | None
) -> tuple[int, BaseException] | None:
    """Return the first row for which a hook raises alone, with its exception; None for none."""
    for index, row in enumerate(rows):
        try:
            if inputs is None:
                hook([row])
            else:
                hook([row], inputs=inputs[index : index + 1])
        except BaseException as error:
            return index, error
    return None


def call_before(
    hook: Hook, rows: list[Row], fields: Sequence[str], *, encoded: Sequence[str]
) -> list[Row]:
    """Return the result of `before` on rows of inputs: bytes for `encoded` fields, otherwise str.

    Raises:
        RequestError: The hook raised ValueError; the error has its message.
        RuntimeError: The hook raised another exception, or its result has another form.
    """
    result = call_hook("before", hook, rows, fields)
    for row in result:
        for field in fields:
            wanted = bytes if field in encoded else str
            if not isinstance(row[field], wanted):
                found = type(row[field]).__name__
                raise RuntimeError(
                    f"hooks.before must return {wanted.__name__} as `{field}`, not {found}"
                )
    return result


class RowForm:
    """Converter between the ensemble's outputs and the rows of `after` and `decode`.

    Args:
        outputs: Name, dtype, dims (without the batch) and ``json`` (whether elements are JSON).
    """

    def __init__(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        self._outputs = outputs
        self.names = [output["name"] for output in outputs]

    def rows(self, tensors: Mapping[str, NDArray[np.generic]]) -> list[Row]:
        """Return each row as a dict of scalars (dims [1]), lists of str, or arrays of numbers.

        Outputs that `after` adds are left out before it has run.
        """
        count = len(tensors[self.names[0]])
        known = [output for output in self._outputs if output["name"] in tensors]
        columns = {o["name"]: self._column(o, tensors[o["name"]]) for o in known}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]

    def tensors(self, rows: Sequence[Row]) -> dict[str, NDArray[np.generic]]:
        """Return the outputs of `rows`, each ``[len(rows), …]``.

        Raises:
            RuntimeError: A value does not fit the output.
        """
        return {o["name"]: self._tensor(o, [row[o["name"]] for row in rows]) for o in self._outputs}

    @staticmethod
    def _column(output: Mapping[str, Any], tensor: NDArray[np.generic]) -> list[Any]:
        if output["dtype"] == "BYTES":
            texts = [[item.decode("utf-8") for item in row.flat] for row in tensor]
            if output["json"]:
                texts = [[json.loads(text) for text in row] for row in texts]
            return [row[0] for row in texts] if output["dims"] == [1] else texts
        if output["dims"] == [1]:
            return [row.item() for row in tensor]
        return list(tensor)

    @staticmethod
    def _tensor(output: Mapping[str, Any], values: Sequence[Any]) -> NDArray[np.generic]:
        name, dims = output["name"], output["dims"]
        if dims == [1]:
            values = [[value] for value in values]
        try:
            result = (
                _texts(values, as_json=output["json"])
                if output["dtype"] == "BYTES"
                else cast_numbers(np.array(values), NUMPY_TYPES[output["dtype"]])
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise RuntimeError(
                f"hooks: `{name}` has a value that does not fit the output: {error}"
            ) from error
        wanted = [len(values), *dims]
        fits = result.ndim == len(wanted) and all(
            want in (-1, has) for want, has in zip(wanted, result.shape, strict=True)
        )
        if not fits:
            raise RuntimeError(
                f"hooks: `{name}` must have the shape {wanted}, it has {list(result.shape)}"
            )
        return result


def _texts(rows: Sequence[Any], *, as_json: bool) -> NDArray[np.object_]:
    """Return rows of texts, or of data for JSON, as bytes; a row must be a list, not a str."""
    for row in rows:
        if not isinstance(row, list | tuple | np.ndarray):
            raise TypeError(f"a row must be a list of str, not {type(row).__name__} {row!r:.40}")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(f"rows must be equally long, they have {lengths} elements")
    result = np.empty((len(rows), lengths[0]), dtype=np.object_)
    for index, row in enumerate(rows):
        result[index] = [_encoded(item, as_json=as_json) for item in row]
    return result


def cast_numbers(array: NDArray[np.generic], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Return numbers as `dtype`.

    Raises:
        TypeError: The elements are of another kind, such as floats for integers.
        ValueError: An integer is out of the range of `dtype`.
    """
    if array.dtype == dtype:
        return array
    same = np.can_cast(array.dtype, dtype, "same_kind")
    is_int = np.issubdtype(dtype, np.integer) and array.dtype.kind in "iu"
    is_float = np.issubdtype(dtype, np.floating) and array.dtype.kind in "iu"
    if array.size and not (same or is_int or is_float):
        given = "text" if array.dtype.kind in "US" else array.dtype
        raise TypeError(f"must have elements of type {dtype.__name__}, not {given}")
    result = array.astype(dtype)
    if is_int and (bad := result != array).any():
        limits = np.iinfo(dtype)  # type: ignore[type-var]
        words = f"{dtype.__name__}, from {limits.min} to {limits.max}"
        raise ValueError(f"must have elements of type {words}, not {array[bad][0]}")
    return result


def _encoded(item: Any, *, as_json: bool) -> bytes:
    if not as_json and not isinstance(item, str):
        raise TypeError(f"elements must be str, not {type(item).__name__} {item!r:.40}")
    text = json.dumps(item, ensure_ascii=False, allow_nan=False) if as_json else item
    return str(text).encode("utf-8")


FORWARDED_PREFIX = "forwarded_"
"""Prefix of the tensors with forwarded inputs between preprocess and postprocess."""


def make_forwarded(
    columns: Mapping[str, Sequence[str | bytes]], count: int
) -> dict[str, NDArray[np.object_]]:
    """Return the inputs as BYTES ``[count, 1]`` each: the request's rows, then empty values."""
    tensors = {}
    for name, values in columns.items():
        tensor = np.full((count, 1), b"", dtype=np.object_)
        for row, value in enumerate(values):
            tensor[row, 0] = value.encode() if isinstance(value, str) else value
        tensors[FORWARDED_PREFIX + name] = tensor
    return tensors


def read_forwarded(
    columns: Mapping[str, Sequence[bytes]], contents: Mapping[str, str], count: int
) -> list[dict[str, Any]]:
    """Return the request's rows of forwarded inputs: bytes for images, else str.

    Args:
        columns: One value per model row for each input.
        contents: ``text`` or ``image`` for each input.
        count: Number of rows of the request.
    """
    return [
        {
            name: columns[name][row] if content == "image" else columns[name][row].decode()
            for name, content in contents.items()
        }
        for row in range(count)
    ]
