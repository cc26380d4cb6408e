"""Step between two cores: postprocess whose outputs go to the next core."""

from __future__ import annotations

from .postprocess import Postprocess
from .row_types import NO_TICKET, PAYLOAD, TICKET, Arrays, write_ticket
from .triton_io import Inputs, read_bytes


class Passing(Postprocess):
    """Postprocess that passes ticket and payload on; see `row_types.write_ticket`."""

    def answer(self, inputs: Inputs, given: str) -> Arrays:
        result = super().answer(inputs, given)
        ticket = inputs[TICKET].as_numpy()[0].tolist() if TICKET in inputs else NO_TICKET
        payload = read_bytes(inputs, PAYLOAD)[0] if PAYLOAD in inputs else b""
        rows = len(result[self.settings["rows_from"]])
        return {**result, **write_ticket(ticket, payload, rows)}
