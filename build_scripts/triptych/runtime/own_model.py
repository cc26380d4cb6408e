"""Call the functions of a pipeline around the user's own model, with typed rows.

`preprocess` makes the core's inputs from the rows of a request, and `postprocess` makes the outputs
from those of the core. Without a function, tensors of the same name are passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bucketing import pad_tensors
from .hooking import FORWARDED_PREFIX, NUMPY_TYPES, cast_numbers, find_hook
from .request_errors import RequestError, StepError
from .row_types import Arrays, CoreRows, Metadata, Parameters, RowInputs

ROW_TYPES = "row_types"
"""Parameter of the ensemble's config: the declared type of each input, as JSON."""
ROW_COUNTS = "row_counts"
"""Tensor INT32 ``[core rows, 1]``: the number of core rows of each row, then zeros."""

Column = list[Any] | NDArray[np.generic]
"""One value per row: a list of `str` or `bytes`, or an array ``[rows, ...]``."""


class OwnInputs:
    """Reader of the inputs of a request by their declared types.

    Args:
        settings: Settings of the step; ``own_inputs`` has the fields of each input in the spec, and
            its dtype.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._fields: Mapping[str, Mapping[str, Any]] = settings["own_inputs"]
        self._bounds = {name: read_bounds(each["bounds"]) for name, each in self._fields.items()}

    def read(self, inputs: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of a request, with defaults, from its tensors by name.

        Raises:
            RequestError: A value breaks the rules of its input.
        """
        return self.columns({n: inputs[n].as_numpy() for n in self._fields if n in inputs})

    def columns(self, arrays: Arrays) -> dict[str, Column]:
        """Return the columns of arrays ``[rows, ...]``; see `read`."""
        given = {name: self._column(name, array) for name, array in arrays.items()}
        count = len(next(iter(given.values())))
        return {
            name: given[name] if name in given else self._default(name, count)
            for name in self._fields
        }

    def _default(self, name: str, count: int) -> Column:
        field = self._fields[name]
        value = make_array(field, [field["default"]] * count)
        return self._column(name, value)

    def _column(self, name: str, array: NDArray[np.generic]) -> Column:
        field = self._fields[name]
        if not array.size:  # see `overflow`
            raise RequestError(name, "must have elements", "none", "Correct the shape of the input")
        if field["max_items"] is not None and array[0].size > field["max_items"]:
            rule = f"must have at most {field['max_items']} elements in each row"
            raise RequestError(name, rule, array[0].size, "Send fewer elements", 0)
        if array.dtype == np.object_:
            return _read_elements(name, array, field)
        if array[0].nbytes > field["max_bytes"]:
            raise _too_large(name, field, array[0].nbytes, 0)
        if field["type"] == "float" and not field["allow_nan"]:
            bad = ~np.isfinite(array).reshape(len(array), -1)
            if bad.any():
                row = int(bad.any(axis=1).argmax())
                value = array.reshape(len(array), -1)[row][bad[row]][0]
                remedy = "Send a number, or set allow_nan for the input in the pipeline"
                raise RequestError(name, "must have finite numbers", value, remedy, row)
        check_range(name, array, self._bounds[name])
        if field["choices"]:
            bad = ~np.isin(array, np.array(field["choices"], array.dtype))
            rule = f"must be one of {', '.join(map(str, field['choices']))}"
            _refuse_elements(name, rule, array, bad)
        return array if field["shape"] else array.reshape(-1)


def read_bounds(given: object) -> NDArray[np.float64]:
    """Return bounds ``[2, ...]`` of a setting, with infinity in place of null."""
    bounds = np.array(given, np.float64)
    none = np.array([-np.inf, np.inf]).reshape(2, *[1] * (bounds.ndim - 1))
    return np.where(np.isnan(bounds), none, bounds)


def check_range(name: str, array: NDArray[np.generic], bounds: NDArray[np.generic]) -> None:
    """Check numbers ``[rows, ...]`` by bounds ``[2, ...]``, which are infinite without a limit.

    Raises:
        RequestError: A number is out of its range, or is NaN where it has one.
    """
    low, high = bounds
    bad = (array < low) | (array > high)
    if array.dtype.kind == "f":
        bad |= np.isnan(array) & (np.isfinite(low) | np.isfinite(high))
    if bad.any():
        place = np.unravel_index(bad.argmax(), bad.shape)
        least, most = (f"{np.broadcast_to(each, bad.shape)[place]:.6g}" for each in bounds)
        rule = {"-inf": f"must be at most {most}"}.get(least, f"must be from {least} to {most}")
        _refuse_elements(name, f"must be at least {least}" if most == "inf" else rule, array, bad)


