"""Write the PII example's data: sentence frames, filled at random from lists of values.

Usage: ``python build_scripts/examples/pii_data.py`` rewrites ``pipelines/pii/data/*.jsonl``.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

DATA = Path(__file__).parents[2] / "pipelines/pii/data"
LANGUAGES = ("en", "de")
NUMBERS = {"en": ("date", "amount"), "de": ("datum", "betrag")}
_SLOT = re.compile(r"\{([A-Za-z.]+)(?:=([^}]*))?\}")
_COPIES = {"train": (4, 3), "dev": (3, 2), "test": (2, 1)}
"""Number of times that a frame, and a frame without PII, is filled."""
_JOINED = {"train": 0.2, "dev": 0.15, "test": 0.1}
"""Ratio of rows with a second sentence."""
_ROUGH = 0.25
"""Ratio of training rows with a typing error."""
_FOREIGN_NAMES = 0.15
_COMPOSED = 0.5
"""Ratio of values composed of a start and an end, for splits with such sections."""
_SPELLED_OUT = {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"}
_LETTERS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "\u0131": "i", "ł": "l"})


@dataclass(frozen=True)
class Marked:
    """A text and its PII spans: (first character, end, type)."""

    text: str
    spans: list[tuple[int, int, str]]
    language: str


def read_frames(path: Path) -> dict[str, list[str]]:
    """Read the sections of a frames file; values are separated by lines or commas."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    by_line = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\[([\w.]+)\]", line):
            lines = sections.setdefault(heading[1], [])
            by_line = heading[1].startswith(("frames", "negative", "written", "address"))
        elif line and not line.startswith(";"):
            line = line.replace(r"\n", "\n")
            lines.extend([line] if by_line else line.split(", "))
    return sections


def generate(split: str, sections: Mapping[str, Sequence[str]]) -> list[Marked]:
    """Generate every row of a split in a seeded order; each written sentence occurs once."""
    draw = random.Random(f"pii {split}")
    frame_copies, negative_copies = _COPIES[split]
    rows = []
    for language in LANGUAGES:
        frames = [*sections[f"frames.{language}"]] * frame_copies
        negatives = [*sections[f"negative.{language}"]] * negative_copies
        filler = _Filler(sections, language, draw)
        made = [filler.fill(frame) for frame in (*frames, *negatives)]
        joined = [
            _join(row, draw.choice(made)) if draw.random() < _JOINED[split] else row for row in made
        ]
        rows += joined + [filler.fill(frame) for frame in sections[f"written.{language}"]]
    if split == "train":
        rows = [_roughen(row, draw) if draw.random() < _ROUGH else row for row in rows]
    rows = list({row.text: row for row in rows}.values())
    draw.shuffle(rows)
    return rows


def _join(first: Marked, second: Marked) -> Marked:
    gap = " " if first.text[-1] in ".!?:" else ". "
    shift = len(first.text) + len(gap)
    moved = [(start + shift, end + shift, kind) for start, end, kind in second.spans]
    return Marked(first.text + gap + second.text, first.spans + moved, first.language)


def _roughen(row: Marked, draw: random.Random) -> Marked:
    """Return the row with replaced umlauts, or without a space, a sign or a letter."""
    pieces = list(row.text)
    outside = [
        index
        for index in range(len(pieces))
        if not any(start <= index < end for start, end, _ in row.spans)
    ]
    way = draw.choice(("umlauts", "spaces", "signs", "letter"))
    if way == "umlauts":
        pieces = [_SPELLED_OUT.get(piece, piece) for piece in pieces]
    elif way == "spaces":
        pieces = [
            "" if piece == " " and before in ",:;" else piece
            for before, piece in zip(" " + row.text, pieces, strict=False)
        ]
    elif way == "signs":
        for index in outside:
            pieces[index] = "" if pieces[index] in ".,:!?" else pieces[index]
    elif letters := [index for index in outside if pieces[index].isalpha()]:
        pieces[draw.choice(letters)] = ""
    places = [0, *accumulate(map(len, pieces))]
    spans = [(places[start], places[end], kind) for start, end, kind in row.spans]
    return Marked("".join(pieces), spans, row.language)


