"""Read lines of a pipeline's files as requests, as its preprocess step will.

Images are read, hooks run, parameters checked and rows made. A request has three forms, all in
`GateRequest`: `sent` by a client, `inputs` after `hooks.before`, and the `rows` that its batch
encoder makes for the core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.base.tensors import TokenRow
from triptych.core.requests import GateRequest, preview_text
from triptych.models.info import ModelInfo
from triptych.runtime.hooking import Hook, call_before
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import RowMaker, find_class
from triptych.runtime.triton_io import check_parameters
from triptych.spec.plan import core_rows_of, max_length_of, row_settings
from triptych.spec.spec import EncoderSpec
from triptych.spec.traffic import Lengths, TrafficRow
from triptych.tasks.task import Task

if TYPE_CHECKING:
    from triptych.runtime.rows_text import TokenRowMaker  # Imports tokenizers.

UNLIMITED = 1 << 30

Rules = Mapping[str, Mapping[str, object]]
"""Allowed values of each request parameter, as plain data."""


class RequestReader:
    """Makes requests of a pipeline, as its preprocess step will.

    Args:
        tokenizer_folder: Folder with the ``tokenizer.json``; for images, any folder.
        before: The pipeline's function `hooks.before`, if it has one.

    Attributes:
        parameters: Defaults of the request parameters; the spec's override the task's.
        max_length: Maximum number of tokens in a core row.

    Raises:
        UserError: The spec's parameters are not the task's, or the length limit is too small.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        task: Task,
        info: ModelInfo,
        tokenizer_folder: Path,
        before: Hook | None,
    ) -> None:
        self._folder = spec.folder
        self._names = [tensor.name for tensor in task.inputs]
        self._images = [tensor.name for tensor in task.inputs if tensor.content == "image"]
        self._before = before
        known = task.parameters(info)
        self._rules: Rules = {name: rule.as_dict() for name, rule in known.items()}
        defaults = {
            name: list(rule.default) if isinstance(rule.default, tuple) else rule.default
            for name, rule in known.items()
            if rule.default is not None
        }
        self.parameters = check_line("parameters", spec.parameters, self._rules, defaults)
        self.max_length = max_length_of(spec, info, task)
        most = core_rows_of(spec, info, task)
        settings = row_settings(spec, info, task, max_core_rows=most)
        if self._images:
            self._images_maker: RowMaker = find_class(task.rows)(settings, tokenizer_folder)
            return
        settings |= {"bucket_edges": [], "overflow": "truncate"}
        unlimited = {**settings, "max_length": UNLIMITED, "max_core_rows": UNLIMITED}
        try:
            self._texts_maker: TokenRowMaker = find_class(task.rows)(settings, tokenizer_folder)
            self._untruncated: TokenRowMaker = find_class(task.rows)(unlimited, tokenizer_folder)
        except RequestError as error:
            raise UserError(
                "tokenizer.max_length", "is too small for the task", given=error, remedy="Raise it"
            ) from error

    @property
    def special_tokens(self) -> list[str]:
        """Special tokens of the tokenizer that a text may contain, by their ids.

        Empty for images.
        """
        if self._images:
            return []
        tokens = self._texts_maker.tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(tokens.items()) if token.special]

    def read(
        self, file: str, lines: Sequence[TrafficRow], *, with_rows: int | None = None
    ) -> list[GateRequest]:
        """Return the request of each line of `file`.

        Args:
            file: Path in the pipeline's folder, or an absolute path.
            lines: Lines of the file.
            with_rows: Number of first requests that get core rows; None for all.

        Raises:
            UserError: An image cannot be read, a hook rejects a line, a parameter is invalid, or
                the pipeline does not accept a request.
        """
        requests = [self._read_line(file, line) for line in lines]
        first = requests[:with_rows]
        for index, made in enumerate(self.with_rows(first)):
            if isinstance(made, Exception):
                raise UserError(
                    self._where(file, lines[index].line),
                    "has a request that the pipeline rejects",
                    given=made,
                    remedy="Correct the line",
                )
            requests[index] = made
        return requests

    def make_synthetic(
        self, sent: Mapping[str, str | bytes], parameters: Mapping[str, object], preview: str
    ) -> GateRequest | None:
        """Return a synthetic request without core rows; None if `hooks.before` rejects it."""
        try:
            return GateRequest(sent, self._after_hook(sent), parameters, (), (), True, preview)
        except Exception:  # the user's function need not support synthetic inputs
            return None

    def read_sent(
        self, sent: Mapping[str, str | bytes], parameters: Mapping[str, object], preview: str
    ) -> GateRequest | None:
        """Return a request that a server received, without core rows; None if it is rejected."""
        try:
            checked = check_line(preview, parameters, self._rules, self.parameters)
            return GateRequest(sent, self._after_hook(sent), checked, (), (), False, preview)
        except Exception:  # the user's own function may raise anything
            return None

    def accepted(self, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Return those `requests` that the batch encoder accepts, with their core rows.

        Requests with an empty row are omitted.
        """
        made = self.with_rows(requests)
        return [
            request
            for request in made
            if not isinstance(request, Exception) and all(map(_is_filled, request.rows))
        ]

    def untruncated_lengths(self, requests: Sequence[GateRequest]) -> list[list[int]]:
        """Return the tokens of each core row of each request without a limit.

        The list of a rejected request is empty.
        """
        made = self._untruncated.token_rows([request.row_inputs for request in requests])
        return [
            [] if isinstance(rows, Exception) else [len(row.ids) for row in rows] for rows in made
        ]

    def lengths(self, requests: Sequence[GateRequest]) -> Lengths:
        """Return the token lengths of the core rows before truncation."""
        lengths = [n for each in self.untruncated_lengths(requests) for n in each]
        rows = [row for request in requests for row in request.rows]
        # More rows than without a limit are windows, so nothing is truncated.
        if len(lengths) != len(rows):
            lengths = [len(row.ids) for row in rows if isinstance(row, TokenRow)]
        return Lengths.of(lengths, max_length=self.max_length)

    def _read_line(self, file: str, line: TrafficRow) -> GateRequest:
        where = self._where(file, line.line)
        sent: dict[str, str | bytes] = dict(line.inputs)
        for name in self._images:
            try:
                sent[name] = (self._folder / line.inputs[name]).read_bytes()
            except (OSError, ValueError) as error:
                raise UserError(
                    where,
                    "names an image file that cannot be read",
                    given=f"{line.inputs[name]!r:.100}: {error!s:.100}",
                    remedy="Use a path relative to the pipeline's folder",
                ) from error
        parameters = check_line(where, line.parameters, self._rules, self.parameters)
        preview = line.inputs[self._images[0]] if self._images else preview_text(sent)
        try:
            inputs = self._after_hook(sent)
        except Exception as error:  # the user's own function
            raise UserError(
                where,
                "is rejected by hooks.before",
                given=error,
                remedy="Correct the line or the function",
            ) from error
        return GateRequest(sent, inputs, parameters, (), (), False, preview)

    def _after_hook(self, sent: Mapping[str, str | bytes]) -> Mapping[str, str | bytes]:
        row = dict(sent)
        if self._before is not None:
            (row,) = call_before(self._before, [row], list(sent), encoded=self._images)
        return {name: row[name] for name in self._names}

    def with_rows(self, requests: Sequence[GateRequest]) -> list[GateRequest | Exception]:
        """Return each request with the core rows that the batch encoder makes, or its error."""
        inputs = [request.row_inputs for request in requests]
        if self._images:
            return [
                made
                if isinstance(made, Exception)
                else replace(request, rows=tuple(made.tensors["pixels"]))
                for request, made in zip(requests, self._images_maker.make(inputs), strict=True)
            ]
        return [
            made
            if isinstance(made, Exception)
            else replace(
                request,
                rows=tuple(
                    TokenRow(tuple(row.ids), row.first_segment, row.prompt, row.attended)
                    for row in made
                ),
                metadata=tuple(row.metadata for row in made if row.metadata),
            )
            for request, made in zip(requests, self._texts_maker.token_rows(inputs), strict=True)
        ]

    def _where(self, file: str, line: int) -> str:
        return f"{self._folder / file}:{line}"


def _is_filled(row: object) -> bool:
    return not isinstance(row, TokenRow) or bool(row.ids)


def check_line(
    where: str, given: Mapping[str, object], rules: Rules, defaults: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the parameters of a line of a file, with defaults.

    Args:
        where: Name of the line or field, for errors.
        rules: Rules of all parameters.
        defaults: Defaults of all parameters.

    Raises:
        UserError: A parameter is unknown or invalid.
    """
    # In the form that a client sends: a list is JSON text.
    sent = {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in given.items()
    }
    try:
        return check_parameters(json.dumps(sent), rules, defaults)
    except RequestError as error:
        raise UserError(
            where,
            "has an invalid parameter",
            given=error,
            remedy="Use the task's parameters and their allowed values",
        ) from error
