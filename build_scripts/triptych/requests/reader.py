"""Lines of a pipeline's files as the requests they stand for: files read, hooks run, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from triptych.errors import UserError
from triptych.model.facts import ModelFacts
from triptych.pipeline.spec import PipelineSpec
from triptych.pipeline.traffic import TrafficRow
from triptych.runtime.faults import RequestError
from triptych.runtime.hooking import Hook, call_before
from triptych.runtime.parameters import check_parameters
from triptych.runtime.row_types import RowInputs
from triptych.tasks import Task

Rules = Mapping[str, Mapping[str, Any]]
"""Request parameter to what it may be, as plain data."""


class ReadRequest(NamedTuple):
    """A request.

    Attributes:
        sent: its inputs as a client sends them.
        ask: what the row maker gets: the same, of one row, as `hooks.before` leaves it.
    """

    sent: dict[str, Any]
    ask: RowInputs


@dataclass(frozen=True)
class RequestReader:
    """What makes requests of lines.

    Attributes:
        spec: the pipeline's.
        task: what is decoded.
        before: the pipeline's own function ahead of the tokenizer, where it has one.
        rules: of request parameters.
        parameters: their defaults.
    """

    spec: PipelineSpec
    task: Task
    before: Hook | None
    rules: Rules
    parameters: Mapping[str, Any]

    @classmethod
    def of(
        cls, spec: PipelineSpec, task: Task, facts: ModelFacts, before: Hook | None
    ) -> RequestReader:
        """With the request parameters' defaults: the spec's over the task's.

        Raises:
            UserError: the spec's are not parameters of the task.
        """
        known = task.parameters(facts)
        rules = {name: rule.as_dict() for name, rule in known.items()}
        defaults = {
            name: list(rule.default) if isinstance(rule.default, tuple) else rule.default
            for name, rule in known.items()
            if rule.default is not None
        }
        parameters = _checked("parameters", spec.parameters, rules, defaults)
        return cls(spec, task, before, rules, parameters)

    def ask(self, file: str, row: TrafficRow) -> ReadRequest:
        """The request that a line of `file`, in the pipeline's folder, stands for.

        Raises:
            UserError: an image that cannot be read, a hook that refuses the row, a bad parameter.
        """
        where = self._where(file, row.line)
        sent: dict[str, Any] = dict(row.inputs)
        for name in self._images:
            try:
                sent[name] = (self.spec.folder / sent[name]).read_bytes()
            except (OSError, ValueError) as error:
                raise UserError(
                    where,
                    "must name image files that can be read",
                    given=f"{sent[name]!r:.100}: {error!s:.100}",
                    remedy="Paths start at the pipeline's folder",
                ) from error
        parameters = _checked(where, row.parameters, self.rules, self.parameters)
        try:
            return self._asked(sent, parameters)
        except Exception as error:  # the user's own function
            raise UserError(where, "must pass hooks.before", given=error) from error

    def make_up(self, sent: Mapping[str, Any], parameters: Mapping[str, Any]) -> ReadRequest | None:
        """The request of inputs that are nobody's; None where `hooks.before` refuses them.

        Args:
            sent: as a client would send them; bytes for an image.
            parameters: checked, with the defaults filled in.
        """
        try:
            return self._asked(dict(sent), parameters)
        except Exception:  # what made-up text does to the user's own function is no mistake
            return None

    def _asked(self, sent: dict[str, Any], parameters: Mapping[str, Any]) -> ReadRequest:
        inputs = sent
        if self.before is not None:
            (inputs,) = call_before(self.before, [dict(sent)], list(sent), encoded=self._images)
        columns = {tensor.name: [inputs[tensor.name]] for tensor in self.task.inputs}
        return ReadRequest(sent, RowInputs(columns, parameters))

    @property
    def _images(self) -> list[str]:
        return [tensor.name for tensor in self.task.inputs if tensor.content == "image"]

    def taken(self, file: str, rows: Sequence[TrafficRow], made: Sequence[Any]) -> list[Any]:
        """What a row maker made of the requests that lines of `file` stand for.

        Raises:
            UserError: it refused one.
        """
        for row, result in zip(rows, made, strict=True):
            if isinstance(result, Exception):
                raise UserError(
                    self._where(file, row.line),
                    "must be a request that the pipeline takes",
                    given=result,
                    remedy="Correct the line",
                )
        return list(made)

    def _where(self, file: str, line: int) -> str:
        return f"{self.spec.folder / file}:{line}"


def _checked(
    where: str, given: Mapping[str, Any], rules: Rules, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    # As a client would send them: a list is a JSON text.
    sent = {k: json.dumps(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        return check_parameters(json.dumps(sent), rules, defaults)
    except RequestError as error:
        raise UserError(where, "must be parameters of the task", given=error) from error