def _refuse_elements(
    name: str, rule: str, array: NDArray[np.generic], bad: NDArray[np.bool_]
) -> None:
    """Raise an error that names the first of the `bad` elements ``[rows, ...]``, if any is."""
    if bad.any():
        row, *place = map(int, np.unravel_index(bad.argmax(), bad.shape))
        at = f" at {place}" if place and array[0].size > 1 else ""
        given = f"{array[(row, *place)]}{at}"
        raise RequestError(name, rule, given, "Send a value in the range", row)


def _read_elements(name: str, array: NDArray[np.generic], field: Mapping[str, Any]) -> Column:
    """Return the elements of a BYTES input: bytes, or texts that are valid UTF-8."""
    count = len(array)
    for row, values in enumerate(array.reshape(count, -1)):
        size = sum(map(len, values))
        if size > field["max_bytes"]:
            raise _too_large(name, field, size, row)
    if field["type"] == "bytes":
        return array if field["shape"] else array.ravel().tolist()
    texts = np.empty(array.size, np.object_)
    for index, data in enumerate(array.ravel()):
        try:
            texts[index] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            given = f"byte 0x{data[error.start]:02x} at position {error.start}"
            row = index * count // array.size
            remedy = "Encode the text as UTF-8"
            raise RequestError(name, "must be valid UTF-8", given, remedy, row) from error
    return texts.reshape(array.shape) if field["shape"] else texts.tolist()


def _too_large(name: str, field: Mapping[str, object], size: int, row: int) -> RequestError:
    rule = f"must have at most {field['max_bytes']} bytes"
    remedy = "Send a smaller value, or raise max_bytes of the input in the pipeline"
    return RequestError(name, rule, f"{size} bytes", remedy, row)


def make_array(field: Mapping[str, Any], values: Sequence[Any] | Column) -> NDArray[np.generic]:
    """Return one value per row as the tensor of an input or output, ``[rows, ...]``.

    Rows of unequal size are filled up with 0, false or an empty text.

    Args:
        field: Declaration of the input or output, with ``type``, ``dtype`` and ``shape``.
        values: Plain values, lists or arrays.

    Raises:
        TypeError: An element has another type.
        ValueError: A value has another shape, or an element is out of range.
    """
    shape, is_text = field["shape"], field["dtype"] == "BYTES"
    dtype = NUMPY_TYPES[field["dtype"]]
    if isinstance(values, np.ndarray) and values.ndim == 1 + len(shape) and not is_text:
        array = cast_numbers(values, dtype)
        _check_shape(array.shape[1:], shape)
    else:
        rows = [_row_array(value, field, dtype) for value in values]
        sizes = tuple(max(row.shape[axis] for row in rows) for axis in range(len(shape)))
        array = np.full((len(rows), *sizes), b"" if is_text else 0, dtype)
        for target, row in zip(array, rows, strict=True) if shape else ():
            target[tuple(slice(size) for size in row.shape)] = row
        if not shape:
            array[:] = [row[()] for row in rows]
    return np.ascontiguousarray(array) if shape else array.reshape(-1, 1)


def _row_array(
    value: Any, field: Mapping[str, Any], dtype: type[np.generic]
) -> NDArray[np.generic]:
    shape = field["shape"]
    if field["dtype"] == "BYTES":
        if not shape:
            array = np.empty((), np.object_)
            array[()] = _encode(value, field["type"])
            return array
        array = np.array(value, dtype=np.object_)
        if not array.size:
            return np.empty([0 if isinstance(size, str) else size for size in shape], np.object_)
        encoded = [_encode(item, field["type"]) for item in array.ravel()]
        flat = np.empty(array.size, np.object_)
        flat[:] = encoded
        _check_shape(array.shape, shape)
        return flat.reshape(array.shape)
    numbers = np.asarray(value)
    if not numbers.size and numbers.ndim < len(shape):
        numbers = np.empty([0 if isinstance(size, str) else size for size in shape], dtype)
    numbers = cast_numbers(numbers, dtype)
    _check_shape(numbers.shape, shape)
    return numbers


