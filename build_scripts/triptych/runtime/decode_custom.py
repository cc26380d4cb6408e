"""Decoder of custom tasks, which calls the function `decode` of the user."""

from __future__ import annotations

from pathlib import Path

from .hooking import Row, RowForm, call_hook, find_hook
from .row_types import Arrays, Metadata, Parameters

CORE_PREFIX = "core_"


class CustomDecoder:
    """Rows of what the core returned to rows of the declared outputs."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        tokenizer = settings.get("tokenizer_file")
        hook = find_hook(folder, "decode", settings.get("labels", ()), tokenizer)
        if hook is None:
            raise RuntimeError("a custom task needs a function `decode` in hooks.py")
        self._decode = hook
        self._form = RowForm(settings["outputs"])

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        count = len(next(iter(outputs.values())))
        rows: list[Row] = [
            {name.removeprefix(CORE_PREFIX): value[i] for name, value in outputs.items()}
            for i in range(count)
        ]
        for row, row_metadata in zip(rows[: len(metadata)], metadata, strict=True):
            tokens = len(row_metadata.kinds)
            for name in outputs:
                name = name.removeprefix(CORE_PREFIX)
                row[name] = row[name][:tokens]
            row.update(text=row_metadata.text, offsets=row_metadata.offsets)
        return self._form.tensors(call_hook("decode", self._decode, rows, self._form.names))
