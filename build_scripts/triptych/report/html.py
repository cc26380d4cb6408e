"""A whole page and the pieces of HTML its sections share: tables, figures, lists, facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.formatting import plain, shown

STYLE = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Of the browser: whatever slipped through could neither run nor load anything."""

PROSE = 2000
"""Characters of a sentence (a failure, a note, a reason) that are shown."""


def document(title: str, body: str, *styles: Path) -> str:
    """A page that needs nothing beside itself: no network, no script, no font.

    Args:
        title: text.
        body: HTML.
        styles: sheets of its own, after the shared one.
    """
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in (STYLE, *styles))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{plain(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, *parts: str, kind: str = "") -> str:
    """A headed part of the page; nothing where all `parts` are empty."""
    body = "".join(parts)
    named = f' class="{kind}"' if kind else ""
    return f"<section{named}><h2>{plain(title)}</h2>{body}</section>" if body else ""


def table(kind: str, name: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table of a kind that the style sheet knows; `heads` and `rows` are HTML, rows whole.

    `name` is what a screen reader calls it.
    """
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(rows)
    scroll = '<div class="scroll" role="region" tabindex="0"'
    return (
        f'{scroll} aria-label="{name}"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure_of(svg: str, caption: str) -> str:
    """A plot with the words below it (HTML)."""
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def listed(kind: str, sentences: Sequence[Any]) -> str:
    """Sentences as a list; nothing where there are none."""
    items = "".join(f"<li>{shown(sentence, PROSE)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def facts(kind: str, entries: Mapping[str, str]) -> str:
    """Names with their values (HTML)."""
    body = "".join(
        f"<div><dt>{plain(name)}</dt><dd>{value}</dd></div>" for name, value in entries.items()
    )
    return f'<dl class="{kind}">{body}</dl>' if body else ""
