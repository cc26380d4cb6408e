"""Prompts before the texts of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .request_errors import RequestError
from .row_types import Row, RowInputs

if TYPE_CHECKING:
    from .rows_text import TokenRowMaker


_KEPT = 64
"""Maximum number of prompts whose tokens are not counted again."""


class TextPrompts:
    """Prompts of a row maker: those of its settings, and free ones where allowed."""

    def __init__(self, maker: TokenRowMaker) -> None:
        """Check the prompts of the settings.

        Raises:
            RequestError: A prompt leaves no space for a text.
        """
        self._maker = maker
        self._prompts: Mapping[str, str] = maker.settings.get("prompts", {})
        self._is_free: bool = maker.settings.get("free_prompt", False)
        self._encoded = lru_cache(_KEPT)(self._encode)
        for prompt in self._prompts.values():
            self._check(prompt)

    def add(self, request: RowInputs, texts: Sequence[str]) -> Sequence[str]:
        """Return the texts with the prompt of the request before each.

        Raises:
            RequestError: The prompt leaves no space for a text.
        """
        prompt = self.chosen(request)
        return [prompt + text for text in texts] if prompt else texts

    def chosen(self, request: RowInputs) -> str:
        """Return the text of the request's prompt; empty for none.

        Raises:
            RequestError: The prompt leaves no space for a text.
        """
        prompt = self._of(request)
        if self._is_free:
            self._check(prompt)
        return prompt

    def mark(
        self, requests: Sequence[RowInputs], made: Sequence[list[Row] | Exception]
    ) -> Sequence[list[Row] | Exception]:
        """Return model rows with the lengths of their prompts, if these are not pooled."""
        if self._maker.prompt_end_ids is None:
            return made
        return [
            rows if isinstance(rows, Exception) else [row._replace(prompt=length) for row in rows]
            for rows, length in zip(made, map(self._length, requests), strict=True)
        ]

    def _of(self, request: RowInputs) -> str:
        chosen, role = request.parameters.get("prompt", ""), request.parameters.get("role")
        if role is not None:
            return self._of_role(role, chosen)
        return self._prompts.get(chosen, chosen if self._is_free else "")

    def _of_role(self, role: str, chosen: str) -> str:
        """Return the prompt of a role; it takes the place of the pipeline's own prompt.

        Raises:
            RequestError: The request names a prompt, too.
        """
        if chosen != self._maker.settings.get("parameters", {}).get("prompt", ""):
            raise RequestError(
                "prompt", "must be left out beside role", f"{chosen!r:.80}", "Send one of the two"
            )
        return self._prompts.get(role, "")

    def _length(self, request: RowInputs) -> int:
        """Return the number of tokens left out of pooling, as sentence-transformers counts them.

        A special token at the end of the prompt belongs to the text.
        """
        prompt = self._of(request)
        size, last = self._encoded(prompt) if prompt else (0, None)
        return size - (last in (self._maker.prompt_end_ids or ()))

    def _encode(self, prompt: str) -> tuple[int, int | None]:
        """Return the number of tokens of a prompt, and the last one."""
        ids = self._maker.tokenizer.encode(prompt).ids
        return len(ids), ids[-1] if ids else None

    def _check(self, prompt: str) -> None:
        maker, size = self._maker, len(prompt.encode())
        limit: int = maker.settings["max_text_bytes"]
        if size > limit:
            raise RequestError(
                "prompt", f"must have at most {limit} bytes", f"{size} bytes", "Shorten it"
            )
        if prompt and self._encoded(prompt)[0] >= maker.max_length:
            raise RequestError(
                "prompt",
                f"must leave space for the text within {maker.max_length} tokens",
                f"{prompt!r:.80}",
                "Shorten it",
            )
