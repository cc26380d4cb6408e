"""The decoder of a custom task: `decode` of the pipeline's own hooks, on plain rows."""

from __future__ import annotations

from pathlib import Path

from .carry import Arrays, Carries, Parameters
from .hooking import Row, RowForm, call_hook, find_hook

PREFIX = "core_"


class Decoder:
    """Rows of what the core returned to rows of the declared outputs."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        hook = find_hook(folder, "decode")
        if hook is None:
            raise RuntimeError("a custom task needs a function `decode` in hooks.py")
        self._decode = hook
        self._form = RowForm(settings["outputs"])

    def decode(self, outputs: Arrays, carries: Carries, parameters: Parameters) -> Arrays:
        count = len(next(iter(outputs.values())))
        rows: list[Row] = [
            {name.removeprefix(PREFIX): value[i] for name, value in outputs.items()}
            for i in range(count)
        ]
        for row, carry in zip(rows[: len(carries)], carries, strict=True):
            tokens = len(carry.kinds)
            for name in outputs:
                name = name.removeprefix(PREFIX)
                row[name] = row[name][:tokens]
            row.update(text=carry.text, offsets=carry.offsets)
        return self._form.tensors(call_hook("decode", self._decode, rows, self._form.names))