def _encode(item: object, kind: str) -> bytes:
    if isinstance(item, str) and kind == "text":
        return item.encode("utf-8")
    if isinstance(item, bytes):
        return item
    raise TypeError(f"must have elements of type {kind}, not {type(item).__name__} {item!r:.40}")


def _check_shape(found: Sequence[int], wanted: Sequence[int | str]) -> None:
    fits = len(found) == len(wanted) and all(
        isinstance(want, str) or want == has for want, has in zip(wanted, found, strict=True)
    )
    if not fits:
        raise ValueError(f"must have the shape {list(wanted)} in each row, it has {list(found)}")


Function = Callable[..., Any]


def call_function(name: str, function: Function, arguments: Mapping[str, object]) -> object:
    """Return the result of a function of the user, called with the arguments that it takes.

    Raises:
        RequestError: The function raised ValueError with a message and, optionally, the row.
        RuntimeError: The function raised another exception.
    """
    taken = inspect.signature(function).parameters
    try:
        return function(**{key: value for key, value in arguments.items() if key in taken})
    except StepError:
        raise
    except ValueError as error:
        message = str(error.args[0]) if error.args else "no reason given"
        is_row = len(error.args) == 2 and isinstance(error.args[1], int)
        row = max(0, error.args[1]) if is_row else None
        raise RequestError(
            f"hooks.{name}", "rejected the request", message, "Correct the request", row
        ) from error
    except BaseException as error:  # sys.exit() in a function must not end the step
        raise RuntimeError(f"hooks.{name} raised {type(error).__name__}: {error}") from error


