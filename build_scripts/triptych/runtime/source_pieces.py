"""Token ids of Marian's source texts: pieces of one vocabulary, ids of another."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path

from tokenizers import Tokenizer

PIECES_FILE = "source_pieces.json"
SPACE = "\u2581"
"""A space in a piece."""


class SourcePieces:
    """Makes ids as `transformers.MarianTokenizer` does.

    Args:
        tokenizer: finds pieces in what sentencepiece would look for them in.
        file: a JSON object: ``ids`` of pieces, in a vocabulary that the languages share;
            ``special``, those that are a token wherever a text has them; the id of what is
            ``unknown`` and that of the ``end``; ``characters``, a `CharacterMap` in base 64.
    """

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        known = json.loads(file.read_bytes())
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = known["ids"]
        self._special: list[str] = known["special"]
        self._unknown: int = known["unknown"]
        self._end: int = known["end"]
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        self._characters = CharacterMap(b64decode(known["characters"]))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the end."""
        pieces: list[str] = []
        for part in self._split.split(text):
            if part in self._special:
                pieces.append(part)
                continue
            end = part.find("<<") + 2
            if part.startswith(">>") and end > 1:  # >>fra<<, the language of the answer
                pieces.append(part[:end])
                part = part[end:]
            pieces += self._find(part)
        return [*(self._ids.get(piece, self._unknown) for piece in pieces), self._end]

    def _find(self, text: str) -> list[str]:
        """The pieces of a text, which is made as sentencepiece's normalizer does."""
        plain = re.sub(" {2,}", " ", self._characters.change(text)).lstrip(" ")
        plain = plain.replace(" ", SPACE).rstrip(SPACE)
        if not plain:
            return []
        found: list[str] = self._tokenizer.encode(SPACE + plain, add_special_tokens=False).tokens
        return found


class CharacterMap:
    """What sentencepiece makes of characters before it looks for pieces.

    `tokenizers` has a normalizer of that name, which leaves some as they are.

    Args:
        compiled: a ``precompiled_charsmap``: the size of a trie in bytes, the trie, and texts that
            end in zeros, which the trie's values are places in. The trie is Darts-clone's double
            array of bytes: units of 32 bits. Empty: nothing is changed.
    """

    def __init__(self, compiled: bytes) -> None:
        size = int.from_bytes(compiled[:4], "little")
        self._units = memoryview(compiled)[4 : 4 + size].cast("I")
        self._texts = compiled[4 + size :]

    def change(self, text: str) -> str:
        """`text`, with the longest characters from each place that become others as these."""
        if not self._units:
            return text
        given, made, at = text.encode(), bytearray(), 0
        while at < len(given):
            length, place = self._longest(given, at)
            if length:
                made += self._texts[place : self._texts.index(0, place)]
            else:
                lead = given[at]
                length = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
                made += given[at : at + length]
            at += length
        return made.decode()

    def _longest(self, given: bytes, start: int) -> tuple[int, int]:
        """Bytes from `start` that become others, and where those are; none where no length is."""
        units = self._units
        node, found = _below(units[0]), (0, 0)
        for at in range(start, len(given)):
            node ^= given[at]
            unit = units[node] if node < len(units) else 0
            if unit & 0x800000FF != given[at]:
                break
            node ^= _below(unit)
            if unit >> 8 & 1:
                found = at + 1 - start, units[node] & 0x7FFFFFFF
        return found


def _below(unit: int) -> int:
    """How far off the children of a unit are."""
    return unit >> 10 << ((unit & 1 << 9) >> 6)
