"""HTML pages from templates, which escape every value unless a filter made it HTML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from triptych.base import formatting
from triptych.base.files import write_files
from triptych.base.formatting import NOTHING, plain, shown
from triptych.interface.report import plots

MAX_PROSE_CHARACTERS = 2000
"""Maximum length of a shown failure, note or reason, in characters."""


def prose(text: object) -> Markup:
    return shown(text, MAX_PROSE_CHARACTERS)


def render(template: str, **values: object) -> str:
    """Return a self-contained page, without network access, scripts or fonts.

    Raises:
        jinja2.UndefinedError: The template reads a name that is not in `values`.
    """
    return PAGES.get_template(template).render(values)


def write_report(folder: Path, page: str, files: Mapping[str, str]) -> Path:
    """Write a report into `folder`, which is created, and return the path of its page.

    Args:
        page: HTML of the page.
        files: Content of the other files by name; they are written in this order, after the page.

    Raises:
        OSError: A file cannot be written. No file is left incomplete.
    """
    write_files(folder, {"report.html": page, **files})
    return folder / "report.html"


def _escape(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    return plain(NOTHING if value is None else value)


PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_escape,
    extensions=["jinja2.ext.do"],
    trim_blocks=True,
    lstrip_blocks=True,
)
for _name in ("code", "figure", "percent", "rounded", "shown"):
    PAGES.filters[_name] = getattr(formatting, _name)
PAGES.filters |= {"prose": prose, "thousands": "{:,}".format}
PAGES.globals |= {
    "amount": formatting.amount,
    "figures": formatting.figures,
    "NOTHING": NOTHING,
    "plots": plots,
}
