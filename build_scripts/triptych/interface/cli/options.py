"""Options that several verbs share, and output: terminal, tables, JSON, progress, reports."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from triptych.base.errors import REPORT, Count, UserError, escape_for_terminal
from triptych.base.files import os_errors_as_user_errors
from triptych.interface import api
from triptych.interface.cli.command import app
from triptych.runtime.sampling import FOLDER_VARIABLE

MIN_WIDTH = 100
"""Minimum width of a table, in columns, if the terminal's width is not known."""

_INTERVAL_S = 10.0
"""Time between two lines about a loop, where there is no terminal."""

STYLES = {"met": "green", "not met": "bold red", "better": "green", "worse": "red"}

Row = Sequence[str | Text]


class Terminal(Console):
    """A console that escapes control characters in all texts."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else Segment(escape_for_terminal(segment.text), segment.style)
            )


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line of plain text."""
    console.print(Text(text, style), highlight=False)


def print_table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Iterable[Row | None],
    *,
    text_columns: Collection[int] = (0,),
) -> None:
    """Print a table, or nothing if it has no rows.

    A row has at most one cell for each of `heads`; None draws a line. Columns other than
    `text_columns` hold numbers, which are aligned right.
    """
    table = Table(title=Text(title), title_justify="left")
    for index, head in enumerate(heads):
        is_text = index in text_columns
        justify, overflow = ("left", "fold") if is_text else ("right", "ellipsis")
        table.add_column(Text(escape_for_terminal(head)), justify=justify, overflow=overflow)  # type: ignore[arg-type]
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(
                *(
                    Text(escape_for_terminal(cell)) if isinstance(cell, str) else cell
                    for cell in row
                )
            )
    if table.row_count:
        width = console.width if console.is_terminal else max(console.width, MIN_WIDTH)
        console.print(table, width=width)


EXIT_FINDINGS = 1
EXIT_MISTAKE = 2
EXIT_UNKNOWN = 70


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


# Progress and errors go to stderr and results to stdout, so that `--json` can be parsed.
status = Terminal(stderr=True, highlight=False, soft_wrap=True)
output = Terminal(highlight=False, soft_wrap=True)

PIPELINES = api.PIPELINES
REPOSITORY = api.REPOSITORY
REPORTS = Path("reports")
SAMPLES = Path("samples")
"""Default folder of sampled rows; outside the repository, which is shipped."""

API_KEY_VARIABLE = "TRIPTYCH_API_KEY"
"""Variable of the API key with which verbs connect to a server."""


def _complete_name(incomplete: str) -> list[str]:
    """Return the names of pipelines in the default folder that begin with a text, for a shell."""
    found = (path.parent.name for path in PIPELINES.glob("*/pipeline.yaml"))
    return sorted(name for name in found if name.startswith(incomplete))


Name = Annotated[
    str, typer.Argument(help="Name of the pipeline's folder.", autocompletion=_complete_name)
]
Names = Annotated[
    list[str],
    typer.Argument(help="Names of the pipelines' folders.", autocompletion=_complete_name),
]
Pipelines = Annotated[Path, typer.Option("--pipelines", help="Folder of the pipelines.")]
Repository = Annotated[
    Path, typer.Option("--repository", "-r", help="Folder of the model repository.")
]
Reports = Annotated[
    Path, typer.Option("--reports", help="Folder of the reports, with one folder per pipeline.")
]
BackendDirectory = Annotated[
    Path | None,
    typer.Option(
        help="Folder with backends of Triton's own, such as "
        "onnxruntime/libtriton_onnxruntime.so, for the embedded server, which is then used "
        "even if a tritonserver is on PATH. Default: emulated backends."
    ),
]
PlannedMachine = Annotated[
    str | None,
    typer.Option(help="Machine whose plan is used, such as cpu8. Default: this one."),
]
Samples = Annotated[
    Path,
    typer.Option(
        "--samples", envvar=FOLDER_VARIABLE, help="Folder of the rows that servers sampled."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field of pipeline.yaml; may be repeated. Default: no overrides.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="gRPC address of a running server. Default: start a server and stop it afterwards."
    ),
]
LoadTimeout = Annotated[float, typer.Option(help="Maximum time to load the models, in seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Folders that a verb reads and writes."""

    pipelines: Pipelines = PIPELINES
    repository: Repository = REPOSITORY


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Key and certificates with which a verb connects to the server at --url."""

    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File of the API key. Default: the variable {API_KEY_VARIABLE}, or no key."
        ),
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authorities that sign the server's certificate; encrypts the "
            "connection. Default: no encryption."
        ),
    ] = None
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the client's certificate. Default: none.")
    ] = None
    certificate_key: Annotated[
        Path | None, typer.Option(help="PEM file of the key of --certificate. Default: none.")
    ] = None

    def apply(self) -> None:
        """Use the key and the certificates for all clients that this verb creates.

        Raises:
            UserError: The file of the key cannot be read, or --ca is missing.
        """
        from triptych.client.connection import CREDENTIALS, Credentials, Tls

        key = os.environ.get(API_KEY_VARIABLE)
        if self.api_key_file is not None:
            try:
                key = self.api_key_file.read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise UserError(
                    "--api-key-file",
                    "must be a file with an API key",
                    given=f"{self.api_key_file} ({type(error).__name__})",
                    remedy="Write the key of `triptych key new` into it",
                ) from error
        if self.ca is None and (self.certificate or self.certificate_key):
            raise UserError(
                "--certificate, --certificate-key",
                "are only supported with --ca",
                given=self.certificate or self.certificate_key,
                remedy="Give the authorities of the server's certificate in --ca",
            )
        tls = None if self.ca is None else Tls(self.ca, self.certificate, self.certificate_key)
        CREDENTIALS.set(Credentials(tls, key or None))


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports of a server."""

    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of gRPC; 0 picks a free port.")
    ] = 8001
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 picks a free port.")
    ] = 8000
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the metrics page; 0 picks a free port.")
    ] = 8002