class _Filler:
    """Filler of the slots in the frames of one language."""

    def __init__(
        self, sections: Mapping[str, Sequence[str]], language: str, draw: random.Random
    ) -> None:
        self._sections = sections
        self._language = language
        self._draw = draw
        self._makers: dict[str, Callable[[str], str]] = {
            "NAME": self._name,
            "EMAIL": self._email,
            "PHONE": lambda _part: self._digits(self._pick(f"phone.{self._language}")),
            "ADDRESS": lambda _part: self._address(),
            "ID": lambda part: self._digits(self._pick(f"id.{part}")),
        }

    def fill(self, frame: str) -> Marked:
        """Return the text of the frame with its spans."""
        text, spans, end = "", [], 0
        for slot in _SLOT.finditer(frame):
            text += frame[end : slot.start()]
            end = slot.end()
            kind, _, part = slot[1].partition(".")
            value = slot[2] or self._value(kind, part)
            if kind.isupper():
                spans.append((len(text), len(text) + len(value), kind))
            text += value
        return Marked(text + frame[end:], spans, self._language)

    def _value(self, kind: str, part: str) -> str:
        if kind in self._makers:
            return self._makers[kind](part)
        if part or kind in ("city", "region"):
            return self._pick(f"{kind}.{part or self._language}")
        return self._digits(self._pick(kind)) if kind == "order" else self._pick(kind)

    def _pick(self, section: str) -> str:
        starts = self._sections.get(f"{section}.start")
        if starts and self._draw.random() < _COMPOSED:
            end = self._draw.choice(self._sections[f"{section}.end"])
            return (self._draw.choice(starts) + end).replace("~", " ")
        return self._draw.choice(self._sections[section])

    def _digits(self, pattern: str) -> str:
        digit = "0123456789"
        letter = "ABCDEFGHJKLMNPRSTUVWXYZ"
        return "".join(
            self._draw.choice(digit if c == "#" else letter) if c in "#@" else c for c in pattern
        )

    def _language_of_name(self) -> str:
        if self._draw.random() < _FOREIGN_NAMES:
            return self._draw.choice(LANGUAGES)
        return self._language

    def _name(self, part: str) -> str:
        language = self._language_of_name()
        first, last = self._pick(f"first.{language}"), self._pick(f"last.{language}")
        if part:
            return first if part == "first" else last
        forms = (
            f"{first} {last}",
            first,
            f"{last}, {first}",
            f"{first} {self._digits('@')}. {last}",
        )
        return self._draw.choices(forms, weights=(70, 14, 8, 8))[0]

    def _email(self, _part: str) -> str:
        language = self._language_of_name()
        first = _ascii(self._pick(f"first.{language}"))
        last = _ascii(self._pick(f"last.{language}"))
        number = str(self._draw.randint(1, 99))
        forms = (
            f"{first}.{last}",
            f"{first[0]}.{last}",
            f"{last}",
            f"{first}_{last}",
            f"{first}{number}",
            f"{first[0]}{last}{number}",
            f"{last}-{first[0]}",
        )
        return f"{self._draw.choice(forms)}@{self._pick('domain')}"

    def _address(self) -> str:
        language = self._language
        pattern = self._pick(f"address.{language}")
        values = {
            "n": str(self._draw.randint(1, 400)),
            "m": str(self._draw.randint(1, 99)),
            "street": self._pick(f"street.{language}"),
            "city": self._pick(f"city.{language}"),
            "region": self._pick("region.en"),
        }
        # Digits first: a street's own characters are no pattern.
        return _SLOT.sub(lambda slot: values[slot[1]], self._digits(pattern))


def _ascii(name: str) -> str:
    """Return a name in the form of an e-mail address."""
    plain = unicodedata.normalize("NFKD", name.lower().translate(_LETTERS))
    return re.sub(r"[^a-z]", "", plain)


def render(split: str) -> str:
    """Return the content of a split's jsonl file."""
    rows = generate(split, read_frames(DATA / f"{split}.frames.txt"))
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """Rewrite every split's file."""
    for split in _COPIES:
        (DATA / f"{split}.jsonl").write_text(render(split), encoding="utf-8")


if __name__ == "__main__":
    main()
