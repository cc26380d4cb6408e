"""Formatting of numbers and of untrusted text for reports and pages."""

from __future__ import annotations

from html import escape
from itertools import groupby
from math import floor, log10

from markupsafe import Markup

from triptych.base.errors import is_unseen

NOTHING = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
MAX_TEXT = 240
"""Maximum number of characters of a client's text that are shown."""

_LARGEST = 1e300
_NAMED = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def number(value: object) -> float | None:
    """Return `value` as a finite float that arithmetic cannot overflow, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def plain(text: object) -> Markup:
    """Return `text` escaped for HTML, an attribute or SVG, with invisible characters named."""
    return _spelled(str(text), "[{}]")


def shown(text: object, most: int = MAX_TEXT) -> Markup:
    """Return the first `most` characters as isolated HTML, with invisible characters named."""
    if text is None:
        return Markup(NOTHING)
    body = _spelled(str(text)[:most], '<span class="mark">{}</span>')
    left_out = len(str(text)) - most
    more = f' <span class="quiet">… {left_out:,} more characters</span>' if left_out > 0 else ""
    if not str(text).strip(" "):
        blanks = amount(len(str(text)), "blank") if body else "empty"
        body = Markup(f'<span class="quiet">{blanks}</span>')
    return Markup(f"<bdi>{body}</bdi>{more}")


def code(name: object) -> Markup:
    """Return a name as HTML that may break after underscores, dots and slashes."""
    text = str(plain(name))
    for sign in "_./":
        text = text.replace(sign, f"{sign}<wbr>")
    return Markup(f"<code>{text}</code>")


def figure(value: object, digits: int = 4) -> str:
    """Return a number with `digits` decimals, or in powers of ten where decimals are uninformative.

    A fraction close to 1 has as many digits as distinguish it from 1.
    """
    given = number(value)
    if not given:
        return NOTHING if given is None else "0"
    size = abs(given)
    if size >= 1e6 or size < 1e-3:
        return _scientific(given, max(1, digits - 3))
    while size < 10**-digits:
        digits += 1
    while digits < 9 and given < 1 and float(f"{given:.{digits}f}") == 1:
        digits += 1
    return f"{given:,.{digits}f}".replace("-", MINUS)


def rounded(value: object) -> str:
    """Return a measured number with three significant digits and all digits before the point."""
    given = number(value)
    if not given:
        return NOTHING if given is None else "0"
    size = abs(given)
    if size >= 1e9 or size < 1e-3:
        return _scientific(given, 1)
    digits = max(0, 2 - floor(log10(size)))
    return f"{given:,.{digits}f}".replace("-", MINUS)


def milliseconds(us: object) -> str:
    """Return microseconds as a rounded number of milliseconds; below a nanosecond it is 0."""
    given = number(us)
    return rounded(given and (given / 1e3 if abs(given) >= 1e-3 else 0))


def percent(share: object) -> str:
    """Return a fraction as ``12 %``, with a decimal below a tenth or above 0.99."""
    given = number(share)
    if given is None:
        return NOTHING
    near = 0 < abs(given) < 0.1 or 0.99 < given < 1
    text = f"{given * 100:,.{1 if near else 0}f}".replace("-", MINUS)
    return f"{text}\N{NO-BREAK SPACE}%"


def signed_percent(share: float) -> str:
    """Return a relative change in percent with its sign."""
    return f"+{percent(share)}" if share > 0 else percent(share)


def signed(value: float) -> str:
    """Return a change as a figure with its sign."""
    return f"+{figure(value)}" if value > 0 else figure(value)


def figures(value: object, limit: object) -> tuple[str, str]:
    """Return `value` and `limit` as texts that differ if the numbers do."""
    digits = 4
    texts = figure(value), figure(limit)
    while texts[0] == texts[1] and number(value) != number(limit) and digits < 15:
        digits += 1
        texts = figure(value, digits), figure(limit, digits)
    return texts


def power(value: float) -> str:
    """Return the label of a tick on a logarithmic axis: 1, 10, 1e+03, 1e-06."""
    exponent = round(log10(value))
    return {0: "1", 1: "10"}.get(exponent, f"1e{exponent:+03d}")


def amount(count: int, noun: str, plural: str = "s") -> str:
    """Return ``1 row`` or ``1,200 rows``; `plural` is the ending of the plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{plural}"


def _scientific(value: float, digits: int) -> str:
    """Return ``6.0e-06``, because many fonts lack superscripts."""
    return f"{value:.{digits}e}"


def _spelled(text: str, form: str) -> Markup:
    """Return `text` escaped, with `form` around the name of each invisible character."""
    parts = []
    for character, run in groupby(text):
        times = len(list(run))
        if not is_unseen(character):
            parts.append(escape(character) * times)
            continue
        mark = _NAMED.get(character, f"U+{ord(character):04X}")
        parts.append(form.format(mark if times == 1 else f"{mark} {TIMES}{times}"))
    return Markup("".join(parts))