class OwnRowMaker:
    """Batch encoder that calls `preprocess` for each request.

    Args:
        settings: Settings of the step; ``core_inputs`` and ``past_core`` have the dtype and dims of
            each tensor. Without ``past_core``, all further arrays of `preprocess` are returned.
        folder: Folder of ``hooks.py``.

    Attributes:
        core_inputs: The dtype and dims of each input of the core.
    """

    min_count = 1
    """Smallest number of core rows of a row."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.name: str = settings.get("function", "preprocess")
        self._function: Function | None = find_hook(folder, self.name)
        self.core_inputs: Mapping[str, Mapping[str, Any]] = settings["core_inputs"]
        self._past_core: Mapping[str, Mapping[str, Any]] | None = settings.get("past_core")
        self._fields: Mapping[str, Mapping[str, Any]] = settings["own_inputs"]
        self._max_rows: int = settings["max_core_rows"]
        self._has_counts: bool = settings.get("has_counts", False)
        self._takes_rows: bool = settings.get("takes_rows", False)
        self._axis: Mapping[str, Any] = settings["padded_axis"]
        self._edges: Sequence[int] = settings.get("bucket_edges", ())
        self._bounds = {name: read_bounds(each) for name, each in settings["ranges"].items()}

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """Return the core's tensors of each request, or its error."""
        made: list[CoreRows | Exception] = []
        for request in requests:
            try:
                made.append(self._make(request))
            except Exception as error:
                made.append(error)
        return made

    def _make(self, request: RowInputs) -> CoreRows:
        rows = request.columns
        count = len(next(iter(rows.values())))
        if self._function is None:
            known = [name for name in self.core_inputs if name in rows]
            result, counts = (
                {name: make_array(self._fields[name], rows[name]) for name in known},
                None,
            )
        else:
            arguments = {"rows": rows, "parameters": request.parameters}
            result, counts = self._call(self._function, arguments, count)
        if (counts is not None) is not self._has_counts and self._past_core is not None:
            raise RuntimeError("hooks.preprocess must return counts always or never")
        total = self._count(count, counts)
        tensors = self._check(result, total)
        self.check_ranges(tensors, counts)
        if counts is not None:
            rest = [0] * (total - count)
            tensors[ROW_COUNTS] = np.array([*counts, *rest], np.int32).reshape(-1, 1)
        if self._takes_rows:
            tensors |= self._forwarded(rows, total - count)
        return self._padded(tensors) if self._axis.get("of") else CoreRows(tensors)

    def check_ranges(self, tensors: Arrays, counts: Sequence[int] | None) -> None:
        """Check the inputs of the core by the ranges of its tables, before padding.

        Raises:
            RequestError: A number is out of its range; the error names the row of the request.
        """
        for name, bounds in self._bounds.items():
            try:
                check_range(name, tensors[name], bounds)
            except RequestError as error:
                if counts is not None:
                    ends = np.cumsum(counts)
                    row = int(np.searchsorted(ends, error.numbers["row"], side="right"))
                    error.numbers["row"] = row
                raise

    def _padded(self, tensors: dict[str, NDArray[np.generic]]) -> CoreRows:
        """Return the rows with their free axis filled up to a planned size."""
        of: Mapping[str, int] = self._axis["of"]
        sizes = {name: tensors[name].shape[axis] for name, axis in of.items()}
        size, most = max(sizes.values()), self._axis["max"]
        if len(set(sizes.values())) > 1:
            raise RuntimeError(
                f"hooks.{self.name} must return arrays of one size, returned {sizes}"
            )
        if size > most:
            rule = f"must become at most {most} along the free axis of the model"
            remedy = "Send a shorter value, or cut it in preprocess"
            raise RequestError(next(iter(self._fields)), rule, size, remedy)
        size = max(size, self._axis["min"])
        width = next((edge for edge in self._edges if edge >= size), size)
        rows = CoreRows(tensors, width, of)
        return rows._replace(tensors=pad_tensors(rows, width))

    def _call(
        self, function: Function, arguments: Mapping[str, object], count: int
    ) -> tuple[dict[str, Any], list[int] | None]:
        """Return the arrays of the function, and the number of core rows of each row if given."""
        result, counts = call_function(self.name, function, arguments), None
        if isinstance(result, tuple) and len(result) == 2:
            result, counts = result[0], [int(each) for each in result[1]]
            if len(counts) != count or min(counts) < self.min_count:
                raise RuntimeError(
                    f"hooks.{self.name} must return a count of at least {self.min_count} for each "
                    f"of {count} rows, returned {counts!r:.80}"
                )
        if not isinstance(result, dict):
            found = type(result).__name__
            raise RuntimeError(f"hooks.{self.name} must return a dict of arrays, returned {found}")
        return result, counts

    def _count(self, count: int, counts: Sequence[int] | None) -> int:
        """Return the number of core rows of a request.

        Raises:
            RequestError: There are too many.
        """
        total = count if counts is None else sum(counts)
        if total > self._max_rows:
            raise RequestError(
                next(iter(self._fields)),
                f"must become at most {self._max_rows} rows of the core in one request",
                total,
                "Send fewer or smaller rows in one request",
            )
        return total

    def _forwarded(
        self, rows: Mapping[str, Column], missing: int
    ) -> dict[str, NDArray[np.generic]]:
        """Return the inputs as tensors, with `missing` empty rows at the end."""
        tensors = {}
        for name, values in rows.items():
            array = make_array(self._fields[name], values)
            fill = b"" if array.dtype == np.object_ else 0
            rest = np.full((missing, *array.shape[1:]), fill, array.dtype)
            tensors[FORWARDED_PREFIX + name] = np.concatenate([array, rest])
        return tensors

    def _check(self, result: Mapping[str, object], total: int) -> dict[str, NDArray[np.generic]]:
        """Return the arrays in the form of their tensors, ``[total, ...]`` each."""
        known = {**self.core_inputs, **(self._past_core or {})}
        made = {ROW_COUNTS, *(FORWARDED_PREFIX + name for name in self._fields)}
        wanted = [name for name in known if name not in made]
        missing = [name for name in wanted if name not in result]
        strange = [n for n in result if n not in known] if self._past_core is not None else []
        if missing or strange:
            raise RuntimeError(
                f"hooks.{self.name} must return arrays with the names {', '.join(wanted)}, "
                f"returned {', '.join(map(str, result)) or 'none'}"
            )
        tensors = {}
        for name, value in result.items():
            array = np.asarray(value)
            if name in known:
                dims = known[name]["dims"]
                if array.ndim == 1 and list(dims) == [1]:
                    array = array[:, None]
                fits = array.ndim == 1 + len(dims) and all(
                    want in (-1, has) for want, has in zip(dims, array.shape[1:], strict=True)
                )
                if not fits or len(array) != total:
                    raise RuntimeError(
                        f"hooks.{self.name}: `{name}` must have the shape {[total, *dims]}, it has "
                        f"{list(array.shape)}"
                    )
                try:
                    array = cast_numbers(array, NUMPY_TYPES[known[name]["dtype"]])
                except (TypeError, ValueError) as error:
                    raise RuntimeError(f"hooks.{self.name}: `{name}` {error}") from error
            elif len(array) != total:
                raise RuntimeError(
                    f"hooks.{self.name}: `{name}` must have {total} rows, it has "
                    f"{list(array.shape)}"
                )
            tensors[name] = np.ascontiguousarray(array)
        return tensors


