"""What all verbs share: the program, where it prints, and options that mean the same everywhere.

The renderer of a terminal: lines and tables in which no text is taken for a command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from triptych.base.errors import UserError, inert
from triptych.interface import api as verbs

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


EXIT_FINDINGS = 1
EXIT_MISTAKE = 2

app = typer.Typer(
    help="Turn a Hugging Face model into a Triton ensemble that tokenizes, infers and decodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# Progress and errors go to stderr, results to stdout: `--json` output stays parseable.
status = Terminal(stderr=True, highlight=False, soft_wrap=True)
output = Terminal(highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="Pipeline: the name of its folder.")]
Names = Annotated[list[str], typer.Argument(help="Pipelines: the names of their folders.")]
Pipelines = Annotated[Path, typer.Option("--pipelines", help="Folder of the pipelines.")]
Repository = Annotated[
    Path, typer.Option("--repository", "-r", help="Folder of the model repository.")
]
RepositoryArgument = Annotated[Path, typer.Argument(help="Folder of the model repository.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")]
LoadTimeout = Annotated[float, typer.Option(help="Time the models may take to load.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ENDPOINTS = "gRPC endpoint; or several IP addresses with commas, or dns:///NAME:PORT."
PIPELINES = verbs.PIPELINES
REPOSITORY = verbs.REPOSITORY
REPORTS = Path("reports")
SAMPLES = Path("samples")
"""Beside the reports, and not in the repository: that is shipped, and its folders are models."""


def progress(stage: str, line: str) -> None:
    """Tell what became of a stage."""
    status.print(f"  {stage:8} {line}", markup=False)


def report_into(write: Callable[[Path], Path], folder: Path) -> Path:
    """Write a report into `folder`; the page.

    Raises:
        UserError: nothing can be written there.
    """
    try:
        page = write(folder)
    except OSError as error:
        raise UserError(
            "--reports",
            "must be a folder that can be written to",
            given=error,
            remedy="Name another one",
        ) from error
    progress("report", str(page))
    return page


def fail(as_json: bool, result: dict[str, Any], message: str) -> NoReturn:
    """Print why, and end with the exit code for findings."""
    if as_json:
        print_json(result)
    status.print(f"failed: {message}", style="red", markup=False)
    raise typer.Exit(EXIT_FINDINGS)


def print_json(value: Any) -> None:
    """Print a result on stdout, in ASCII: nothing in it is a command to a terminal."""
    print(json.dumps(value, indent=2))
