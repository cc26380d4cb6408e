"""Token ids to text while they come: no broken character, no lost space, nothing after a stop."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""Replacement character, which decoding makes of an incomplete character."""

MAX_WAITING = 64
"""Maximum number of tokens that may form an incomplete character; more are sent as decoded."""


class TextStream:
    """Decodes one answer.

    A token is decoded behind those before it, since alone it may lose its space or be a part of a
    character. Such a part at the end of the text waits for the next token.

    Args:
        tokenizer: Tokenizer of the model.
        context: the last ids of the prompt: decoders drop the space of a text's first token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._context = len(self._ids)
        self._shown = self._decode()
        self._waiting = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these ids."""
        self._ids += ids
        self._waiting += len(ids)
        text = self._decode()
        certain = text.rstrip(BROKEN)
        if len(certain) <= len(self._shown) and self._waiting >= MAX_WAITING:
            certain = text
        return self._show(certain, ends_here=certain == text)

    def finish(self) -> str:
        """The text that is left, broken characters included."""
        return self._show(self._decode(), ends_here=True)

    def _show(self, text: str, *, ends_here: bool) -> str:
        new = text[len(self._shown) :]
        if not new:
            return ""
        self._shown, self._waiting = text, 0
        if ends_here:  # at the end of a token: what came so far is the context of what comes next
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


class StopStrings:
    """Holds back what may be the beginning of a stop string, and ends the text before one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The text that may be shown; `stopped` tells whether a stop string has come."""
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back and is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
