"""Lines of a pipeline's files as requests: images read, hooks run, parameters checked, rows made.

A request has three forms, all in `GateRequest`: `sent` by a client, `inputs` after `hooks.before`,
and the `rows` that its row maker makes for the core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.base.tensors import TokenRow
from triptych.core.samples import GateRequest, shown_text
from triptych.runtime import open_row_maker, open_text_row_maker
from triptych.runtime.hooking import Hook, call_before
from triptych.runtime.parameters import check_parameters
from triptych.runtime.request_errors import RequestError
from triptych.spec.model_facts import ModelFacts
from triptych.spec.plan import core_rows_of, max_length_of, row_settings
from triptych.spec.spec import PipelineSpec
from triptych.spec.tasks import Task
from triptych.spec.traffic import Lengths, TrafficRow

UNLIMITED = 1 << 30

Rules = Mapping[str, Mapping[str, Any]]
"""Request parameter to what it may be, as plain data."""


class RequestReader:
    """Makes requests of a pipeline, as its preprocess step will.

    Args:
        spec: the pipeline's.
        task: what is decoded.
        facts: of the model.
        tokenizer_folder: with the ``tokenizer.json``; of images, any folder.
        before: the pipeline's own function ahead of the tokenizer, where it has one.

    Attributes:
        parameters: defaults of request parameters: the spec's over the task's.
        max_length: tokens that a core row may have.

    Raises:
        UserError: the spec's parameters are not the task's, or the length limit leaves no room.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        task: Task,
        facts: ModelFacts,
        tokenizer_folder: Path,
        before: Hook | None,
    ) -> None:
        self._folder = spec.folder
        self._names = [tensor.name for tensor in task.inputs]
        self._images = [tensor.name for tensor in task.inputs if tensor.content == "image"]
        self._before = before
        known = task.parameters(facts)
        self._rules: Rules = {name: rule.as_dict() for name, rule in known.items()}
        defaults = {
            name: list(rule.default) if isinstance(rule.default, tuple) else rule.default
            for name, rule in known.items()
            if rule.default is not None
        }
        self.parameters = _checked("parameters", spec.parameters, self._rules, defaults)
        self.max_length = max_length_of(spec, facts, task)
        most = core_rows_of(spec, facts, task)
        settings = row_settings(spec, facts, task, max_core_rows=most)
        if self._images:
            self._images_maker = open_row_maker(task.rows, settings, tokenizer_folder)
            return
        settings |= {"bucket_edges": [], "overflow": "truncate"}
        unlimited = {**settings, "max_length": UNLIMITED, "max_core_rows": UNLIMITED}
        try:
            self._texts_maker = open_text_row_maker(task.rows, settings, tokenizer_folder)
            self._untruncated = open_text_row_maker(task.rows, unlimited, tokenizer_folder)
        except RequestError as error:
            raise UserError(
                "tokenizer.max_length", "must suit the task", given=error, remedy="Raise it"
            ) from error

    @property
    def special_tokens(self) -> list[str]:
        """What a text may write of the tokenizer's special tokens, by their ids; none of images."""
        if self._images:
            return []
        tokens = self._texts_maker.tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(tokens.items()) if token.special]

    def read(
        self, file: str, lines: Sequence[TrafficRow], *, with_rows: int | None = None
    ) -> list[GateRequest]:
        """The request that each line of `file` stands for.

        Args:
            file: in the pipeline's folder, or an absolute path.
            lines: of the file.
            with_rows: only so many first requests get core rows; None for all.

        Raises:
            UserError: an image that cannot be read, a hook that refuses a line, a bad parameter,
                a request that the pipeline does not take.
        """
        requests = [self._read_line(file, line) for line in lines]
        first = requests[:with_rows]
        for place, made in enumerate(self._with_rows(first)):
            if isinstance(made, Exception):
                raise UserError(
                    self._where(file, lines[place].line),
                    "must be a request that the pipeline takes",
                    given=made,
                    remedy="Correct the line",
                )
            requests[place] = made
        return requests

    def make_up(
        self, sent: Mapping[str, str | bytes], parameters: Mapping[str, Any], shown: str
    ) -> GateRequest | None:
        """A request that nobody sent, without core rows; None where `hooks.before` refuses it."""
        try:
            return GateRequest(sent, self._after_hook(sent), parameters, (), (), True, shown)
        except Exception:  # what made-up inputs do to the user's own function is no mistake
            return None

    def read_sent(
        self, sent: Mapping[str, str | bytes], parameters: Mapping[str, Any], shown: str
    ) -> GateRequest | None:
        """A request as a server got it, without core rows; None where the pipeline refuses it."""
        try:
            checked = _checked(shown, parameters, self._rules, self.parameters)
            return GateRequest(sent, self._after_hook(sent), checked, (), (), False, shown)
        except Exception:  # the user's own function may raise anything
            return None

    def accepted(self, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Those of `requests` that the row maker takes, with their core rows, none empty."""
        made = self._with_rows(requests)
        return [
            request
            for request in made
            if not isinstance(request, Exception) and all(map(_is_filled, request.rows))
        ]

    def untruncated_lengths(self, requests: Sequence[GateRequest]) -> list[list[int]]:
        """Tokens of each core row of each request without a limit; none where it is refused."""
        made = self._untruncated.token_rows([request.row_inputs for request in requests])
        return [
            [] if isinstance(rows, Exception) else [len(row.ids) for row in rows] for rows in made
        ]

    def lengths(self, requests: Sequence[GateRequest]) -> Lengths:
        """Token lengths of the core rows, as they are before truncation."""
        lengths = [n for each in self.untruncated_lengths(requests) for n in each]
        rows = [row for request in requests for row in request.rows]
        # Where there are more rows than without a limit, they are windows: nothing is cut off.
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
                    "must name image files that can be read",
                    given=f"{line.inputs[name]!r:.100}: {error!s:.100}",
                    remedy="Paths start at the pipeline's folder",
                ) from error
        parameters = _checked(where, line.parameters, self._rules, self.parameters)
        shown = line.inputs[self._images[0]] if self._images else shown_text(sent)
        try:
            inputs = self._after_hook(sent)
        except Exception as error:  # the user's own function
            raise UserError(where, "must pass hooks.before", given=error) from error
        return GateRequest(sent, inputs, parameters, (), (), False, shown)

    def _after_hook(self, sent: Mapping[str, str | bytes]) -> Mapping[str, str | bytes]:
        row = dict(sent)
        if self._before is not None:
            (row,) = call_before(self._before, [row], list(sent), encoded=self._images)
        return {name: row[name] for name in self._names}

    def _with_rows(self, requests: Sequence[GateRequest]) -> list[GateRequest | Exception]:
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
                rows=tuple(TokenRow(tuple(row.ids), row.first_segment) for row in made),
                carries=tuple(row.carry for row in made if row.carry),
            )
            for request, made in zip(requests, self._texts_maker.token_rows(inputs), strict=True)
        ]

    def _where(self, file: str, line: int) -> str:
        return f"{self._folder / file}:{line}"


def _is_filled(row: Any) -> bool:
    return not isinstance(row, TokenRow) or bool(row.ids)


def _checked(
    where: str, given: Mapping[str, Any], rules: Rules, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    # As a client would send them: a list is a JSON text.
    sent = {k: json.dumps(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        return check_parameters(json.dumps(sent), rules, defaults)
    except RequestError as error:
        raise UserError(where, "must be parameters of the task", given=error) from error
