"""Rendering of pages: in a template every value is inert text unless a filter made it HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from triptych.base import formatting
from triptych.base.formatting import NOTHING, plain, shown
from triptych.interface.report import plots

PROSE = 2000
"""Characters of a sentence (a failure, a note, a reason) that are shown."""


def prose(text: Any) -> Markup:
    return shown(text, PROSE)


def lines(text: Any) -> Markup:
    """`text` as `plain` shows it, its lines as they are."""
    return Markup("\n").join(plain(line) for line in str(text).split("\n"))


def render(template: str, **values: Any) -> str:
    """A page that needs nothing beside itself: no network, no script, no font.

    Raises:
        jinja2.UndefinedError: the template reads a name that is not in `values`.
    """
    return PAGES.get_template(template).render(values)


def _inert(value: Any) -> Markup:
    if isinstance(value, Markup):
        return value
    return plain(NOTHING if value is None else value)


PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_inert,
    extensions=["jinja2.ext.do"],
    trim_blocks=True,
    lstrip_blocks=True,
)
for _name in ("code", "figure", "milliseconds", "percent", "rounded", "shown"):
    PAGES.filters[_name] = getattr(formatting, _name)
PAGES.filters |= {"lines": lines, "prose": prose, "thousands": "{:,}".format}
PAGES.globals |= {
    "amount": formatting.amount,
    "figures": formatting.figures,
    "NOTHING": NOTHING,
    "plots": plots,
}
