"""Whether requests are of another kind than those that a pipeline was built for."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.spec.tasks.metrics_outputs import Outputs, texts

CHANCE = 1e-6
"""How often two samples of one mix may be called different: over 1,000 looks, once in 1,000."""

LEAST_EXPECTED = 5.0
"""Categories of which fewer rows are expected on a side are taken together."""

MOST_LETTERS = 400
NONE = "(none)"


@dataclass(frozen=True)
class Mix:
    """Shares of categories then and now.

    Attributes:
        kind: what is counted.
        before: rows by category, of the gate's requests.
        now: of the sample.
        chance: of a difference like this in two samples of one mix.
    """

    kind: str
    before: Mapping[str, int]
    now: Mapping[str, int]
    chance: float

    @property
    def moved(self) -> bool:
        return self.chance < CHANCE

    @property
    def largest(self) -> str:
        """The category whose share changed most, in words."""
        before, now = sum(self.before.values()), sum(self.now.values())
        shares = {
            name: (self.before.get(name, 0) / before, self.now.get(name, 0) / now)
            for name in {**self.before, **self.now}
        }
        name = max(sorted(shares), key=lambda one: abs(shares[one][1] - shares[one][0]))
        return f"{name} from {shares[name][0]:.0%} to {shares[name][1]:.0%}"


def compare_mixes(kind: str, before: Sequence[str], now: Sequence[str]) -> Mix | None:
    """The mix of `kind` on both sides; None where a side has no rows."""
    if not before or not now:
        return None
    old, new = Counter(before), Counter(now)
    return Mix(kind, dict(old.most_common()), dict(new.most_common()), _chance(old, new))


def _chance(old: Counter[str], new: Counter[str]) -> float:
    """Of Pearson's chi-square of two samples, by Wilson and Hilferty's approximation (1931)."""
    rows = old.total(), new.total()
    every = sum(rows)
    cells: list[tuple[int, int]] = []
    rest = (0, 0)
    for name in {**old, **new}:
        pair = old[name], new[name]
        if min(rows) * sum(pair) / every < LEAST_EXPECTED:
            rest = rest[0] + pair[0], rest[1] + pair[1]
        else:
            cells.append(pair)
    if sum(rest):
        cells.append(rest)
    freedom = len(cells) - 1
    if not freedom:
        return 1.0
    square = sum(
        (count - total * sum(pair) / every) ** 2 / (total * sum(pair) / every)
        for pair in cells
        for count, total in zip(pair, rows, strict=True)
    )
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def script_of(inputs: Mapping[str, str | bytes]) -> str:
    """The script that most letters of a request are of: ``LATIN``, ``CYRILLIC``, ``CJK``."""
    text = " ".join(value for value in inputs.values() if isinstance(value, str))
    letters = [char for char in text[: 4 * MOST_LETTERS] if char.isalpha()][:MOST_LETTERS]
    names = Counter(unicodedata.name(char, NONE).partition(" ")[0] for char in letters)
    return names.most_common(1)[0][0] if names else NONE


def label_of(outputs: Outputs) -> str | None:
    """The first label of an answer, or the label of its first entity; None where there are none."""
    if labels := texts(outputs, "label"):
        return labels[0] or NONE
    if found := texts(outputs, "entities"):
        try:
            return str(json.loads(found[0])[0]["entity"])
        except (ValueError, LookupError, TypeError):
            return NONE
    return None
