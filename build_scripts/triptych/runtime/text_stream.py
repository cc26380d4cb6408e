"""Decode streamed token ids to text, with whole characters, spaces and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""Replacement character, which decoding makes of an incomplete character."""

MAX_WAITING = 64
"""Maximum number of tokens that may form an incomplete character; more are sent as decoded."""


class TextStream:
    """Decoder of one answer.

    A token is decoded together with earlier tokens, because alone it may lose its space or be part
    of a character. An incomplete character at the end of the text waits for the next token.

    Args:
        tokenizer: Tokenizer of the model.
        context: Last ids of the prompt, because decoders drop the space of a text's first token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._context = len(self._ids)
        self._shown = self._decode()
        self._waiting = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is now final."""
        self._ids += ids
        self._waiting += len(ids)
        text = self._decode()
        certain = text.rstrip(BROKEN)
        if len(certain) <= len(self._shown) and self._waiting >= MAX_WAITING:
            certain = text
        return self._show(certain, ends_here=certain == text)

    def finish(self) -> str:
        """Return the remaining text, with incomplete characters."""
        return self._show(self._decode(), ends_here=True)

    def _show(self, text: str, *, ends_here: bool) -> str:
        new = text[len(self._shown) :]
        if not new:
            return ""
        self._shown, self._waiting = text, 0
        if ends_here:  # at the end of a token, so that earlier ids become the next context
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


class StopStrings:
    """Filter that ends a text before a stop string, and holds back a possible beginning of it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Add text; return the text to send. `stopped` is true after a stop string."""
        held = self._held + text
        found = [index for stop in self._stops if (index := held.find(stop)) >= 0]
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
    """Return the number of characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