def progress(stage: str, line: str) -> None:
    """Print the outcome of a stage."""
    status.print(f"  {stage:8} {line}", markup=False)


@contextmanager
def show_progress(stage: str, label: str) -> Iterator[Callable[[Count], None]]:
    """Show how long the block runs and how far its loops are, with rate and remaining time.

    A terminal shows a bar, other outputs get a line every `_INTERVAL_S` in a loop.

    Args:
        stage: Stage of the lines.
        label: Text before the count of a loop.

    Yields:
        The function that shows a count; `counted` calls it.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown_at = time.monotonic()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=status,
        transient=True,
        refresh_per_second=1,  # it must not take processor time from what is measured
        disable=not status.is_terminal,
    ) as bar:
        task = bar.add_task(label, total=None)

        def show(count: Count) -> None:
            nonlocal shown_at
            bar.update(
                task,
                description=f"{label}: {count}" if count.done < count.total else label,
                completed=count.done,
                total=count.total if count.done < count.total else None,
            )
            if not status.is_terminal and time.monotonic() - shown_at > _INTERVAL_S:
                shown_at = time.monotonic()
                progress(stage, str(count))

        token = REPORT.set(show)
        try:
            yield show
        finally:
            REPORT.reset(token)


def write_report(write: Callable[[Path], Path], folder: Path) -> Path:
    """Write a report into `folder` and return the path of its page.

    Raises:
        UserError: The folder cannot be written to, or its disk is full.
    """
    try:
        with os_errors_as_user_errors(folder, "--reports"):
            page = write(folder)
    except OSError as error:
        raise UserError(
            "--reports",
            "must be a writable folder",
            given=error,
            remedy="Name another folder",
        ) from error
    progress("report", str(page))
    return page


def fail(as_json: bool, result: dict[str, object], message: str) -> NoReturn:
    """Print the reason of a failure and exit with the code for findings."""
    if as_json:
        print_json(result)
    status.print(f"failed: {message}", style="red", markup=False)
    raise typer.Exit(EXIT_FINDINGS)


def keep_traceback(error: Exception) -> UserError:
    """Write the traceback of an error that is no mistake of the user; return what to print."""
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    text = "".join(traceback.format_exception(error))
    try:
        number, file = tempfile.mkstemp(".txt", "triptych-error-", text=True)
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as target:
            target.write(f"{sys.argv}\n{text}")
        place = f"in {file}"
    except OSError:
        status.print(text, markup=False)
        place = "above"
    given = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    return UserError(
        f"triptych {verb}",
        "ended with an error that it does not know",
        given=given,
        remedy=f"The traceback is {place}. If nothing that you gave explains it, report an issue "
        "with it on the hosting page of the project",
    )


def print_json(value: object) -> None:
    """Print a result on stdout, in ASCII so that it contains no control characters."""
    print(json.dumps(value, indent=2))


def warn(line: str) -> None:
    """Print a problem that does not end the verb."""
    status.print(f"warning: {line}", style="yellow", markup=False)


def parse_seconds(option: str, text: str) -> float:
    """Return a duration such as ``90s``, ``15m`` or ``1h`` in seconds.

    Raises:
        UserError: The text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise UserError(
            option, "must be a duration above 0", given=text, remedy="Write it as 90s, 15m or 1h"
        )
    return seconds


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C while the block runs, so that servers are stopped.

    SIGINT is handled, too: a shell ignores it in processes that a script starts in the background.
    Its handler is Python's own, in place of which asyncio cancels its task: an exception of a
    handler may be lost in the code of gRPC.
    """
    handled = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.default_int_handler) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)