class CoreResults:
    """Reader of the results of cores and of the tensors that go past them.

    Args:
        settings: Settings of the step; see `OwnRowMaker`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._reader = OwnInputs(settings) if settings.get("takes_rows") else None
        self._labels = {
            name: np.array(texts, np.object_) for name, texts in settings.get("labels", {}).items()
        }

    def read(self, outputs: Arrays) -> tuple[dict[str, object], int]:
        """Return the arguments of a function except the parameters, and the number of rows."""
        arrays, arguments = dict(outputs), dict[str, Any]()
        count = len(next(iter(arrays.values())))
        if ROW_COUNTS in arrays:
            counts = arrays.pop(ROW_COUNTS).ravel()
            count = int(np.count_nonzero(counts))
            arguments["counts"] = counts[:count].tolist()
        return arguments | self.split(arrays, count), count

    def split(self, arrays: dict[str, NDArray[np.generic]], count: int) -> dict[str, object]:
        """Return arrays and, if the functions take them, the inputs of `count` rows.

        Numbers of labels that are texts become these texts.
        """
        arrays |= {name: texts[arrays[name]] for name, texts in self._labels.items()}
        forwarded = [name for name in arrays if name.startswith(FORWARDED_PREFIX)]
        sent = {n.removeprefix(FORWARDED_PREFIX): arrays.pop(n)[:count] for n in forwarded}
        rows = {} if self._reader is None else {"rows": self._reader.columns(sent)}
        return {"arrays": arrays, **rows}


class OwnDecoder:
    """Decoder that calls `postprocess` for each request.

    Args:
        settings: Settings of the step; see `OwnRowMaker`. ``own_outputs`` declares the outputs.
        folder: Folder of ``hooks.py``.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._function: Function | None = find_hook(folder, "postprocess")
        self._fields: Mapping[str, Mapping[str, Any]] = settings["own_outputs"]
        self._results = CoreResults(settings)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the declared outputs, ``[rows, ...]`` each."""
        arguments, count = self._results.read(outputs)
        result: Any = arguments["arrays"]
        if self._function is not None:
            arguments["parameters"] = parameters
            result = call_function("postprocess", self._function, arguments)
        else:
            if len(result) == len(self._fields) == 1:  # whatever the model calls it
                result = dict(zip(self._fields, result.values(), strict=True))
            missing = [name for name in self._fields if name not in result]
            if missing:
                raise RuntimeError(
                    f"the model must return the outputs, {missing[0]} is not among "
                    f"{', '.join(result)}: name them in model.outputs (of a module), or make them "
                    "in hooks.postprocess"
                )
        if not isinstance(result, dict) or (
            self._function is not None and result.keys() != self._fields.keys()
        ):
            found = sorted(map(str, result)) if isinstance(result, dict) else type(result).__name__
            raise RuntimeError(
                f"hooks.postprocess must return a dict with {list(self._fields)}, returned {found}"
            )
        return {name: self._output(name, result[name], count) for name in self._fields}

    def _output(self, name: str, values: Any, count: int) -> NDArray[np.generic]:
        try:
            if len(values) != count:
                raise ValueError(f"must have {count} rows, it has {len(values)}")
            field = self._fields[name]
            if not field["shape"] and np.shape(values)[1:] == (1,):
                values = np.reshape(values, -1)
            return make_array(field, values)
        except (TypeError, ValueError, OverflowError) as error:
            raise RuntimeError(f"hooks.postprocess: `{name}` {error}") from error
