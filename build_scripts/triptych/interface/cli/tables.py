"""The renderer of a terminal: lines and tables in which no text is taken for a command."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from triptych.base.errors import inert

WIDTH = 100
"""Columns of a table, at least, where the terminal's width is not known."""

STYLES = {"met": "green", "not met": "bold red", "better": "green", "worse": "red"}

Row = Sequence[str | Text]


class Terminal(Console):
    """A console in which labels, texts and names cannot move the cursor, paint or hide a line."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(inert(segment.text), segment.style)


def say(console: Console, text: str, style: str = "") -> None:
    """A line."""
    console.print(Text(text, style), highlight=False)


def print_table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Iterable[Row | None],
    *,
    text_columns: Collection[int] = (0,),
) -> None:
    """A table; nothing where there are no rows.

    Args:
        console: to print to.
        title: above it.
        heads: one a column.
        rows: a cell for each head, or fewer; None draws a line.
        text_columns: indices of the columns of text; the others are numbers, to the right.
    """
    table = Table(title=Text(title), title_justify="left")
    for index, head in enumerate(heads):
        is_text = index in text_columns
        justify, overflow = ("left", "fold") if is_text else ("right", "ellipsis")
        table.add_column(Text(inert(head)), justify=justify, overflow=overflow)  # type: ignore[arg-type]
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(inert(cell)) if isinstance(cell, str) else cell for cell in row))
    if table.row_count:
        width = console.width if console.is_terminal else max(console.width, WIDTH)
        console.print(table, width=width)
