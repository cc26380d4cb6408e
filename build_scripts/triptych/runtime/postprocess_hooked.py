"""Postprocess with the function `after` of a user."""

from __future__ import annotations

from collections.abc import Mapping

from .hooking import FORWARDED_PREFIX, RowForm, call_hook, find_hook, read_forwarded
from .postprocess import Postprocess
from .row_types import Arrays, Parameters
from .triton_io import Inputs, read_bytes


class CallingAfter(Postprocess):
    """Postprocess that calls `after` on the outputs of a request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._after = find_hook(self.folder, "after", self.settings.get("labels", ()))
        self._form = RowForm(self.settings["outputs"])
        self._forwarded: Mapping[str, str] | None = self.settings.get("forwarded_inputs")

    def decode(self, inputs: Inputs, results: Arrays, parameters: Parameters) -> Arrays:
        outputs = super().decode(inputs, results, parameters)
        if self._after is None:
            return outputs
        rows, given = self._form.rows(outputs), None
        if self._forwarded is not None:
            columns = {
                name: read_bytes(inputs, FORWARDED_PREFIX + name) for name in self._forwarded
            }
            given = read_forwarded(columns, self._forwarded, len(rows))
        changed = call_hook("after", self._after, rows, self._form.names, given)
        return self._form.tensors(changed)
