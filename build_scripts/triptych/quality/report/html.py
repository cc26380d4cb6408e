"""Pieces of HTML that the report's sections share: tables, figures, lists, the metric's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.quality.report.text import plain, shown
from triptych.tasks.accuracy import METRICS

PROSE = 2000
"""Characters of a sentence (a failure, a note, a reason) that are shown."""


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


def says(metric: str) -> str:
    """What `metric` says, in a few words; "" for one that is not known."""
    return METRICS[metric].says if metric in METRICS else ""


def better(metric: str) -> str:
    """``higher``, ``lower``, or "" for a metric that is not known."""
    return METRICS[metric].better if metric in METRICS else ""
