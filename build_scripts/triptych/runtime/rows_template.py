"""Model rows of text pairs that a chat template joins, for rerankers that are language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .row_types import Row, RowInputs
from .rows_pairs import check_filled
from .rows_text import Input, PlainTextRowMaker

FILLERS = ("0", "1 2 3 4")
"""Texts whose tokens differ from the first to the last, as sentence-transformers has them."""


class TemplateRowMaker(PlainTextRowMaker):
    """Row maker of pairs joined by the rendered chat template of the model.

    Args:
        settings: ``pair_template`` has the rendered template without a prompt and with one: a list
            of texts, of which every second one is ``prompt``, ``text`` or ``text_pair``.
        folder: Folder of the ``tokenizer.json``.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._forms: list[list[str]] = settings["pair_template"]
        super().__init__(settings, folder)

    def configure(self) -> None:
        super().configure()
        self._whole = Tokenizer.from_str(self.tokenizer.to_str())
        self._whole.no_truncation()

    def inputs(self, request: RowInputs) -> list[Input]:
        prompt = self._prompt_of(request)
        check_filled(request, self.fields)
        columns = request.columns
        return [
            self._render(prompt, text, other)
            for text, other in zip(columns["text"], columns["text_pair"], strict=True)
        ]

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        made = super().token_rows(requests)
        for rows, request in zip(made, requests, strict=True):
            if isinstance(rows, Exception):
                continue
            full = [place for place, row in enumerate(rows) if len(row.ids) >= self.max_length]
            end = self._end(self._prompt_of(request)) if full else []
            for place in full:
                ids = rows[place].ids
                whole = [*ids[: max(0, len(ids) - len(end))], *end]
                rows[place] = rows[place]._replace(ids=whole[-len(ids) :])
        return made

    def _prompt_of(self, request: RowInputs) -> str:
        return "" if self._prompts is None else str(self._prompts.chosen(request))

    def _render(self, prompt: str, text: str, other: str) -> str:
        values = {"prompt": prompt, "text": text, "text_pair": other}
        form = self._forms[bool(prompt)]
        return "".join(values[part] if place % 2 else part for place, part in enumerate(form))

    def _end(self, prompt: str) -> list[int]:
        """Return the tokens at the end of the template, which truncation must not remove."""
        texts = [self._render(prompt, filler, filler) for filler in FILLERS]
        encodings = self._whole.encode_batch_fast(texts, add_special_tokens=False)
        first, second = (encoding.ids[::-1] for encoding in encodings)
        equal = [one == other for one, other in zip(first, second, strict=False)]
        count = equal.index(False) if False in equal else 0
        ids: list[int] = first[:count][::-1]
        return ids

    def _encode_all(self, inputs: Sequence[object]) -> list[object]:
        # The template writes the special tokens.
        encodings: list[Any] = self.tokenizer.encode_batch_fast(inputs, add_special_tokens=False)
        return encodings
