"""Postprocess that reports requests with a ticket as answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .in_flight import InFlight
from .postprocess import Postprocess
from .row_types import NO_TICKET, TICKET, Arrays
from .triton_io import Inputs


class Marked(Postprocess):
    """Postprocess that clears the mark of each request, for which flow control and a stop wait.

    A step between two cores clears it only if it fails, because the request is not answered yet.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self.marks = InFlight(self.settings["pipeline"])
        self._answers = "rows_from" not in self.settings

    def answer(self, inputs: Inputs, given: str) -> Arrays:
        ticket: Sequence[int] = NO_TICKET
        if TICKET in inputs:
            ticket = inputs[TICKET].as_numpy()[0].tolist()
        try:
            result = super().answer(inputs, given)
        except BaseException:
            self.marks.done(ticket)
            raise
        if self._answers:
            self.marks.done(ticket)
        return result
