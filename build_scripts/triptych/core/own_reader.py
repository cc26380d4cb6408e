"""Make requests of a pipeline around the user's own model, as its preprocess step will."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError, closest
from triptych.core.gate_rows import EDGE_TEXTS, make_bitmap, probe_texts
from triptych.core.own_chain import Chain, rows_of_model
from triptych.core.reader import check_line
from triptych.core.requests import GateRequest, hash_inputs, preview_text
from triptych.models.info import ModelInfo, ModelNames, OwnInterface, OwnStage, info_of_interface
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.own_model import OwnInputs, OwnRowMaker, make_array
from triptych.runtime.own_step import OwnStep
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import Arrays, CoreRows, RowInputs
from triptych.spec.model_fields import PREPROCESS, InputField, ModelSpec
from triptych.spec.own_task import step_settings
from triptych.spec.traffic import PARAMETERS, require_lines
from triptych.tasks.task import Task

_DEVICE_ROWS = 8
"""Number of rows for the check on the device that serves."""
_ROWS_OF_CATEGORY = 3
"""Minimum mean number of rows with the same text if the text is the name of a category."""


class OwnReader:
    """Makes requests of a pipeline around the user's own model, as its preprocess step will.

    Args:
        info: Information on the model, for `accepted`.
        chain: Functions and models of a pipeline with several models; else None.

    Attributes:
        parameters: Defaults of the request parameters.
    """

    def __init__(
        self,
        spec: ModelSpec,
        task: Task,
        info: ModelInfo | None = None,
        chain: Chain | None = None,
    ) -> None:
        self._spec = spec
        self._task = task
        self._info = info
        self._chain = chain
        self._rules = {name: field.rule.as_dict() for name, field in spec.parameters.items()}
        self.parameters = {name: field.default for name, field in spec.parameters.items()}
        self._fields = {name: field.as_dict() for name, field in spec.inputs.items()}
        self._reader = OwnInputs({"own_inputs": self._fields})

    def read(self, path: Path) -> list[GateRequest]:
        """Return the request of each line, without core rows.

        Raises:
            UserError: A line is not an object with a value of the right type for each input.
        """
        fields = self._spec.inputs
        form = "{" + ", ".join(f'"{name}": {_example(f)}' for name, f in fields.items()) + "}"
        requests = []
        for number, line, row in require_lines(path, form):
            where = f"{path}:{number}"
            if row is None:
                raise _bad_line(where, "must be a JSON object with the inputs", line[:80], form)
            own = row.pop(PARAMETERS, {})
            if not isinstance(own, dict):
                raise _bad_line(f"{where}: {PARAMETERS}", "must be an object", own, form)
            if strange := [name for name in row if name not in fields]:
                rule = "is not an input of the pipeline"
                remedy = f"{closest(strange[0], fields)}Write {form}"
                raise UserError(f"{where}: {strange[0]}", rule, given=line[:80], remedy=remedy)
            preview = preview_text(row)
            try:
                sent = {name: self._value(name, value) for name, value in row.items()}
                requests.append(
                    self.request(
                        sent, check_line(where, own, self._rules, self.parameters), preview
                    )
                )
            except (RequestError, TypeError, ValueError, OSError) as error:
                raise _bad_line(where, "has an invalid input", error, form) from error
        return requests

    def request(
        self,
        sent: Mapping[str, object],
        parameters: Mapping[str, object],
        preview: str,
        *,
        edge: bool = False,
    ) -> GateRequest:
        """Return a request without core rows.

        Raises:
            RequestError: A value breaks the rules of its input.
            TypeError: A value has another type.
            ValueError: An input is missing, or a value has another shape.
        """
        missing = [n for n, f in self._spec.inputs.items() if f.default is None and n not in sent]
        if missing:
            raise ValueError(f"`{missing[0]}` is required")
        arrays = {}
        for name, value in sent.items():
            try:
                arrays[name] = make_array(self._fields[name], [value])
            except (TypeError, ValueError) as error:
                raise type(error)(f"`{name}` {error}") from error
        columns = self._reader.columns({n: arrays[n] for n in self._fields if n in arrays})
        return GateRequest(sent, sent, parameters, (), (), edge, preview, columns)

    def read_sent(
        self, sent: Mapping[str, object], parameters: Mapping[str, object], preview: str
    ) -> GateRequest | None:
        """Return a request that a server received, without core rows; None if it is rejected."""
        try:
            checked = check_line(preview, parameters, self._rules, self.parameters)
            return self.request(sent, checked, preview)
        except (UserError, RequestError, TypeError, ValueError):
            return None

    def accepted(self, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Return those `requests` that `preprocess` accepts, with their core rows."""
        if self._info is None:
            raise ValueError("the reader needs the information on the model")
        if self._chain is not None:
            return self._chain.accepted(requests)
        maker = self.maker(self._info)
        made = maker.make([request.row_inputs for request in requests])
        names = ModelNames("", {name: name for name in maker.core_inputs}, {})
        return [
            _with_core(request, rows, maker, names)
            for request, rows in zip(requests, made, strict=True)
            if not isinstance(rows, Exception)
        ]

    def key(self, row: Mapping[str, object]) -> str:
        """Return the hash of a line's inputs, which is equal for equal numbers and defaults.

        Raises:
            ValueError: A value breaks the rules of its input.
        """
        sent = {name: row[name] for name in self._fields if name in row}
        columns = self.request(sent, {}, "").columns or {}
        return hash_inputs({name: np.asarray(each).tolist() for name, each in columns.items()})

    def encode(self, sent: Mapping[str, object]) -> dict[str, object]:
        """Return inputs with numbers and lists as arrays without the batch, for load tests."""
        return {
            name: value
            if isinstance(value, str | bytes)
            else make_array(self._fields[name], [value])[0]
            for name, value in sent.items()
        }

    def named(self, request: GateRequest, names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Return the inputs of a request that have one of the `names`, ``[1, ...]`` each."""
        columns = request.columns or {}
        known = [name for name in names if name in columns]
        return {name: make_array(self._fields[name], columns[name]) for name in known}

    def join(self, requests: Sequence[GateRequest]) -> RowInputs:
        """Return the inputs of one request with the rows of several that have equal parameters."""
        arrays = {
            name: make_array(
                field, [request.sent.get(name, field["default"]) for request in requests]
            )
            for name, field in self._fields.items()
        }
        return RowInputs(self._reader.columns(arrays), requests[0].parameters)

    def maker(self, info: ModelInfo) -> OwnRowMaker:
        """Return the batch encoder of the pipeline."""
        return OwnRowMaker(self._settings(info), self._spec.folder)

    def discover(self, own: OwnInterface, requests: Sequence[GateRequest]) -> list[CoreRows]:
        """Return what `preprocess` makes of requests before all tensors are known.

        Raises:
            UserError: `preprocess` fails, or its arrays do not fit the graph.
        """
        settings = self._settings(info_of_interface(own))
        del settings["past_core"]
        maker = OwnRowMaker(settings, self._spec.folder)
        return [made for _, made in self._made(maker, requests)]

    def step(self, stage: OwnStage) -> OwnStep:
        """Return a function between models."""
        settings = step_settings(self._spec, info_of_interface(stage.own), stage)
        return OwnStep(settings, self._spec.folder)

    def call(self, step: OwnStep, request: GateRequest, results: Arrays) -> CoreRows:
        """Return what a function between models makes of results.

        Raises:
            UserError: The function fails.
        """
        try:
            return CoreRows(dict(step.decode(results, (), request.parameters)))
        except (RequestError, RuntimeError) as error:
            raise self._failure(step.name, request, error) from error

    def with_rows(
        self, maker: OwnRowMaker, requests: Sequence[GateRequest], names: ModelNames
    ) -> list[GateRequest]:
        """Return requests with the core rows of the first model.

        Raises:
            UserError: `preprocess` fails on a request.
        """
        return [
            _with_core(request, made, maker, names) for request, made in self._made(maker, requests)
        ]

    def edge_cases(
        self,
        maker: OwnRowMaker,
        example: GateRequest,
        traffic: Sequence[Mapping[str, object]],
        names: ModelNames,
    ) -> list[GateRequest]:
        """Return requests with unusual texts and numbers, as far as the pipeline accepts them."""
        edges = (
            (kind, {**example.sent, name: value})
            for name, kind, value in self._edge_values(traffic)
        )
        return self._synthetic(maker, edges, example.parameters, names)

    def device_rows(
        self, maker: OwnRowMaker, traffic: Sequence[Mapping[str, object]], names: ModelNames
    ) -> list[GateRequest]:
        """Return requests without values of the traffic, as far as the pipeline accepts them.

        Texts are those of the general probe, unless the traffic repeats a few: these are names of
        categories, which functions may require. Files are small images. Numbers are drawn from the
        range of the traffic, in the shape of its first row. Other inputs have their default.
        """
        drawn = np.random.default_rng(0)
        rows = []
        for row in range(_DEVICE_ROWS):
            sent: dict[str, object] = {}
            for name, field in self._spec.inputs.items():
                known = [np.asarray(each[name]) for each in traffic if name in each]
                if field.type == "bytes" and not field.shape:
                    sent[name] = make_bitmap(64 + row, 48)
                elif field.type == "text" and not field.shape and known:
                    kinds = sorted({str(each) for each in known})
                    few = len(kinds) * _ROWS_OF_CATEGORY <= len(known)
                    sent[name] = kinds[row % len(kinds)] if few else probe_texts()[row].text
                elif field.type in ("int", "float") and (extremes := _extremes(known)):
                    low, high = extremes
                    draw = drawn.integers if field.type == "int" else drawn.uniform
                    high = high + 1 if field.type == "int" else high
                    sent[name] = draw(low, high, known[0].shape).tolist()
            rows.append(("made up", sent))
        return self._synthetic(maker, rows, self.parameters, names)

    def _synthetic(
        self,
        maker: OwnRowMaker,
        rows: Iterable[tuple[str, Mapping[str, Any]]],
        parameters: Mapping[str, object],
        names: ModelNames,
    ) -> list[GateRequest]:
        """Return the requests of rows, each with its kind, that the pipeline accepts."""
        requests = []
        for kind, sent in rows:
            try:
                made = self.request(sent, parameters, f"{kind}: {preview_text(sent)}", edge=True)
                (core_rows,) = maker.make([made.row_inputs])
            except (RequestError, TypeError, ValueError):
                continue
            if not isinstance(core_rows, Exception):
                requests.append(_with_core(made, core_rows, maker, names))
        return requests

    def _edge_values(
        self, traffic: Sequence[Mapping[str, object]]
    ) -> Iterator[tuple[str, str, object]]:
        for name, field in self._spec.inputs.items():
            if field.type == "text" and not field.shape:
                yield from ((name, kind, text) for kind, text in EDGE_TEXTS.items())
            if field.type in ("int", "float"):
                known = [np.asarray(row[name]) for row in traffic if name in row]
                if known:
                    yield name, "zeros", np.zeros_like(known[0]).tolist()
                for kind, extreme in zip(("smallest", "largest"), _extremes(known), strict=False):
                    yield name, kind, np.full(known[0].shape, extreme).tolist()

    def _settings(self, info: ModelInfo) -> dict[str, object]:
        return {**self._task.settings(info), "max_core_rows": self._spec.max_rows(PREPROCESS)}

    def _made(
        self, maker: OwnRowMaker, requests: Sequence[GateRequest]
    ) -> Iterator[tuple[GateRequest, CoreRows]]:
        for request, made in zip(
            requests, maker.make([r.row_inputs for r in requests]), strict=True
        ):
            if isinstance(made, Exception):
                raise self._failure("preprocess", request, made) from made
            yield request, made

    def _failure(self, function: str, request: GateRequest, error: Exception) -> UserError:
        return UserError(
            str(self._spec.folder / HOOKS_FILE),
            f"has a function `{function}` that fails on {request.preview!r}",
            given=error,
            remedy="Correct the function, or remove the row from traffic.jsonl",
        )

    def _value(self, name: str, value: object) -> object:
        """Return a value as a client sends it: the content of the file for bytes."""
        if self._spec.inputs[name].type != "bytes":
            return value
        if not isinstance(value, str):
            raise TypeError(f"`{name}` must be the path of a file, not {value!r:.40}")
        return (self._spec.folder / value).read_bytes()


def _extremes(arrays: Sequence[NDArray[np.generic]]) -> tuple[Any, ...]:
    """Return the smallest and the largest finite number of arrays; nothing if there is none."""
    numbers = np.concatenate([np.zeros(0, np.int64), *(array.ravel() for array in arrays)])
    numbers = numbers[np.isfinite(numbers)]
    return (numbers.min(), numbers.max()) if numbers.size else ()


def _bad_line(where: str, rule: str, given: object, form: str) -> UserError:
    return UserError(where, rule, given=f"{given!s:.300}", remedy=f"Write {form}")


def _example(field: InputField) -> str:
    values = {
        "text": '"…"',
        "bytes": '"path of a file"',
        "int": "1",
        "float": "0.5",
        "bool": "true",
    }
    return "[" * len(field.shape) + values[field.type] + "]" * len(field.shape)


def _with_core(
    request: GateRequest, made: CoreRows, maker: OwnRowMaker, model: ModelNames
) -> GateRequest:
    names = maker.core_inputs
    past_core = {name: value for name, value in made.tensors.items() if name not in names}
    return replace(request, rows=rows_of_model(made.tensors, model), past_core=past_core)
